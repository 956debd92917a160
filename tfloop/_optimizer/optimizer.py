"""`ModuleOptimizer`: state and routing by path, and the order of a step.

A step goes reduce, finite?, clip, rate, update; all its checks come before its first change. Who
owns which parameter is decided in `routing`, what replicas have together in `reduction`, how one
group's variables are updated is `update`'s business, and how state is written down `record`'s.
"""

import contextlib
import copy
import functools
import threading
from collections.abc import Callable
from typing import Any, Self

import tensorflow as tf

from tfloop._accumulation.accumulator import GradientsAccumulator
from tfloop._checks.copying import with_attributes_of
from tfloop._checks.messages import described, not_pickled
from tfloop._gradients.params import GradientsParams
from tfloop._gradients.scaling import LossScaler
from tfloop._groups.group import ParamGroup, as_group
from tfloop._model.paths import AddressBook, address_book, root_key
from tfloop._optimizer import nonfinite, record, summary
from tfloop._optimizer.checks import (
    STEP,
    as_rate,
    assert_born,
    assert_current,
    assert_sound,
    check_born_on_replicas,
)
from tfloop._optimizer.clipping import GradientClipping
from tfloop._optimizer.contribution import Contribution
from tfloop._optimizer.keras_optimizer import as_keras_optimizer
from tfloop._optimizer.routing import (
    Group,
    check_clipping,
    check_groups_of_rates,
    check_no_complex,
    owners,
)
from tfloop._optimizer.update import GroupUpdate, State
from tfloop._replicas import placement
from tfloop._replicas.reduction import check_reduction
from tfloop._tensors import sparse
from tfloop._tensors.sparse import Gradient
from tfloop._tracing import traces
from tfloop.schedulers._rates import ModuleLearningRate


