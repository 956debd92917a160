"""`GradientClipping`: three bounds on gradients, applied once per update.

The optimizer applies them after accumulation and after the replicas are reduced, before the
weight decay. Pure functions of gradients; which gradients form a group is `optimizer`'s.
"""

import dataclasses
import math
import numbers
from typing import Literal

import tensorflow as tf

from tfloop._checks.messages import described, listed
from tfloop._tensors import sparse
from tfloop._tensors.sparse import Gradient

_ARGUMENTS = {"value": "limit", "norm": "max_norm", "global_norm": "max_norm"}


@dataclasses.dataclass(frozen=True)
class GradientClipping:
    """A bound on the gradients of one group; made by one of the three constructors.

    Sparse gradients are deduplicated first, so they are clipped as the dense ones would be. A
    norm that isn't finite makes the clipped gradients NaN, never silent zeros. Below the
    bound a gradient is bit-equal to what it was.

    Example:
      >>> import tfloop
      >>> tfloop.GradientClipping.by_global_norm(1.0)
      GradientClipping.by_global_norm(1.0)
    """

    kind: Literal["value", "norm", "global_norm"]
    limit: float

    def __post_init__(self) -> None:
        """Refuses a bound that isn't a positive number, whoever calls."""
        if self.kind not in _ARGUMENTS:
            raise ValueError(
                f"`GradientClipping(kind, limit)` got the kind {self.kind!r}, expected one of "
                f"{listed(_ARGUMENTS)}. It is made by its constructors. "
                "Write `tfloop.GradientClipping.by_global_norm(1.0)`."
            )
        call = f"GradientClipping.by_{self.kind}({_ARGUMENTS[self.kind]})"
        if isinstance(self.limit, bool) or not isinstance(self.limit, numbers.Real):
            raise TypeError(
                f"`{call}` needs a number: got {described(self.limit)}, expected a positive float. "
                "The bound is fixed when a step is traced. "
                "Write `tfloop.GradientClipping.by_global_norm(1.0)`."
            )
        if not (math.isfinite(self.limit) and self.limit > 0):
            raise ValueError(
                f"`{call}` needs a positive bound: got {self.limit!r}, expected a finite float "
                "above 0. A bound of 0 would stop the training; no clipping is None. "
                "Write `clipping=None`."
            )
        object.__setattr__(self, "limit", float(self.limit))

    @classmethod
    def by_value(cls, limit: float) -> "GradientClipping":
        """Clamps every element:  min(max(g, -limit), limit).

        Args:
          limit: Positive, in units of the gradient.
        """
        return cls("value", limit)

    @classmethod
    def by_norm(cls, max_norm: float) -> "GradientClipping":
        """Bounds the norm of each gradient alone:  g * min(1, max_norm / ||g||).

        Keras calls this `clipnorm`. For one bound over all gradients take `by_global_norm`.

        Args:
          max_norm: Positive, in units of the gradient.
        """
        return cls("norm", max_norm)

    @classmethod
    def by_global_norm(cls, max_norm: float) -> "GradientClipping":
        """Bounds the norm over all gradients of the group together.

            g * min(1, max_norm / sqrt(sum over the group of ||g||^2))

        Args:
          max_norm: Positive, in units of the gradient.
        """
        return cls("global_norm", max_norm)

    def clip(self, grads: list[Gradient]) -> list[Gradient]:
        """Clips the gradients of one group; shapes, dtypes and order are kept."""
        if self.kind == "value":
            return [sparse.map_values(self._clamp, sparse.deduplicate(grad)) for grad in grads]
        squares = [sparse.squared_norm(grad) for grad in grads]
        if grads and self.kind == "global_norm":
            dtype = sparse.accumulation_dtype(*(square.dtype for square in squares))
            total = tf.add_n([tf.cast(square, dtype) for square in squares])
            squares = [total] * len(grads)
        return [_scaled(grad, self._factor(s)) for grad, s in zip(grads, squares, strict=True)]

    def _clamp(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.clip_by_value(tensor, -self.limit, self.limit)

    def _factor(self, square: tf.Tensor) -> tf.Tensor:
        """min(1, limit / norm), or NaN: an infinite norm would give 0 and hide its cause."""
        norm = tf.sqrt(square)
        limit = tf.constant(self.limit, norm.dtype)
        # Computed: `tf.debugging.enable_check_numerics` stops at a NaN that stands in a graph.
        zero_or_nan = tf.sqrt(tf.where(tf.math.is_finite(norm), 0.0 * limit, -limit))
        return limit / tf.maximum(norm, limit) + zero_or_nan

    def __repr__(self) -> str:
        return f"GradientClipping.by_{self.kind}({self.limit!r})"


def _scaled(grad: Gradient, factor: tf.Tensor) -> Gradient:
    """The product, rounded once to the gradient's dtype."""
    product = sparse.map_values(lambda t: tf.cast(t, factor.dtype) * factor, grad)
    return sparse.cast(product, grad.dtype)
