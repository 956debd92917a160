"""`ModuleOptimizer`: who owns which parameter, and the order of a step.

Routing, checks and the order reduce, clip, rate, update live here. How one group's variables
are updated is `_update`'s, what a group matches `_groups`', how state is written down
`_record`'s, and the table of it `_summary`'s.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from tfloop import _record, _summary, _traces
from tfloop._accumulate import GradientsAccumulator
from tfloop._clipping import GradientClipping
from tfloop._gradients import GradientsParams
from tfloop._groups import ParamGroup, as_group, near_misses
from tfloop._messages import described, listed
from tfloop._paths import AddressBook, Variable, address_book, root_key
from tfloop._presence import apply_where
from tfloop._sparse import Gradient
from tfloop._update import GroupUpdate, as_keras_optimizer
from tfloop.schedulers._rates import ModuleLearningRate

_STEP = "ModuleOptimizer.step(lr, model, grads)"


class ModuleOptimizer(tf.train.experimental.PythonState):
    """Applies gradients to a model, each parameter by the optimizer of its group.

    The optimizer given here serves every parameter that no group takes. A step consumes the
    gradients. Its order is: clip per group, rate, then the Keras update with its decay. A
    parameter without a gradient is untouched: no decay, no change of its state. Each group counts
    the steps that it took part in; bias correction, Keras schedules and moving averages follow
    that count. State is made by `build`, which the first step calls.

    A `tf.train.Checkpoint` saves the state of every parameter by path; restoring checks
    everything before it changes anything, and doesn't depend on the order of the groups.

    Args:
      optimizer: A `keras.optimizers.Optimizer`, its name or its config. Each group works on a copy;
        of the object given, only `learning_rate` is read later. Its `clipnorm`, `clipvalue` or
        `global_clipnorm` becomes the group's clipping.
      clipping: `GradientClipping` for the parameters that no group takes; groups don't inherit it.
      strict: Raise for a group that serves no parameter; `False` only warns.

    Raises:
      TypeError: It isn't an optimizer, or not a clipping.
      ValueError: The optimizer would do something twice or at the wrong time (accumulation, loss
        scaling), or has already been used.

    Example:
      >>> import keras, tensorflow as tf, tfloop
      >>> net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
      >>> net.layers[0].kernel.assign([[1.0]])
      >>> optim = tfloop.ModuleOptimizer(keras.optimizers.SGD())
      >>> grads = tfloop.GradientsParams({"dense.kernel": tf.constant([[2.0]])})
      >>> _ = optim.step(0.25, net, grads)
      >>> float(net.layers[0].kernel[0, 0])
      0.5
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        clipping: GradientClipping | None = None,
        strict: bool = True,
    ) -> None:
        self._strict = strict
        fallback = _Group(ParamGroup.all(), optimizer, clipping, "ModuleOptimizer(optimizer)")
        if fallback.update is None:
            as_keras_optimizer(optimizer, "ModuleOptimizer(optimizer)")
        self._groups = [fallback]
        self._model: Any = None
        self._book: AddressBook | None = None
        self._owner: dict[str, int] = {}
        self._pending: bytes | None = None
        self._version = 0
        self._rate_parts: dict[Any, dict[str, int]] = {}
        counter = {"dtype": tf.int64, "trainable": False}
        self._iterations = _traces.eagerly(lambda: tf.Variable(0, name="iterations", **counter))
        self._routing = _traces.eagerly(lambda: tf.Variable(0, name="routing", **counter))

    @_traces.not_converted
    def with_group(
        self, group: ParamGroup, optimizer: Any, clipping: GradientClipping | None = None
    ) -> Self:
        """Gives the parameters of a group an optimizer of their own.

        The last group that matches a parameter serves it. Adding a group later clears the state
        of the parameters it takes, and of no others; steps compiled by tfloop use it from their
        next call.

        Args:
          group: Which parameters.
          optimizer: As in the constructor. `None` freezes the group: never updated, decayed,
            counted in a norm or averaged.
          clipping: For this group alone; `None` is no clipping, whatever the fallback does.

        Returns:
          self.
        Mutates: self; after `build` also the routing, at once. Nothing if it raises.
        Graph mode: call it outside.

        Raises:
          TypeError: A wrong kind of argument.
          ValueError: As in the constructor; after `build` also as `build`.
        """
        call = "ModuleOptimizer.with_group(group, optimizer)"
        added = _Group(as_group(call, group), optimizer, clipping, call)
        self._change([*self._groups, added])
        return self

    @_traces.not_converted
    def with_clipping(self, clipping: GradientClipping | None) -> Self:
        """Sets the clipping of the parameters that no group takes; it holds from the next step.

        Args:
          clipping: A `GradientClipping`, or `None` for no clipping.

        Returns:
          self.

        Raises:
          TypeError: It is neither.
        """
        _check_clipping(clipping, "ModuleOptimizer.with_clipping(clipping)")
        self._groups[0].clipping = clipping
        self._mark_changed()
        return self

    @_traces.not_converted
    def build(self, model: Any) -> Self:
        """Routes every parameter to its group and makes all state, once.

        The first step calls it. Call it yourself to see mistakes early, or before a `tf.function`
        of your own that was traced with an older routing.

        Args:
          model: The root that this optimizer belongs to from now on, as in `named_parameters`.

        Returns:
          self.
        Mutates: self.
        Graph mode: works in any trace; state is made outside of it.

        Raises:
          ValueError: A group matches nothing, or later groups take all it matches; the optimizer
            belongs to another root; the model isn't built; a restored state doesn't fit.
        """
        self._prepare(model, "ModuleOptimizer.build(model)")
        return self

    @_traces.not_converted
    def step(
        self, lr: Any, model: Any, grads: GradientsParams | GradientsAccumulator
    ) -> Any:
        """Updates the parameters that have a gradient.

        Args:
          lr: The rate: a float, a scalar tensor or variable, a `ModuleLearningRate`, or `None` for
            the `learning_rate` of the optimizers that were given, schedules included.
          model: The root, or a view of it.
          grads: Gradients by path, consumed; or a `GradientsAccumulator`, whose window is used with
            its weights and emptied. Those of frozen parameters are dropped.

        Returns:
          `model`, as it was given.
        Mutates: parameters, their state and the counts; nothing if it raises.
        Graph mode: works, jitted too. In a `tf.function` of your own, a rate is an argument (a
          tensor, or a trace per value); a trace older than the routing raises at its next call,
          except under XLA. A tensor rate that is negative or not finite raises when it runs, except
          under XLA.

        Raises:
          ValueError: `grads` is empty, has an unknown path or another shape; the rate is negative
            or not finite; the optimizer belongs to another root.
          TypeError: A wrong kind of argument.
          RuntimeError: `grads` was consumed before, or the window is empty.
        """
        if not isinstance(grads, (GradientsParams, GradientsAccumulator)):
            raise TypeError(
                f"`{_STEP}` needs a GradientsParams: got {described(grads)}. Gradients are applied "
                "by path. Key them: `GradientsParams.from_grads(tape.backward(loss), model)`."
            )
        _refuse_replicas()
        rate = lr if isinstance(lr, ModuleLearningRate) or lr is None else _checked_rate(lr)
        book = self._prepare(model, _STEP)
        if isinstance(grads, GradientsAccumulator):
            found, present = grads.window(model, _STEP)
        else:
            found, present = grads.checked(book, _STEP), None
        plans = [
            (self._groups[index].update, self._with_rates(rate, self._groups[index], share, book))
            for index, share in self._route(found, book).items()
        ]
        # Nothing raises from here on.
        if isinstance(grads, GradientsAccumulator):
            grads.reset()
        else:
            grads._consume(_STEP)
        with tf.control_dependencies(self._checks()):
            if present is None:
                for update, parts in plans:
                    update.apply(parts)
                updated = tf.constant(bool(plans))
            else:
                some = [apply_where(update, parts, present) for update, parts in plans]
                updated = tf.reduce_any(tf.stack(some)) if some else tf.constant(False)
            self._iterations.assign_add(tf.cast(updated, tf.int64))
        return model

    def summary(self, model: Any) -> str:
        """Prints who updates what, and gives the table back as text.

        A row for each floating-point variable that is a parameter or could be: path, shape, group,
        optimizer, clipping, rate (of its optimizer), weight decay, and whether it is frozen.

        Args:
          model: The root; built on it if that hasn't happened yet.

        Returns:
          The table as plain text.
        """
        book = self._prepare(model, "ModuleOptimizer.summary(model)")
        rows = _summary.rows(book, self._owner, self._groups)
        return _summary.show(rows)

    def state(self, path: str) -> dict[str, tf.Tensor]:
        """The optimizer's state of one parameter.

        Args:
          path: Any path to it.

        Returns:
          Slot -> value, under Keras' attribute names without the underscore (`momentums`,
          `velocities`); empty for a frozen parameter, or an optimizer without state.

        Raises:
          RuntimeError: The optimizer isn't built.
          KeyError: The model has no such path.
        """
        if self._book is None:
            raise RuntimeError(
                "`ModuleOptimizer.state(path)` has no state yet: got an optimizer that isn't built. "
                "The first step builds it; or do it now: `optim.build(model)`."
            )
        canonical = self._book.resolve(path)
        if canonical is None:
            raise KeyError(
                f"`ModuleOptimizer.state(path)` got an unknown path: {self._book.unknown(path)} "
                "`tfloop.named_parameters(model)` lists them all."
            )
        update = self._groups[self._owner.get(canonical, 0)].update
        slots = update.slots(canonical) if update else {}
        return {name: tf.convert_to_tensor(slot) for name, slot in slots.items()}

    @property
    def iterations(self) -> tf.Variable:
        """The steps in which anything was updated: an int64 scalar variable."""
        return self._iterations

    @property
    def root(self) -> Any:
        """The model that the optimizer was built with, or `None`."""
        return self._model

    def fingerprint(self) -> object:
        """What of this optimizer a trace bakes in; see `_traces`."""
        sources = (group.update.rate_source() for group in self._groups if group.update)
        return (self._version, *map(id, sources))

    def serialize(self) -> bytes:
        """The state as bytes, for `tf.train.Checkpoint`."""
        if self._pending is not None:
            return self._pending
        return _record.dump(self.records()) if self._book is not None else b""

    def deserialize(self, state: bytes) -> None:
        """Takes over a state from `tf.train.Checkpoint`, or nothing if it doesn't fit.

        Before the first step the state is kept until `build` knows the model.

        Raises:
          ValueError: Another optimizer, or missing, extra or misshapen entries.
        """
        if self._book is None:
            self._pending = state or None
        else:
            _record.load(state, self.records())

    def __repr__(self) -> str:
        """The groups in the order in which they are asked, the last one first."""
        rows = [f"  {group}" for group in reversed(self._groups)]
        steps = f", {int(self._iterations.numpy())} steps" if tf.executing_eagerly() else ""
        root = self._book.description if self._book else "not built"
        return "\n".join([f"ModuleOptimizer({root}{steps}", *rows, ")"])

    def _prepare(self, model: Any, call: str) -> AddressBook:
        """Builds for the root, or checks that it is ours and follows what has changed in it."""
        key = root_key(model, call)
        if self._book is not None and key != self._book.key:
            raise ValueError(self._why_another_root(model, call))
        book = address_book(model, call)
        if book is not self._book or self._lacks_state(book):
            _traces.eagerly(lambda: self._build(model, book, self._groups))
        _traces.depends_on(book)
        _traces.depends_on(self)
        return book

    def _lacks_state(self, book: AddressBook) -> bool:
        """Has a parameter been thawed that has no slots yet?"""
        for path in book.parameters():
            update = self._groups[self._owner[path]].update
            if update is not None and path not in update.variables:
                return True
        return False

    def _build(self, model: Any, book: AddressBook, groups: list["_Group"]) -> None:
        """Routes and makes state; changes nothing before all checks have passed."""
        owner = _owners(book, groups)
        self._check_groups(book, groups, owner)
        trainable = book.parameters()
        states = []
        for index, group in enumerate(groups):
            if group.update is None:
                continue
            served = {
                path: book.variables[path]
                for path, owned_by in owner.items()
                if owned_by == index and (path in trainable or path in group.update.variables)
            }
            states.append((group.update, group.update.state_for(served)))
        for update, state in states:
            update.adopt(state)
        floating = book.floating()
        for group in groups:
            group.resolved = group.group.resolve(floating, book.paths_of)
        self._model, self._book, self._owner, self._groups = model, book, owner, groups
        self._mark_changed()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            _record.load(pending, self.records())

    def _change(self, groups: list["_Group"]) -> None:
        """Takes over a new list of groups, at once where the optimizer is built."""
        if self._book is None:
            self._groups = groups
        else:
            book, model = self._book, self._model
            _traces.eagerly(lambda: self._build(model, book, groups))

    def _mark_changed(self) -> None:
        """Makes older traces stale: ours look at the version, others at the variable."""
        self._version += 1
        self._rate_parts.clear()
        _traces.eagerly(lambda: self._routing.assign(self._version))

    def _check_groups(
        self, book: AddressBook, groups: list["_Group"], owner: dict[str, int]
    ) -> None:
        """Refuses groups that serve nothing, with near misses and the table of who owns what."""
        floating = book.floating()
        for index, group in enumerate(groups[1:], start=1):
            bound = group.group.bind()
            matched = [p for p, v in floating.items() if bound.matches_any(book.paths_of(p), v)]
            if any(owner[path] == index for path in matched):
                continue
            if matched:
                takers = {str(groups[owner[path]].group) for path in matched}
                what = f"serves nothing: later groups ({', '.join(sorted(takers))}) take all"
                what += f" {len(matched)} variables it matches, {listed(matched)}"
                fix = "The last matching group wins: declare the narrower group last, with "
            else:
                close = near_misses(group.group, floating)
                hint = f" Did you mean {listed(close)}?" if close else ""
                what = f"matches no floating-point variable of {book.description}"
                fix = f"It may be misspelt.{hint} Correct it, or allow it with "
            message = (
                f"`ModuleOptimizer.build(model)` found that the group {group.group} {what}. "
                f"{fix}`ModuleOptimizer(..., strict=False)`.\n"
                f"{_summary.ownership(book, owner, groups)}"
            )
            if self._strict:
                raise ValueError(message)
            warnings.warn(message, stacklevel=4)

    def _route(
        self, grads: dict[str, Gradient], book: AddressBook
    ) -> dict[int, dict[str, Gradient]]:
        """Each group's share, clipped; frozen parameters drop out."""
        trainable = book.parameters()
        routed: dict[int, dict[str, Gradient]] = {}
        for path, grad in grads.items():
            index = self._owner.get(path)
            if path in trainable and self._groups[index].update is not None:
                routed.setdefault(index, {})[path] = grad
        for index, share in routed.items():
            clipping = self._groups[index].clipping
            if clipping is not None:
                clipped = clipping.clip(list(share.values()))
                routed[index] = dict(zip(share, clipped, strict=True))
        return routed

    def _with_rates(
        self, rate: Any, group: "_Group", share: dict[str, Gradient], book: AddressBook
    ) -> list[tuple[Any, dict[str, Gradient]]]:
        """A group's gradients, parted by the rate they take."""
        if rate is None:
            return [(group.update.own_rate(), share)]
        if not isinstance(rate, ModuleLearningRate):
            return [(rate, share)]
        parts: dict[int, dict[str, Gradient]] = {}
        for path, grad in share.items():
            bucket = rate.bucket_of(book.paths_of(path), book.variables[path])
            parts.setdefault(bucket, {})[path] = grad
        if len(parts) > 1 and not group.update.takes_several_rates():
            raise ValueError(
                f"`{_STEP}` got {len(parts)} rates for the group {group.group}, expected one: "
                f"{group.update.name} moves state that its variables share, once per update. "
                "Give each rate a group of its own: `optim.with_group(group, optimizer)`."
            )
        rates = rate.rates()
        return [(_checked_rate(rates[bucket]), part) for bucket, part in parts.items()]

    def _checks(self) -> list[tf.Operation]:
        """In a trace that we don't watch over: is the routing still the one that was traced?"""
        if tf.executing_eagerly() or _traces.is_recorded():
            return []
        message = (
            f"`{_STEP}` ran in a tf.function that was traced before the routing changed: a group "
            "was added, or a parameter thawed. A trace keeps what it was made with. Call "
            "`optim.build(model)` before tracing, or compile the step with `tfloop.compile`, which "
            "traces again."
        )
        fresh = tf.debugging.assert_equal(self._routing, tf.constant(self._version, tf.int64), message)
        return [fresh] if fresh is not None else []

    def records(self) -> list[_record.GroupRecord]:
        """The live state, as `_record` writes and restores it."""
        groups = [
            _record.GroupRecord(
                group.update.name,
                {path: group.update.slots(path) for path in group.update.variables},
                group.update.counters(),
            )
            for group in self._groups
            if group.update is not None and group.update.variables
        ]
        totals = _record.GroupRecord("ModuleOptimizer", {}, {"iterations": self._iterations})
        return [*groups, totals]

    def _why_another_root(self, model: Any, call: str) -> str:
        """Names both roots, and says whether they share variables."""
        ours, theirs = self._book, address_book(model, call)
        shared = [path for path, v in theirs.variables.items() if ours.path_of(v) is not None]
        relation = f"which shares {len(shared)} of its variables" if shared else "another model"
        return (
            f"`{call}` got {theirs.description}, {relation}: expected {ours.description}, which "
            "this optimizer was built with. State and paths belong to one root. Pass that root, "
            "or make another optimizer: `tfloop.ModuleOptimizer(...)`."
        )


