"""Shapes that are a formula of the step alone: Noam, OneCycle."""

import math

import keras
import tensorflow as tf

from tfloop._checks.arguments import number, whole_number
from tfloop.schedulers._base import Schedule, choice


@keras.saving.register_keras_serializable(package="tfloop")
class Noam(Schedule):
    """The Transformer's rate: a linear rise, then the inverse square root of the step.

        rate(i) = factor * model_size^-0.5 * min(s^-0.5, s * warmup_steps^-1.5),  s = i + 1

    The peak, at `i = warmup_steps - 1`, is `factor / sqrt(model_size * warmup_steps)`.

    Args:
      factor: Scales the whole curve, > 0.
      warmup_steps: Length of the rise in steps, >= 1.
      model_size: Width of the model, `d_model` in the paper, >= 1.

    Raises:
      TypeError: An argument has the wrong kind.
      ValueError: An argument is out of range.

    Example:
      >>> import tfloop
      >>> schedule = tfloop.schedulers.Noam(1.0, warmup_steps=4, model_size=1)
      >>> [float(schedule(step)) for step in (0, 3, 15)]
      [0.125, 0.5, 0.25]

    References:
      Vaswani et al., Attention Is All You Need, 2017, https://arxiv.org/abs/1706.03762
    """

    def __init__(self, factor: float = 1.0, warmup_steps: int = 4000, model_size: int = 512):
        super().__init__()
        call = "Noam(factor, warmup_steps, model_size)"
        fix = "It scales the whole curve. Write `Noam(1.0, 4000, 512)`."
        self.factor = number(call, "factor", factor, lambda x: x > 0, "a number > 0", fix)
        self.warmup_steps = whole_number(
            call, "warmup_steps", warmup_steps, least=1, fix="warmup_steps=4000"
        )
        self.model_size = whole_number(
            call, "model_size", model_size, least=1, fix="model_size=512"
        )

    def rate_at(self, step: tf.Tensor) -> tf.Tensor:
        """The formula of the class."""
        s = tf.cast(step, tf.float32) + 1.0
        rise = s * self.warmup_steps**-1.5
        return self.factor * self.model_size**-0.5 * tf.minimum(1.0 / tf.sqrt(s), rise)


@keras.saving.register_keras_serializable(package="tfloop")
class OneCycle(Schedule):
    """The 1cycle policy: up to a high rate, then down to almost nothing.

    With the start `max_lr / div_factor`, the end `start / final_div_factor`, the peak at
    `p = pct_start * total_steps - 1` (a start at the peak if that is less than 0) and the last
    step `n = total_steps - 1`:

        rate(i) = anneal(start, max_lr, i / p)              for i <= p
        rate(i) = anneal(max_lr, end, (i - p) / (n - p))    for p < i <= n, and the end after that
        anneal(a, b, t) = b + (a - b) * (1 + cos(pi * t)) / 2    or, linear, a * (1 - t) + b * t

    Args:
      max_lr: The rate at the peak, > 0.
      total_steps: Length of the whole cycle in steps, >= 2.
      pct_start: Share of the cycle that rises, in (0, 1).
      div_factor: Peak over start, >= 1.
      final_div_factor: Start over end, >= 1.
      anneal: `"cosine"` or `"linear"`.

    Raises:
      TypeError: An argument has the wrong kind.
      ValueError: An argument is out of range.

    Example:
      >>> import tfloop
      >>> schedule = tfloop.schedulers.OneCycle(1.0, total_steps=10, anneal="linear")
      >>> [round(float(schedule(step)), 2) for step in (0, 1, 2, 9)]
      [0.04, 0.52, 1.0, 0.0]

    References:
      Smith and Topin, Super-Convergence, 2018, https://arxiv.org/abs/1708.07120. The steps are
      those of PyTorch's `OneCycleLR` with two phases.
    """

    def __init__(
        self,
        max_lr: float,
        total_steps: int,
        pct_start: float = 0.3,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        anneal: str = "cosine",
    ):
        super().__init__()
        call = "OneCycle(max_lr, total_steps, ...)"
        fix = "The cycle covers the whole training. Write `OneCycle(0.1, epochs * len(loader))`."
        self.max_lr = number(call, "max_lr", max_lr, lambda x: x > 0, "a number > 0", fix)
        self.total_steps = whole_number(
            call, "total_steps", total_steps, least=2, fix="total_steps=epochs * len(loader)"
        )
        share = "a share in (0, 1)"
        self.pct_start = number(call, "pct_start", pct_start, lambda x: 0 < x < 1, share, fix)
        ratio = "a ratio >= 1"
        self.div_factor = number(call, "div_factor", div_factor, lambda x: x >= 1, ratio, fix)
        self.final_div_factor = number(
            call, "final_div_factor", final_div_factor, lambda x: x >= 1, ratio, fix
        )
        self.anneal = choice(call, "anneal", anneal, ("cosine", "linear"), fix)

    def rate_at(self, step: tf.Tensor) -> tf.Tensor:
        """The formula of the class."""
        start = self.max_lr / self.div_factor
        end = start / self.final_div_factor
        peak = max(self.pct_start * self.total_steps - 1.0, 0.0)
        last = self.total_steps - 1.0
        step = tf.minimum(tf.cast(step, tf.float32), last)
        up = self._annealed(start, self.max_lr, step / peak if peak else tf.ones_like(step))
        down = self._annealed(self.max_lr, end, (step - peak) / (last - peak))
        return tf.where(step <= peak, up, down)

    def _annealed(self, first: float, final: float, share: tf.Tensor) -> tf.Tensor:
        if self.anneal == "linear":
            return first * (1.0 - share) + final * share
        return final + (first - final) * (1.0 + tf.cos(math.pi * share)) / 2.0
