"""`ModuleOptimizer`: what a user says to an optimizer, and is told by it.

The groups and their state are the `assembly`'s, the order of an update is in `step`.
"""

import copy
import threading
from typing import Any, Self, TypeVar, overload

import tensorflow as tf

from tfloop._accumulation.accumulator import GradientsAccumulator
from tfloop._checks.copying import with_attributes_of
from tfloop._checks.messages import described, not_pickled
from tfloop._clipping.clipping import GradientClipping
from tfloop._gradients.params import GradientsParams
from tfloop._gradients.scaling import LossScaler
from tfloop._groups.group import ParamGroup, as_group
from tfloop._optimizer import nonfinite, record, summary
from tfloop._optimizer.assembly import Assembly
from tfloop._optimizer.checks import LEFT_OUT, STEP, step_arguments
from tfloop._optimizer.contribution import turn_at
from tfloop._optimizer.rates import rates_of
from tfloop._optimizer.routing import Group, check_clipping
from tfloop._optimizer.step import take_step
from tfloop._optimizer.summary import RoutingTable
from tfloop._replicas import contexts
from tfloop._replicas.reduction import KINDS, reduction_of
from tfloop._tracing import traces
from tfloop._update.keras_optimizer import as_keras_optimizer

Model = TypeVar("Model")


