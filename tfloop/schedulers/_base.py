"""What every schedule shares: the base class, steps and rates as tensors, checks of arguments."""

import abc
import copy
import inspect
import math
import numbers
import threading
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from tfloop._checks.messages import described
from tfloop._tracing.traces import not_converted

ONE_AT_A_TIME = threading.RLock()
"""Held while state of a schedule moves: threads may move it at once, and each counts."""


class Schedule(tf.Module, LearningRateSchedule, abc.ABC):
    """A Keras schedule that is a `tf.Module` too, so that checkpoints find state inside it.

    A subclass keeps each argument of its `__init__` as an attribute of the same name, from which
    the config is made, and gives `rate_at(step)`.
    """

    @not_converted
    def __call__(self, step: Any) -> tf.Tensor:
        """The rate at a step.

        Args:
          step: Scalar, counted from 0: a Python number, a tensor or a variable.

        Returns:
          Scalar float32 tensor.
        Mutates: nothing.
        Graph mode: works in a `tf.function`, with `jit_compile=True` too; a Python number is a
          constant of the trace.
        """
        return tf.cast(self.rate_at(as_step(step)), tf.float32)

    def __copy__(self) -> "Schedule":
        """As `copy.deepcopy`: two schedules can't share state."""
        return copy.deepcopy(self)

    @abc.abstractmethod
    def rate_at(self, step: tf.Tensor) -> tf.Tensor:
        """The formula, for a step that is an int64 or float32 scalar."""

    def get_config(self) -> dict[str, Any]:
        """The arguments, with nested schedules serialised."""
        _, *arguments = inspect.signature(type(self).__init__).parameters
        return {name: _serialized(getattr(self, name)) for name in arguments}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Schedule":
        """The schedule that `get_config` described; state such as a plateau's starts anew."""
        return cls(**{name: _deserialized(value) for name, value in config.items()})


def _serialized(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_serialized(part) for part in value]
    return keras.saving.serialize_keras_object(value) if callable(value) else value


def _deserialized(value: Any) -> Any:
    nested = isinstance(value, (dict, list))
    return keras.saving.deserialize_keras_object(value) if nested else value


def as_step(step: Any) -> tf.Tensor:
    """A step as an int64 scalar, or float32 if it isn't whole by type."""
    step = tf.convert_to_tensor(step)
    return tf.cast(step, tf.int64 if step.dtype.is_integer else tf.float32)


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
    if isinstance(value, LearningRateSchedule):
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


def is_number(value: Any) -> bool:
    """Is it a Python or NumPy number? A bool isn't one here."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def number(
    call: str, name: str, value: Any, holds: Callable[[float], bool], expected: str, fix: str
) -> float:
    """A finite number for which `holds` holds.

    Args:
      call: The public call as typed.
      name: The argument.
      value: What was given for it.
      holds: The condition.
      expected: The condition in words.
      fix: The likely cause, and the line of code to write.

    Raises:
      TypeError: It isn't a number.
      ValueError: It isn't finite, or the condition doesn't hold.
    """
    if not is_number(value):
        raise TypeError(
            f"`{call}` needs a number: got {name}={value!r}, expected {expected}. {fix}"
        )
    if not (math.isfinite(value) and holds(value)):
        raise ValueError(
            f"`{call}` has a {name} out of range: got {value!r}, expected {expected}. {fix}"
        )
    return float(value)


def choice(call: str, name: str, value: Any, options: tuple[str, ...], fix: str) -> str:
    """One of a few words.

    Args:
      call: The public call as typed.
      name: The argument.
      value: What was given for it.
      options: The words.
      fix: The likely cause, and the line of code to write.

    Raises:
      ValueError: It is another one.
    """
    if value not in options:
        expected = ", ".join(repr(option) for option in options)
        raise ValueError(
            f"`{call}` doesn't know this {name}: got {value!r}, expected one of {expected}. {fix}"
        )
    return value
