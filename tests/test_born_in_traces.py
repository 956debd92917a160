"""Models built by their first call, inside a trace: their variables have no value there yet.

State that begins with the value of a variable (moving averages, ScheduleFree's second sequence,
what a rule of one's own keeps) is made once there is one: before the first update runs.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from since import SCHEDULE_FREE, has, since

import tfloop
from tfloop import GradientsParams, ModuleOptimizer

X = tf.constant(np.cos(np.arange(8.0)).reshape(2, 4), tf.float32)
STEPS = 4


@keras.saving.register_keras_serializable("tests")
class Tethered(keras.optimizers.SGD):
    """Pulls each variable to half of what it was in the beginning."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.anchors = self.add_optimizer_variables(variables, "anchor")
        for anchor, variable in zip(self.anchors, variables, strict=True):
            anchor.assign(0.5 * tf.convert_to_tensor(variable))

    def update_step(self, gradient, variable, learning_rate):
        rate = tf.cast(learning_rate, variable.dtype)
        anchor = self.anchors[self._get_variable_index(variable)]
        self.assign_sub(variable, rate * (gradient + 0.5 * (variable - anchor)))


RULES = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "averages": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "ScheduleFreeAdamW": lambda: keras.optimizers.ScheduleFreeAdamW(0.1),
    "a rule of one's own": lambda: Tethered(0.1),
}
if not has(SCHEDULE_FREE):
    del RULES["ScheduleFreeAdamW"]


def a_net(layers, built=False):
    names = [f"l{n}" for n in range(layers)]
    parts = [keras.layers.Dense(3, "tanh", kernel_initializer="ones", name=n) for n in names]
    return keras.Sequential([keras.Input((4,)), *parts] if built else parts)


def plain(make, layers):
    """The tape loop, on a model that is built before."""
    net, optimizer = a_net(layers, built=True), make()
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((net(X) - 0.1) ** 2)
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
    return net, optimizer


def step_of(net, optim):
    def step(x):
        tape = tfloop.Tape()
        with tape:
            loss = tf.reduce_mean((net(x) - 0.1) ** 2)
        grads = GradientsParams.from_grads(tape.backward(loss), net)
        optim.step(None, net, grads)
        return loss

    return step


MAKERS = {
    "tf.function": tf.function,
    "compile": tfloop.compile,
    "jit": lambda step: tfloop.compile(step, jit_compile=True),
}


@pytest.mark.parametrize("layers", [1, 3], ids=["alone", "fused"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", MAKERS)
def test_a_model_born_in_the_trace_trains_as_one_built_before(mode, rule, layers):
    reference, _ = plain(RULES[rule], layers)
    net = a_net(layers)
    optim = ModuleOptimizer(RULES[rule]())
    step = MAKERS[mode](step_of(net, optim))
    for _ in range(STEPS):
        step(X)
    for ours, theirs in zip(net.weights, reference.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_averages_are_those_of_a_model_built_before():
    _, reference = plain(RULES["averages"], 3)
    net = a_net(3)
    optim = ModuleOptimizer(RULES["averages"]())
    step = tfloop.compile(step_of(net, optim))
    for _ in range(STEPS):
        step(X)
    wanted = reference._model_variables_moving_average
    for path, average in zip(tfloop.named_parameters(net), wanted, strict=True):
        ours = optim.state(path)["model_variables_moving_average"]
        np.testing.assert_allclose(ours, average, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rule", RULES)
def test_fit_of_a_model_without_input_trains_as_the_tape_loop(rule):
    # Not as Keras' own `fit`, where state that begins as a copy begins as zeros: it is assigned in
    # a trace that TensorFlow never runs.
    reference, kept = plain(RULES[rule], 3)
    net = a_net(3)
    net.compile(ModuleOptimizer(RULES[rule]()).as_keras(net), "mse")
    net.fit(X, tf.fill((2, 3), 0.1), epochs=STEPS, verbose=0)
    kept.finalize_variable_values(reference.trainable_variables)
    for ours, theirs in zip(net.weights, reference.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@since(SCHEDULE_FREE)
def test_a_variable_without_gradient_in_the_first_update_begins_where_it_is():
    net = a_net(3)
    optim = ModuleOptimizer(keras.optimizers.ScheduleFreeAdamW(0.1))

    @tf.function
    def first(x):
        net(x)
        optim.step(None, net, GradientsParams({"l0.bias": tf.ones(3)}))

    first(X)
    np.testing.assert_array_equal(optim.state("l1.kernel")["momentums"], net.layers[1].kernel)


class FromTheBatch(tf.Module):
    """Makes its variable of the first batch, which TensorFlow can't do ahead of the run."""

    def __call__(self, x):
        if not hasattr(self, "scale"):
            self.scale = tf.Variable(tf.reduce_mean(x) * tf.ones(4))
        return x * self.scale


def test_a_first_value_that_follows_from_the_batch_will_do_where_no_state_copies_it():
    net = FromTheBatch()
    step = tf.function(step_of(net, ModuleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))))
    step(X)
    first = net.scale.numpy()
    step(X)
    assert np.isfinite(first).all()
    assert not np.array_equal(net.scale, first)


@since(SCHEDULE_FREE)
@pytest.mark.parametrize("maker", [tf.function, tfloop.compile])
def test_a_first_value_that_follows_from_the_batch_is_refused_where_state_copies_it(maker):
    net = FromTheBatch()
    step = maker(step_of(net, ModuleOptimizer(keras.optimizers.ScheduleFreeAdamW(0.1))))
    with pytest.raises(tf.errors.InvalidArgumentError, match="begin its state: got no value yet"):
        step(X)


@since(SCHEDULE_FREE)
def test_a_restored_state_waits_for_a_model_born_in_the_trace():
    old, net = a_net(3, built=True), a_net(3)
    saved = ModuleOptimizer(RULES["ScheduleFreeAdamW"]())
    for _ in range(2):
        step_of(old, saved)(X)
    optim = ModuleOptimizer(RULES["ScheduleFreeAdamW"]())
    optim.deserialize(saved.serialize())
    weights = old.get_weights()
    step_of(old, saved)(X)

    @tfloop.compile
    def resumed(x):
        net(x)
        for variable, value in zip(net.weights, weights, strict=True):
            variable.assign(value)
        step_of(net, optim)(x)

    resumed(X)
    for ours, theirs in zip(net.weights, old.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@since(SCHEDULE_FREE)
def test_what_was_trained_before_keeps_its_state_when_a_layer_is_born_in_a_trace():
    net, twin = a_net(1, built=True), a_net(1, built=True)
    rule = RULES["ScheduleFreeAdamW"]
    optim, reference = ModuleOptimizer(rule()), ModuleOptimizer(rule())
    for each, one in ((net, optim), (twin, reference)):
        step_of(each, one)(X)
        each.add(keras.layers.Dense(3, "tanh", kernel_initializer="ones", name="late"))
    late = keras.layers.Dense(3, "tanh", kernel_initializer="ones", name="late")
    assert late.name == twin.layers[-1].name
    step = tfloop.compile(step_of(net, optim))
    for _ in range(2):
        step(X)
        step_of(twin, reference)(X)
    for ours, theirs in zip(net.weights, twin.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)
