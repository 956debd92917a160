"""The one room that knows `tf.IndexedSlices`: deduplicate, densify, add, scale, measure.

The gradient of an embedding lookup comes as rows and their numbers, the same number often
more than once. Most Keras optimizers and every norm are wrong on repeated rows; everything
here gives the result that the dense tensor would. Dense tensors go through the same functions,
so that no caller asks which kind it holds.
"""

from collections.abc import Callable

import tensorflow as tf

Gradient = tf.Tensor | tf.IndexedSlices


def is_sparse(grad: Gradient) -> bool:
    """Is the gradient given as rows?"""
    return isinstance(grad, tf.IndexedSlices)


def deduplicate(grad: Gradient) -> Gradient:
    """Sums the rows that have the same number, so that each number occurs once."""
    if not is_sparse(grad):
        return grad
    numbers, position = tf.unique(grad.indices)
    rows = tf.math.unsorted_segment_sum(grad.values, position, tf.shape(numbers)[0])
    return tf.IndexedSlices(rows, numbers, grad.dense_shape)


def densify(grad: Gradient) -> tf.Tensor:
    """The same gradient as a dense tensor; repeated rows are summed."""
    if not is_sparse(grad):
        return grad
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


def add(one: Gradient, other: Gradient) -> Gradient:
    """The sum; sparse only where both are. Overlapping rows are kept side by side, not merged."""
    if is_sparse(one) and is_sparse(other):
        numbers = [tf.cast(grad.indices, tf.int64) for grad in (one, other)]
        values = [one.values, tf.cast(other.values, one.dtype)]
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(numbers, 0), one.dense_shape)
    return densify(one) + tf.cast(densify(other), one.dtype)


def dot(one: Gradient, other: Gradient) -> tf.Tensor:
    """The scalar product, in float32 or in float64 where one of the two is."""
    dtype = accumulation_dtype(one.dtype, other.dtype)
    if is_sparse(one) and not is_sparse(other):
        one, other = other, one
    if is_sparse(other) and not is_sparse(one):
        one = tf.gather(one, other.indices)
        other = other.values
    else:
        one, other = densify(one), densify(other)
    return tf.reduce_sum(tf.cast(one, dtype) * tf.cast(other, dtype))


def squared_norm(grad: Gradient) -> tf.Tensor:
    """The sum of squares of the dense gradient, in float32, or in float64 for float64."""
    values = deduplicate(grad)
    values = values.values if is_sparse(values) else values
    values = tf.cast(values, accumulation_dtype(values.dtype))
    return tf.reduce_sum(tf.square(values))


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
