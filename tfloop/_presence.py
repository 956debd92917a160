"""Updates in a trace where only a run tells which parameters received a gradient.

A window of micro-batches may leave parameters out. Eagerly they are simply not passed on; in a
trace all are updated, and what received nothing is put back, value and state.
"""

import tensorflow as tf

from tfloop._paths import tf_variable
from tfloop._sparse import Gradient
from tfloop._update import GroupUpdate


def apply_where(
    update: GroupUpdate,
    parts: list[tuple[tf.Tensor, dict[str, Gradient]]],
    present: dict[str, tf.Tensor],
) -> tf.Tensor:
    """Updates a group as `update.apply(parts)` does, but for parameters that received nothing.

    Where all are present, which is the common case, no copy of the state is made.

    Args:
      update: The group.
      parts: As in `GroupUpdate.apply`; absent gradients hold zeros.
      present: Path -> scalar bool, for every path of the parts.

    Returns:
      A scalar bool: did the group take part at all?
    """
    paths = [path for _, grads in parts for path in grads]
    flags = tf.stack([present[path] for path in paths])
    some = tf.reduce_any(flags)
    # A function of its own, so that the update is traced once and stands in both branches.
    apply = tf.function(lambda: update.apply(parts), autograph=False)

    def everything() -> None:
        apply()

    def what_is_there() -> None:
        state = [(v, present[p]) for p in paths for v in _state_of(update, p)]
        state += [(counter, some) for counter in update.counters().values()]
        before = [tf.identity(variable) for variable, _ in state]
        apply()
        for (variable, flag), old in zip(state, before, strict=True):
            variable.assign(tf.where(flag, variable, old), read_value=False)

    tf.cond(tf.reduce_all(flags), everything, what_is_there)
    return some


def _state_of(update: GroupUpdate, path: str) -> list[tf.Variable]:
    """Everything that an update of one parameter writes."""
    return [tf_variable(update.variables[path]), *update.slots(path).values()]
