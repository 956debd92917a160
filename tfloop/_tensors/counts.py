"""How much a micro-batch counts: its samples or tokens, checked and applied.

Shared by `GradientsAccumulator` and `microbatch`, so that they agree on every corner.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tfloop._checks.arguments import is_number, wrong_scalar
from tfloop._tensors import sparse
from tfloop._tensors.sparse import Gradient


def checked_weight(call: str, weight: Any) -> tf.Tensor:
    """A weight as a float64 scalar; a bad one raises, in a trace when it runs."""
    wrong = wrong_scalar(weight)
    if wrong is not None and wrong.has_axes:
        raise ValueError(
            f"`{call}` got a weight of {wrong.got}, expected a scalar. It is the number of samples "
            "or tokens behind the gradients. Sum it: `weight=tf.reduce_sum(mask)`."
        )
    if wrong is not None:
        raise TypeError(
            f"`{call}` got {wrong.got} as weight, expected a number or a scalar tensor of one. It "
            "is the number of samples or tokens behind the gradients: `weight=tf.shape(x)[0]`."
        )
    if is_number(weight):
        tensor = tf.constant(float(weight), tf.float64)
    else:
        tensor = tf.cast(tf.convert_to_tensor(weight), tf.float64)
    value = tf.get_static_value(tensor)
    if value is None:
        sound = tf.logical_and(tf.math.is_finite(tensor), tensor >= 0)
        text = f"`{call}` got a weight that is negative or not finite"
        with tf.control_dependencies([tf.raw_ops.Assert(condition=sound, data=[text])]):
            return tf.identity(tensor)
    if not (np.isfinite(value) and value >= 0):
        raise ValueError(
            f"`{call}` got the weight {value}, expected a finite number of at least 0. It is the "
            "number of samples or tokens behind the gradients: `weight=len(x)`."
        )
    return tensor


def weighted(grad: Gradient, weight: tf.Tensor) -> Gradient:
    """The gradient times the weight; 0 at weight 0, where a mean over nothing made it NaN."""
    return sparse.map_values(
        lambda tensor: tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype)), grad
    )


def divided(total: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """The mean; 0 and not NaN at weight 0, which XLA lets through because it drops asserts."""
    return tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))
