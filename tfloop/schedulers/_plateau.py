"""Plateau: a rate that falls when a metric stops improving."""

import math
from typing import Any

import keras
import tensorflow as tf

from tfloop._checks.arguments import number, whole_number
from tfloop._checks.messages import described
from tfloop._tracing.traces import eagerly, not_converted
from tfloop.schedulers._base import ONE_AT_A_TIME, Schedule, choice

_CALL = "Plateau(initial_learning_rate, ...)"


@keras.saving.register_keras_serializable(package="tfloop")
class Plateau(Schedule):
    """Lowers the rate when a metric hasn't improved for some time.

    Feed it once per epoch (or whenever the metric is known): `plateau.update(metric)`. As a
    schedule it gives the current rate at any step, so it can be the rate of a Keras optimizer, of
    a group, or be nested in `Warmup` and the like. The rules are those of Keras'
    `ReduceLROnPlateau`: a metric improves if it beats the best one by more than `min_delta`; after
    `patience` updates without that,

        rate = max(rate * factor, min_lr)

    and for the next `cooldown` updates waiting isn't counted. A metric that is NaN never improves.

    The state (`rate`, `best`, `wait`, `cooldown_left`) is in variables that `tf.train.Checkpoint`
    finds; the config holds the arguments alone, so a schedule made from it starts anew.

    Args:
      initial_learning_rate: The rate before anything was lowered, > 0.
      factor: What the rate is multiplied with, in (0, 1).
      patience: Updates without improvement that are borne, >= 0.
      mode: `"min"` or `"max"`: which way the metric gets better.
      min_delta: What an improvement must exceed, >= 0.
      cooldown: Updates after a reduction that aren't counted, >= 0.
      min_lr: The rate never falls below it, >= 0.

    Raises:
      TypeError: An argument has the wrong kind.
      ValueError: An argument is out of range.

    Example:
      >>> import tfloop
      >>> plateau = tfloop.schedulers.Plateau(1.0, factor=0.5, patience=2)
      >>> [float(plateau.update(loss)) for loss in (3.0, 2.0, 2.0, 2.0)]
      [1.0, 1.0, 1.0, 0.5]
    """

    def __init__(
        self,
        initial_learning_rate: float,
        factor: float = 0.1,
        patience: int = 10,
        mode: str = "min",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ):
        super().__init__()
        fix = "Write `Plateau(0.1, factor=0.5, patience=5, mode='min')`."

        def at_least_0(name: str, value: float) -> float:
            return number(_CALL, name, value, lambda x: x >= 0, "a number >= 0", fix)

        self.initial_learning_rate = number(
            _CALL,
            "initial_learning_rate",
            initial_learning_rate,
            lambda x: x > 0,
            "a number > 0",
            fix,
        )
        share = "a number in (0, 1)"
        self.factor = number(_CALL, "factor", factor, lambda x: 0 < x < 1, share, fix)
        self.patience = whole_number(_CALL, "patience", patience, least=0, fix="patience=10")
        self.mode = choice(_CALL, "mode", mode, ("min", "max"), fix)
        self.min_delta = at_least_0("min_delta", min_delta)
        self.cooldown = whole_number(_CALL, "cooldown", cooldown, least=0, fix="cooldown=0")
        self.min_lr = at_least_0("min_lr", min_lr)
        eagerly(self._make_state)

    def _make_state(self) -> None:
        worst = math.inf if self.mode == "min" else -math.inf
        self.rate = tf.Variable(self.initial_learning_rate, trainable=False, name="rate")
        self.best = tf.Variable(worst, trainable=False, name="best")
        self.wait = tf.Variable(0, dtype=tf.int64, trainable=False, name="wait")
        self.cooldown_left = tf.Variable(0, dtype=tf.int64, trainable=False, name="cooldown_left")

    def rate_at(self, step: tf.Tensor) -> tf.Tensor:
        """The current rate, whatever the step."""
        return tf.identity(self.rate)

    @not_converted
    def update(self, metric: Any) -> tf.Tensor:
        """Takes a new value of the metric and lowers the rate if it is time to.

        Args:
          metric: Scalar: a number, or a tensor such as `loss.result()`.

        Returns:
          The rate from now on, a float32 scalar.
        Mutates: this schedule's variables.
        Graph mode: works in a `tf.function`, with `jit_compile=True` too.

        Raises:
          TypeError: The metric isn't a number.
          ValueError: It isn't a scalar.
          RuntimeError: It is called by each of several replicas.
        """
        metric = _scalar(metric)
        with ONE_AT_A_TIME:
            return self._moved(metric)

    def _moved(self, metric: tf.Tensor) -> tf.Tensor:
        """Takes the metric into account."""
        left = tf.maximum(self.cooldown_left - 1, 0)
        wait = tf.where(self.cooldown_left > 0, tf.zeros_like(left), self.wait)
        if self.mode == "min":
            improved = metric + self.min_delta < self.best
        else:
            improved = metric - self.min_delta > self.best
        wait = tf.where(improved, tf.zeros_like(wait), tf.where(left > 0, wait, wait + 1))
        due = ~improved & (left == 0) & (wait >= self.patience) & (self.rate > self.min_lr)
        rate = tf.where(due, tf.maximum(self.rate * self.factor, self.min_lr), self.rate)
        self.best.assign(tf.where(improved, metric, self.best))
        self.wait.assign(tf.where(due, tf.zeros_like(wait), wait))
        self.cooldown_left.assign(tf.where(due, tf.cast(self.cooldown, tf.int64), left))
        self.rate.assign(rate)
        return rate


def _scalar(metric: Any) -> tf.Tensor:
    """The metric as a float32 scalar, once for all replicas."""
    replica = tf.distribute.get_replica_context()
    if replica is not None and replica.num_replicas_in_sync > 1:
        raise RuntimeError(
            f"`plateau.update(metric)` was called in a replica: got {replica.num_replicas_in_sync} "
            "calls, expected one. Each replica would count as an update. Reduce the metric and "
            "call it outside of `strategy.run`: `plateau.update(total / count)`."
        )
    try:
        value = tf.cast(tf.convert_to_tensor(metric), tf.float32)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise TypeError(
            f"`plateau.update(metric)` needs a number: got {described(metric)}, expected a scalar. "
            "A Keras metric is read first. Write `plateau.update(metric.result())`."
        ) from error
    if value.shape.rank not in (0, None):
        raise ValueError(
            f"`plateau.update(metric)` needs one number: got shape {tuple(value.shape)}, expected "
            "(). Values per sample or batch are averaged first. Write "
            "`plateau.update(tf.reduce_mean(losses))`."
        )
    return value
