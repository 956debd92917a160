"""`AdaptiveGradientClipping`: each unit's gradient stays in proportion to its weights.

Which weights make a unit is decided here; how a gradient is brought within a norm is `clipping`'s.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfloop._checks.arguments import positive
from tfloop._clipping.clipping import GradientClipping, factor, fixed_when_traced, scaled
from tfloop._tensors import sparse
from tfloop._tensors.sparse import Gradient

_CALL = "AdaptiveGradientClipping(clipping, eps)"


@keras.saving.register_keras_serializable("tfloop")
@dataclasses.dataclass(frozen=True)
class AdaptiveGradientClipping(GradientClipping):
    """Bounds the gradient of each unit by a share of the norm of its weights (AGC).

        g * min(1, clipping * max(||w||, eps) / ||g||),  with norms over one unit

    A unit is what feeds one output, told by the parameter's shape as in the paper's own code: the
    whole of a scalar or vector, such as a bias; a column of a kernel (in, out); of a kernel with
    four axes or more, as (height, width, in, out) of a convolution, all that leads to one of the
    last axis. Three axes are read as (in, heads, size), so a unit lies along the first. Axes of
    size 1 don't make a vector a kernel. Of an embedding a unit is a column, too, whether its
    gradient is sparse or dense; the whole table is measured at each update.

    Norms are taken in float32, or float64 where the gradient or the weights are. The paper
    leaves out the last layer: give it a group without clipping.

    Args:
      clipping: The largest share, > 0; "lambda" in the paper. Larger batches take smaller ones.
      eps: Weights count as if their norm were at least this, > 0, so that zeros can move.

    Raises:
      TypeError: An argument isn't a number.
      ValueError: An argument is not finite, or not above 0.

    Example:
      >>> import tensorflow as tf, tfloop
      >>> agc = tfloop.AdaptiveGradientClipping(0.5)
      >>> kernel = tf.Variable([[3.0, 0.0], [4.0, 2.0]])  # columns of norm 5 and 2
      >>> (grad,) = agc.clip([tf.constant([[0.0, 3.0], [10.0, 4.0]])], [kernel])
      >>> print(grad.numpy().round(3))
      [[0.  0.6]
       [2.5 0.8]]

    References:
      Brock et al., High-Performance Large-Scale Image Recognition Without Normalization, 2021,
      https://arxiv.org/abs/2102.06171
    """

    clipping: float = 0.01
    eps: float = 1e-3

    def __post_init__(self) -> None:
        """Refuses what isn't a positive number."""
        for name in ("clipping", "eps"):
            fix = fixed_when_traced(name, "tfloop.AdaptiveGradientClipping(0.01)")
            value = positive(_CALL, name, getattr(self, name), fix)
            object.__setattr__(self, name, value)

    @property
    def label(self) -> str:
        """The share."""
        return f"adaptive {self.clipping:g}"

    def clip(
        self, grads: list[Gradient], parameters: Sequence[tf.Variable] = (), state: Any = None
    ) -> list[Gradient]:
        """Each unit of each gradient alone."""
        return [self._clipped(g, weights) for g, weights in zip(grads, parameters, strict=True)]

    def _clipped(self, grad: Gradient, weights: tf.Variable) -> Gradient:
        grad = sparse.deduplicate(grad)
        dtype = sparse.accumulation_dtype(grad.dtype, weights.dtype)
        axes = unit_axes(weights.shape)
        # Rows that a sparse gradient lacks are zeros, which add nothing to the norm of a column.
        norm = _norm(grad.values if sparse.is_sparse(grad) else grad, axes, dtype)
        limit = self.clipping * tf.maximum(_norm(weights, axes, dtype), self.eps)
        # Weights that aren't finite bound nothing: they have no share that could be taken.
        limit = tf.where(tf.math.is_finite(limit), limit, dtype.max)
        return scaled(grad, factor(norm, limit))


def unit_axes(shape: tf.TensorShape) -> list[int]:
    """The axes along which a unit lies, of a parameter with this shape."""
    if sum(size != 1 for size in shape) <= 1:
        return list(range(shape.rank))
    return [0] if shape.rank <= 3 else list(range(shape.rank - 1))


def _norm(tensor: Any, axes: list[int], dtype: tf.DType) -> tf.Tensor:
    squares = tf.square(tf.cast(tf.convert_to_tensor(tensor), dtype))
    return tf.sqrt(tf.reduce_sum(squares, axes, keepdims=True))
