"""The one room that knows `tf.distribute`: what changes variables runs once for all replicas.

On one device everything here is plain. Gradients aren't reduced yet, so a step refuses several
replicas.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfloop._paths import tf_variable


def is_replica() -> bool:
    """Does this code run once per replica of a strategy?"""
    return tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None


def once(fn: Callable[..., None], *values: Any) -> None:
    """Runs `fn(strategy, *values)` once for all replicas; on one device, here.

    Args:
      fn: Changes variables through `strategy.extended.update` alone.
      *values: Structures of tensors; replica by replica inside.
    """
    if is_replica():
        tf.distribute.get_replica_context().merge_call(fn, args=values)
    else:
        fn(tf.distribute.get_strategy(), *values)


def update(strategy: Any, variable: Any, fn: Callable[..., None], *values: Any) -> None:
    """Runs `fn(component, *values)` on every device that holds a copy of the variable."""
    strategy.extended.update(tf_variable(variable), fn, args=values, group=False)
