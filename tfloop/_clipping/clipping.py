"""`GradientClipping`: what every clipping has to say, and the three bounds that Keras has.

Another clipping is a subclass in a file of its own, like `adaptive_clipping`. When it is asked,
with what, and where its state is kept, is `clipper`'s business.
"""

import abc
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import keras
import tensorflow as tf

from tfloop._checks.arguments import positive
from tfloop._checks.messages import listed
from tfloop._tensors import sparse
from tfloop._tensors.sparse import Gradient


class GradientClipping(abc.ABC):
    """A bound on the gradients of one group; three of them are made by the constructors here.

    The optimizer asks it once per update: after accumulation and after the replicas are reduced,
    before the weight decay. Sparse gradients are deduplicated first, so they are clipped as the
    dense ones would be. A norm that isn't finite makes the clipped gradients NaN, never silent
    zeros. Below the bound a gradient is bit-equal to what it was.

    One of your own is a subclass that gives `clip`, and `initial_state` if it remembers anything.
    It keeps the arguments of its `__init__` as attributes of the same names (a frozen dataclass
    does), from which `get_config` is made; for `.keras` files register it with
    `keras.saving.register_keras_serializable`.

    Example:
      >>> import tfloop
      >>> tfloop.GradientClipping.by_global_norm(1.0)
      GradientClipping.by_global_norm(1.0)
    """

    @staticmethod
    def by_value(limit: float) -> "GradientClipping":
        """Clamps every element:  min(max(g, -limit), limit).

        Args:
          limit: Positive, in units of the gradient.
        """
        return ByValue(limit)

    @staticmethod
    def by_norm(max_norm: float) -> "GradientClipping":
        """Bounds the norm of each gradient alone:  g * min(1, max_norm / ||g||).

        Keras calls this `clipnorm`. For one bound over all gradients take `by_global_norm`.

        Args:
          max_norm: Positive, in units of the gradient.
        """
        return ByNorm(max_norm)

    @staticmethod
    def by_global_norm(max_norm: float) -> "GradientClipping":
        """Bounds the norm over all gradients of the group together.

            g * min(1, max_norm / sqrt(sum over the group of ||g||^2))

        Args:
          max_norm: Positive, in units of the gradient.
        """
        return ByGlobalNorm(max_norm)

    @abc.abstractmethod
    def clip(
        self,
        grads: list[Gradient],
        parameters: Sequence[tf.Variable] = (),
        state: dict[str, tf.Tensor] | None = None,
    ) -> list[Gradient]:
        """Clips the gradients of one group; shapes, dtypes and order are kept.

        Args:
          grads: Dense or sparse. What overwrites a variable isn't among them.
          parameters: The variable of each, for clippings that measure it. It is read, not changed.
          state: Name -> value, as `initial_state` named them. What is put in the place of a value
            is there at the next update, if this one is made.
        """

    def initial_state(self) -> Mapping[str, Any]:
        """Name -> what it remembers before the first update: numbers or arrays; nothing by default.

        Each group has state of its own, which checkpoints save.
        """
        return {}

    @property
    def label(self) -> str:
        """How it reads in a cell of `ModuleOptimizer.summary`."""
        return type(self).__name__

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """The clipping that `get_config` described."""
        return cls(**config)


@dataclasses.dataclass(frozen=True)
class Bound(GradientClipping):
    """A bound that is one number."""

    kind: ClassVar[str]
    argument: ClassVar[str] = "max_norm"
    limit: float

    def __post_init__(self) -> None:
        call = f"GradientClipping.by_{self.kind}({self.argument})"
        fix = fixed_when_traced("bound", "tfloop.GradientClipping.by_global_norm(1.0)")
        object.__setattr__(self, "limit", positive(call, "bound", self.limit, fix))

    @property
    def label(self) -> str:
        """As the constructor without its `by`."""
        return f"{self.kind} {self.limit:g}"

    def __repr__(self) -> str:
        return f"GradientClipping.by_{self.kind}({self.limit!r})"


