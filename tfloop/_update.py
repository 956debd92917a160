"""How the variables of one group are updated: by a Keras optimizer of their own.

The one room that knows how `keras.optimizers.Optimizer` updates. It applies Keras' rules as
they are, with three additions: several rates in one update, a subset of the variables at a
time, and state by path that survives when the set of variables changes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer
from keras.optimizers.schedules import LearningRateSchedule

from tfloop import _sparse, _traces
from tfloop._given import (
    applies_by_itself,
    check_arguments,
    check_copy,
    clipping_of,
    copy_of,
)
from tfloop._messages import listed
from tfloop._paths import Variable, is_variable, tf_variable
from tfloop._sparse import Gradient

_BUILD = "ModuleOptimizer.build(model)"
_ROW_RULES = {
    getattr(keras.optimizers, name).update_step
    for name in ("SGD", "Adam", "Adamax", "Nadam", "Ftrl", "Lion", "Lamb")
}
_NOT_SLOTS = {"_variables", "_trainable_variables", "_accumulated_gradients"}


class GroupUpdate:
    """One group's own copy of a Keras optimizer, and the state of the variables it serves.

    Args:
      given: The optimizer that the user gave. It is never changed; its `learning_rate` is read at
        every step, so setting it later works.
      call: The public call, for messages.

    Attributes:
      given: As above.
      clipping: The clipping that `given` asked for by its own arguments, or `None`.
      state: The copy, and its state by path.
    """

    def __init__(self, given: Optimizer, call: str) -> None:
        check_arguments(given, call)
        self.given = given
        self.clipping = clipping_of(given)
        self.state = State(copy_of(given, call), {})
        check_copy(given, self.state.optimizer, call)
        self._rate_source: Any = given._learning_rate
        self._rate_changes = 0
        self._called_rate: tf.Variable | None = None
        self._asked = False

    @property
    def variables(self) -> dict[str, Variable]:
        """Path -> variable: those that have state."""
        return self.state.variables

    @property
    def name(self) -> str:
        """The class of the optimizer."""
        return type(self.given).__name__

    def overwrites(self, path: str) -> bool:
        """Is the gradient the variable's new value, as for the scales of float8 layers?"""
        return getattr(self.variables[path], "overwrite_with_gradient", False)

    def decay_of(self, path: str) -> float | None:
        """The weight decay that reaches the variable at `path`, if any."""
        optimizer, variable = self.state.optimizer, self.state.targets[path]
        if not optimizer._use_weight_decay(variable):
            return None
        if isinstance(optimizer, keras.optimizers.Muon) and optimizer._should_use_adamw(variable):
            return optimizer.adam_weight_decay or None
        return optimizer.weight_decay or None

    def state_for(self, variables: Mapping[str, Variable]) -> "State":
        """Makes the state for a set of variables; those that have state under their path keep it.

        Nothing of this object changes until the result is put into `state`.

        Raises:
          ValueError: The optimizer keeps state that isn't found by path.
        """
        old = self.state
        if list(variables) == list(old.variables) and all(
            old.variables[path] is variable for path, variable in variables.items()
        ):
            return old
        new = State(copy_of(old.optimizer, _BUILD), dict(variables))
        if not variables:
            return new
        new.build()
        counts = old.counters()
        for name, counter in new.counters().items():
            if name in counts:
                counter.assign(counts[name])
        for path, variable in variables.items():
            if old.variables.get(path) is variable:
                kept = old.slots(path)
                for name, slot in new.slots(path).items():
                    slot.assign(kept[name])
        return new

    def slots(self, path: str) -> dict[str, tf.Variable]:
        """The state of one variable by Keras' attribute names, without the underscore."""
        return self.state.slots(path)

    def counters(self) -> dict[str, tf.Variable]:
        """The state that the whole group shares: its iterations, and what else Keras counts."""
        return self.state.counters()

    def own_rate(self) -> Any:
        """The rate of the optimizer that was given: a number, a tensor or a variable.

        A schedule is asked at the count of this group's updates. A function is called; the
        plain number that it may give would be baked into a trace, so a trace reads it from a
        variable, which `refresh` brings up to date.
        """
        rate = self.given._learning_rate
        if isinstance(rate, LearningRateSchedule):
            return rate(self.state.optimizer.iterations)
        if not _is_function(rate):
            return tf_variable(rate)
        value = rate()
        known = None if is_variable(value) else tf.get_static_value(value)
        if tf.executing_eagerly() or known is None:
            return value
        _traces.eagerly(lambda: self._remember(known))
        self._asked = _traces.is_recorded()
        return self._called_rate

    def schedule_name(self) -> str | None:
        """The class of the schedule that gives the rate, if one does."""
        rate = self.given._learning_rate
        return type(rate).__name__ if isinstance(rate, LearningRateSchedule) else None

    def refresh(self) -> int:
        """Brings up to date what a trace reads; called before each compiled step.

        Returns:
          How often the object that holds the rate was replaced, which makes a trace stale.
        """
        if self.given._learning_rate is not self._rate_source:
            self._rate_source = self.given._learning_rate
            self._rate_changes += 1
        if self._called_rate is not None and _is_function(self._rate_source):
            if not self._asked:
                self._remember(self._rate_source())
            self._asked = False  # what its own trace asked counts for the first run
        return self._rate_changes

    def _remember(self, value: Any) -> None:
        value = tf.cast(value, self.state.optimizer._learning_rate.dtype)
        if self._called_rate is None:
            self._called_rate = tf.Variable(value, trainable=False, name="rate")
        self._called_rate.assign(value)

    def takes_several_rates(self) -> bool:
        """Can one update use a rate of its own for each variable?

        Nadam moves a scalar once per update before the variables; a rule of unknown kind that
        does so can't be split.
        """
        optimizer = self.state.optimizer
        known = [kind._backend_update_step for kind in (Optimizer, keras.optimizers.Nadam)]
        return type(optimizer)._backend_update_step in known and not applies_by_itself(optimizer)

    def apply(self, parts: Iterable[tuple[Any, dict[str, Gradient]]]) -> None:
        """Updates variables once: decay, Keras' rule, moving average, constraint, count.

        Args:
          parts: (rate, path -> gradient) for each rate. The gradients are of the variables' shapes
            and final: reduced and clipped.
        """
        optimizer, targets = self.state.optimizer, self.state.targets
        own_apply = applies_by_itself(optimizer)
        prepare = _sparse.deduplicate if _takes_rows(optimizer) else _sparse.densify
        with keras.name_scope(optimizer.name):
            for number, (rate, grads) in enumerate(parts):
                variables = [targets[path] for path in grads]
                # Repeated rows are summed before a 16-bit dtype would round each of them.
                values = [
                    _sparse.cast(prepare(grad), tf.as_dtype(variable.dtype))
                    for grad, variable in zip(grads.values(), variables, strict=True)
                ]
                optimizer.learning_rate = tf.cast(rate, optimizer._learning_rate.dtype)
                if own_apply:
                    optimizer.apply_gradients(zip(values, variables, strict=True))
                else:
                    self._apply_part(values, variables, first=number == 0)
            if not own_apply:
                optimizer.iterations.assign_add(1)

    def _apply_part(self, grads: list[Gradient], variables: list[Variable], first: bool) -> None:
        """What `Optimizer.apply` does, but for the count, and for these variables alone."""
        optimizer = self.state.optimizer
        grads, variables = optimizer._overwrite_variables_directly_with_gradients(grads, variables)
        if not variables:
            return
        # As a variable, which Keras casts where a rule forgets to.
        rate = optimizer.learning_rate
        optimizer._apply_weight_decay(variables)
        if first:
            optimizer._backend_update_step(grads, variables, rate)
        else:
            Optimizer._backend_update_step(optimizer, grads, variables, rate)
        if optimizer.use_ema:
            self._average(variables)
        for variable in variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    def _average(self, variables: list[Variable]) -> None:
        """Keras' moving average, of the variables that were updated and of no others."""
        optimizer = self.state.optimizer
        started = tf.not_equal(optimizer.iterations, 0)
        every = optimizer.ema_overwrite_frequency
        due = tf.equal((optimizer.iterations + 1) % every, 0) if every else None
        for variable in variables:
            index = optimizer._get_variable_index(variable)
            average = tf_variable(optimizer._model_variables_moving_average[index])
            value = tf.convert_to_tensor(tf_variable(variable))
            momentum = tf.cast(started, value.dtype) * optimizer.ema_momentum
            average.assign(momentum * average + (1 - momentum) * value)
            if due is not None:
                variable.assign(tf.where(due, average, value))


