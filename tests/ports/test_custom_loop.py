"""Keras' guide "Writing a training loop from scratch in TensorFlow" (keras.io, by F. Chollet).

A classifier of digits as vectors. One layer adds a loss of its own to the model, which the loop has
to add to the cross-entropy, and an accuracy is kept in the step.
"""

import keras
import numpy as np
import tensorflow as tf
from side_by_side import STEPS, World, assert_equal

import tfloop

RNG = np.random.default_rng(0)
BATCHES = [
    (RNG.normal(size=(8, 12)).astype("float32"), RNG.integers(0, 4, 8)) for _ in range(STEPS)
]
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class SmallActivity(keras.layers.Layer):
    def call(self, x):
        self.add_loss(1e-2 * tf.reduce_sum(x))
        return x


def make():
    dense = keras.layers.Dense
    layers = [keras.Input((12,)), dense(16, "relu"), SmallActivity(), dense(16, "relu"), dense(4)]
    return World(net=keras.Sequential(layers), accuracy=keras.metrics.SparseCategoricalAccuracy())


def by_hand(world):
    net, accuracy = world.net, world.accuracy
    optimizer = keras.optimizers.Adam(1e-3)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = net(x, training=True)
            loss = cross_entropy(y, logits) + sum(net.losses)
        grads = tape.gradient(loss, net.trainable_variables)
        optimizer.apply(grads, net.trainable_variables)
        accuracy.update_state(y, logits)
        return loss

    return train_step


def with_tfloop(world):
    model, accuracy = tfloop.train(world.net), world.accuracy
    optim = tfloop.ModuleOptimizer(keras.optimizers.Adam(1e-3))

    @tfloop.compile
    def train_step(x, y):
        with tfloop.Tape() as tape:
            logits = model(x)
            loss = tfloop.total_loss(cross_entropy(y, logits), model)
        grads = tape.backward(loss, model)
        optim.step(model, grads)
        accuracy.update_state(y, logits)
        return loss

    return train_step


def test_both_loops_learn_the_same():
    assert_equal(make, by_hand, with_tfloop, BATCHES)
