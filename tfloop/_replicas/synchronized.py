"""Changes of variables that are made once for all replicas, on every copy of a variable."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfloop._model.paths import tf_variable
from tfloop._replicas import contexts
from tfloop._replicas.placement import strategy_of


def once(fn: Callable[..., None], *values: Any) -> None:
    """Runs `fn(strategy, *values)` once for all replicas; on one device, here.

    Args:
      fn: Changes variables through `update` alone.
      *values: Structures of tensors; replica by replica inside.
    """
    if contexts.is_replica():
        context = tf.distribute.get_replica_context()
        contexts.check_unconditional()
        context.merge_call(fn, args=values)
    else:
        fn(tf.distribute.get_strategy(), *values)


def update(strategy: Any, variable: Any, fn: Callable[..., None], *values: Any) -> None:
    """Runs `fn(component, *values)` on every device that holds a copy of the variable."""
    variable = tf_variable(variable)
    if strategy_of([variable]) is None and strategy.num_replicas_in_sync > 1:
        fn(variable, *tf.nest.map_structure(functools.partial(agreed, strategy), values))
        return
    strategy.extended.update(variable, fn, args=values, group=False)


def assign(strategy: Any, variable: Any, value: Any) -> None:
    """Gives every copy of a variable a value, inside `once`."""
    update(strategy, variable, lambda component, new: component.assign(new), value)


def agreed(strategy: Any, value: Any) -> Any:
    """The value that is the same on all replicas, inside `once`."""
    return strategy.experimental_local_results(value)[0]
