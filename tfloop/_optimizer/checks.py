"""What a step checks about its routing and its parameters, now or when it runs.

What is known now raises at once; what a trace can only know when it runs becomes an assertion
in the graph, which every change waits for. (XLA drops assertions.)
"""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from tfloop._checks.messages import listed
from tfloop._model.paths import Variable
from tfloop._replicas import contexts
from tfloop._tracing import traces
from tfloop._update.fused import has_value

STEP = "ModuleOptimizer.step(lr, model, grads)"


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