class _Group:
    """One row of the routing: who, by which optimizer (`None` for frozen), clipped how."""

    def __init__(
        self, group: ParamGroup, optimizer: Any, clipping: GradientClipping | None, call: str
    ) -> None:
        _check_clipping(clipping, call)
        self.group = group
        self.resolved = group
        self.update: GroupUpdate | None = None
        if optimizer is not None:
            self.update = GroupUpdate(as_keras_optimizer(optimizer, call), call)
            if clipping is not None and self.update.clipping is not None:
                raise ValueError(
                    f"`{call}` got two clippings: {clipping} and the optimizer's own "
                    f"{self.update.clipping}, expected one. Leave one out: "
                    f"`keras.optimizers.{self.update.name}()`."
                )
            clipping = clipping or self.update.clipping
        self.clipping = clipping

    def __str__(self) -> str:
        if self.update is None:
            return f"{self.group}: frozen"
        return f"{self.group}: {self.update.name}" + (f", {self.clipping}" if self.clipping else "")


def _owners(book: AddressBook, groups: list[_Group]) -> dict[str, int]:
    """The index of the last matching group for every floating-point variable."""
    bound = [group.group.bind() for group in groups]
    owner = {}
    for path, variable in book.floating().items():
        paths = book.paths_of(path)
        matching = (i for i in reversed(range(len(bound))) if bound[i].matches_any(paths, variable))
        owner[path] = next(matching)
    return owner


