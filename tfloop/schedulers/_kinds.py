"""What a rate may be: a number, a scalar tensor or variable, or a schedule that gives one.

The rates of several groups are a `ModuleLearningRate`; what a step takes besides is told apart in
`tfloop._optimizer.rates`.
"""

from typing import Any

import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from tfloop._checks.arguments import is_number, number, wrong_scalar
from tfloop._checks.messages import described


def is_schedule(value: object) -> bool:
    """Is it Keras' kind of schedule, which gives a rate for each step?"""
    return isinstance(value, LearningRateSchedule)


def rate_of(schedule: Any, step: tf.Tensor) -> tf.Tensor:
    """The rate of a float or schedule at a step, as float32."""
    rate = schedule(step) if callable(schedule) else schedule
    return tf.cast(tf.convert_to_tensor(rate), tf.float32)


def as_schedule(call: str, value: Any) -> Any:
    """A schedule as it is; a number as a checked float.

    Args:
      call: The public call as typed.
      value: What the user gave as schedule.

    Raises:
      TypeError: It is neither.
      ValueError: The number is negative, infinite or NaN.
    """
    if is_schedule(value):
        return value
    if not is_number(value):
        raise TypeError(
            f"`{call}` needs a schedule: got {described(value)}, expected a float, a Keras "
            "LearningRateSchedule or one of tfloop.schedulers. A class must be called first, and "
            "a function belongs in a subclass of LearningRateSchedule. Write for example "
            "`keras.optimizers.schedules.CosineDecay(0.1, 1000)`."
        )
    fix = "A rate that falls is a schedule: `PolynomialDecay(0.1, 1000)`."
    return number(call, "schedule", value, lambda rate: rate >= 0, "a finite rate >= 0", fix)


def checked_rate(call: str, name: str, value: Any) -> Any:
    """A float, or a scalar tensor or variable as it is.

    Args:
      call: The public call as typed.
      name: The argument.
      value: What was given for it.

    Raises:
      TypeError: It isn't a scalar number by kind.
      ValueError: It is a number that is NaN, infinite or negative, or a tensor with axes.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if is_number(value):
        fix = (
            "It may come from a loss that isn't finite; 0 stops a group. Write "
            "`tfloop.ModuleLearningRate(1e-3)`."
        )
        return number(call, name, value, lambda rate: rate >= 0, "a finite number >= 0", fix)
    wrong = wrong_scalar(value)
    if wrong is None:
        return value
    if wrong.has_axes:
        raise ValueError(
            f"`{call}` needs one rate: got {name} of {wrong.got}, expected (). Several "
            "rates belong to several groups. Write `tfloop.ModuleLearningRate(1e-3)"
            ".with_group(tfloop.ParamGroup.from_name('encoder'), 1e-4)`."
        )
    cause, fix = "Rates are numbers", "ModuleLearningRate(1e-3)"
    if is_schedule(value):
        cause, fix = "A schedule gives a rate for each step", "ModuleLrScheduler(schedule).step()"
    raise TypeError(
        f"`{call}` needs a rate: got {name}={wrong.got}, expected a number or a scalar "
        f"tensor. {cause}. Write `{fix}`."
    )
