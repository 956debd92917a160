"""`LossScaler`: keeps the gradients of float16 computations from vanishing.

The tape asks it for the seed of a backward pass and to undo it; the optimizer tells it whether the
reduced gradients were finite. One scale serves all groups and all replicas.
"""

import copy
import json
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfloop._checks.arguments import positive, whole_number
from tfloop._checks.copying import with_attributes_of
from tfloop._checks.messages import not_pickled
from tfloop._model.paths import Variable
from tfloop._replicas import placement, synchronized
from tfloop._tensors import sparse
from tfloop._tensors.sparse import Gradient
from tfloop._tracing import traces

_FIX = "It multiplies the loss. Write `tfloop.LossScaler(2.0**15)`."


class LossScaler(tf.train.experimental.PythonState):
    """Scales losses for float16, and finds the scale by itself.

    Gradients below 6e-8 are zero in float16. The backward pass starts with `scale` in place of 1
    and divides it out in float32, so it never shows. After each update:

        scale / 2    if a gradient wasn't finite; the update is skipped then
        scale * 2    after `growth_interval` finite updates in a row

    Give it to the optimizer and to the tape: `ModuleOptimizer(..., scaler=tfloop.LossScaler())` and
    `Tape(scaler=optim.scaler)`. bfloat16 has the range of float32 and needs none. Its state is
    saved with that of the optimizer.

    Args:
      initial: The first scale, positive; powers of 2 lose nothing.
      growth_interval: Updates between two tries of a larger scale.

    Raises:
      TypeError: An argument isn't a number.
      ValueError: One isn't positive and finite.

    Example:
      >>> import tfloop
      >>> optim = tfloop.ModuleOptimizer("adam", scaler=tfloop.LossScaler(initial=1024.0))
      >>> float(optim.scaler.scale)
      1024.0

    References: Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740.
    """

    def __init__(self, initial: float = 2.0**15, growth_interval: int = 2000) -> None:
        self._start(positive("LossScaler(initial)", "scale", initial, _FIX))
        self._growth_interval: int | None = whole_number(
            "LossScaler(...)", "growth_interval", growth_interval, least=1, fix="2000"
        )

    @classmethod
    def fixed(cls, scale: float) -> "LossScaler":
        """A scale that stays; updates that aren't finite are skipped all the same.

        Args:
          scale: Positive.
        """
        scaler = cls.__new__(cls)
        scaler._start(positive("LossScaler.fixed(scale)", "scale", scale, _FIX))
        scaler._growth_interval = None
        return scaler

    def _start(self, initial: float) -> None:
        self._owned = False
        self._scale, self._finite_steps = traces.eagerly(
            lambda: (
                tf.Variable(initial, dtype=tf.float32, name="scale", trainable=False),
                tf.Variable(0, dtype=tf.int64, name="finite_steps", trainable=False),
            )
        )

    @property
    def scale(self) -> tf.Variable:
        """The present scale: a float32 scalar variable."""
        return self._scale

    def variables(self) -> dict[str, tf.Variable]:
        """The state by name."""
        return {"scale": self._scale, "finite_steps": self._finite_steps}

    def serialize(self) -> str:
        """The state as JSON, for checkpoints."""
        return json.dumps({key: v.numpy().item() for key, v in self.variables().items()})

    def deserialize(self, string_value: str) -> None:
        """Takes over what `serialize` gave."""
        state = json.loads(string_value)
        for key, variable in self.variables().items():
            variable.assign(state[key])

    def own(self, call: str) -> None:
        """Says that an optimizer will tell whether gradients were finite.

        Raises:
          ValueError: Another one does.
        """
        if self._owned:
            raise ValueError(
                f"`{call}` got a scaler that another optimizer owns, expected a fresh one. Each "
                "scale follows the gradients of one optimizer. Make another: "
                "`scaler=tfloop.LossScaler()`."
            )
        self._owned = True

    def check_owned(self, call: str) -> None:
        """Refuses a scaler that nobody would adapt.

        Raises:
          ValueError: No optimizer owns it.
        """
        if not self._owned:
            raise ValueError(
                f"`{call}` got a scaler that no optimizer owns, expected that of one. Its scale "
                "would never adapt, and updates that aren't finite wouldn't be skipped. Give it to "
                "the optimizer, and take it from there: `tfloop.Tape(scaler=optim.scaler)`."
            )

    def place_with(self, variables: Iterable[Variable]) -> None:
        """Puts the state into the strategy of these variables."""
        self._scale = placement.placed_with(self._scale, variables, placement.MIRRORED)
        self._finite_steps = placement.placed_with(
            self._finite_steps, variables, placement.MIRRORED
        )

    def seed(self, loss: tf.Tensor) -> tf.Tensor:
        """What the backward pass starts with, in place of ones."""
        return tf.fill(tf.shape(loss), tf.cast(self._scale, loss.dtype))

    def unscaled(self, grad: Gradient) -> Gradient:
        """The true gradient in float32, or in float64 where it is."""
        grad = sparse.cast(grad, sparse.accumulation_dtype(grad.dtype))
        return sparse.map_values(lambda t: t / tf.cast(self._scale, t.dtype), grad)

    def adapt(self, strategy: Any, finite: tf.Tensor) -> None:
        """Moves the scale after an update was made or skipped; runs once for all replicas."""
        interval = self._growth_interval
        if interval is None:
            return
        finite = synchronized.agreed(strategy, finite)
        steps = tf.where(finite, self._finite_steps + 1, tf.constant(0, tf.int64))
        grown = steps >= interval
        factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
        steps = tf.where(grown, tf.zeros_like(steps), steps)
        # It neither vanishes nor overflows, whatever the gradients do.
        scale = tf.clip_by_value(self._scale * factor, 2.0**-24, 2.0**120)
        synchronized.assign(strategy, self._scale, scale)
        synchronized.assign(strategy, self._finite_steps, steps)

    def __copy__(self) -> "LossScaler":
        """As `copy.deepcopy`: two optimizers can't share a scale."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict) -> "LossScaler":
        """A scaler of its own with an equal state, which no optimizer owns yet."""
        twin = type(self).fixed(1.0)
        twin._growth_interval = self._growth_interval
        twin.deserialize(self.serialize())
        return with_attributes_of(self, twin, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled."""
        raise not_pickled(self)

    def __repr__(self) -> str:
        """The present scale, and how it grows."""
        now = f"scale={float(self._scale.numpy())}" if tf.executing_eagerly() else "in a trace"
        if self._growth_interval is None:
            return f"LossScaler.fixed({now})"
        return f"LossScaler({now}, growth_interval={self._growth_interval})"
