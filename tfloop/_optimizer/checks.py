"""What a step checks about its routing and its parameters, now or when it runs.

What is known now raises at once; what a trace can only know when it runs becomes an assertion
in the graph, which every change waits for. (XLA drops assertions.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfloop._checks.messages import described, listed
from tfloop._model.paths import Variable
from tfloop._replicas import contexts
from tfloop._tracing import traces
from tfloop._update.fused import has_value

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


def assert_current(version: int, routing: tf.Variable) -> list[tf.Operation]:
    """In a trace, an assertion that the routing is still the one that was traced."""
    message = (
        f"`{STEP}` ran in a tf.function that is too old: got the routing of its trace, expected "
        "the present one. A group or a clipping was changed, or a parameter unfrozen, and a trace "
        "keeps what it was made with. Call `optim.build(model)` before tracing, or let "
        "`tfloop.compile(step)` trace again by itself."
    )
    return traces.assert_fresh(version, routing, message)


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
    if contexts.count() == 1:
        return
    unborn = traces.eagerly(lambda: [path for path, v in parameters.items() if not has_value(v)])
    if unborn:
        raise ValueError(
            f"`{call}` found parameters that are made in the step of a replica: got "
            f"{listed(unborn)} without values, expected a built model. TensorFlow can't fill them "
            "there, nor for Keras' own optimizers. Build it first: `with strategy.scope(): "
            "model.build(input_shape)`."
        )