class State:
    """A Keras optimizer and the variables it is built on, read by path.

    Attributes:
      optimizer: The optimizer.
      variables: Path -> variable, as the model holds it.
      targets: Path -> the same as `keras.Variable`.
    """

    def __init__(self, optimizer: Optimizer, variables: dict[str, Variable]) -> None:
        self.optimizer = optimizer
        self.variables = variables
        self.targets = {path: _as_keras(path, v) for path, v in variables.items()}
        self._index = {path: index for index, path in enumerate(variables)}

    def build(self) -> None:
        """Makes the slots.

        Raises:
          ValueError: Some of them aren't found by path.
        """
        optimizer = self.optimizer
        optimizer.build(list(self.targets.values()))
        found = [self.counters(), *map(self.slots, self._index)]
        known = {id(variable) for named in found for variable in named.values()}
        known.add(id(tf_variable(optimizer._learning_rate)))
        lost = [v.name for v in optimizer.variables if id(tf_variable(v)) not in known]
        if lost:
            raise ValueError(
                f"`{_BUILD}` found state of {type(optimizer).__name__} that no path leads to: got "
                f"{listed(lost)}, expected lists with an entry per variable, or single variables. "
                "It could be neither saved nor kept when groups change. Make it in `build`: "
                "`self.momentums = self.add_optimizer_variables(variables, 'momentum')`."
            )
        if optimizer.use_ema:
            # Keras fills the averages at its first update, of whichever variables take part then.
            averages = optimizer._model_variables_moving_average
            for average, variable in zip(averages, self.targets.values(), strict=True):
                if average is not None:
                    average.assign(variable)

    def slots(self, path: str) -> dict[str, tf.Variable]:
        """Slot -> variable, from the lists that Keras keeps parallel to its variables.

        The names are Keras' attributes without the underscore.
        """
        if path not in self._index:
            return {}
        index, count = self._index[path], len(self._index)
        return {
            name.lstrip("_"): tf_variable(value[index])
            for name, value in vars(self.optimizer).items()
            if name not in _NOT_SLOTS
            and isinstance(value, list)
            and len(value) == count
            and is_variable(value[index])
        }

    def counters(self) -> dict[str, tf.Variable]:
        """Counter -> variable: what stands alone on the optimizer, but for the rate."""
        return {
            name.lstrip("_"): tf_variable(value)
            for name, value in vars(self.optimizer).items()
            if is_variable(value) and name != "_learning_rate"
        }


def _as_keras(path: str, variable: Variable) -> keras.Variable:
    """A `keras.Variable` around a raw `tf.Variable`: Muon asks for its `path`."""
    if isinstance(variable, keras.Variable):
        return variable
    target = keras.Variable(variable, name=path.replace("/", "_") or "variable", autocast=False)
    target.constraint = variable.constraint
    return target


def _is_function(rate: Any) -> bool:
    return callable(rate) and not isinstance(rate, LearningRateSchedule)


def _takes_rows(optimizer: Optimizer) -> bool:
    """Is its rule right, also under XLA, for rows that occur once each?

    Those are that first mix the gradient with dense state. The others of Keras divide or add
    sparse tensors, in branches that XLA can't compile; a user's own is likely written for dense
    ones. They get the dense gradient.
    """
    return type(optimizer).update_step in _ROW_RULES
