"""The one room that knows `tf.distribute`: where state lives, and how replicas agree.

Gradients are reduced once per update, all dense ones of a dtype and all sparse ones in one call
each; what changes variables runs once for all replicas. On one device everything here is plain.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfloop import _sparse
from tfloop._paths import Variable, tf_variable
from tfloop._sparse import Gradient


def is_replica() -> bool:
    """Does this code run once per replica of a strategy?"""
    return tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None


def check_context(call: str) -> None:
    """Refuses the place where a strategy is open but no replica runs.

    Raises:
      RuntimeError: It is called in a scope, outside of `strategy.run`.
    """
    if tf.distribute.has_strategy() and tf.distribute.get_replica_context() is None:
        raise RuntimeError(
            f"`{call}` was called in a strategy's scope, outside of its replicas, where one "
            "gradient can't be told from another. The scope is for building. Run the step in "
            "replicas: `strategy.run(step_fn, args=(batch,))`, or "
            "`tfloop.compile(step_fn, strategy=strategy)`."
        )


def scope_of(variables: Iterable[Variable]) -> AbstractContextManager:
    """The scope in which state for these variables is made: the strategy that they were made in.

    State made elsewhere would drift apart between replicas without a word.
    """
    for variable in variables:
        strategy = getattr(tf_variable(variable), "distribute_strategy", None)
        if strategy is not None:
            return strategy.scope()
    return tf.distribute.get_strategy().scope()


def reduce_sum(grads: Mapping[str, Gradient], extra: list[tf.Tensor]) -> tuple[dict, list]:
    """Sums gradients and scalars over the replicas.

    One collective for the dense tensors of each dtype, packed into one vector, which copies each
    of them once; one for the sparse ones, whose rows are gathered.

    Args:
      grads: Path -> gradient, the same paths on every replica.
      extra: Float32 scalars that travel along.

    Returns:
      The sums, in the same order.
    """
    context = tf.distribute.get_replica_context()
    dense = {path: grad for path, grad in grads.items() if not _sparse.is_sparse(grad)}
    sparse = {path: grad for path, grad in grads.items() if _sparse.is_sparse(grad)}
    summed: dict[str, Gradient] = {}
    by_dtype: dict[tf.DType, list[str]] = {tf.float32: []}
    for path, grad in dense.items():
        by_dtype.setdefault(grad.dtype, []).append(path)
    extras = list(extra)
    for dtype, paths in by_dtype.items():
        tensors = [dense[path] for path in paths]
        riders = extras if dtype == tf.float32 else []
        if tensors or riders:
            results = _packed_sum(context, [*tensors, *riders])
            summed.update(zip(paths, results, strict=False))
            if riders:
                extras = results[len(paths) :]
    if sparse:
        results = context.all_reduce(tf.distribute.ReduceOp.SUM, list(sparse.values()))
        summed.update(zip(sparse, results, strict=True))
    return {path: summed[path] for path in grads}, extras


def _packed_sum(context: Any, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """One all-reduce for tensors of one dtype."""
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
    flat = context.all_reduce(tf.distribute.ReduceOp.SUM, flat)
    sizes = [tf.size(tensor) for tensor in tensors]
    parts = tf.split(flat, sizes)
    return [tf.reshape(p, tf.shape(t)) for p, t in zip(parts, tensors, strict=True)]


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