class ByValue(Bound):
    """See `GradientClipping.by_value`."""

    kind, argument = "value", "limit"

    def clip(
        self, grads: list[Gradient], parameters: Any = (), state: Any = None
    ) -> list[Gradient]:
        """Each element alone."""
        return [sparse.map_values(self._clamp, sparse.deduplicate(grad)) for grad in grads]

    def _clamp(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.clip_by_value(tensor, -self.limit, self.limit)


class ByNorm(Bound):
    """See `GradientClipping.by_norm`."""

    kind = "norm"

    def clip(
        self, grads: list[Gradient], parameters: Any = (), state: Any = None
    ) -> list[Gradient]:
        """Each gradient alone."""
        norms = [tf.sqrt(sparse.squared_norm(grad)) for grad in grads]
        return [scaled(g, factor(norm, self.limit)) for g, norm in zip(grads, norms, strict=True)]


class ByGlobalNorm(Bound):
    """See `GradientClipping.by_global_norm`."""

    kind = "global_norm"

    def clip(
        self, grads: list[Gradient], parameters: Any = (), state: Any = None
    ) -> list[Gradient]:
        """The same for all gradients."""
        if not grads:
            return []
        squares = [sparse.squared_norm(grad) for grad in grads]
        dtype = sparse.accumulation_dtype(*(square.dtype for square in squares))
        norm = tf.sqrt(tf.add_n([tf.cast(square, dtype) for square in squares]))
        common = factor(norm, self.limit)
        return [scaled(grad, common) for grad in grads]


_BOUNDS = {bound.kind: bound for bound in (ByValue, ByNorm, ByGlobalNorm)}


def factor(norm: tf.Tensor, limit: float | tf.Tensor) -> tf.Tensor:
    """min(1, limit / norm), or NaN: an infinite norm would give 0 and hide its cause."""
    limit = tf.convert_to_tensor(limit, norm.dtype)
    # Computed: `tf.debugging.enable_check_numerics` stops at a NaN that stands in a graph.
    zero_or_nan = tf.sqrt(tf.where(tf.math.is_finite(norm), 0.0 * limit, -limit))
    return limit / tf.maximum(norm, limit) + zero_or_nan


def scaled(grad: Gradient, factor: tf.Tensor) -> Gradient:
    """The product, rounded once to the gradient's dtype."""
    product = sparse.map_values(lambda t: tf.cast(t, factor.dtype) * factor, grad)
    return sparse.cast(product, grad.dtype)


def fixed_when_traced(name: str, example: str) -> str:
    """What a message says of an argument of a clipping that can't be one."""
    return (
        f"The {name} is fixed when a step is traced; 0 would stop the training. Write `{example}`, "
        "or for no clipping `clipping=None`."
    )


def serialize(clipping: GradientClipping | None) -> Any:
    """A clipping as JSON: a bound as `[kind, limit]`, any other as Keras writes objects."""
    if clipping is None:
        return None
    if isinstance(clipping, Bound):
        return [clipping.kind, clipping.limit]
    return keras.saving.serialize_keras_object(clipping)


def deserialize(config: Any, custom_objects: Any = None) -> GradientClipping | None:
    """The clipping that `serialize` wrote.

    Raises:
      ValueError: There is no such bound.
    """
    if config is None:
        return None
    if isinstance(config, Mapping):
        return keras.saving.deserialize_keras_object(config, custom_objects)
    kind, limit = config
    if kind not in _BOUNDS:
        raise ValueError(
            f"`GradientClipping` can't be read: got the kind {kind!r}, expected one of "
            f"{listed(_BOUNDS)}. The file is damaged, or a newer tfloop wrote it. Make it again: "
            "`tfloop.GradientClipping.by_global_norm(1.0)`."
        )
    return _BOUNDS[kind](limit)
