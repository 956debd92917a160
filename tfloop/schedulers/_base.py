"""What every schedule shares: the base class, steps as tensors, choices of words."""

import abc
import copy
import inspect
import threading
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

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
