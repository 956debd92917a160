"""Checks of plain arguments that several rooms share: numbers, whole numbers, scalars."""

import math
import numbers
import operator
from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import keras
import numpy as np
import tensorflow as tf

from tfloop._checks.messages import described

TENSORS = (tf.Tensor, tf.Variable, keras.Variable, np.ndarray)
"""What holds numbers with a shape and a dtype."""


def is_number(value: object) -> TypeGuard[float]:
    """Is it a Python or NumPy number? A bool isn't one here."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole_number(call: str, name: str, value: object, *, least: int, fix: str) -> int:
    """`value` as an int of at least `least`, or the error that says how to write it.

    Args:
      call: The public call, as in `DataLoader(...)`.
      name: The argument's name.
      value: What was given. A bool isn't a number here; NumPy integers are.
      least: The smallest value that makes sense.
      fix: The argument as it could be written, `batch_size=64`.

    Raises:
      TypeError: `value` isn't an integer.
      ValueError: `value` is smaller than `least`.
    """
    expected = f"expected an int of at least {least}. Pass `{fix}`."
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"`{call}` takes no such `{name}`: got {described(value)}, {expected}")
    if number < least:
        raise ValueError(f"`{call}` takes no such `{name}`: got {number}, {expected}")
    return number


def number(
    call: str, name: str, value: object, holds: Callable[[float], bool], expected: str, fix: str
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
            f"`{call}` needs a number: got {name}={described(value)}, expected {expected}. {fix}"
        )
    if not (math.isfinite(value) and holds(value)):
        raise ValueError(
            f"`{call}` has a {name} out of range: got {value!r}, expected {expected}. {fix}"
        )
    return float(value)


def positive(call: str, name: str, value: object, fix: str) -> float:
    """A finite number above 0; see `number`."""
    return number(call, name, value, lambda x: x > 0, "a finite number > 0", fix)


class WrongScalar(NamedTuple):
    """Why something isn't one number.

    Attributes:
      got: What it is, for a message: its kind, its dtype or its shape.
      has_axes: Are its elements numbers, but it isn't one?
    """

    got: str
    has_axes: bool


def wrong_scalar(value: object) -> WrongScalar | None:
    """What keeps something from being a number, or a tensor or variable that holds one.

    A shape that a trace doesn't know yet keeps it from nothing.
    """
    if is_number(value):
        return None
    if not isinstance(value, TENSORS):
        return WrongScalar(described(value), False)
    dtype, shape = tf.as_dtype(value.dtype), tf.TensorShape(value.shape)
    if not (dtype.is_floating or dtype.is_integer):
        return WrongScalar(f"dtype {dtype.name}", False)
    return None if shape.rank in (0, None) else WrongScalar(f"shape {tuple(shape)}", True)
