"""The learning rate of an optimizer as the user gave it: a number, a schedule or a function."""

from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfloop._backend.keras_optimizers import rate_of
from tfloop._model.paths import is_variable, tf_variable
from tfloop._tracing import traces
from tfloop.schedulers._kinds import is_schedule


class GivenRate:
    """Reads the rate of an optimizer at every step, so that setting it later works.

    The plain number that a function gives would be baked into a trace, so a trace reads it from a
    variable, which `refresh` brings up to date.

    Args:
      given: The optimizer.

    Attributes:
      changes: How often the object that holds the rate was replaced, as `refresh` has seen it;
        that makes a trace stale.
    """

    def __init__(self, given: Optimizer) -> None:
        self.changes = 0
        self._given = given
        self._source: Any = rate_of(given)
        self._called: tf.Variable | None = None  # what a function gave last
        self._asked = False

    def value(self, iterations: Any) -> Any:
        """The present rate: a number, a tensor or a variable.

        Args:
          iterations: The count of updates at which a schedule is asked.
        """
        rate = rate_of(self._given)
        if is_schedule(rate):
            return rate(iterations)
        if not _is_function(rate):
            return tf_variable(rate)
        value = rate()
        known = None if is_variable(value) else tf.get_static_value(value)
        if tf.executing_eagerly() or known is None:
            return value
        traces.eagerly(lambda: self._remember(known))
        self._asked = traces.is_recorded()
        return self._called

    def schedule_name(self) -> str | None:
        """The class of the schedule that gives it, if one does."""
        rate = rate_of(self._given)
        return type(rate).__name__ if is_schedule(rate) else None

    def variables(self) -> dict[str, tf.Variable]:
        """The rate where it is a variable, and so state."""
        rate = rate_of(self._given)
        return {"learning_rate": tf_variable(rate)} if is_variable(rate) else {}

    def refresh(self) -> None:
        """Brings up to date what a trace reads; called before each compiled step."""
        if (rate := rate_of(self._given)) is not self._source:
            self._source = rate
            self.changes += 1
        if self._called is not None and _is_function(self._source):
            if not self._asked:
                self._remember(self._source())
            self._asked = False  # what its own trace asked counts for the first run

    def _remember(self, value: Any) -> None:
        value = tf.cast(value, keras.config.floatx())  # in which Keras keeps rates
        if self._called is None:
            self._called = tf.Variable(value, trainable=False, name="rate")
        self._called.assign(value)


def _is_function(rate: Any) -> bool:
    return callable(rate) and not is_schedule(rate)
