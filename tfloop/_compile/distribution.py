"""How a batch is spread over the replicas of a strategy, and what they return put together.

What a replica does with its part is the step's business, how gradients are reduced `reduction`'s.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfloop._backend import keras_losses
from tfloop._checks.messages import described, listed
from tfloop._gradients.params import GradientsParams
from tfloop._model.containers import parts_of
from tfloop._replicas import contexts, placement
from tfloop._tracing import traces

_CALL = "compiled_step(batch)"


def keep_losses_whole() -> None:
    """Stops Keras' loss objects from dividing by the replicas in a step of ours.

    Keras divides the mean of each replica by their number, because its optimizers add gradients up,
    and multiplies it again where it shows it. Ours take the mean, so a loop with such a loss would
    train at a fraction of its rate. Elsewhere they go on to do so. There is no other way in: Keras
    asks the strategy, which must tell everybody else the truth. Where a Keras to come has another
    way, this raises.
    """
    keras_losses.keep_whole(contexts.is_in_step)


# Autograph must go through here to the user's function.
def run(
    strategy: tf.distribute.Strategy,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Runs a step on every replica, each on its part of the batch.

    Args:
      strategy: With one replica or many.
      fn: `fn(part, *others, **kwargs)`.
      args: First the batch, a structure of tensors with one common leading axis: the rows of all
        replicas, the same on each worker. Or what `strategy.experimental_distribute_dataset`
        yields, as it is. Without any axis it is no batch. The others are the same for all replicas.
      kwargs: The same for all replicas, but for the batch, where that was given by its name.

    Returns:
      The outputs of all replicas as one: floating scalars as their mean weighted by rows, whole
      scalars as their sum, the rest end to end along the first axis (other scalars stacked).
      Over several workers the scalars are those of all, the rest is this worker's.

    Raises:
      TypeError: The batch has something else than dense tensors, or gradients are returned.
      ValueError: It has no common leading axis.
    """
    args, kwargs = _batch_first(strategy, fn, args, kwargs)
    if not args or not _has_rows(strategy, args[0]):

        def whole(args: Any, kwargs: Any) -> Any:
            with contexts.in_step(None):
                return fn(*args, **kwargs)

        ones = strategy.experimental_distribute_values_from_function(lambda _: tf.constant(1))
        return _joined(strategy, strategy.run(whole, args=(tuple(args), dict(kwargs))), ones)
    parts, rows, total, replicas = _spread(strategy, args[0])

    def replica(part: Any, rows: tf.Tensor, others: Any, kwargs: Any) -> Any:
        with contexts.in_step(contexts.Share(rows, total, replicas)):
            return fn(part, *others, **kwargs)

    outputs = strategy.run(replica, args=(parts, rows, tuple(args[1:]), dict(kwargs)))
    return _joined(strategy, outputs, rows)


