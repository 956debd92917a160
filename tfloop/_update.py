"""How the variables of one group are updated: by a Keras optimizer of their own.

The one room that knows the inside of `keras.optimizers.Optimizer`. It applies Keras' rules as
they are, with three additions: several rates in one update, a subset of the variables at a
time, and state by path that survives when the set of variables changes.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfloop import _sparse
from tfloop._clipping import GradientClipping
from tfloop._messages import described, listed
from tfloop._paths import Variable, tf_variable
from tfloop._sparse import Gradient

_CLIP_ARGUMENTS = {
    "clipvalue": GradientClipping.by_value,
    "clipnorm": GradientClipping.by_norm,
    "global_clipnorm": GradientClipping.by_global_norm,
}
_NOT_SLOTS = {"_variables", "_trainable_variables", "_accumulated_gradients"}
_Keras = keras.optimizers.Optimizer


class GroupUpdate:
    """One group's own copy of a Keras optimizer, and the state of the variables it serves.

    Args:
      given: The optimizer that the user gave. It is never changed; its `learning_rate` is read at
        every step, so setting it later works.
      call: The public call, for messages.

    Attributes:
      given: As above.
      clipping: The clipping that `given` asked for by its own arguments, or `None`.
    """

    def __init__(self, given: keras.optimizers.Optimizer, call: str) -> None:
        _check_arguments(given, call)
        self.given = given
        self.clipping = _clipping_of(given)
        self._state = _State(_copy(given, call), {})

    @property
    def variables(self) -> dict[str, Variable]:
        """Path -> variable: those that have state."""
        return self._state.variables

    @property
    def _optimizer(self) -> keras.optimizers.Optimizer:
        return self._state.optimizer

    @property
    def name(self) -> str:
        """The class of the optimizer."""
        return type(self.given).__name__

    @property
    def iterations(self) -> tf.Variable:
        """How many updates this group has taken part in."""
        return tf_variable(self._optimizer.iterations)

    @property
    def weight_decay(self) -> float | None:
        """The decoupled weight decay of the copy."""
        return self._optimizer.weight_decay

    def decays(self, path: str) -> bool:
        """Does weight decay reach the variable at `path`?"""
        optimizer = self._optimizer
        return bool(optimizer.weight_decay) and optimizer._use_weight_decay(
            tf_variable(self.variables[path])
        )

    def state_for(self, variables: Mapping[str, Variable]) -> "_State":
        """Makes the state for a set of variables; those that have state under their path keep it.

        Nothing of this object changes until `adopt`.
        """
        if not variables or variables.keys() == self.variables.keys():
            return _State(self._optimizer, dict(variables))
        optimizer = _copy(self.given, "ModuleOptimizer.build(model)")
        optimizer.build(list(variables.values()))
        if optimizer.use_ema:
            # Keras fills the averages at its first update, of whichever variables take part then.
            averages = optimizer._model_variables_moving_average
            for average, variable in zip(averages, variables.values(), strict=True):
                average.assign(variable)
        state = _State(optimizer, dict(variables))
        if self.variables:
            for name, counter in state.counters().items():
                counter.assign(self._state.counters()[name])
        for path, variable in variables.items():
            if path in self.variables and self.variables[path] is variable:
                for name, slot in state.slots(path).items():
                    slot.assign(self._state.slots(path)[name])
        return state

    def adopt(self, state: "_State") -> None:
        """Takes over a state that `state_for` made."""
        self._state = state

    def slots(self, path: str) -> dict[str, tf.Variable]:
        """The state of one variable by Keras' attribute names, without the underscore."""
        return self._state.slots(path)

    def counters(self) -> dict[str, tf.Variable]:
        """The state that the whole group shares: its iterations, and what else Keras counts."""
        return self._state.counters()

    def own_rate(self) -> Any:
        """The rate of the optimizer that was given: a variable, or a schedule of our updates."""
        rate = self.given._learning_rate
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return rate(self.iterations)
        return rate() if callable(rate) else tf_variable(rate)

    def rate_source(self) -> Any:
        """The object that holds the rate; another one makes a trace stale."""
        return self.given._learning_rate

    def takes_several_rates(self) -> bool:
        """Can one update use a rate of its own for each variable?

        Nadam moves a scalar once per update before the variables; a rule of unknown kind that
        does so can't be split.
        """
        if isinstance(self._optimizer, keras.optimizers.Nadam):
            return True
        plain = type(self._optimizer)._backend_update_step is _Keras._backend_update_step
        return plain and not _applies_by_itself(self._optimizer)

    def apply(self, parts: Iterable[tuple[Any, dict[str, Gradient]]]) -> None:
        """Updates variables once: decay, Keras' rule, constraint, moving average, count.

        Args:
          parts: (rate, path -> gradient) for each rate. The gradients are of the variables' shapes
            and final: reduced and clipped.
        """
        optimizer = self._optimizer
        own_apply = _applies_by_itself(optimizer)
        prepare = _sparse.deduplicate if _takes_rows(optimizer) else _sparse.densify
        with keras.name_scope(optimizer.name):
            for number, (rate, grads) in enumerate(parts):
                variables = [self.variables[path] for path in grads]
                values = [
                    prepare(_sparse.cast(grad, tf.as_dtype(variable.dtype)))
                    for grad, variable in zip(grads.values(), variables, strict=True)
                ]
                rate = tf.cast(rate, optimizer._learning_rate.dtype)
                optimizer.learning_rate = rate  # decay reads it there
                if own_apply:
                    optimizer.apply(values, variables)
                    continue
                self._apply_part(rate, values, variables, first=number == 0)
                if optimizer.use_ema:
                    self._average(grads)
            if not own_apply:
                optimizer.iterations.assign_add(1)

    def _apply_part(
        self, rate: Any, grads: list[Gradient], variables: list[Variable], first: bool
    ) -> None:
        optimizer = self._optimizer
        grads, variables = optimizer._overwrite_variables_directly_with_gradients(grads, variables)
        optimizer._apply_weight_decay(variables)
        if first:
            optimizer._backend_update_step(grads, variables, rate)
        else:
            _Keras._backend_update_step(optimizer, grads, variables, rate)
        for variable in variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    def _average(self, paths: Iterable[str]) -> None:
        """Keras' moving average, of the variables that were updated and of no others."""
        optimizer = self._optimizer
        averages = optimizer._model_variables_moving_average
        moved = [(self.variables[p], averages[self._state.index[p]]) for p in paths]
        started = tf.not_equal(self.iterations, 0)
        for variable, average in moved:
            value = tf.convert_to_tensor(tf_variable(variable))
            momentum = tf.cast(started, value.dtype) * optimizer.ema_momentum
            average.assign(momentum * average + (1 - momentum) * value)
        if optimizer.ema_overwrite_frequency:
            due = (self.iterations + 1) % optimizer.ema_overwrite_frequency == 0
            for variable, average in moved:
                variable.assign(tf.where(due, average, variable))


