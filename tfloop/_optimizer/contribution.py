"""What this replica brings to a step: gradients, how much they count, and what is absent.

Makes one thing of a `GradientsParams` and of an accumulator's window, so that a step needn't ask
which it got. What all replicas have together is `reduction`'s business.
"""

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfloop._accumulation.accumulator import GradientsAccumulator
from tfloop._checks.messages import described
from tfloop._gradients.params import GradientsParams
from tfloop._model.paths import AddressBook
from tfloop._optimizer.checks import STEP
from tfloop._replicas import contexts
from tfloop._replicas.reduction import (
    KINDS,
    Contribution,
    Reduction,
    Total,
    check_counts,
    moved_state,
)
from tfloop._tensors.counts import checked_weight

Source = GradientsParams | GradientsAccumulator


def turn_at(source: Source) -> AbstractContextManager:
    """Held while a step uses a window, so that no other thread adds to it meanwhile."""
    return source._lock if isinstance(source, GradientsAccumulator) else contextlib.nullcontext()


def contribution_of(
    source: Source,
    model: Any,
    book: AddressBook,
    weight: Any,
    reduction: Reduction,
    served: Callable[[Iterable[str]], list[str]],
) -> Contribution:
    """What a replica brings by what it was given; nothing is used up yet.

    Args:
      source: A `GradientsParams`, or a `GradientsAccumulator`.
      model: The root.
      book: The root's.
      weight: As in `ModuleOptimizer.step`.
      reduction: The optimizer's.
      served: Those of some paths that anything updates; the gradients of others stay here.

    Raises:
      ValueError: A weight that has nothing to weigh, or what `checked` and `window` raise.
    """
    weight = _weight_of(source, weight, reduction)
    statistics, share = {}, contexts.share()
    if contexts.count() > 1:
        statistics = {path: tf.convert_to_tensor(v) for path, v in moved_state(book).items()}
    rows = None if share is None else tf.cast(share.rows, tf.float32)
    if isinstance(source, GradientsParams):
        grads = source.checked(book, STEP)
        grads = {path: grads[path] for path in served(grads)}
        return Contribution(grads, weight, statistics=statistics, rows=rows)
    window = source.window(model, STEP)
    grads = {path: window.sums[path] for path in served(window.sums)}
    weighed = window.weight is not None
    return Contribution(
        grads,
        weight=window.weight if weighed else weight,
        weighed=weighed,
        present=window.present and {path: window.present[path] for path in grads},
        filled=tf.convert_to_tensor(source.count) > 0,
        statistics=statistics,
        rows=rows,
    )


def checks_of(source: Source, contribution: Contribution, total: Total) -> list[tf.Operation]:
    """Refuses what is empty or counts nothing, in a trace when it runs."""
    if isinstance(source, GradientsAccumulator):
        return source.checks(STEP, total.weight if contribution.weighed else None, total.filled)
    return check_counts(STEP, total.weight)


def use_up(source: Source) -> None:
    """Empties a window, or marks gradients as consumed."""
    if isinstance(source, GradientsAccumulator):
        source.reset()
    else:
        source._consume(STEP)


def _weight_of(source: Source, weight: Any, reduction: Reduction) -> tf.Tensor | None:
    """How much this replica counts, or `None` where all count the same."""
    accumulator = source if isinstance(source, GradientsAccumulator) else None
    if weight is not None:
        own = accumulator is not None and KINDS[accumulator.reduction].weighs
        if own or not reduction.weighs:
            other = "an accumulator that has weights of its own" if own else "no mean"
            raise ValueError(
                f"`{STEP}` got weight={described(weight)} with {other}, expected none: nothing "
                "is left to be weighed. Leave it out: `optim.step(lr, model, grads)`."
            )
        return checked_weight(STEP, weight)
    share = contexts.share()
    if share is None or not reduction.sends:
        return None
    if accumulator is None:
        return tf.cast(share.rows, tf.float64) if reduction.weighs else None
    if not (reduction.weighs or KINDS[accumulator.reduction].weighs):
        raise ValueError(
            f"`{STEP}` got sums that were weighed by each replica's share of the batch, and "
            f"reduction={reduction.name!r}, expected 'mean': shares are parts of a mean. Write "
            "`tfloop.ModuleOptimizer(optimizer)`, or distribute the batch yourself and call "
            "`strategy.run`."
        )
    return None
