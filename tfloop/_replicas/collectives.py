"""What replicas send each other: sums of gradients, a row of each, a number of each worker."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfloop._replicas import contexts
from tfloop._replicas.placement import replica_ids
from tfloop._tensors import sparse
from tfloop._tensors.sparse import Gradient


def reduce_sum(
    grads: Mapping[str, Gradient], extra: list[tf.Tensor]
) -> tuple[dict[str, Gradient], list[tf.Tensor]]:
    """Sums gradients over the replicas.

    One collective for the dense ones of each dtype, packed into one vector, which copies each of
    them twice; one for the sparse ones, whose rows are gathered.

    Args:
      grads: Path -> gradient, the same paths on every replica.
      extra: Float32 tensors that are summed in the same call as the float32 gradients.

    Returns:
      The sums, in the same order.
    """
    context = tf.distribute.get_replica_context()
    contexts.check_unconditional()
    rows = {path: grad for path, grad in grads.items() if sparse.is_sparse(grad)}
    kinds: dict[tf.DType, list[str]] = {tf.float32: []}
    for path, grad in grads.items():
        if path not in rows:
            kinds.setdefault(grad.dtype, []).append(path)
    summed: dict[str, Gradient] = {}
    for dtype, paths in kinds.items():
        tensors = [*(grads[path] for path in paths), *(extra if dtype == tf.float32 else [])]
        if tensors:
            sums = _packed_sum(context, tensors)
            summed.update(zip(paths, sums, strict=False))
            extra = sums[len(paths) :] if dtype == tf.float32 else extra
    if rows:
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, list(rows.values()))
        summed.update(zip(rows, sums, strict=True))
    return {path: summed[path] for path in grads}, extra


def in_own_row(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor in this replica's row of zeros; a sum over the replicas has all of them as rows."""
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    return in_row(tensor, number, contexts.count())


def in_row(tensor: tf.Tensor, number: Any, rows: int) -> tf.Tensor:
    """A tensor in the row of that number, zeros in the others."""
    ours = tf.reshape(tf.equal(tf.range(rows), number), [rows] + [1] * tensor.shape.rank)
    return tf.where(ours, tensor[tf.newaxis], tf.zeros([], tensor.dtype))


def gather_number(strategy: tf.distribute.Strategy, number: int) -> list[int]:
    """A number of each worker, on every worker, the first worker's first; all have to call it.

    Also a barrier: what workers did before, they have done on return.
    """
    ours = replica_ids(strategy)
    rows = tf.one_hot(ours[:1], strategy.num_replicas_in_sync, dtype=tf.int64)[0] * number
    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: rows if context.replica_id_in_sync_group == ours[0] else tf.zeros_like(rows)
    )
    found = strategy.reduce(tf.distribute.ReduceOp.SUM, numbers, axis=None)
    return [int(each) for each in found.numpy()[:: len(ours)]]


def _packed_sum(context: Any, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """One all-reduce for tensors of one dtype."""
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
    flat = context.all_reduce(tf.distribute.ReduceOp.SUM, flat)
    pieces = tf.split(flat, [tf.size(tensor) for tensor in tensors])
    return [
        tf.ensure_shape(tf.reshape(piece, tf.shape(tensor)), tensor.shape)
        for piece, tensor in zip(pieces, tensors, strict=True)
    ]
