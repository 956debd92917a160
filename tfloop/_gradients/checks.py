"""What is checked of gradients before they are used: kind, dtype, shape, and whose they are.

Plain functions under `GradientsParams`; each names the public call that got the wrong thing.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfloop._checks.messages import described, listed
from tfloop._model.paths import AddressBook
from tfloop._tensors import overwritten, sparse
from tfloop._tensors.sparse import Gradient

_MSG_NOT_A_GRADIENT = (
    "`{call}` takes no such gradient for {path!r}: got {what}, expected a tf.Tensor or "
    "tf.IndexedSlices of a floating dtype. {cause}"
)


def as_gradient(call: str, path: str, grad: Any) -> Gradient:
    """The gradient as a tensor or as rows.

    Raises:
      TypeError: It is neither, or not floating.
    """
    if not isinstance(grad, (tf.Tensor, tf.IndexedSlices)):
        if not hasattr(grad, "dtype") and not isinstance(grad, float):
            what = described(grad)
            cause = "A parameter without gradient is absent: `grads.remove(path)`."
            raise TypeError(
                _MSG_NOT_A_GRADIENT.format(call=call, what=what, path=path, cause=cause)
            )
        grad = tf.convert_to_tensor(grad)
    if not grad.dtype.is_floating:
        what = f"dtype {grad.dtype.name}"
        cause = "Integers can't be scaled or averaged. Cast it: `tf.cast(grad, tf.float32)`."
        raise TypeError(_MSG_NOT_A_GRADIENT.format(call=call, what=what, path=path, cause=cause))
    return grad


def same_shape(call: str, path: str, one: Gradient, other: Gradient) -> None:
    """Raises where two gradients of one path can't be of the same variable.

    Raises:
      ValueError: Their shapes differ.
    """
    shapes = [sparse.shape_of(grad) for grad in (one, other)]
    if not shapes[0].is_compatible_with(shapes[1]):
        raise ValueError(
            f"`{call}` needs gradients of one shape for {path!r}: got {shapes[1]}, expected "
            f"{shapes[0]}. One of them belongs to another model. Look at both: `print(grads)`."
        )


def known_path(book: AddressBook, path: str, call: str) -> str:
    """The canonical path that a gradient's path leads to.

    Raises:
      ValueError: It leads nowhere; near misses are named.
    """
    canonical = book.resolve(path)
    if canonical is None:
        raise ValueError(
            f"`{call}` got the gradient of an unknown path: {book.unknown(path)} It was keyed by "
            "another model. Key it by this one: `tfloop.GradientsParams.from_grads(grads, model)`."
        )
    return canonical


def against_book(
    grads: Mapping[str, Gradient], book: AddressBook, call: str
) -> dict[str, Gradient]:
    """The gradients by canonical path, each compared with its variable.

    Raises:
      ValueError: There is none, or an unknown path, another shape, a variable twice.
      TypeError: One isn't a gradient.
    """
    if not grads:
        raise ValueError(
            f"`{call}` needs a gradient: got none, expected at least one of "
            f"{listed(book.variables)}. Every one was removed, or the wrong group was "
            "selected. Look at them before: `print(grads)`."
        )
    checked: dict[str, Gradient] = {}
    for path, grad in grads.items():
        canonical = known_path(book, path, call)
        if canonical in checked:
            raise ValueError(
                f"`{call}` got two gradients for one variable: {path!r} and another path lead to "
                f"{canonical!r}, expected one. The variable is tied. Add them up: "
                "`grads.merge(other)`."
            )
        shape = tf.TensorShape(book.variables[canonical].shape)
        grad = sparse.with_dense_shape(as_gradient(call, path, grad), shape)
        if not sparse.shape_of(grad).is_compatible_with(shape):
            raise ValueError(
                f"`{call}` takes no such gradient for {path!r}: got the shape "
                f"{sparse.shape_of(grad)}, expected {shape}. It was registered for another "
                "variable. Look at them before: `print(grads)`."
            )
        checked[overwritten.path_for(canonical, book.variables[canonical])] = grad
    return checked
