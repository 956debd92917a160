"""Models of Keras 2 (`tf_keras`) in our loop, beside their own; skipped where there is none."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import message

import tfloop
from tfloop import GradientsAccumulator, GradientsParams, ModuleOptimizer, Tape
from tfloop._backend import tf_keras

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its own
legacy = pytest.importorskip("tf_keras")
layers = legacy.layers

X = tf.constant(np.cos(np.arange(24.0)).reshape(8, 3), tf.float32)
Y = tf.reduce_sum(X, 1, keepdims=True)


def a_net():
    legacy.utils.set_random_seed(0)
    return legacy.Sequential(
        [
            layers.Dense(
                4, "tanh", input_shape=(3,), kernel_regularizer=legacy.regularizers.L2(0.1)
            ),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(1, name="head"),
        ]
    )


class Tower(legacy.Model):
    def __init__(self):
        super().__init__()
        self.stem = layers.Dense(4)
        self.blocks = [layers.Dense(4), layers.Dense(4)]
        self.dropout = layers.Dropout(0.5)

    def call(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.dropout(x)


def step_of(net, optim):
    def step(x, y):
        with Tape() as tape:
            loss = tfloop.total_loss(tf.reduce_mean((net(x, training=True) - y) ** 2), net)
        optim.step(None, net, GradientsParams.from_grads(tape.backward(loss), net))
        return loss

    return step


def test_paths_are_attributes_and_names_of_layers():
    stem = ["dense.kernel", "dense.bias", "batch_normalization.gamma", "batch_normalization.beta"]
    assert list(tfloop.named_parameters(a_net())) == [*stem, "head.kernel", "head.bias"]
    assert len(tfloop.named_variables(a_net())) == 8
    tower = Tower()
    tower(X)
    names = ("stem", "blocks.0", "blocks.1")
    wanted = [f"{name}.{variable}" for name in names for variable in ("kernel", "bias")]
    assert list(tfloop.named_parameters(tower)) == wanted
    assert list(tfloop.named_parameters({"a": tower}))[0] == "a.stem.kernel"


def test_frozen_layers_are_left_out_as_keras_does():
    net = a_net()
    net.layers[0].trainable = False
    found = tfloop.named_parameters(net)
    assert {*map(id, found.values())} == {*map(id, net.trainable_variables)}
    net.trainable = False
    assert tfloop.named_parameters(net) == {}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loop_trains_as_the_plain_loop_with_keras_2(compiled):
    net, twin = a_net(), a_net()
    for each in (net, twin):
        each.layers[2].rate = 0.0
    step = step_of(net, ModuleOptimizer(keras.optimizers.Adam(0.05)))
    step = tfloop.compile(step) if compiled else step
    given = legacy.optimizers.Adam(0.05)
    for _ in range(10):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((twin(X, training=True) - Y) ** 2) + tf.add_n(twin.losses)
        given.apply_gradients(
            zip(
                tape.gradient(loss, twin.trainable_variables), twin.trainable_variables, strict=True
            )
        )
        np.testing.assert_allclose(step(X, Y), loss, rtol=1e-4)
    for one, other in zip(net.weights, twin.weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_a_compiled_step_follows_flags_and_settings_and_nothing_else():
    net = a_net()
    step = tfloop.compile(step_of(net, ModuleOptimizer("sgd")))
    for _ in range(4):
        step(X, Y)
        net(X)
        assert net.losses
    assert step.trace_count == 1
    net.layers[0].trainable = False
    before = net.layers[0].kernel.numpy()
    step(X, Y)
    np.testing.assert_array_equal(net.layers[0].kernel, before)
    net.layers[2].rate = 0.1
    step(X, Y)
    assert step.trace_count == 3


def test_views_pass_the_mode_on_or_say_that_they_cannot():
    net, twin = a_net(), a_net()
    ones = tf.ones((100, 100))
    assert 0.4 < np.mean(tfloop.train(net).layers[2](ones).numpy() == 0) < 0.6
    np.testing.assert_array_equal(tfloop.valid(net)(X), twin(X, training=False))
    tower = Tower()
    tower(X)
    assert tfloop.valid(tower)(X).shape == (8, 4)
    fix = "`def call(self, x, training=None): ...`"
    with pytest.raises(TypeError, match=message("can't train", "of tf_keras", "Dropout", fix)):
        tfloop.train(tower)(X)


def test_micro_batches_equal_the_batch_and_a_checkpoint_goes_on(tmp_path):
    def grads(net, x, y):
        with Tape() as tape:
            loss = tf.reduce_mean((net(x, training=False) - y) ** 2)
        return GradientsParams.from_grads(tape.backward(loss), net)

    net, twin = a_net(), a_net()
    optim, other = ModuleOptimizer(keras.optimizers.Adam(0.1)), ModuleOptimizer("adam")
    window = GradientsAccumulator(reduction="mean")
    for rows in (slice(0, 4), slice(4, 8)):
        window.accumulate(net, grads(net, X[rows], Y[rows]))
    optim.step(0.1, net, window)
    other.step(0.1, twin, grads(twin, X, Y))
    for one, wanted in zip(net.weights, twin.weights, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-6)

    tfloop.Checkpoint(tmp_path, model=net, optim=optim).save(1)
    again, resumed = a_net(), ModuleOptimizer(keras.optimizers.Adam(0.1))
    assert tfloop.Checkpoint(tmp_path, model=again, optim=resumed).restore() == 1
    for model, rule in ((net, optim), (again, resumed)):
        rule.step(0.1, model, grads(model, X, Y))
    for one, wanted in zip(again.weights, net.weights, strict=True):
        np.testing.assert_array_equal(one, wanted)


def test_its_optimizers_are_refused_by_name():
    with pytest.raises(TypeError, match=message("got 'Adam' (Adam)", "keras.optimizers.Adam()")):
        ModuleOptimizer(legacy.optimizers.Adam())


class TestBackend:
    def test_what_its_layers_track_is_what_they_list(self):
        net = a_net()
        own = tf_keras.tracked(net.layers[1])
        assert {*map(id, own)} == {*map(id, net.layers[1].weights)}
        assert all(any(layer is one for one in tf_keras.tracked(net)) for layer in net.layers)

    def test_under_another_name_that_is_refused(self):
        layer = a_net().layers[0]
        vars(layer)["_renamed"] = vars(layer).pop("_trainable_weights")
        with pytest.raises(RuntimeError, match=message("tfloop needs `_trainable_weights`")):
            tf_keras.tracked(layer)

    def test_its_accounts_are_no_settings_but_flags_are(self):
        assert tf_keras.records() >= {"_losses", "_thread_local", "_trainable_weights"}
        assert tf_keras.records() - tf_keras.bookkeeping() == {
            *("_trainable", "_dtype_policy", "_activity_regularizer")
        }

    def test_named_layers_are_those_of_sequential_and_functional_models(self):
        x = legacy.Input((3,))
        models = [a_net(), legacy.Model(x, layers.Dense(1)(x)), Tower()]
        assert [*map(tf_keras.has_named_layers, models)] == [True, True, False]
        assert not tf_keras.is_layer(keras.layers.Dense(1))