class ModuleOptimizer(tf.train.experimental.PythonState):
    """Applies gradients to a model, each parameter by the optimizer of its group.

    The optimizer given here serves every parameter that no group takes. A step consumes the
    gradients. Its order is: reduce over replicas, skip if not finite (where asked for), clip per
    group, rate, then the Keras update with its decay. A parameter without a gradient is untouched:
    no decay, no change of its state. Each group counts
    the steps that it took part in; bias correction, Keras schedules and moving averages follow
    that count. State is made by `build`, which the first step calls.

    A `tf.train.Checkpoint` saves the state of every parameter by path; restoring checks
    everything before it changes anything, and doesn't depend on the order of the groups.

    `copy.deepcopy` gives an optimizer of its own with equal state, for the same model or a copy of
    it, whichever it steps first. Several threads may step one optimizer: eager steps take turns;
    runs of compiled ones overlap, as those of every `tf.function` do.

    Args:
      optimizer: A `keras.optimizers.Optimizer`, its name or its config. Each group works on a copy;
        of the object given, only `learning_rate` is read later. Its `clipnorm`, `clipvalue` or
        `global_clipnorm` becomes the group's clipping.
      clipping: `GradientClipping` for the parameters that no group takes; groups don't inherit it.
      reduction: How the gradients of replicas become one: `"mean"`, weighted by `step(weight=...)`;
        `"sum"`; or `None` for gradients that are reduced already, by `grads.reduce()`.
      scaler: A `LossScaler`, for float16; it is this optimizer's from now on. Hand it to each
        `Tape(scaler=optim.scaler)`.
      on_nonfinite: What becomes of an update with a gradient that isn't finite. By default it is
        made. `"skip"`, as a scaler does: the update of all groups on all replicas is left out, and
        `skipped` counts it. `"raise"`: it is left out, and the step raises a
        `tf.errors.InvalidArgumentError` that names the first parameter of the backward pass whose
        gradient isn't finite, how many are, the updates made before and the replica; a step under
        XLA can't raise, so the next call of a `tfloop.compile` step does.
      skip_nonfinite: `True` is `on_nonfinite="skip"`.
      strict: Raise for a group that serves no parameter; `False` only warns.
      fused: Where Keras' rule treats each element alone, run it once over all small parameters of
        a group as one vector; and in a graph on a CPU, let XLA make one pass of it for those of
        3,145,728 elements or more. State is the same, and results are to rounding; `False` runs it
        for each parameter as it is.

    Raises:
      TypeError: It isn't an optimizer, not a clipping, or not a scaler.
      ValueError: Another reduction; a scaler of another optimizer; the optimizer would do something
        twice or at the wrong time (accumulation, loss scaling), or has already been used.

    Example:
      >>> import keras, tensorflow as tf, tfloop
      >>> net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
      >>> _ = net.layers[0].kernel.assign([[1.0]])
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
        reduction: str | None = "mean",
        scaler: LossScaler | None = None,
        skip_nonfinite: bool = False,
        on_nonfinite: str | None = None,
        strict: bool = True,
        fused: bool = True,
    ) -> None:
        call = "ModuleOptimizer(optimizer)"
        optimizer = as_keras_optimizer(optimizer, call)  # None can freeze a group, not everything
        check_reduction(call, reduction)
        if scaler is not None and not isinstance(scaler, LossScaler):
            raise TypeError(
                f"`{call}` got {described(scaler)} as scaler, expected a LossScaler or None. "
                "Write `tfloop.ModuleOptimizer(optimizer, scaler=tfloop.LossScaler())`."
            )
        self._strict = strict
        self._reduction = reduction
        on_nonfinite = nonfinite.checked(call, on_nonfinite, skip_nonfinite, scaler)
        self._skips = on_nonfinite is not None  # XLA drops what raises
        self._alarm = nonfinite.Alarm() if on_nonfinite == "raise" else None
        self._fused = bool(fused)
        self._groups = [Group(ParamGroup.all(), optimizer, clipping, call, fused=self._fused)]
        self._model: Any = None
        self._book: AddressBook | None = None
        self._owner: dict[str, int] = {}
        self._pending: bytes | None = None
        self._checked_rates: Any = None
        self._is_new_copy = False  # which may still go on with a copy of the model
        self._version = 0
        self._lock = threading.RLock()
        self.stepped_in: threading.Thread | None = None  # by hand, which nothing else can see
        counter = {"dtype": tf.int64, "trainable": False}
        self._iterations, self._skipped, self._routing = traces.eagerly(
            lambda: [
                tf.Variable(0, name=n, **counter) for n in ("iterations", "skipped", "routing")
            ]
        )
        self._scaler = scaler
        if scaler is not None:
            scaler.own(call)

    @traces.not_converted
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
        added = Group(as_group(call, group), optimizer, clipping, call, fused=self._fused)
        self._change([*self._groups, added])
        return self

    @traces.not_converted
    def with_clipping(self, clipping: GradientClipping | None) -> Self:
        """Sets the clipping of the parameters that no group takes; it holds from the next step.

        Args:
          clipping: A `GradientClipping`, or `None` for no clipping.

        Returns:
          self.

        Raises:
          TypeError: It is neither.
        """
        check_clipping(clipping, "ModuleOptimizer.with_clipping(clipping)")
        self._groups[0].clipping = clipping
        self._mark_changed()
        return self

    @traces.not_converted
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

    @traces.not_converted
    def step(
        self,
        lr: Any,
        model: Any,
        grads: GradientsParams | GradientsAccumulator,
        *,
        weight: Any = None,
    ) -> Any:
        """Updates the parameters that have a gradient.

        Args:
          lr: The rate: a float, a scalar tensor or variable, a `ModuleLearningRate`, or `None` for
            the `learning_rate` of the optimizers that were given, schedules included.
          model: The root, or a view of it.
          grads: Gradients by path, consumed; or a `GradientsAccumulator`, whose window is used with
            its weights and emptied. Those of frozen parameters are dropped.
          weight: How much this replica's gradient counts in the mean over replicas: the samples or
            tokens behind it. By default all count alike, or in `tfloop.compile(strategy=...)` by
            the rows of the batch that they got. At 0 a replica adds nothing, not even NaN. On one
            device it changes nothing.

        Returns:
          `model`, as it was given.
        Mutates: parameters, their state and the counts; nothing if it raises.
        Graph mode: works, jitted too. In a `tf.function` of your own, a rate is an argument (a
          tensor, or a trace per value); a trace older than the routing raises at its next call,
          except under XLA. A tensor rate that is negative or not finite raises when it runs, except
          under XLA.
        Replicas: call it on each, in `strategy.run` or `tfloop.compile(strategy=...)`; not inside a
          `tf.cond` there. One all-reduce for the dense gradients of each dtype, packed, and one
          for sparse ones. The state that layers move, such as the statistics of
          BatchNormalization, becomes its mean over the rows along with it: floating variables
          made with `trainable=False` and no aggregation of their own. What is alike on all stays
          bit for bit; the states of a stateful RNN stay each replica's own.

        Raises:
          ValueError: `grads` is empty, has an unknown path or another shape; the rate is negative
            or not finite; the weights sum to 0; the optimizer belongs to another root.
          TypeError: A wrong kind of argument.
          RuntimeError: `grads` was consumed before, the window is empty, or it is called outside
            of the replicas.
        """
        if not isinstance(grads, (GradientsParams, GradientsAccumulator)):
            raise TypeError(
                f"`{STEP}` needs a GradientsParams: got {described(grads)}. Gradients are applied "
                "by path. Key them: "
                "`tfloop.GradientsParams.from_grads(tape.backward(loss), model)`."
            )
        rate = lr if isinstance(lr, ModuleLearningRate) or lr is None else as_rate(lr)
        window = (
            grads._lock if isinstance(grads, GradientsAccumulator) else contextlib.nullcontext()
        )
        if not (traces.is_recorded() or placement.is_replica()):
            self.stepped_in = threading.current_thread()
        with placement.one_at_a_time(self._lock), placement.one_at_a_time(window):
            self._step(rate, model, grads, weight)
        return model

    def _step(
        self, rate: Any, model: Any, grads: GradientsParams | GradientsAccumulator, weight: Any
    ) -> None:
        """All of a step; nothing is changed before everything is checked."""
        book = self._prepare(model, STEP)
        self._is_new_copy = False
        placement.check_context(STEP, book.variables)
        if isinstance(rate, ModuleLearningRate):
            self._check_groups_of(rate, book)
        brought = Contribution(grads, model, book, weight, self._reduction)
        routed = self._routed(brought.grads, book)
        total = brought.reduced([path for *_, share in routed for path in share], book)
        plans = []
        judged: list[Gradient] = []
        for group, update, share in routed:
            bounded = group.clipped({path: total.grads[path] for path in share})
            if group.clipping is not None:
                judged += bounded.values()  # of finite gradients the norm may be infinite
            plans.append((update, self._with_rates(rate, group, update, bounded, book)))
        checks = self._checks(plans) + brought.checks(total)
        finite = []
        if self._skips:
            flags = nonfinite.flags_of(total.grads)
            every = [*flags.values(), *map(sparse.all_finite, judged)]
            finite = [tf.reduce_all(tf.stack(every)) if every else tf.constant(True)]
            if self._alarm is not None and flags:
                if placement.is_replica():
                    flags = nonfinite.flags_of({path: brought.grads[path] for path in flags})
                finite.append(self._alarm.findings(flags, book.parameters(), self._iterations))
                checks += self._alarm.asserted(*finite)
        # Nothing raises from here on, but what is asserted in the graph; all changes wait for that.
        with tf.control_dependencies(checks):
            works = [update.prepared(parts, total.present) for update, parts in plans]
            brought.take()
            updated = tf.constant(bool(plans))
            if total.present is not None and plans:
                updated = tf.reduce_any(tf.stack(list(total.present.values())))
            placement.once(
                functools.partial(self._apply, [work.run for work in works]),
                [(work.inputs, work.some) for work in works],
                updated,
                finite,
                total.statistics,
            )

    @traces.not_converted
    def summary(self, model: Any) -> str:
        """Prints who updates what, and gives the table back as text.

        A row for each floating-point variable that is a parameter or could be: path, shape, group,
        optimizer, clipping, rate (of its optimizer), weight decay, and whether it is frozen.

        Args:
          model: The root; built on it if that hasn't happened yet.

        Returns:
          The table as plain text.
        """

        def shown() -> str:
            book = self._prepare(model, "ModuleOptimizer.summary(model)")
            return summary.show(summary.rows(book, self._owner, self._groups))

        return traces.eagerly(shown)

    @traces.not_converted
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
                "`ModuleOptimizer.state(path)` has no state: got an optimizer that isn't built, "
                "expected a built one. The first step builds it. Or now: `optim.build(model)`."
            )
        traces.depends_on(self)
        canonical = self._book.resolve(path)
        if canonical is None:
            raise KeyError(
                f"`ModuleOptimizer.state(path)` got an unknown path: {self._book.unknown(path)} "
                "`tfloop.named_parameters(model)` lists them all."
            )
        update = self._groups[self._owner.get(canonical, 0)].update
        slots = update.slots(canonical) if update else {}
        return {name: tf.convert_to_tensor(slot) for name, slot in slots.items()}

    def as_keras(self, model: Any) -> Any:
        """Gives a `keras.optimizers.Optimizer` with these groups, for `model.compile`.

        `fit` then makes the updates that `step(None, model, grads)` makes, with the same state.
        `learning_rate` is the rate of the fallback; a callback that sets it moves the rates of the
        groups in proportion. A `.keras` file holds the routing by path and the state; loading it
        needs `import tfloop`.

        Args:
          model: The root: the model to be compiled, or one that holds it.

        Returns:
          The optimizer: `model.compile(optimizer=optim.as_keras(model), loss=...)`.
        Mutates: self, as `build`, if the model is built; `fit` builds it otherwise.
        Graph mode: call it outside.

        Raises:
          TypeError: It isn't a model.
          ValueError: As `build`.
        """
        from tfloop._optimizer.as_keras import GroupedOptimizer

        return GroupedOptimizer(self, model)

    @property
    def iterations(self) -> tf.Variable:
        """The steps in which anything was updated: an int64 scalar variable.

        Under a strategy `build` puts another in its place.
        """
        traces.depends_on(self)
        return self._iterations

    @property
    def skipped(self) -> tf.Variable:
        """The steps that were left out for a gradient that wasn't finite, like `iterations`."""
        traces.depends_on(self)
        return self._skipped

    @property
    def scaler(self) -> LossScaler | None:
        """The scaler that was given; `Tape(scaler=optim.scaler)` takes it, `None` too."""
        return self._scaler

    @property
    def reduction(self) -> str | None:
        """How the gradients of replicas become one."""
        return self._reduction

    @property
    def on_nonfinite(self) -> str | None:
        """What happens to an update with a gradient that isn't finite."""
        return "raise" if self._alarm is not None else "skip" if self._skips else None

    @property
    def root(self) -> Any:
        """The model that the optimizer was built with, or `None`."""
        return self._model

    def fingerprint(self) -> object:
        """What of this optimizer a trace bakes in; see `traces`."""
        return [self._version, *[g.update.rate_changes for g in self._groups if g.update]]

    def refresh(self) -> None:
        """Asks the functions given as rates, for the compiled step that comes next.

        Raises what the step before has met, if that couldn't.
        """
        if self._alarm is not None:
            self._alarm.ring()
        for group in self._groups:
            if group.update is not None:
                group.update.refresh()

    def serialize(self) -> bytes:
        """The state as bytes, for `tf.train.Checkpoint`."""
        if self._pending is not None:
            return self._pending
        return record.dump(self.records()) if self._book is not None else b""

    def deserialize(self, state: bytes) -> None:
        """Takes over a state from `tf.train.Checkpoint`, or nothing if it doesn't fit.

        Before the first step the state is kept until `build` knows the model.

        Raises:
          ValueError: Another optimizer; missing, extra or misshapen entries; a damaged record.
        """
        if self._book is not None:
            record.load(state, self.records())
            return
        if state:
            record.parse(state)
        self._pending = state or None

    def __copy__(self) -> Self:
        """As `copy.deepcopy`: two optimizers can't share state."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict) -> Self:
        """An optimizer of its own with equal groups, rates and state.

        It goes on with the same model, or with a copy of that: its first step decides.
        """
        twin = type(self)(
            "sgd",
            reduction=self._reduction,
            scaler=copy.deepcopy(self._scaler, memo),
            on_nonfinite=self.on_nonfinite,
            strict=self._strict,
            fused=self._fused,
        )
        twin._pending = self._pending
        twin._groups = [group.twin(memo) for group in self._groups]
        if self._book is not None:
            twin._build(self._model, self._book, twin._groups)
            twin._is_new_copy = True
            if id(self._model) in memo:
                twin.build(memo[id(self._model)])
        twin._iterations.assign(self._iterations)
        twin._skipped.assign(self._skipped)
        return with_attributes_of(self, twin, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled."""
        raise not_pickled(self)

    def __repr__(self) -> str:
        """The groups in the order in which they are asked, the last one first."""
        rows = [f"  {group}" for group in reversed(self._groups)]
        steps = f", {int(self._iterations.numpy())} steps" if tf.executing_eagerly() else ""
        root = self._book.description if self._book else "not built"
        return "\n".join([f"ModuleOptimizer({root}{steps}", *rows, ")"])

    def _prepare(self, model: Any, call: str) -> AddressBook:
        """Builds for the root, or checks that it is ours and follows what has changed in it."""
        key = root_key(model, call)
        book = address_book(model, call)
        with self._lock:  # no replica waits for another in here
            if self._book is not None and key != self._book.key:
                if not (self._is_new_copy and self._book.is_like(book)):
                    raise ValueError(_why_another_root(call, self._book, book))
                traces.eagerly(lambda: self._move(book))
            if book is not self._book or self._lacks_state(book):
                check_born_on_replicas(call, book.parameters())
                traces.eagerly(lambda: self._build(model, book, self._groups))
        traces.depends_on(book)
        traces.depends_on(self)
        return book

    def _move(self, book: AddressBook) -> None:
        """Leaves the root for a copy of it; `_build` does the rest."""
        assert self._book is not None  # or there is nothing to leave
        for group in self._groups:
            group.move(self._book, book)

    def _lacks_state(self, book: AddressBook) -> bool:
        """Has a parameter no slots yet, or the value by now that they wait for?"""
        updates = ((path, self._groups[self._owner[path]].update) for path in book.parameters())
        if any(update and path not in update.variables for path, update in updates):
            return True
        return any(group.update and group.update.state.can_begin() for group in self._groups)

    def _build(self, model: Any, book: AddressBook, groups: list[Group]) -> None:
        """Routes and makes state; changes nothing before all checks have passed."""
        check_no_complex(book, groups)
        owner, states = self._with_states(book, groups)
        restored = []
        if self._pending is not None:
            restored = record.assignments(record.parse(self._pending), self.records(states))
        for update, state in states:
            update.state = state
        for variable, value in restored:
            variable.assign(value)
        if not any(state.waiting for _, state in states):
            self._pending = None  # else it is needed once more
        home = list(book.variables.values())
        for name in ("_iterations", "_skipped", "_routing"):
            moved = placement.at_home(getattr(self, name), home, placement.ALIKE)
            setattr(self, name, moved)
        if self._scaler is not None:
            self._scaler.move_home(home)
        if self._alarm is not None:
            self._alarm.move_home(home)
        placement.spread_seeds(home)
        self._model, self._book, self._owner, self._groups = model, book, owner, groups
        self._mark_changed()

    def _with_states(
        self, book: AddressBook, groups: list[Group]
    ) -> tuple[dict[str, int], list[tuple[GroupUpdate, State]]]:
        """Who owns which path, and state for all; changes nothing."""
        owner = owners(book, groups, self._strict)
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
        return owner, states

    def first_records(self, model: Any) -> tuple[list[record.GroupRecord], dict[int, Any]]:
        """The state that this optimizer would begin with; it isn't built by this.

        Returns:
          The records, and id of a variable -> the restored value that waits for it.
        """
        book = address_book(model)
        _, states = traces.eagerly(lambda: self._with_states(book, self._groups))
        records = self.records(states)
        if self._pending is None:
            return records, {}
        waiting = record.assignments(record.parse(self._pending), records)
        return records, {id(variable): value for variable, value in waiting}

    def _change(self, groups: list[Group]) -> None:
        """Takes over a new list of groups, at once where the optimizer is built."""
        with self._lock:
            if self._book is None:
                self._groups = groups
            else:
                book, model = self._book, self._model
                traces.eagerly(lambda: self._build(model, book, groups))

    def _mark_changed(self) -> None:
        """Makes older traces stale: ours look at the version, others at the variable."""
        self._version += 1
        traces.eagerly(lambda: self._routing.assign(self._version))

    def _routed(
        self, grads: dict[str, Gradient], book: AddressBook
    ) -> list[tuple[Group, GroupUpdate, dict[str, Gradient]]]:
        """Each group's share; frozen parameters drop out."""
        trainable = book.parameters()
        shares: dict[int, tuple[Group, GroupUpdate, dict[str, Gradient]]] = {}
        for path in (path for path in grads if path in trainable):
            index = self._owner[path]
            group, update = self._groups[index], self._groups[index].update
            if update is not None:
                shares.setdefault(index, (group, update, {}))[-1][path] = grads[path]
        return list(shares.values())

    def _check_groups_of(self, rate: ModuleLearningRate, book: AddressBook) -> None:
        """Refuses a group of rates that no parameter is in, most likely misspelt; once for each."""
        seen = (book, rate.groups)
        if not self._strict or seen == self._checked_rates:
            return
        check_groups_of_rates(STEP, rate.groups, book)
        self._checked_rates = seen

    def _with_rates(
        self,
        rate: Any,
        group: Group,
        update: GroupUpdate,
        share: dict[str, Gradient],
        book: AddressBook,
    ) -> list[tuple[tf.Tensor, dict[str, Gradient]]]:
        """A group's gradients, parted by the rate they take."""
        if rate is None:
            return [(as_rate(update.own_rate(), f"the rate of {group.group}"), share)]
        if not isinstance(rate, ModuleLearningRate):
            return [(rate, share)]
        parts: dict[int, dict[str, Gradient]] = {}
        for path, grad in share.items():
            bucket = rate.bucket_of(book.paths_of(path), book.variables[path])
            parts.setdefault(bucket, {})[path] = grad
        if len(parts) > 1 and not update.takes_several_rates():
            raise ValueError(
                f"`{STEP}` got {len(parts)} rates for the group {group.group}, expected one: "
                f"{update.name} moves state that its variables share, once per update. "
                "Give each rate a group of its own: `optim.with_group(group, optimizer)`."
            )
        rates = rate.rates()
        return [(as_rate(rates[bucket]), part) for bucket, part in parts.items()]

    def _apply(
        self,
        runs: list[Callable[..., None]],
        strategy: Any,
        inputs: list[Any],
        updated: tf.Tensor,
        finite: list[tf.Tensor],
        statistics: dict[str, tf.Tensor],
    ) -> None:
        """All changes of one step, once for all replicas."""
        assert self._book is not None  # `_prepare` has built it

        def change() -> tf.Tensor:
            for run, (values, some) in zip(runs, inputs, strict=True):
                run(strategy, values, some)
            placement.update(strategy, self._iterations, _add, updated)
            return tf.constant(0)

        with self._lock:  # a trace, too, sets a rate on the Keras optimizer for a while
            if finite:
                sound = placement.agreed(strategy, finite[0])
                tf.cond(sound, change, lambda: tf.constant(0))
                placement.update(strategy, self._skipped, _add, tf.logical_not(sound))
                if self._scaler is not None:
                    self._scaler.adapt(strategy, sound)
                if self._alarm is not None:
                    for met in finite[1:]:
                        self._alarm.note(strategy, sound, placement.agreed(strategy, met))
            else:
                change()
            for path, mean in statistics.items():
                placement.assign(strategy, self._book.variables[path], mean)

    def _checks(self, plans: list[tuple[GroupUpdate, list]]) -> list[tf.Operation]:
        """What can only be known when the step runs."""
        rates = {id(rate): rate for _, parts in plans for rate, _ in parts}
        sound = [check for rate in rates.values() for check in assert_sound(rate)]
        unborn = [path for update, _ in plans for path in update.state.waiting]
        return [*assert_current(self._version, self._routing), *assert_born(unborn), *sound]

    def records(
        self, states: list[tuple[GroupUpdate, State]] | None = None
    ) -> list[record.GroupRecord]:
        """The live state, or one that is about to be, as `record` writes and restores it."""
        if states is None:
            states = [(group.update, group.update.state) for group in self._groups if group.update]
        groups = [
            record.GroupRecord(
                update.name,
                {path: state.slots(path) for path in state.variables},
                state.counters() | update.rate_variable(),
            )
            for update, state in states
            if state.variables
        ]
        counters = {"iterations": self._iterations, "skipped": self._skipped}
        if self._scaler is not None:
            counters |= self._scaler.variables()
        totals = record.GroupRecord("ModuleOptimizer", {}, counters)
        return [*groups, totals]


def _why_another_root(call: str, ours: AddressBook, theirs: AddressBook) -> str:
    """Names both roots, and says whether they share variables."""
    shared = [path for path, v in theirs.variables.items() if ours.path_of(v) is not None]
    relation = f"which shares {len(shared)} of its variables" if shared else "another model"
    return (
        f"`{call}` got {theirs.description}, {relation}, expected {ours.description}, which "
        "this optimizer was built with. State and paths belong to one root. Pass that root, "
        "or make another optimizer: `tfloop.ModuleOptimizer(...)`."
    )


def _add(counter: tf.Variable, one: tf.Tensor) -> None:
    counter.assign_add(tf.cast(one, counter.dtype))
