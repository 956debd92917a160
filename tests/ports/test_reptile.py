"""Keras' example "Few-Shot learning with Reptile" (keras.io, `vision/reptile`, by ADMoreau).

From its weights the network learns a small task by a few steps of SGD; then the weights move a part
of the way that they went, a smaller one each time. As in the example BatchNormalization runs on its
statistics (the model is called without a flag), and the loss is one number per image, which a tape
sums.
"""

import keras
import numpy as np
import tensorflow as tf
from side_by_side import STEPS, World, assert_equal

import tfloop

CLASSES, INNER, META_RATE = 3, 4, 0.25
RNG = np.random.default_rng(0)
layers = keras.layers
cross_entropy = keras.losses.sparse_categorical_crossentropy


def task():
    labels = RNG.integers(0, CLASSES, (INNER, 6))
    return RNG.normal(size=(INNER, 6, 8, 8, 1)).astype("float32"), labels


TASKS = [(META_RATE * (1.0 - number / STEPS), *task()) for number in range(STEPS)]


def network():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, strides=2, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(CLASSES, "softmax"),
        ]
    )


def make():
    return World(net=network())


def by_hand(world):
    net = world.net
    optimizer = keras.optimizers.SGD(0.003)

    @tf.function
    def inner_step(images, labels):
        with tf.GradientTape() as tape:
            loss = cross_entropy(labels, net(images))
        grads = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
        return loss

    def meta_step(rate, images, labels):
        old = net.get_weights()
        losses = [inner_step(*batch) for batch in zip(images, labels, strict=True)]
        new = net.get_weights()
        net.set_weights([a + (b - a) * rate for a, b in zip(old, new, strict=True)])
        return losses

    return meta_step


def with_tfloop(world):
    net, slow = world.net, network()
    optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.003))
    tfloop.blend(slow, net)

    @tfloop.compile
    def inner_step(images, labels):
        with tfloop.Tape() as tape:
            loss = cross_entropy(labels, net(images))
        grads = tape.backward(loss, net)
        optim.step(net, grads)
        return loss

    def meta_step(rate, images, labels):
        losses = [inner_step(*batch) for batch in zip(images, labels, strict=True)]
        tfloop.blend(slow, net, rate)
        tfloop.blend(net, slow)
        return losses

    return meta_step


def test_both_loops_learn_the_same():
    assert_equal(make, by_hand, with_tfloop, TASKS)