class _State:
    """A Keras optimizer that was built on a set of variables, read by path."""

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, variables: dict[str, Variable]
    ) -> None:
        self.optimizer = optimizer
        self.variables = variables
        self.index = {path: index for index, path in enumerate(variables)}

    def slots(self, path: str) -> dict[str, tf.Variable]:
        """Slot -> variable, from the lists that Keras keeps parallel to its variables."""
        if path not in self.index:
            return {}
        index, count = self.index[path], len(self.index)
        return {
            name.lstrip("_"): tf_variable(value[index])
            for name, value in vars(self.optimizer).items()
            if name not in _NOT_SLOTS
            and isinstance(value, list)
            and len(value) == count
            and isinstance(value[index], keras.Variable)
        }

    def counters(self) -> dict[str, tf.Variable]:
        """Counter -> variable: what stands alone on the optimizer, but for the rate."""
        return {
            name.lstrip("_"): tf_variable(value)
            for name, value in vars(self.optimizer).items()
            if isinstance(value, keras.Variable) and name != "_learning_rate"
        }


def as_keras_optimizer(optimizer: Any, call: str) -> keras.optimizers.Optimizer:
    """An optimizer from what `keras.Model.compile` accepts: an instance, a name or a config."""
    if isinstance(optimizer, (str, dict)):
        return keras.optimizers.get(optimizer)
    if isinstance(optimizer, type) and issubclass(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"`{call}` needs an optimizer: got the class {optimizer.__name__}, expected an "
            f"instance. Make one: `keras.optimizers.{optimizer.__name__}()`."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"`{call}` needs an optimizer: got {described(optimizer)}, expected a "
            "keras.optimizers.Optimizer, its name or its config. "
            "Make one: `keras.optimizers.Adam()`."
        )
    return optimizer


