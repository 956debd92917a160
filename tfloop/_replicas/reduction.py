"""What the gradients of all replicas are together: a sum, or a mean over samples.

Another one is another `Reduction` here; the rooms above ask it, not its name. Knows weights and
absences; how tensors are sent is `collectives`' business.
"""

import abc
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import tensorflow as tf

from tfloop._checks.messages import described
from tfloop._model.paths import AddressBook, is_variable, tf_variable, variable_id
from tfloop._replicas import collectives, contexts, per_replica
from tfloop._tensors import overwritten, sparse
from tfloop._tensors.counts import divided, weighted
from tfloop._tensors.sparse import Gradient, accumulation_dtype, map_values

Grads: TypeAlias = dict[str, Gradient]


class Reduction(abc.ABC):
    """How the gradients of replicas, or of micro-batches in a window, become one.

    Attributes:
      name: What a user writes for it.
      weighs: Does what has more samples count more? Else nothing takes a weight.
      sends: Do replicas send their gradients at all?
    """

    name: ClassVar[str | None]
    weighs: ClassVar[bool] = False
    sends: ClassVar[bool] = True

    def sent(self, grads: Grads, weight: tf.Tensor | None, weighed: bool) -> Grads:
        """What a replica sends, as in `total`; by default the mean of its own window."""
        return _own(grads, weight, weighed)

    def received(self, sums: Grads, weight: tf.Tensor) -> Grads:
        """What is made of the sums over all replicas, whose weights sum to `weight`."""
        return sums


class Mean(Reduction):
    """sum of w_i g_i / sum of w_i."""

    name = "mean"
    weighs = True

    def sent(self, grads: Grads, weight: tf.Tensor | None, weighed: bool) -> Grads:
        """Gradients times weights."""
        if weighed or weight is None:
            return grads
        return {path: weighted(grad, weight) for path, grad in grads.items()}

    def received(self, sums: Grads, weight: tf.Tensor) -> Grads:
        """Divided by the weights."""
        return _means_of(sums, weight)


class Sum(Reduction):
    """sum of g_i."""

    name = "sum"


class Unreduced(Reduction):
    """g_i, which is the same on all replicas already."""

    name = None
    sends = False


KINDS: dict[str | None, Reduction] = {kind.name: kind for kind in (Mean(), Sum(), Unreduced())}
"""What a user writes -> the reduction."""
WINDOW_KINDS = {name: kind for name, kind in KINDS.items() if kind.sends}
"""Those that put the micro-batches of a window together: none of them is reduced already."""


class Contribution(NamedTuple):
    """What one replica brings to an update.

    Attributes:
      grads: Path -> gradient, the same paths on all replicas.
      weight: How much this replica counts; `None`: all count the same.
      weighed: Are the gradients sums over the weight, w_i g_i in place of g_i?
      present: Path -> has this replica one, a scalar bool; `None` if all are there. What is absent
        is zero in `grads`.
      filled: Beside `present`: was anything added to its window at all?
      statistics: Path -> what this replica has of `moved_state`; means in any case.
      rows: How much this replica counts in these, where it isn't `weight`.
    """

    grads: dict[str, Gradient]
    weight: tf.Tensor | None = None
    weighed: bool = False
    present: dict[str, tf.Tensor] | None = None
    filled: tf.Tensor | None = None
    statistics: Mapping[str, tf.Tensor] = {}
    rows: tf.Tensor | None = None


class Total(NamedTuple):
    """What all replicas have together, the same on each.

    Attributes:
      grads: Path -> gradient.
      weight: The sum of the weights, or `None` if nothing was weighted.
      present: Path -> did any replica have one, a scalar bool; `None` if all are there.
      filled: Was anything added to any window? `None` where there is none.
      statistics: Path -> what the state that layers move is over all replicas.
    """

    grads: dict[str, Gradient]
    weight: tf.Tensor | None
    present: dict[str, tf.Tensor] | None
    filled: tf.Tensor | None
    statistics: dict[str, tf.Tensor]


def total(contribution: Contribution, reduction: Reduction) -> Total:
    """Reduces gradients over the replicas, in one call for each kind of them.

    What overwrites a variable becomes the maximum over the replicas that count, in any case.
    """
    if contexts.count() == 1:
        # Nothing is sent: its own is all there is, however replicas would be put together.
        grads, values = overwritten.split(contribution.grads)
        grads = _own(grads, contribution.weight, contribution.weighed)
        found = Total(
            grads | values, contribution.weight, contribution.present, contribution.filled, {}
        )
    else:
        found = _total_of_replicas(contribution, reduction)
    if found.present is None or found.weight is None:
        return found
    # XLA drops the checks: there, a window that weighs nothing leaves all as it is.
    counts = found.weight > 0
    present = {path: tf.logical_and(flag, counts) for path, flag in found.present.items()}
    return found._replace(present=present)


