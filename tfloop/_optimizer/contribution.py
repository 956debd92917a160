"""What this replica brings to a step: gradients, how much they count, and what is absent.

Makes one thing of a `GradientsParams` and of an accumulator's window, so that a step needn't ask
which it got. What all replicas have together is `reduction`'s business.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfloop._accumulation.accumulator import GradientsAccumulator
from tfloop._checks.messages import described
from tfloop._gradients.params import GradientsParams
from tfloop._model.paths import AddressBook
from tfloop._optimizer.checks import STEP
from tfloop._replicas import placement
from tfloop._replicas.reduction import KINDS, Reduction, Total, check_counts, moved_state, total
from tfloop._tensors.counts import checked_weight

_WINDOW = ""  # beside the paths: has the window itself got anything?


class Contribution:
    """The gradients of this replica, until they are taken.

    Args:
      source: A `GradientsParams`, or a `GradientsAccumulator`.
      model: The root.
      book: The root's.
      weight: As in `ModuleOptimizer.step`.
      reduction: The optimizer's.

    Attributes:
      grads: Path -> gradient; of a window the sums.

    Raises:
      ValueError: A weight that has nothing to weigh, or what `checked` and `window` raise.
    """

    def __init__(
        self,
        source: GradientsParams | GradientsAccumulator,
        model: Any,
        book: AddressBook,
        weight: Any,
        reduction: Reduction,
    ) -> None:
        self._source = source
        self._reduction = reduction
        self._weight = _weight_of(source, weight, reduction)
        self._present: dict[str, tf.Tensor] | None = None
        self._is_sum = False
        self._is_filled: tf.Tensor | None = None  # the window, by any replica
        if isinstance(source, GradientsAccumulator):
            window = source.window(model, STEP)
            self.grads, self._present = window.sums, window.present
            self._is_filled = tf.convert_to_tensor(source.count) > 0
            if window.weight is not None:
                self._weight, self._is_sum = window.weight, True
        else:
            self.grads = source.checked(book, STEP)

    def reduced(self, paths: Iterable[str], book: AddressBook) -> Total:
        """Those of some paths, of all replicas, divided by their weights."""
        grads = {path: self.grads[path] for path in paths}
        present = None
        if self._present is not None:
            present = {path: self._present[path] for path in grads}
            present[_WINDOW] = self._is_filled
        statistics = {}
        if placement.count() > 1:
            moved = moved_state(book)
            statistics = {path: tf.convert_to_tensor(v) for path, v in moved.items()}
        share = placement.share()
        found = total(
            grads,
            self._weight,
            reduction=self._reduction,
            present=present,
            weighed=self._is_sum,
            statistics=statistics,
            rows=None if share is None else tf.cast(share.rows, tf.float32),
        )
        if found.present is not None:
            self._is_filled = found.present.pop(_WINDOW)
        if found.present is not None and found.weight is not None:
            # XLA drops the checks: there, a window that weighs nothing leaves all as it is.
            counts = found.weight > 0
            flags = {path: tf.logical_and(flag, counts) for path, flag in found.present.items()}
            found = found._replace(present=flags)
        return found

    def checks(self, found: Total) -> list[tf.Operation]:
        """Refuses what is empty or counts nothing, in a trace when it runs."""
        if isinstance(self._source, GradientsAccumulator):
            weight = found.weight if self._is_sum else None
            return self._source.checks(STEP, weight, self._is_filled)
        return check_counts(STEP, found.weight)

    def take(self) -> None:
        """Uses them up."""
        if isinstance(self._source, GradientsAccumulator):
            self._source.reset()
        else:
            self._source._consume(STEP)


def _weight_of(
    source: GradientsParams | GradientsAccumulator, weight: Any, reduction: Reduction
) -> tf.Tensor | None:
    """How much this replica counts, or `None` where all count alike."""
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
    share = placement.share()
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
