"""Private of `keras.optimizers.Optimizer`: its rate, its state, its exclusions, its hooks."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfloop._backend.keras_variables import is_variable, tf_variable
from tfloop._backend.versions import required, unsupported

_OPTIMIZER = "keras.optimizers.Optimizer"
_RATE = "_learning_rate"
_AVERAGES = "_model_variables_moving_average"
AVERAGE = _AVERAGES.lstrip("_")
"""The slot that is a variable's moving average."""
# By key, and by a pattern for names. Keras leaves them out of the config.
_EXCLUSIONS = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")


def kinds(*names: str) -> tuple[Any, ...]:
    """The optimizer classes of these names that this Keras has: some came with 3.10, 3.14, 3.15."""
    found = (getattr(keras.optimizers, name, None) for name in names)
    return tuple(kind for kind in found if kind is not None)


def rate_of(optimizer: Optimizer) -> Any:
    """What gives its rate: a variable, a schedule or a function.

    The public `learning_rate` asks the schedule or function, for its own count of updates.
    """
    return required(optimizer, _RATE, _OPTIMIZER, "what gives the rate")


@contextlib.contextmanager
def rate_set(optimizer: Optimizer, rate: tf.Tensor) -> Iterator[Any]:
    """Lets `optimizer.learning_rate` be a tensor for a while: some rules read it there.

    Past Keras' attribute tracking, and without the cost of writing a variable. Muon multiplies
    dtypes that only a `keras.Variable` promotes, so it gets one.
    """
    kept = rate_of(optimizer)
    if isinstance(optimizer, kinds("Muon")):
        kept.assign(rate)
        yield kept
        return
    attributes = vars(optimizer)
    attributes[_RATE] = rate
    try:
        yield rate
    finally:
        attributes[_RATE] = kept


def config_without_rate(optimizer: Optimizer) -> dict[str, Any]:
    """Its config, with any number for a rate that is a function or schedule.

    Those may have no config.
    """
    if callable(rate_of(optimizer)):
        shell = object.__new__(type(optimizer))
        shell.__dict__.update(vars(optimizer), **{_RATE: 0.0})
        optimizer = shell
    return dict(optimizer.get_config())


def use_iterations(optimizer: Optimizer, counter: Any) -> None:
    """Lets a variable of ours be what `optimizer.iterations` gives."""
    optimizer._iterations = counter
    if optimizer.iterations is not counter:
        raise unsupported("_iterations", _OPTIMIZER, "what `iterations` gives")


def copy_exclusions(given: Optimizer, optimizer: Optimizer) -> None:
    """Leaves out of weight decay what another optimizer leaves out."""
    _check_exclusions()
    for name in _EXCLUSIONS:
        if hasattr(given, name):
            setattr(optimizer, name, getattr(given, name))


def exclude(optimizer: Optimizer, variables: Iterable[Any]) -> None:
    """Leaves variables out of weight decay, besides those that are left out already.

    Keras' public call forgets what it was told before.
    """
    variables = [*variables]
    if not variables:
        return
    _check_exclusions()
    keys, pattern = (getattr(optimizer, name, None) for name in _EXCLUSIONS)
    optimizer.exclude_from_weight_decay(var_list=variables)
    setattr(optimizer, _EXCLUSIONS[0], getattr(optimizer, _EXCLUSIONS[0]) | (keys or set()))
    setattr(optimizer, _EXCLUSIONS[1], pattern)


@functools.cache
def _check_exclusions() -> None:
    """Once: an optimizer has these attributes only if something was excluded."""
    probe = keras.optimizers.SGD(0.0, name="probe")
    probe.exclude_from_weight_decay(var_names=["probe"])
    for name in _EXCLUSIONS:
        if not hasattr(probe, name):
            raise unsupported(name, _OPTIMIZER, "what is excluded from weight decay")


def is_decayed(optimizer: Optimizer, variable: tf.Variable) -> bool:
    """Was it not excluded from weight decay?

    Give it the inner variable, as Keras' own update does: Keras looks for names in that one's
    name, and remembers the answer for both.
    """
    # Keras 3.16 answers `_use_weight_decay` from a table of what the optimizer was built on, in
    # which the members of a fused vector aren't.
    excluded = getattr(optimizer, "_is_excluded_from_weight_decay", None)
    if excluded is not None:
        return not excluded(variable)
    meaning = "whether a variable is excluded from weight decay"
    return required(optimizer, "_use_weight_decay", _OPTIMIZER, meaning)(variable)