def _total_of_replicas(contribution: Contribution, reduction: Reduction) -> Total:
    """`total` where there are several."""
    grads, values = overwritten.split(contribution.grads)
    weight, present, one = contribution.weight, contribution.present, tf.constant(1.0)
    grads = reduction.sent(grads, weight, contribution.weighed)
    # A sum over rows of zeros is what each replica has; what is the same on all stays bit for bit.
    own = {path: collectives.in_own_row(_wide(v)) for path, v in contribution.statistics.items()}
    counted = next((w for w in (weight, contribution.rows) if w is not None), one)
    extra = [collectives.in_own_row(tf.cast(counted, tf.float32))] if own else []
    if not reduction.sends:
        parts, extra = collectives.reduce_sum(own, extra) if own else ({}, extra)
        means = _means(contribution.statistics, parts, extra)
        return Total(grads | values, weight, present, contribution.filled, means)
    proposed = {
        path: collectives.in_own_row(_only_if(_counts(path, weight, present), value))
        for path, value in values.items()
    }
    extra.append(one if weight is None else tf.cast(weight, tf.float32))
    if present is not None:
        extra.append(tf.cast(tf.stack([*present.values(), contribution.filled]), tf.float32))
    sums, extra = collectives.reduce_sum(grads | own | proposed, extra)
    means = _means(contribution.statistics, sums, extra)
    weights, filled = extra[1 if own else 0], contribution.filled
    grads = reduction.received({path: sums[path] for path in grads}, weights)
    values = {path: tf.reduce_max(sums[path], 0) for path in values}
    if present is not None:
        *flags, filled = tf.unstack(extra[-1] > 0, len(present) + 1)
        present = dict(zip(present, flags, strict=True))
        # What is absent is zero here, too.
        values = {path: tf.where(present[path], value, 0) for path, value in values.items()}
    return Total(grads | values, None if weight is None else weights, present, filled, means)


def reduction_of(call: str, name: Any, names: Collection[str | None], fix: str) -> Reduction:
    """The reduction that a user means.

    Args:
      call: The public call, for messages.
      name: What was given.
      names: Those of `KINDS` that make sense there.
      fix: The likely cause, and the line of code to write.

    Raises:
      ValueError: It is another one.
    """
    if name not in tuple(names):  # by equality: it may be something without a hash
        *others, last = map(repr, names)
        raise ValueError(
            f"`{call}` got reduction={described(name)}, expected {', '.join(others)} or {last}. "
            f"{fix}"
        )
    return KINDS[name]


def check_counts(call: str, weight: tf.Tensor | None) -> list[tf.Operation]:
    """An assertion that the replicas together have any weight.

    Raises:
      ValueError: They have none, which is known in eager mode.
    """
    if weight is None:
        return []
    value = tf.get_static_value(weight)
    text = (
        f"`{call}` can't take the mean: got weights that sum to 0, expected more. No replica had "
        "a sample. Skip such a batch: `if len(labels):`."
    )
    if value is None:
        return [tf.raw_ops.Assert(condition=weight > 0, data=[text])]
    if value == 0:
        raise ValueError(text)
    return []


def moved_state(book: AddressBook) -> dict[str, Any]:
    """Path -> variable: the floating state that layers move, each replica its own copy of it.

    Statistics of any kind, which over all replicas are their mean. What a stateful layer remembers
    of each sample isn't: a replica has samples of its own.
    """
    samples = {
        variable_id(state)
        for layer in book.layers.values()
        if getattr(layer, "stateful", False)
        for state in tf.nest.flatten(getattr(layer, "states", None))
        if is_variable(state)
    }
    return {
        path: tf_variable(variable)
        for path, variable in book.floating().items()
        if per_replica.is_unsynchronized(variable)
        and variable_id(variable) not in samples
        and tf.TensorShape(variable.shape).is_fully_defined()
    }


def mean_of_parts(parts: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """What replicas have of a statistic, as one: what is the same on all, else their weighted mean.

    One that isn't finite, as after a batch without a sample, doesn't count where another is.

    Args:
      parts: Floating, a row for each replica.
      weights: Of each replica, of the same dtype.
    """
    sound = tf.reduce_all(tf.math.is_finite(parts), range(1, parts.shape.rank))
    weights = tf.where(sound, weights, tf.zeros_like(weights))
    shares = tf.reshape(weights, [-1] + [1] * (parts.shape.rank - 1))
    weight = tf.reduce_sum(weights)
    mean = tf.math.divide_no_nan(tf.reduce_sum(tf.math.multiply_no_nan(parts, shares), 0), weight)
    equal = tf.reduce_all(tf.equal(parts, parts[:1]))
    return tf.where(tf.logical_or(equal, weight <= 0), parts[0], mean)


def _means(
    statistics: Mapping[str, tf.Tensor],
    parts: Mapping[str, Gradient],
    extra: list[tf.Tensor],
) -> dict[str, tf.Tensor]:
    """Path -> mean, from the parts of all replicas and their weights, the first of `extra`."""
    return {
        path: tf.cast(mean_of_parts(parts[path], tf.cast(extra[0], parts[path].dtype)), value.dtype)
        for path, value in statistics.items()
    }


def _wide(value: tf.Tensor) -> tf.Tensor:
    """Narrow ones ride with the float32 gradients; each is exact there."""
    return tf.cast(value, accumulation_dtype(value.dtype))


def _counts(
    path: str, weight: tf.Tensor | None, present: Mapping[str, tf.Tensor] | None
) -> tf.Tensor:
    """Has this replica got the value at a path?"""
    counts = tf.constant(True) if weight is None else weight > 0
    return counts if present is None else tf.logical_and(counts, present[path])


def _only_if(counts: tf.Tensor, value: Gradient) -> tf.Tensor:
    """A value that is no maximum where it doesn't count."""
    value = sparse.densify(value)
    return tf.where(counts, value, tf.constant(value.dtype.min, value.dtype))


def _own(grads: Grads, weight: tf.Tensor | None, weighed: bool) -> Grads:
    """The gradients of this replica alone: the mean, where they are sums of its window."""
    return _means_of(grads, weight) if weighed and weight is not None else grads


def _means_of(sums: Grads, weight: tf.Tensor) -> Grads:
    return {path: map_values(lambda t: divided(t, weight), grad) for path, grad in sums.items()}
