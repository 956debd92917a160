"""What the gradients of all replicas are together: a sum, or a mean over samples.

Knows weights and absences; how tensors are sent is `_replicas`' business.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfloop import _overwritten, _replicas, _sparse
from tfloop._messages import described
from tfloop._paths import AddressBook, tf_variable
from tfloop._sparse import Gradient, map_values
from tfloop._weights import divided, weighted


class Total(NamedTuple):
    """The gradients of all replicas, the same on each.

    Attributes:
      grads: Path -> gradient.
      weight: The sum of the weights, or `None` if nothing was weighted.
      present: Path -> did any replica have one, a scalar bool; `None` if all are there.
      statistics: Path -> what moving statistics are over all replicas.
    """

    grads: dict[str, Gradient]
    weight: tf.Tensor | None
    present: dict[str, tf.Tensor] | None
    statistics: dict[str, tf.Tensor]


def total(
    grads: Mapping[str, Gradient],
    weight: tf.Tensor | None,
    *,
    reduction: str | None,
    present: Mapping[str, tf.Tensor] | None = None,
    weighed: bool = False,
    statistics: Mapping[str, tf.Tensor] | None = None,
) -> Total:
    """Reduces gradients over the replicas, in one call for each kind of them.

        "mean":  sum of w_i g_i / sum of w_i
        "sum":   sum of g_i

    What overwrites a variable becomes the maximum over the replicas that count, in any case.

    Args:
      grads: Path -> gradient of this replica, the same paths on all.
      weight: How much this replica counts; `None`: all count alike.
      reduction: `"mean"`, `"sum"`, or `None` for gradients that are reduced already.
      present: Path -> scalar bool: has this replica one? What is absent is zero in `grads`.
      weighed: The gradients are sums over the weight: w_i g_i in place of g_i.
      statistics: Path -> what a replica has of moving statistics; means in any case.
    """
    replicas = _replicas.count()
    grads, values = _overwritten.parted(grads)
    present = None if present is None else dict(present)
    if replicas == 1 or reduction is None:
        if weighed and weight is not None:
            grads = {path: _mean(grad, weight) for path, grad in grads.items()}
        return Total(grads | values, weight, present, {})
    counts = {path: _counts(path, weight, present) for path in values}
    if reduction == "sum" and weighed and weight is not None:
        grads, weight = {path: _mean(grad, weight) for path, grad in grads.items()}, None
    elif weight is not None and not weighed:
        grads = {path: weighted(grad, weight) for path, grad in grads.items()}
    one = tf.constant(1.0) if weight is None else tf.cast(weight, tf.float32)
    riders = [one]
    if present is not None:
        riders.append(tf.cast(tf.stack(list(present.values())), tf.float32))
    if statistics:
        riders += _weighted_statistics(statistics, one)
    apart = {path: _replicas.in_own_row(_only_if(counts[path], v)) for path, v in values.items()}
    grads, riders = _replicas.reduce_sum(grads | apart, riders)
    grads, apart = _overwritten.parted(grads)
    weights = riders.pop(0)
    if present is not None:
        flags = tf.unstack(riders.pop(0) > 0, len(present))
        present = dict(zip(present, flags, strict=True))
    means: dict[str, tf.Tensor] = {}
    if statistics:
        means = _mean_statistics(statistics, riders)
    if reduction == "mean":
        grads = {path: _mean(grad, weights) for path, grad in grads.items()}
    values = {path: tf.reduce_max(rows, 0) for path, rows in apart.items()}
    if present is not None:  # what is absent is zero here, too
        values = {path: tf.where(present[path], v, 0) for path, v in values.items()}
    return Total(grads | values, None if weight is None else weights, present, means)


def check_reduction(call: str, reduction: Any) -> None:
    """Refuses what is no reduction.

    Raises:
      ValueError: It is neither `"mean"`, `"sum"` nor `None`.
    """
    if reduction not in ("mean", "sum", None):
        raise ValueError(
            f"`{call}` got reduction={described(reduction)}, expected 'mean', 'sum' or None (for "
            "gradients that are reduced already). A loss that is a mean over each replica's batch "
            "takes the mean: `tfloop.ModuleOptimizer(optimizer, reduction='mean')`."
        )


def moving_statistics(book: AddressBook) -> dict[str, Any]:
    """Path -> variable: the statistics of BatchNormalization, which each replica moves alone.

    Those of frozen layers don't move. With `synchronized=True` Keras keeps them alike.
    """
    found = {}
    for layer in book.layers.values():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            for variable in (layer.moving_mean, layer.moving_variance):
                key = book.path_of(variable)
                if key is not None and not layer.synchronized:
                    found[key] = tf_variable(variable)
    return found


def _weighted_statistics(statistics: Mapping[str, tf.Tensor], weight: tf.Tensor) -> list[tf.Tensor]:
    """The weights, then the statistics times these; a replica that saw no sample has NaN."""
    values = [tf.cast(value, tf.float32) for value in statistics.values()]
    sound = tf.reduce_all(tf.stack([tf.reduce_all(tf.math.is_finite(v)) for v in values]))
    weight = tf.where(sound, weight, 0.0)
    return [weight, *(tf.math.multiply_no_nan(value, weight) for value in values)]


def _mean_statistics(
    statistics: Mapping[str, tf.Tensor], sums: list[tf.Tensor]
) -> dict[str, tf.Tensor]:
    weight, *values = sums
    return {
        path: tf.where(weight > 0, tf.cast(tf.math.divide_no_nan(value, weight), old.dtype), old)
        for (path, old), value in zip(statistics.items(), values, strict=True)
    }


def _counts(
    path: str, weight: tf.Tensor | None, present: Mapping[str, tf.Tensor] | None
) -> tf.Tensor:
    """Has this replica got the value at a path?"""
    counts = tf.constant(True) if weight is None else weight > 0
    return counts if present is None else tf.logical_and(counts, present[path])


def _only_if(counts: tf.Tensor, value: Gradient) -> tf.Tensor:
    """A value that is no maximum where it doesn't count."""
    value = _sparse.densify(value)
    return tf.where(counts, value, tf.constant(-math.inf, value.dtype))


def _mean(grad: Gradient, weight: tf.Tensor) -> Gradient:
    return map_values(lambda tensor: divided(tensor, weight), grad)
