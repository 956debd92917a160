"""The arithmetic of `tf.IndexedSlices`: deduplicate, densify, add, scale, measure.

The gradient of an embedding lookup comes as rows and their numbers, the same number often
more than once. Most Keras optimizers and every norm are wrong on repeated rows; everything
here gives the result that the dense tensor would. Dense tensors go through the same functions,
so that no caller asks which kind it holds.
"""

import numbers
from collections.abc import Callable
from typing import Any, TypeAlias

import tensorflow as tf

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices

_MSG_NO_SHAPE = (
    "A sparse gradient can't be made dense: got rows of shape {shape} without a dense shape, "
    "expected one. `tf.IndexedSlices` made by hand often lacks it. Give the variable's: "
    "`tf.IndexedSlices(values, indices, tf.constant(variable.shape))`."
)


def is_sparse(grad: Gradient) -> bool:
    """Is the gradient given as rows?"""
    return isinstance(grad, tf.IndexedSlices)


def has_known_rows(grad: Gradient) -> bool:
    """Is it dense, or does the trace know how many rows it has?"""
    return not is_sparse(grad) or grad.values.shape.is_fully_defined()


def deduplicate(grad: Gradient) -> Gradient:
    """Sums the rows that have the same number, so that each number occurs once."""
    if not is_sparse(grad):
        return grad
    numbers, position = tf.unique(grad.indices)
    rows = tf.math.unsorted_segment_sum(grad.values, position, tf.shape(numbers)[0])
    return tf.IndexedSlices(rows, numbers, grad.dense_shape)


def densify(grad: Gradient) -> tf.Tensor:
    """The same gradient as a dense tensor; repeated rows are summed.

    Raises:
      ValueError: The rows don't say of what shape the dense tensor is.
    """
    if not is_sparse(grad):
        return grad
    if grad.dense_shape is None:
        raise ValueError(_MSG_NO_SHAPE.format(shape=tuple(grad.values.shape)))
    shape = tf.cast(grad.dense_shape, grad.indices.dtype)
    return tf.scatter_nd(grad.indices[:, tf.newaxis], grad.values, shape)


def map_values(fn: Callable[[tf.Tensor], tf.Tensor], grad: Gradient) -> Gradient:
    """Applies `fn` to a dense gradient, or to the rows of a sparse one.

    Right for functions that are linear, or that map 0 to 0 after `deduplicate`.
    """
    if not is_sparse(grad):
        return fn(grad)
    return tf.IndexedSlices(fn(grad.values), grad.indices, grad.dense_shape)


def cast(grad: Gradient, dtype: tf.DType) -> Gradient:
    """The gradient in another dtype; itself where the dtype is the same."""
    return grad if grad.dtype == dtype else map_values(lambda t: tf.cast(t, dtype), grad)


def scale(grad: Gradient, factor: Any) -> Gradient:
    """The gradient times a scalar, in its own dtype; sparse ones stay sparse."""
    return map_values(lambda values: values * scalar(factor, values.dtype), grad)


def scalar(value: Any, dtype: tf.DType) -> tf.Tensor:
    """A number or tensor in a dtype. A Python float isn't rounded to float32 on the way."""
    if isinstance(value, numbers.Number):
        return tf.constant(value, dtype)
    return tf.cast(tf.convert_to_tensor(value), dtype)


def add(one: Gradient, other: Gradient) -> Gradient:
    """The sum, in the wider dtype; sparse only where both are.

    Overlapping rows are kept side by side, not merged.
    """
    dtype = one.dtype if one.dtype.size >= other.dtype.size else other.dtype
    one, other = cast(one, dtype), cast(other, dtype)
    if not (is_sparse(one) and is_sparse(other)):
        return densify(one) + densify(other)
    numbers = [grad.indices for grad in (one, other)]
    if numbers[0].dtype != numbers[1].dtype:
        numbers = [tf.cast(part, tf.int64) for part in numbers]
    shape = one.dense_shape if one.dense_shape is not None else other.dense_shape
    rows = tf.concat([one.values, other.values], 0)
    return tf.IndexedSlices(rows, tf.concat(numbers, 0), shape)


def dot(one: Gradient, other: Gradient) -> tf.Tensor:
    """The scalar product, in float32 or in float64 where one of the two is."""
    dtype = accumulation_dtype(one.dtype, other.dtype)
    one, other = cast(one, dtype), cast(other, dtype)
    if is_sparse(one) and not is_sparse(other):
        one, other = other, one
    if is_sparse(other) and not is_sparse(one):
        one, other = tf.gather(one, other.indices), other.values
    return tf.reduce_sum(densify(one) * densify(other))


def squared_norm(grad: Gradient) -> tf.Tensor:
    """The sum of squares of the dense gradient, in float32, or in float64 for float64."""
    values = deduplicate(cast(grad, accumulation_dtype(grad.dtype)))
    return tf.reduce_sum(tf.square(values.values if is_sparse(values) else values))


def all_finite(grad: Gradient) -> tf.Tensor:
    """A scalar bool: no NaN and no infinity."""
    return tf.reduce_all(tf.math.is_finite(grad.values if is_sparse(grad) else grad))


def accumulation_dtype(*dtypes: tf.DType) -> tf.DType:
    """The dtype in which sums are kept: float64 if one is, else float32."""
    return tf.float64 if tf.float64 in [tf.as_dtype(dtype) for dtype in dtypes] else tf.float32


def with_dense_shape(grad: Gradient, shape: tf.TensorShape) -> Gradient:
    """Rows made by hand may lack the dense shape; it is that of the variable."""
    if not is_sparse(grad) or grad.dense_shape is not None:
        return grad
    dense_shape = tf.constant(shape.as_list(), grad.indices.dtype)
    return tf.IndexedSlices(grad.values, grad.indices, dense_shape)


def shape_of(grad: Gradient) -> tf.TensorShape:
    """The static shape of the dense gradient, as far as it is known."""
    if not is_sparse(grad):
        return grad.shape
    rows = tf.get_static_value(grad.dense_shape) if grad.dense_shape is not None else None
    return tf.TensorShape(rows) if rows is not None else tf.TensorShape(None)