def _check_arguments(given: keras.optimizers.Optimizer, call: str) -> None:
    """Refuses what would be applied twice or at the wrong time, and names what does it here."""
    name = type(given).__name__
    if isinstance(given, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"`{call}` got a LossScaleOptimizer, expected the optimizer inside it: one scale must "
            f"serve all groups. Give the inner one: `{type(given.inner_optimizer).__name__}(...)`."
        )
    if isinstance(given, keras.optimizers.MultiOptimizer):
        raise ValueError(
            f"`{call}` got a MultiOptimizer, expected one optimizer: groups are declared here. "
            "Write `.with_group(tfloop.ParamGroup.from_regex(pattern), optimizer)` for each."
        )
    if given.gradient_accumulation_steps:
        raise ValueError(
            f"`{call}` got {name}(gradient_accumulation_steps="
            f"{given.gradient_accumulation_steps}), expected none: it would count micro-batches as "
            "updates. Accumulate before the step: `tfloop.GradientsAccumulator()`."
        )
    if given.loss_scale_factor:
        raise ValueError(
            f"`{call}` got {name}(loss_scale_factor={given.loss_scale_factor}), expected none: "
            "gradients reach the step unscaled. Undo a scale of your own: `grads.scale(1 / s)`."
        )
    clips = [f"{arg}={getattr(given, arg)}" for arg in _CLIP_ARGUMENTS if getattr(given, arg)]
    bad = [arg for arg in _CLIP_ARGUMENTS if (getattr(given, arg) or 0) < 0]
    if bad:
        raise ValueError(
            f"`{call}` got {name}({listed(clips)}), expected a positive bound. "
            "Write `clipping=tfloop.GradientClipping.by_norm(1.0)`."
        )
    steps = int(given.iterations.numpy()) if tf.executing_eagerly() else 0
    if steps:
        raise ValueError(
            f"`{call}` got an optimizer that has already made {steps} steps elsewhere, expected a "
            "fresh one: each group works on a copy, and the state would be lost. "
            f"Make a new one: `keras.optimizers.{name}(...)`."
        )


def _clipping_of(given: keras.optimizers.Optimizer) -> GradientClipping | None:
    """The optimizer's own clipping as ours, which means the same."""
    for argument, make in _CLIP_ARGUMENTS.items():
        limit = getattr(given, argument)
        if limit:
            return make(float(limit) if not math.isnan(limit) else limit)
    return None


def _copy(given: keras.optimizers.Optimizer, call: str) -> keras.optimizers.Optimizer:
    """A fresh optimizer of the same configuration, its rate a variable that each step sets."""
    try:
        with warnings.catch_warnings():
            # A lambda as rate is read from `given`, never loaded from the config.
            warnings.filterwarnings("ignore", message="The object being serialized.*lambda")
            config = given.get_config()
        config.update({argument: None for argument in _CLIP_ARGUMENTS}, learning_rate=0.0)
        optimizer = type(given).from_config(config)
    except Exception as error:
        raise ValueError(
            f"`{call}` can't copy {type(given).__name__}: its config gave "
            f"{type(error).__name__}: {error}. Each group needs its own copy. "
            "Write `get_config` so that `type(opt).from_config(opt.get_config())` works."
        ) from error
    # Keras leaves these out of the config.
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(given, name):
            setattr(optimizer, name, getattr(given, name))
    return optimizer


def _applies_by_itself(optimizer: keras.optimizers.Optimizer) -> bool:
    """Does a subclass bring an `apply` of its own, which must not be bypassed?"""
    return any(
        getattr(type(optimizer), name) is not getattr(_Keras, name)
        for name in ("apply", "_backend_apply_gradients")
    )


def _takes_rows(optimizer: keras.optimizers.Optimizer) -> bool:
    """Is its rule right for deduplicated rows?

    Keras' own rules are, but Adadelta adds two sparse tensors, which XLA can't. A rule of the
    user's is most likely written for dense tensors.
    """
    of_keras = type(optimizer).__module__.startswith("keras.")
    return of_keras and not isinstance(optimizer, keras.optimizers.Adadelta)