@traces.not_converted
def _batch_first(
    strategy: tf.distribute.Strategy,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments, the batch in the first place where it was given by its name."""
    first = next(iter(inspect.signature(fn).parameters.values()), None)
    if not args and first is not None and first.kind is first.POSITIONAL_OR_KEYWORD:
        kwargs = dict(kwargs)
        args = (kwargs.pop(first.name),) if first.name in kwargs else ()
    if not args and _has_rows(strategy, kwargs):
        raise TypeError(
            f"`{_CALL}` needs its batch as first argument: got none, and {listed(kwargs)} with an "
            "axis, expected what is spread over the replicas. Pass it by position: "
            "`step(batch, lr=lr)`."
        )
    return args, kwargs


@traces.not_converted
def _has_rows(strategy: tf.distribute.Strategy, batch: Any) -> bool:
    """Is there anything with an axis in it? A number, a flag or a text has none."""
    leaves = (strategy.experimental_local_results(leaf)[0] for leaf in tf.nest.flatten(batch))
    return any(tf.TensorShape(getattr(leaf, "shape", ())).rank != 0 for leaf in leaves)


@traces.not_converted
def _spread(strategy: tf.distribute.Strategy, batch: Any) -> tuple[Any, Any, tf.Tensor, int]:
    """The parts of the replicas, their rows, the rows together, and the number of parts."""
    batch = tf.nest.map_structure(_as_tensor, batch)
    leaves = tf.nest.flatten(batch)
    distributed = [leaf for leaf in leaves if isinstance(leaf, tf.distribute.DistributedValues)]
    if distributed:
        with_rows = next(leaf for leaf in distributed if _has_rows(strategy, leaf))
        local = strategy.experimental_local_results(with_rows)
        counts = iter([tf.shape(part)[0] for part in local])
        rows = strategy.experimental_distribute_values_from_function(lambda _: next(counts))
        (total,) = _over_workers(strategy, [tf.add_n(strategy.experimental_local_results(rows))])
        return batch, rows, total, strategy.num_replicas_in_sync
    for leaf in leaves:
        if not isinstance(leaf, tf.Tensor):
            raise TypeError(
                f"`{_CALL}` can't spread a batch over replicas: got {described(leaf)} in it, "
                "expected dense tensors. They are cut along their first axis. Convert it: "
                "`tf.convert_to_tensor(x)`."
            )
    lengths = {leaf.shape[0] if leaf.shape.rank else None for leaf in leaves}
    if not leaves or any(leaf.shape.rank == 0 for leaf in leaves) or len(lengths - {None}) > 1:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        raise ValueError(
            f"`{_CALL}` can't spread a batch over replicas: got the shapes {shapes or 'of nothing'}"
            ", expected one common leading axis. The first argument is the batch. Put what isn't "
            "per sample behind it: `step(batch, scalar)`."
        )
    known = next(iter(lengths - {None}), None)
    total = tf.shape(leaves[0])[0] if known is None else known
    replicas = strategy.num_replicas_in_sync

    def part(context: Any) -> tuple[Any, tf.Tensor]:
        place = context.replica_id_in_sync_group
        least, more = total // replicas, total % replicas
        if known is None:
            begin = place * least + tf.minimum(place, more)
            size = least + tf.cast(place < more, tf.int32)
        else:
            begin, size = place * least + min(place, more), least + (place < more)
        cut = tf.nest.map_structure(lambda leaf: leaf[begin : begin + size], batch)
        if known is not None and size == 0:
            cut = tf.nest.map_structure(_of_unknown_rows, cut)
        return cut, tf.constant(size) if known is not None else size

    parts, rows = strategy.experimental_distribute_values_from_function(part)
    return parts, rows, tf.convert_to_tensor(total), replicas


def _as_tensor(leaf: Any) -> Any:
    """An array is one where functions run eagerly, as it is in a trace."""
    return tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _of_unknown_rows(part: tf.Tensor) -> tf.Tensor:
    """An empty part that doesn't show it in its shape: Keras' losses are no scalars on none."""
    if tf.executing_eagerly():
        return part
    return tf.compat.v1.placeholder_with_default(part, [None, *part.shape[1:]])


@traces.not_converted
def _joined(strategy: tf.distribute.Strategy, outputs: Any, rows: Any) -> Any:
    """One result from those of the replicas."""
    for container in _containers(outputs):
        if isinstance(container, GradientsParams):
            raise TypeError(
                f"`{_CALL}` can't put gradients of replicas together: got GradientsParams among "
                "its results, expected losses and metrics. They differ from replica to replica. "
                "Reduce and use them inside: `grads = grads.reduce()`."
            )
    counts = strategy.experimental_local_results(rows)
    leaves = tf.nest.flatten(outputs)
    found: list[Any] = [None] * len(leaves)
    means: dict[int, list[tf.Tensor]] = {}
    sums: dict[int, list[tf.Tensor]] = {}
    for number, leaf in enumerate(leaves):
        if leaf is None:
            continue
        values = list(strategy.experimental_local_results(leaf))
        # What is one object on all replicas isn't wrapped.
        values = [tf.convert_to_tensor(v) for v in values * (len(counts) // len(values))]
        kind = values[0].dtype
        if values[0].shape.rank != 0:
            found[number] = tf.concat(values, 0)
        elif kind.is_floating:
            means[number] = values
        elif kind.is_integer:
            sums[number] = values
        else:
            found[number] = tf.stack(values)
    _fill(found, means, _means(strategy, list(means.values()), counts))
    _fill(found, sums, _sums(strategy, list(sums.values())))
    return tf.nest.pack_sequence_as(outputs, found)


def _containers(outputs: Any) -> Iterator[Any]:
    """The outputs and every container in them."""
    yield outputs
    for part in parts_of(outputs) or ():
        yield from _containers(part)


def _fill(found: list[Any], where: Mapping[int, Any], tensors: list[tf.Tensor]) -> None:
    for number, tensor in zip(where, tensors, strict=True):
        found[number] = tensor


def _means(strategy: Any, values: list[list[tf.Tensor]], counts: Any) -> list[tf.Tensor]:
    """Weighted by rows; a replica without any adds nothing, not even NaN, but where none has."""
    if not values:
        return []
    weights = [tf.cast(count, tf.float64) for count in counts]
    wide = [[tf.cast(value, tf.float64) for value in row] for row in values]
    shares = [[*map(tf.math.multiply_no_nan, row, weights)] for row in wide]
    counted = [weights, [tf.ones_like(weight) for weight in weights]]
    totals = [tf.add_n(parts) for parts in (*shares, *wide, *counted)]
    *totals, weight, number = _over_workers(strategy, totals)
    return [
        tf.cast(
            tf.where(weight > 0, tf.math.divide_no_nan(share, weight), plain / number), row[0].dtype
        )
        for share, plain, row in zip(totals[: len(wide)], totals[len(wide) :], values, strict=True)
    ]


def _sums(strategy: Any, values: list[list[tf.Tensor]]) -> list[tf.Tensor]:
    totals = [tf.add_n([tf.cast(value, tf.int64) for value in row]) for row in values]
    totals = _over_workers(strategy, totals) if totals else []
    return [tf.cast(total, row[0].dtype) for total, row in zip(totals, values, strict=True)]


def _over_workers(strategy: Any, totals: list[tf.Tensor]) -> list[tf.Tensor]:
    """Adds up scalars of one dtype over the workers, in one call; nothing to do on one."""
    places = placement.replica_ids(strategy)
    if len(places) == strategy.num_replicas_in_sync:
        return totals
    ours = tf.stack(totals)
    shares = strategy.experimental_distribute_values_from_function(
        lambda context: (
            ours if context.replica_id_in_sync_group == places[0] else tf.zeros_like(ours)
        )
    )
    return tf.unstack(strategy.reduce(tf.distribute.ReduceOp.SUM, shares, axis=None), len(totals))