class ModuleOptimizer(tf.train.experimental.PythonState):
    """Applies gradients to a model, each parameter by the optimizer of its group.

    The optimizer given here serves every parameter that no group takes. A step consumes the
    gradients. Its order is: reduce over replicas, skip if not finite (where asked for), clip per
    group, rate, then the Keras update with its decay. A parameter without a gradient is untouched:
    no decay, no change of its state. Each group counts the steps that it took part in; bias
    correction, Keras schedules and moving averages follow that count. State is made by `build`,
    which the first step calls.

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
        fix = (
            "None is for gradients that are reduced already; a loss that is a mean over each "
            "replica's batch takes the mean: `tfloop.ModuleOptimizer(optimizer, reduction='mean')`."
        )
        reduced = reduction_of(call, reduction, KINDS, fix)
        if scaler is not None and not isinstance(scaler, LossScaler):
            raise TypeError(
                f"`{call}` got {described(scaler)} as scaler, expected a LossScaler or None. "
                "Write `tfloop.ModuleOptimizer(optimizer, scaler=tfloop.LossScaler())`."
            )
        on_nonfinite = nonfinite.checked(call, on_nonfinite, skip_nonfinite, scaler)
        self._fused = bool(fused)
        self._assembly = Assembly(
            Group(ParamGroup.all(), optimizer, clipping, call, fused=self._fused),
            reduced,
            scaler=scaler,
            on_nonfinite=on_nonfinite,
            strict=strict,
        )
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
        self._assembly.add(added)
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
        self._assembly.set_clipping(clipping)
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
        self._assembly.prepare(model, "ModuleOptimizer.build(model)")
        return self

    @overload
    def step(
        self,
        lr: Any,
        model: Model,
        grads: GradientsParams | GradientsAccumulator,
        *,
        weight: Any = None,
    ) -> Model: ...

    @overload
    def step(
        self, model: Model, grads: GradientsParams | GradientsAccumulator, *, weight: Any = None
    ) -> Model: ...

    # The first argument may be what the second is named after, and mypy asks for one name.
    @traces.not_converted  # type: ignore[misc]
    def step(
        self,
        lr: Any = LEFT_OUT,
        model: Any = LEFT_OUT,
        grads: Any = LEFT_OUT,
        *,
        weight: Any = None,
    ) -> Any:
        """Updates the parameters that have a gradient.

        `step(lr, model, grads)`, or `step(model, grads)` where the optimizers hold their rates.

        Args:
          lr: The rate: a float, a scalar tensor or variable, or a `ModuleLearningRate`. Left out,
            or `None`, it is the `learning_rate` of the optimizers that were given, schedules
            included.
          model: The root, or a view of it.
          grads: Gradients by path, consumed; or a `GradientsAccumulator`, whose window is used with
            its weights and emptied. Those of frozen parameters are dropped.
          weight: How much this replica's gradient counts in the mean over replicas: the samples or
            tokens behind it. By default all count the same, or in `tfloop.compile(strategy=...)` by
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
          made with `trainable=False` and no aggregation of their own. What is the same on all stays
          bit for bit; the states of a stateful RNN stay each replica's own.

        Raises:
          ValueError: `grads` is empty, has an unknown path or another shape; the rate is negative
            or not finite; the weights sum to 0; the optimizer belongs to another root.
          TypeError: A wrong kind of argument, or an argument missing.
          RuntimeError: `grads` was consumed before, the window is empty, or it is called outside
            of the replicas.
        """
        lr, model, grads = step_arguments(lr, model, grads)
        if not isinstance(grads, (GradientsParams, GradientsAccumulator)):
            raise TypeError(
                f"`{STEP}` needs a GradientsParams: got {described(grads)}. Gradients are applied "
                "by path, and come last. Key them: `grads = tape.backward(loss, model)`, or those "
                "made elsewhere: `tfloop.GradientsParams.from_grads(grads, model)`."
            )
        rates = rates_of(lr)
        optim = self._assembly
        if not (traces.is_recorded() or contexts.is_replica()):
            optim.stepped_in = threading.current_thread()
        with contexts.one_at_a_time(optim.lock), contexts.one_at_a_time(turn_at(grads)):
            take_step(optim, rates, model, grads, weight)
        return model

    @traces.not_converted
    def summary(self, model: Any) -> RoutingTable:
        """Shows who updates what, and gives the table back as text.

        A row for each floating-point variable that is a parameter or could be: path, shape, group,
        optimizer, clipping, rate (of its optimizer), weight decay, and whether it is frozen.

        A script prints it here. A notebook, or another prompt, shows what a cell ends with by
        itself, and so the table; in the middle of a cell, `print` it.

        Args:
          model: The root; built on it if that hasn't happened yet.

        Returns:
          The table: a string, whose `repr` is the table, too.
        """
        optim = self._assembly

        def shown() -> RoutingTable:
            book = optim.prepare(model, "ModuleOptimizer.summary(model)")
            return summary.show(summary.rows(book, optim.owner, optim.groups))

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
        optim = self._assembly
        if optim.book is None:
            raise RuntimeError(
                "`ModuleOptimizer.state(path)` has no state: got an optimizer that isn't built, "
                "expected a built one. The first step builds it. Or now: `optim.build(model)`."
            )
        traces.depends_on(optim)
        canonical = optim.book.resolve(path)
        if canonical is None:
            raise KeyError(
                f"`ModuleOptimizer.state(path)` got an unknown path: {optim.book.unknown(path)} "
                "`tfloop.named_parameters(model)` lists them all."
            )
        update = optim.groups[optim.owner.get(canonical, 0)].update
        slots = update.state.slots(canonical) if update else {}
        return {name: tf.convert_to_tensor(slot) for name, slot in slots.items()}

    def as_keras(self, model: Any) -> Any:
        """Gives a `keras.optimizers.Optimizer` with these groups, for `model.compile`.

        `fit` then makes the updates that `step(model, grads)` makes, with the same state.
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
        traces.depends_on(self._assembly)
        return self._assembly.iterations

    @property
    def skipped(self) -> tf.Variable:
        """The steps that were left out for a gradient that wasn't finite, like `iterations`."""
        traces.depends_on(self._assembly)
        return self._assembly.skipped

    @property
    def scaler(self) -> LossScaler | None:
        """The scaler that was given; `Tape(scaler=optim.scaler)` takes it, `None` too."""
        return self._assembly.scaler

    @property
    def reduction(self) -> str | None:
        """How the gradients of replicas become one."""
        return self._assembly.reduction.name

    @property
    def on_nonfinite(self) -> str | None:
        """What happens to an update with a gradient that isn't finite."""
        return self._assembly.on_nonfinite

    @property
    def root(self) -> Any:
        """The model that the optimizer was built with, or `None`."""
        return self._assembly.model

    def serialize(self) -> bytes:
        """The state as bytes, for `tf.train.Checkpoint`."""
        optim = self._assembly
        if optim.pending is not None:
            return optim.pending
        return record.dump(optim.records()) if optim.book is not None else b""

    def deserialize(self, state: bytes) -> None:
        """Takes over a state from `tf.train.Checkpoint`, or nothing if it doesn't fit.

        Before the first step the state is kept until `build` knows the model.

        Raises:
          ValueError: Another optimizer; missing, extra or misshapen entries; a damaged record.
        """
        if self._assembly.book is not None:
            record.load(state, self._assembly.records())
            return
        if state:
            record.parse(state)
        self._assembly.pending = state or None

    def __copy__(self) -> Self:
        """As `copy.deepcopy`: two optimizers can't share state."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict) -> Self:
        """An optimizer of its own with equal groups, rates and state.

        It goes on with the same model, or with a copy of that: its first step decides.
        """
        optim = self._assembly
        twin = type(self)(
            "sgd",
            reduction=optim.reduction.name,
            scaler=copy.deepcopy(optim.scaler, memo),
            on_nonfinite=optim.on_nonfinite,
            strict=optim.strict,
            fused=self._fused,
        )
        twin._assembly.become(optim, memo)
        return with_attributes_of(self, twin, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled."""
        raise not_pickled(self)

    def __repr__(self) -> str:
        """The groups in the order in which they are asked, the last one first."""
        optim = self._assembly
        rows = [f"  {group}" for group in reversed(optim.groups)]
        steps = f", {int(optim.iterations.numpy())} steps" if tf.executing_eagerly() else ""
        root = optim.book.description if optim.book else "not built"
        return "\n".join([f"ModuleOptimizer({root}{steps}", *rows, ")"])
