"""Where variables live: in which strategy or on which device, and where state beside them goes."""

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfloop._model.paths import Variable, tf_variable

# Variables that every replica holds and changes the same way: the first one's value is the value.
MIRRORED = {"trainable": False, "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}
# Variables of which each replica has its own value; read together they are the sum, or the first.
_PER_REPLICA = {"trainable": False, "synchronization": tf.VariableSynchronization.ON_READ}
SUMMED = _PER_REPLICA | {"aggregation": tf.VariableAggregation.SUM}
OF_THE_FIRST = _PER_REPLICA | {"aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}


def strategy_of(variables: Iterable[Variable]) -> tf.distribute.Strategy | None:
    """The strategy in which variables were made, or `None` for plain ones."""
    found = (getattr(tf_variable(v), "distribute_strategy", None) for v in variables)
    return next(filter(None, found), None)


def scope_of(variables: Iterable[Variable]) -> AbstractContextManager:
    """Where state for these variables is made: in their strategy, or on the device they share.

    State made elsewhere would drift apart between replicas without a word, or be copied between
    devices with each update, which XLA refuses.
    """
    variables = list(variables)
    strategy, device = strategy_of(variables), _device_of(variables)
    if strategy is not None:
        return strategy.scope()
    return contextlib.nullcontext() if device is None else tf.device(device)


def placed_with(counter: tf.Variable, variables: Iterable[Variable], kind: dict) -> tf.Variable:
    """A counter in the placement of these variables: itself if it is there, else a new one.

    Args:
      counter: A plain variable, made before the model was known, or one that was moved.
      variables: Those of the model.
      kind: `MIRRORED`, `SUMMED` or `OF_THE_FIRST`.
    """
    variables = list(variables)
    wanted, present = strategy_of(variables), strategy_of([counter])
    if wanted is None and present is None:
        stays = _device_of(variables) in (None, counter.device)
    else:
        stays = wanted in (None, present)
    if stays:
        return counter
    with scope_of(variables):
        name = counter.name.partition(":")[0]
        return tf.Variable(counter.numpy(), dtype=counter.dtype, name=name, **kind)


def replica_ids(strategy: tf.distribute.Strategy) -> list[int]:
    """The numbers of this process' replicas among all."""
    found = []

    def note(context: Any) -> tf.Tensor:
        found.append(context.replica_id_in_sync_group)
        return tf.constant(0)

    strategy.experimental_distribute_values_from_function(note)
    return found


def spans_processes(strategy: tf.distribute.Strategy | None) -> bool:
    """Does it work in several processes?"""
    return strategy is not None and len(replica_ids(strategy)) < strategy.num_replicas_in_sync


def _device_of(variables: Iterable[Variable]) -> str | None:
    """The one device that plain variables are on."""
    if strategy_of(variables) is not None:
        return None
    devices = {tf_variable(variable).device for variable in variables}
    return devices.pop() if len(devices) == 1 else None
