"""Schedules made of other schedules: one after the other, together, or after a warm-up."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfloop._checks.arguments import number, whole_number
from tfloop._checks.messages import described
from tfloop.schedulers._base import Schedule, choice
from tfloop.schedulers._kinds import as_schedule, rate_of

_REDUCTIONS = {"prod": tf.reduce_prod, "sum": tf.reduce_sum, "mean": tf.reduce_mean}


@keras.saving.register_keras_serializable(package="tfloop")
class Sequential(Schedule):
    """One schedule after the other, each from its own step 0.

        rate(i) = schedules[k](i - milestones[k - 1]),  k = how many milestones are <= i

    Args:
      schedules: Floats and schedules, at least one.
      milestones: The steps at which the second, third, ... schedule begins: one fewer than
        schedules, > 0 and increasing.

    Raises:
      TypeError: A schedule or a milestone has the wrong kind.
      ValueError: There is no schedule, or the milestones don't fit.

    Example:
      >>> import tfloop
      >>> schedule = tfloop.schedulers.Sequential([0.1, 0.05, 0.01], milestones=[2, 3])
      >>> [round(float(schedule(step)), 2) for step in range(5)]
      [0.1, 0.1, 0.05, 0.01, 0.01]
    """

    def __init__(self, schedules: Sequence[Any], milestones: Sequence[int]):
        super().__init__()
        call = "Sequential(schedules, milestones)"
        self.schedules = _several(call, schedules, "Sequential([0.1, 0.01], milestones=[1000])")
        fix = (
            "They count from the first step of all. Write "
            "`Sequential([warm, main, 1e-5], milestones=[500, 10_000])`."
        )
        starts = milestones if isinstance(milestones, (list, tuple)) else [milestones]
        starts = [
            whole_number(call, "milestones", start, least=1, fix="milestones=[500, 10_000]")
            for start in starts
        ]
        rising = all(a < b for a, b in zip(starts, starts[1:], strict=False))
        if len(starts) != len(self.schedules) - 1 or not rising:
            raise ValueError(
                f"`{call}` has milestones that don't fit: got {starts} for {len(self.schedules)} "
                f"schedules, expected {len(self.schedules) - 1} increasing steps. {fix}"
            )
        self.milestones = tuple(starts)

    def rate_at(self, step: tf.Tensor) -> tf.Tensor:
        """The formula of the class."""
        rates = [
            rate_of(schedule, tf.maximum(step - tf.cast(start, step.dtype), 0))
            for schedule, start in zip(self.schedules, (0, *self.milestones), strict=True)
        ]
        begun = [tf.cast(step >= tf.cast(m, step.dtype), tf.int32) for m in self.milestones]
        return tf.gather(tf.stack(rates), tf.add_n([tf.constant(0), *begun]))


@keras.saving.register_keras_serializable(package="tfloop")
class Composed(Schedule):
    """Several schedules at once: their product, sum or mean at each step.

    Args:
      schedules: Floats and schedules, at least one.
      reduction: `"prod"`, `"sum"` or `"mean"`.

    Raises:
      TypeError: A schedule has the wrong kind.
      ValueError: There is no schedule, or the reduction isn't known.

    Example:
      >>> import tfloop
      >>> float(tfloop.schedulers.Composed([0.5, 0.25])(0))
      0.125
    """

    def __init__(self, schedules: Sequence[Any], reduction: str = "prod"):
        super().__init__()
        call = "Composed(schedules, reduction)"
        example = "Composed([CosineDecay(0.1, 1000), 0.5], reduction='prod')"
        self.schedules = _several(call, schedules, example)
        fix = f"They combine the rates of one step. Write `{example}`."
        self.reduction = choice(call, "reduction", reduction, tuple(_REDUCTIONS), fix)

    def rate_at(self, step: tf.Tensor) -> tf.Tensor:
        """The reduction over the rates."""
        return _REDUCTIONS[self.reduction]([rate_of(s, step) for s in self.schedules])


@keras.saving.register_keras_serializable(package="tfloop")
class Warmup(Schedule):
    """A linear rise to where a schedule begins, then that schedule from its own step 0.

        rate(i) = start + (schedule(0) - start) * i / steps    for i < steps
        rate(i) = schedule(i - steps)                          after that

    From `start=0` the very first update has the rate 0; give a start above it to use that step.

    Args:
      schedule: A float or a schedule.
      steps: Length of the rise in steps, >= 1.
      start: The rate at step 0, >= 0.

    Raises:
      TypeError: An argument has the wrong kind.
      ValueError: An argument is out of range.

    Example:
      >>> import tfloop
      >>> schedule = tfloop.schedulers.Warmup(0.5, steps=2)
      >>> [float(schedule(step)) for step in range(4)]
      [0.0, 0.25, 0.5, 0.5]
    """

    def __init__(self, schedule: Any, steps: int, start: float = 0.0):
        super().__init__()
        call = "Warmup(schedule, steps, start)"
        fix = "The rise goes from `start` to the schedule's first rate. Write `Warmup(0.1, 500)`."
        self.schedule = as_schedule(call, schedule)
        self.steps = whole_number(call, "steps", steps, least=1, fix="steps=500")
        self.start = number(call, "start", start, lambda x: x >= 0, "a rate >= 0", fix)

    def rate_at(self, step: tf.Tensor) -> tf.Tensor:
        """The formula of the class."""
        steps = tf.cast(self.steps, step.dtype)
        target = rate_of(self.schedule, tf.zeros_like(step))
        share = tf.cast(step, tf.float32) / self.steps
        rise = self.start + (target - self.start) * share
        return tf.where(step < steps, rise, rate_of(self.schedule, tf.maximum(step - steps, 0)))


def _several(call: str, schedules: Any, example: str) -> tuple[Any, ...]:
    """At least one schedule, each checked."""
    if not isinstance(schedules, (list, tuple)):
        raise TypeError(
            f"`{call}` needs a list: got {described(schedules)}, expected floats and schedules. "
            f"A single schedule stands alone. Write `{example}`."
        )
    if not schedules:
        raise ValueError(
            f"`{call}` has no schedules: got an empty list, expected at least one. Nothing says "
            f"what the rate is. Write `{example}`."
        )
    return tuple(as_schedule(call, schedule) for schedule in schedules)