def decay_of(optimizer: Optimizer, variable: keras.Variable) -> float | None:
    """The weight decay of a variable that isn't excluded: Muon has one for each of its rules."""
    if isinstance(optimizer, kinds("Muon")) and own_decay(optimizer) is not None:
        meaning = "which of its rules a variable gets"
        uses_adam = required(optimizer, "_should_use_adamw", "keras.optimizers.Muon", meaning)
        by_adam = uses_adam(variable)
        return optimizer.adam_weight_decay if by_adam else optimizer.weight_decay
    return optimizer.weight_decay


def own_decay(optimizer: Optimizer) -> Callable[[list[keras.Variable]], None] | None:
    """The decay of a class that has its own, to be called with variables; `None` for Keras'."""
    name = "_apply_weight_decay"
    return getattr(optimizer, name) if _overrides(optimizer, name) else None


def applies_by_itself(optimizer: Optimizer) -> bool:
    """Does a subclass bring an `apply` of its own, which must not be bypassed?"""
    names = ("apply", "apply_gradients", "_backend_apply_gradients", "_clip_gradients")
    return any(_overrides(optimizer, name) for name in names)


def updates_by_itself(optimizer: Optimizer) -> bool:
    """Does a subclass do the update of all variables in a way that must not be taken apart?

    That of Keras' Nadam is known: see `nadam_product`.
    """
    return _overrides(optimizer, "_backend_update_step", keras.optimizers.Nadam)


def _overrides(optimizer: Optimizer, name: str, *known: type) -> bool:
    """Has its class another method than `Optimizer` and the classes that are known?"""
    if not hasattr(Optimizer, name):
        raise unsupported(name, _OPTIMIZER, "the method that a subclass may override")
    return getattr(type(optimizer), name) not in [
        getattr(kind, name) for kind in (Optimizer, *known)
    ]


def nadam_product(optimizer: Optimizer) -> Any:
    """The product of momenta that Keras' Nadam moves once per update; `None` for others."""
    if not isinstance(optimizer, keras.optimizers.Nadam):
        return None
    meaning = "the product that is moved once per update"
    return required(optimizer, "_u_product", "keras.optimizers.Nadam", meaning)


def moving_averages(optimizer: Optimizer) -> list[Any]:
    """The averages of an optimizer with `use_ema`, parallel to its variables; `None` for some."""
    return required(optimizer, _AVERAGES, _OPTIMIZER, "the averages of `use_ema`")


def moving_average_of(optimizer: Optimizer, variable: tf.Variable) -> tf.Variable:
    """The average of one variable."""
    return tf_variable(moving_averages(optimizer)[index_of(optimizer, variable)])


def index_of(optimizer: Optimizer, variable: Any) -> int:
    """The place of a variable in the lists that Keras keeps parallel to its variables."""
    meaning = "the place of a variable in its lists"
    return required(optimizer, "_get_variable_index", _OPTIMIZER, meaning)(variable)


def index_anew(optimizer: Optimizer, targets: Sequence[keras.Variable]) -> None:
    """Lets it find the slots of variables that have other `tf.Variable`s since it was built."""
    meaning = "the places of variables by their keys"
    if not hasattr(optimizer, "_trainable_variables_indices"):
        raise unsupported("_trainable_variables_indices", _OPTIMIZER, meaning)
    if not hasattr(optimizer, "_var_key"):
        raise unsupported("_var_key", _OPTIMIZER, meaning)
    keys = map(optimizer._var_key, targets)
    optimizer._trainable_variables_indices = {key: n for n, key in enumerate(keys)}


def slots_of(
    optimizer: Optimizer, target: keras.Variable, index: int, count: int
) -> dict[str, Any]:
    """Slot -> variable, from the lists that Keras keeps parallel to its variables.

    The names are Keras' attributes without the underscore. A list of what it was built on has the
    target itself at its place, that of all its state begins with the count: neither has slots.

    Args:
      optimizer: A built one.
      target: What it was built on.
      index: The place of that.
      count: How many it was built on.
    """
    return {
        name.lstrip("_"): tf_variable(value[index])
        for name, value in vars(optimizer).items()
        if isinstance(value, list)
        and len(value) == count
        and is_variable(value[index])
        and value[index] is not target
        and value[0] is not optimizer.iterations
    }


def counters_of(optimizer: Optimizer) -> dict[str, tf.Variable]:
    """Counter -> variable: what stands alone on the optimizer, but for the rate."""
    rate = rate_of(optimizer)
    return {
        name.lstrip("_"): tf_variable(value)
        for name, value in vars(optimizer).items()
        if is_variable(value) and value is not rate
    }


def without_missing(
    optimizer: Optimizer, grads: Sequence[Any], variables: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The gradients that are there, and their variables; warns of the others as Keras does."""
    meaning = "what leaves out missing gradients, with Keras' warning"
    present = required(optimizer, "_filter_empty_gradients", _OPTIMIZER, meaning)
    return present(grads, variables)
