"""Values that aren't gradients: those of variables with `overwrite_with_gradient`.

Keras' float8 layers give their new scales and largest magnitudes in the place of gradients, and its
optimizers put these into the variables as they are. Several of them become one by their maximum;
nothing else that is done to gradients is done to them. The one room that knows which they are.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfloop._tensors import sparse
from tfloop._tensors.sparse import Gradient


class ValuePath(str):
    """The path of such a value, which is known by it where no variable is at hand."""

    __slots__ = ()


def overwrites(variable: Any) -> bool:
    """Is what comes as its gradient the variable's new value?"""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def path_for(path: str, variable: Any) -> str:
    """The path under which the gradient of a variable goes through the library."""
    return ValuePath(path) if overwrites(variable) else path


def is_value(path: str) -> bool:
    """Is what lies under the path a value, and no gradient?"""
    return isinstance(path, ValuePath)


def split(grads: Mapping[str, Gradient]) -> tuple[dict[str, Gradient], dict[str, Gradient]]:
    """The gradients, and the values."""
    values = {path: value for path, value in grads.items() if is_value(path)}
    return {path: grad for path, grad in grads.items() if path not in values}, values


def larger(one: Gradient, other: Gradient) -> tf.Tensor:
    """One value of two, in the wider dtype; NaN where one of them is."""
    dtype = one.dtype if one.dtype.size >= other.dtype.size else other.dtype
    one, other = (sparse.densify(sparse.cast(value, dtype)) for value in (one, other))
    return tf.maximum(one, other)
