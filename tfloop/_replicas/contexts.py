"""Where code runs: in a replica or outside, alone or one of several, with which part of a batch."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import tensorflow as tf

from tfloop._backend.tensorflow import is_default_strategy, replica_graph
from tfloop._model.paths import Variable
from tfloop._replicas.placement import strategy_of


class Share(NamedTuple):
    """What a replica has of the batch that one call of a compiled step works on.

    Attributes:
      rows: Its own rows, a scalar.
      of: The rows of the batch, a scalar.
      replicas: Into how many parts the batch was cut.
    """

    rows: tf.Tensor
    of: tf.Tensor
    replicas: int


# Replicas run in threads of their own, which have contexts of their own.
_SHARE: contextvars.ContextVar[Share | None] = contextvars.ContextVar("share", default=None)
_IN_STEP: contextvars.ContextVar[bool] = contextvars.ContextVar("in_step", default=False)


@contextlib.contextmanager
def in_step(share: Share | None) -> Iterator[None]:
    """Says, while the block runs, that this is a replica of a compiled step of ours.

    Args:
      share: What it has of the batch; `None` where no batch was cut.
    """
    before, outside = _SHARE.set(share), _IN_STEP.set(True)
    try:
        yield
    finally:
        _SHARE.reset(before)
        _IN_STEP.reset(outside)


def share() -> Share | None:
    """What this replica has of the batch, where `compile` has cut one."""
    return _SHARE.get()


def is_in_step() -> bool:
    """Is this a replica of a step that `compile` runs, with a batch or without?"""
    return _IN_STEP.get()


def is_default(strategy: tf.distribute.Strategy | None) -> bool:
    """Is it TensorFlow's default strategy, one device without replicas, or none at all?"""
    return strategy is None or is_default_strategy(strategy)


def is_replica() -> bool:
    """Does this code run once per replica of a strategy?"""
    return tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None


def one_at_a_time(lock: AbstractContextManager) -> AbstractContextManager:
    """Lets threads take turns in a block, but not replicas, which wait in it for each other."""
    return contextlib.nullcontext() if is_replica() else lock


def count() -> int:
    """The replicas that work on one update."""
    return tf.distribute.get_strategy().num_replicas_in_sync if is_replica() else 1


def check_context(call: str, variables: Mapping[str, Variable]) -> None:
    """Refuses the places where gradients of replicas can't be told from one another.

    Args:
      call: The public call, for messages.
      variables: The root's, by path.

    Raises:
      RuntimeError: It is called outside of the replicas, or the model was made elsewhere.
    """
    theirs = strategy_of(variables.values())
    if not is_replica():
        replicas = 1 if theirs is None else theirs.num_replicas_in_sync
        if tf.distribute.has_strategy() or replicas > 1:
            name = type(theirs or tf.distribute.get_strategy()).__name__
            raise RuntimeError(
                f"`{call}` was called outside of the replicas: got {name}'s cross-replica context, "
                "expected a replica. The scope is for building models, and there is one gradient "
                "for each replica. Run the step in them: "
                "`tfloop.compile(step, strategy=strategy)`, or `strategy.run(step, args=(batch,))`."
            )
        return
    ours = tf.distribute.get_strategy()
    odd = [p for p, v in variables.items() if strategy_of([v]) is not ours]
    if odd and ours.num_replicas_in_sync > 1:
        raise RuntimeError(
            f"`{call}` got a model that wasn't made in this strategy: got {odd[0]!r} of "
            f"{type(theirs).__name__ if theirs else 'no strategy'}, expected a variable of "
            f"{type(ours).__name__}. Each replica needs its own copy. Build it in the scope: "
            "`with strategy.scope(): model = build_model()`."
        )


def check_unconditional() -> None:
    """Refuses a graph within that of the replica: TensorFlow can't meet the others from there.

    Raises:
      RuntimeError: It is called in a `tf.cond`, a loop or a `tf.function` inside the replica.
    """
    theirs = replica_graph()
    here = tf.compat.v1.get_default_graph()
    if not tf.executing_eagerly() and theirs is not None and theirs is not here:
        raise RuntimeError(
            f"`ModuleOptimizer.step` was called in {getattr(here, 'name', 'a graph')!r} inside a "
            "replica, expected the replica's own code: in a `tf.cond`, a loop or a `tf.function` "
            "there, replicas can't wait for each other. Accumulate and step in two compiled "
            "functions, and decide between them in Python: `if (i + 1) % 4 == 0: update(lr)`."
        )
