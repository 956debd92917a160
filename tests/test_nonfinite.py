"""Gradients that aren't finite: what is left out, and what is said about them."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop
from tfloop import GradientClipping, GradientsParams, LossScaler, ModuleOptimizer

WAYS = ["eager", "tf.function", "compiled", "jitted"]


class Net(tf.Module):
    """The gradient of `middle` and of what is before it isn't finite at a root of 0."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (tf.Variable(tf.ones(2)) for _ in range(3))

    def loss(self, x):
        hidden = tf.sqrt(self.first * self.middle * x)
        return tf.reduce_sum(hidden * self.last)


def stepper(net, optim, way):
    def step(x):
        with tfloop.Tape() as tape:
            loss = net.loss(x)
        optim.step(0.1, net, GradientsParams.from_grads(tape.backward(loss), net))
        return loss

    if way == "tf.function":
        return tf.function(step)
    return step if way == "eager" else tfloop.compile(step, jit_compile=way == "jitted")


def calls(step, *inputs):
    """One after the other: a step under XLA can't raise, so the next call does, at its begin."""
    for each in inputs:
        step(each)


def values(net):
    return [variable.numpy() for variable in net.variables]


@pytest.mark.parametrize("way", WAYS)
def test_raise_names_the_parameter_where_it_begins_and_changes_nothing(way):
    net, optim = Net(), ModuleOptimizer("sgd", on_nonfinite="raise")
    step = stepper(net, optim, way)
    step(tf.ones(2))
    step(tf.ones(2))
    before = values(net)
    counts = "2 of 3 have it, after 2" if way == "jitted" else r"updates before:\] \[2 3 1 2\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"(?s)first for `middle`.*{counts}"):
        calls(step, tf.constant([0.0, 1.0]), tf.ones(2))
    np.testing.assert_array_equal(values(net), before)
    assert int(optim.iterations) == 2
    step(tf.ones(2))
    assert int(optim.iterations) == 3


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_is_not_finite_reaches_every_gradient(way):
    net, optim = Net(), ModuleOptimizer("sgd", on_nonfinite="raise")
    step = stepper(net, optim, way)
    match = r"(?s)`last`.*(\[3 3 0 0\]|3 of 3 have)"
    with pytest.raises(tf.errors.InvalidArgumentError, match=match):
        calls(step, tf.constant([np.nan, np.nan]), tf.ones(2))


@pytest.mark.parametrize("way", WAYS)
def test_a_norm_that_overflows_is_told_from_a_gradient(way):
    clipping = GradientClipping.by_global_norm(1.0)
    net, optim = Net(), ModuleOptimizer("sgd", clipping=clipping, on_nonfinite="raise")
    step = stepper(net, optim, way)
    net.last.assign([1e10, 1e10])
    with pytest.raises(tf.errors.InvalidArgumentError, match="the norm that a clipping takes"):
        calls(step, tf.fill(2, 1e38), tf.ones(2))


@pytest.mark.parametrize("way", WAYS)
def test_while_all_is_well_it_is_as_if_nobody_asked(way):
    found = []
    for what in (None, "raise", "skip"):
        net, optim = Net(), ModuleOptimizer("adam", on_nonfinite=what)
        step = stepper(net, optim, way)
        for _ in range(5):
            step(tf.constant([1.0, 2.0]))
        found.append(values(net))
    np.testing.assert_array_equal(found[1], found[2])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)  # XLA may order what it computes


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"on_nonfinite": "stop"}, "got str 'stop' as on_nonfinite, expected 'skip', 'raise'"),
        ({"on_nonfinite": "raise", "skip_nonfinite": True}, "with skip_nonfinite=True"),
        ({"on_nonfinite": "raise", "scaler": LossScaler()}, "with a scaler"),
    ],
)
def test_what_contradicts_itself_raises(options, match):
    with pytest.raises(ValueError, match=match):
        ModuleOptimizer("sgd", **options)


def test_a_copy_and_a_keras_optimizer_keep_the_choice():
    for what in (None, "skip", "raise"):
        optim = ModuleOptimizer("sgd", on_nonfinite=what)
        assert copy.deepcopy(optim).on_nonfinite == what
        net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        optim.build(net)
        config = optim.as_keras(net).get_config()
        assert config["on_nonfinite"] == what
        twin = type(optim.as_keras(net)).from_config(config)
        assert twin.get_config()["on_nonfinite"] == what
