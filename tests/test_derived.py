"""What layers compute from their variables follows them wherever these are assigned."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop
from tfloop import Checkpoint

X = np.array([[8.0, 1.0], [12.0, 5.0], [10.0, 3.0]], "float32")


class Halved(keras.layers.Layer):
    """A user's layer that follows Keras' protocol."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False)
        self.finalize_state()

    def finalize_state(self):
        self.half = tf.convert_to_tensor(self.scale) / 2.0

    def call(self, x):
        return x * self.half


def build():
    return keras.Sequential([keras.Input((2,)), keras.layers.Normalization(), Halved()])


@pytest.fixture
def adapted():
    net = build()
    net.layers[0].adapt(X)
    net.layers[1].scale.assign([3.0, 5.0])
    net.layers[1].finalize_state()
    np.testing.assert_allclose(net(X), (X - X.mean(0)) / X.std(0) * [1.5, 2.5], rtol=1e-5)
    return net


@pytest.mark.parametrize("strict", [True, False])
def test_a_restored_model_computes_as_the_saved_one(strict, adapted, tmp_path):
    for kind in (lambda net: net, tfloop.valid, lambda net: {"net": net}, lambda net: [net]):
        other = build()
        Checkpoint(tmp_path, net=kind(adapted)).save(0)
        Checkpoint(tmp_path, net=kind(other)).restore(strict=strict)
        np.testing.assert_array_equal(other(X), adapted(X))


def test_a_blended_model_computes_by_its_new_values(adapted):
    other = build()
    tfloop.blend(other, adapted)
    np.testing.assert_array_equal(other(X), adapted(X))
    other = build()
    tfloop.blend(other, adapted, 0.5)
    mean, variance, scale = X.mean(0) / 2, (1 + X.var(0)) / 2, np.array([2.0, 3.0]) / 2
    np.testing.assert_allclose(other(X), (X - mean) / np.sqrt(variance) * scale, rtol=1e-5)


def test_blending_in_a_trace_leaves_no_tensor_of_the_trace_behind(adapted):
    other = tfloop.to_device(adapted, "CPU:0")
    tf.function(lambda: tfloop.blend(other, adapted, 0.5))()
    np.testing.assert_array_equal(other(X), adapted(X))


def test_a_copied_model_computes_as_the_original(adapted):
    for model in (adapted, tfloop.valid(adapted)):
        np.testing.assert_array_equal(tfloop.to_device(model, "CPU:0")(X), adapted(X))


def test_layers_that_learnt_without_variables_are_left_alone(tmp_path):
    words = keras.layers.TextVectorization()
    words.adapt(["a b", "b"])
    bins = keras.layers.Discretization(num_bins=3)
    bins.adapt(np.arange(9.0)[:, None])
    numbers = [0.0, 4.0, 8.0]
    dense = keras.layers.Dense(2)
    dense.build((None, 2))
    dense.enable_lora(1)
    dense.lora_kernel_b.assign(tf.ones_like(dense.lora_kernel_b))
    root = {"words": words, "bins": bins, "dense": dense}
    before = words(["b a"]).numpy(), np.asarray(bins(numbers)), dense(X[:, :2]).numpy()
    checkpoint = Checkpoint(tmp_path, root=root)
    checkpoint.save(0)
    checkpoint.restore()
    after = words(["b a"]).numpy(), np.asarray(bins(numbers)), dense(X[:, :2]).numpy()
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