def _check_clipping(clipping: object, call: str) -> None:
    if clipping is not None and not isinstance(clipping, GradientClipping):
        raise TypeError(
            f"`{call}` got {described(clipping)} as clipping, expected a GradientClipping or None. "
            "A number doesn't say which norm. Write `GradientClipping.by_global_norm(1.0)`."
        )


def _refuse_replicas() -> None:
    """Fails where gradients would have to be reduced first."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync > 1:
        raise RuntimeError(
            f"`{_STEP}` was called under a strategy of several replicas, expected one device: "
            "gradients aren't reduced over replicas yet, and would be applied apart. "
            "Train on one device: `with tf.device('/CPU:0'): ...`."
        )


def _checked_rate(lr: Any) -> tf.Tensor:
    """A rate as a float32 scalar; wrong ones raise, in a trace when they run."""
    if isinstance(lr, (int, float, np.number)) and not isinstance(lr, bool):
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(
                f"`{_STEP}` got the rate {lr!r}, expected a finite number of at least 0. "
                "A schedule or a division went wrong. Check it: `print(lr)`."
            )
        return tf.constant(float(lr), tf.float32)
    if isinstance(lr, keras.optimizers.schedules.LearningRateSchedule):
        raise TypeError(
            f"`{_STEP}` got the schedule {described(lr)} as rate, expected a number. A schedule "
            "needs a count of steps. Give it to the optimizer (`keras.optimizers.Adam(schedule)` "
            "and `step(None, ...)`) or step it: `ModuleLrScheduler(schedule).step()`."
        )
    numeric = isinstance(lr, (tf.Tensor, tf.Variable, keras.Variable, np.ndarray))
    if not numeric or not tf.as_dtype(lr.dtype).is_floating or tf.TensorShape(lr.shape).rank != 0:
        what = f"shape {tuple(lr.shape)} and dtype {lr.dtype}" if numeric else described(lr)
        raise TypeError(
            f"`{_STEP}` got {what} as rate, expected a float, a floating scalar tensor or variable, "
            "a ModuleLearningRate, or None. One rate per group is "
            "`ModuleLearningRate(base).with_group(group, lr)`."
        )
    rate = tf.cast(tf.convert_to_tensor(lr), tf.float32)
    sound = tf.logical_and(tf.math.is_finite(rate), rate >= 0)
    check = tf.debugging.Assert(sound, [f"`{_STEP}` got a rate that is negative or not finite:", rate])
    with tf.control_dependencies([check] if check is not None else []):
        return tf.identity(rate)
