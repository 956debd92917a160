"""The value that each replica has of a variable: read, compared and assigned."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfloop._model.paths import Variable, tf_variable
from tfloop._replicas.collectives import in_row
from tfloop._replicas.placement import replica_ids, strategy_of


def read_together(values: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the variables that are synchronized on read, for which all workers have to call it."""
    return {key: v.numpy() if _is_synchronized_on_read(v) else v for key, v in values.items()}


def is_unsynchronized(variable: Variable) -> bool:
    """Is it state of which each replica changes its own copy, and nobody puts them together?

    Parameters are mirrored; a variable with an aggregation is TensorFlow's business.
    """
    variable = tf_variable(variable)
    return (
        strategy_of([variable]) is not None
        and not variable.trainable
        and variable.aggregation == tf.VariableAggregation.NONE
        and not _is_synchronized_on_read(variable)
    )


def differing(variables: Mapping[str, Variable]) -> dict[str, list[np.ndarray]]:
    """Key -> the value on each replica, for those of the variables where these differ.

    Over several workers all have to call it.
    """
    found = {}
    for key, variable in variables.items():
        variable = tf_variable(variable)
        strategy = strategy_of([variable])
        if strategy is None or not (
            is_unsynchronized(variable) or _is_synchronized_on_read(variable)
        ):
            continue
        values = _per_replica(strategy, variable)
        if any(value.tobytes() != values[0].tobytes() for value in values):
            found[key] = values
    return found


def assign_each(variable: tf.Variable, values: Sequence[Any]) -> None:
    """Gives every replica its own value, where there is one for each of them."""
    strategy = strategy_of([variable])
    if strategy is None or strategy.num_replicas_in_sync != len(values):
        return
    components = strategy.experimental_local_results(variable)
    for component, number in zip(components, replica_ids(strategy), strict=True):
        component.assign(values[number])


def assign_total(variable: tf.Variable, value: Any) -> None:
    """Gives a variable a value; of a sum over replicas, the first gets all and the others zero.

    TensorFlow would split a sum, by a division that rounds, or drops the remainder of an integer.
    """
    if not _is_synchronized_on_read(variable) or variable.aggregation != tf.VariableAggregation.SUM:
        variable.assign(value)
        return
    strategy = strategy_of([variable])
    assert strategy is not None  # or nothing would be synchronized
    components = strategy.experimental_local_results(variable)
    for component, number in zip(components, replica_ids(strategy), strict=True):
        component.assign(value if number == 0 else tf.zeros_like(component))


def maximum(variable: tf.Variable) -> tf.Tensor:
    """The maximum over the replicas' values of a variable; each worker has to ask."""
    strategy = strategy_of([variable])
    if strategy is None:
        return tf.convert_to_tensor(variable)
    values = iter(strategy.experimental_local_results(variable))
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: in_row(
            tf.convert_to_tensor(next(values)),
            context.replica_id_in_sync_group,
            context.num_replicas_in_sync,
        )
    )
    return tf.reduce_max(strategy.reduce(tf.distribute.ReduceOp.SUM, rows, axis=None), 0)


def _is_synchronized_on_read(value: Any) -> bool:
    return (
        isinstance(value, tf.Variable)
        and value.synchronization == tf.VariableSynchronization.ON_READ
        and strategy_of([value]) is not None
    )


def _per_replica(strategy: tf.distribute.Strategy, variable: tf.Variable) -> list[np.ndarray]:
    """The values of a variable, by the numbers of the replicas; other workers' are sent."""
    components = strategy.experimental_local_results(variable)
    ours = dict(zip(replica_ids(strategy), components, strict=True))
    if len(ours) == strategy.num_replicas_in_sync:
        return [np.asarray(ours[number].numpy()) for number in sorted(ours)]
    # Gathers take no integers below 32 bits and no booleans.
    kind = tf.int64 if variable.dtype.is_integer or variable.dtype.is_bool else variable.dtype
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: tf.cast(ours[context.replica_id_in_sync_group], kind)[None]
    )
    return [*tf.cast(strategy.gather(rows, 0), variable.dtype).numpy()]
