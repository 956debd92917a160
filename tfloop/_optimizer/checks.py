"""What a step checks about its rates and its routing, now or when it runs.

What is known now raises at once; what a trace can only know when it runs becomes an assertion
in the graph, which every change waits for. (XLA drops assertions.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers.schedules import LearningRateSchedule

from tfloop._checks.messages import described, listed
from tfloop._model.paths import Variable, is_model
from tfloop._optimizer.fused import has_value
from tfloop._replicas import placement
from tfloop._tracing import traces
from tfloop.schedulers._base import is_number

STEP = "ModuleOptimizer.step(lr, model, grads)"


LEFT_OUT: Any = object()
"""The default of an argument whose place the others may take."""


def step_arguments(lr: Any, model: Any, grads: Any) -> tuple[Any, Any, Any]:
    """The rate, model and gradients of `step`, whose first argument may be left out.

    Args:
      lr: The first argument by position, or the rate by name; as the others, maybe `LEFT_OUT`.
      model: Likewise.
      grads: Likewise.

    Returns:
      The three, the rate `None` where none was given.

    Raises:
      TypeError: One of the other two is missing, or they stand in another order.
    """
    given = [argument for argument in (lr, model, grads) if argument is not LEFT_OUT]
    if len(given) == 2:
        given.insert(0, None)
    if len(given) != 3:
        got = ", ".join(map(described, given)) or "nothing"
        raise TypeError(
            f"`{STEP}` needs a model and its gradients: got {got}, expected both, after a rate or "
            "without one. Write `optim.step(lr, model, grads)`, or `optim.step(model, grads)` "
            "where the optimizer holds the rate."
        )
    return given[0], given[1], given[2]


def as_rate(rate: Any, what: str = "the rate") -> tf.Tensor:
    """A rate as a scalar tensor, which `assert_sound` may still have to look at.

    Args:
      rate: A number, or a scalar tensor or variable.
      what: Whose rate it is, for messages.

    Raises:
      ValueError: It is known to be negative or not finite.
      TypeError: It isn't a number by kind, or has axes.
    """
    if isinstance(rate, LearningRateSchedule):
        raise TypeError(
            f"`{STEP}` got the schedule {described(rate)} as rate, expected a number. A schedule "
            "needs a count of steps. Give it to the optimizer (`keras.optimizers.Adam(schedule)` "
            "and `step(model, grads)`) or step it: `tfloop.ModuleLrScheduler(schedule).step()`."
        )
    if is_number(rate):
        tensor = tf.constant(float(rate), tf.float64)
    else:
        tensor = _scalar(rate, what)
    value = tf.get_static_value(tensor)
    if value is not None and not (np.isfinite(value) and value >= 0):
        raise ValueError(
            f"`{STEP}` got {float(value)} as {what}, expected a finite number of at least 0. "
            "A schedule or a division went wrong, or a loss wasn't finite. Check it: `print(lr)`."
        )
    return tensor


def _scalar(rate: Any, what: str) -> tf.Tensor:
    numeric = isinstance(rate, (tf.Tensor, tf.Variable, keras.Variable, np.ndarray))
    dtype = tf.as_dtype(rate.dtype) if numeric else tf.string
    scalar = numeric and tf.TensorShape(rate.shape).rank in (0, None)
    if not scalar or not (dtype.is_floating or dtype.is_integer):
        got = f"shape {tuple(rate.shape)} and dtype {dtype.name}" if numeric else described(rate)
        if hasattr(rate, "peek"):
            cause, fix = "A scheduler gives the rates of each step", "scheduler.step()"
        elif is_model(rate):
            cause, fix = "The rate comes first", "optim.step(lr, model, grads)"
        elif isinstance(rate, str):
            cause, fix = "A text is no number", "float(lr)"
        else:
            cause = "Several rates belong to several groups"
            fix = "tfloop.ModuleLearningRate(base).with_group(group, lr)"
        raise TypeError(
            f"`{STEP}` got {got} as {what}, expected a number, a scalar tensor or variable, "
            f"a ModuleLearningRate, or None. {cause}. Write `{fix}`."
        )
    tensor = tf.convert_to_tensor(rate)
    return tensor if tensor.shape.rank == 0 else tf.ensure_shape(tensor, ())


def assert_sound(rate: tf.Tensor) -> list[tf.Operation]:
    """An assertion that a rate is finite and not negative, where that isn't known yet."""
    if tf.get_static_value(rate) is not None:
        return []
    message = (
        f"`{STEP}` got a rate that is not sound, expected a finite number of at least 0. A "
        "schedule or a division went wrong, or a loss was not finite. Check it: `tf.print(lr)`. "
        "The rate was:"
    )
    number = rate if rate.dtype.is_floating else tf.cast(rate, tf.float64)
    # The root of a negative number is NaN; small steps feel each operation.
    sound = tf.math.is_finite(tf.sqrt(number))
    return [tf.raw_ops.Assert(condition=sound, data=[message, number])]


def assert_current(version: int, routing: tf.Variable) -> list[tf.Operation]:
    """In a trace, an assertion that the routing is still the one that was traced.

    `compile` traces again in time, and needs none. This is for a `tf.function` of the user's, also
    one that a compiled step calls.
    """
    if tf.executing_eagerly() or traces.is_current():
        return []
    message = (
        f"`{STEP}` ran in a tf.function that is too old: got the routing of its trace, expected "
        "the present one. A group or a clipping was changed, or a parameter thawed, and a trace "
        "keeps what it was made with. Call `optim.build(model)` before tracing, or let "
        "`tfloop.compile(step)` trace again by itself."
    )
    fresh = tf.equal(routing, tf.constant(version, routing.dtype))
    return [tf.raw_ops.Assert(condition=fresh, data=[message])]


def assert_born(unborn: Sequence[str]) -> list[tf.Operation]:
    """An assertion that fails in a run of the very trace in which variables were born.

    TensorFlow runs another one, but for values that follow from the arguments of the step.
    """
    if not unborn:
        return []
    message = (
        f"`{STEP}` can't begin its state: got no value yet for {listed(unborn)}, expected one "
        "before the first step: the state begins as a copy. The variable is made in the step, of "
        "what the step is given. Make it before: `model(sample_batch)`."
    )
    return [tf.raw_ops.Assert(condition=False, data=[message])]


def check_born_on_replicas(call: str, parameters: Mapping[str, Variable]) -> None:
    """Refuses parameters that are born in the trace of a replica, where nothing fills them."""
    if placement.count() == 1:
        return
    unborn = traces.eagerly(lambda: [path for path, v in parameters.items() if not has_value(v)])
    if unborn:
        raise ValueError(
            f"`{call}` found parameters that are made in the step of a replica: got "
            f"{listed(unborn)} without values, expected a built model. TensorFlow can't fill them "
            "there, nor for Keras' own optimizers. Build it first: `with strategy.scope(): "
            "model.build(input_shape)`."
        )
