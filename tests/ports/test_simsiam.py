"""Keras' example "Self-supervised contrastive learning with SimSiam" (keras.io, `vision/simsiam`).

Two views of an image go through an encoder; a predictor makes each encoding like the other one,
which is held fixed. SGD with momentum, on a cosine schedule. The example has L2 regularizers that
its step never adds to the loss, so they do nothing there, nor here. Where it leaves the training
flag out, it is given.
"""

import keras
import numpy as np
import tensorflow as tf
from side_by_side import STEPS, World, assert_equal

import tfloop

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(STEPS, 8, 6, 6, 3)).astype("float32")
PAIRS = [(x, x[:, :, ::-1] + 0.1 * RNG.normal(size=x.shape).astype("float32")) for x in IMAGES]
layers = keras.layers


def make():
    encoder = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(8, use_bias=False, kernel_regularizer=keras.regularizers.L2(5e-4)),
            layers.BatchNormalization(),
        ]
    )
    predictor = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(4, use_bias=False, kernel_regularizer=keras.regularizers.L2(5e-4)),
            layers.ReLU(),
            layers.BatchNormalization(),
            layers.Dense(8),
        ]
    )
    return World(encoder=encoder, predictor=predictor, loss=keras.metrics.Mean())


def sgd():
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.03, STEPS), momentum=0.6)


def unlikeness(guess, code):
    code = tf.math.l2_normalize(tf.stop_gradient(code), axis=1)
    return -tf.reduce_mean(tf.reduce_sum(tf.math.l2_normalize(guess, axis=1) * code, axis=1))


def by_hand(world):
    encoder, predictor = world.encoder, world.predictor
    optimizer = sgd()

    @tf.function
    def train_step(one, two):
        with tf.GradientTape() as tape:
            z1, z2 = encoder(one, training=True), encoder(two, training=True)
            p1, p2 = predictor(z1, training=True), predictor(z2, training=True)
            loss = unlikeness(p1, z2) / 2 + unlikeness(p2, z1) / 2
        variables = encoder.trainable_variables + predictor.trainable_variables
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables, strict=True))
        world.loss.update_state(loss)
        return world.loss.result()

    return train_step


def with_tfloop(world):
    nets = tfloop.train({"encoder": world.encoder, "predictor": world.predictor})
    encoder, predictor = nets.values()
    optim = tfloop.ModuleOptimizer(sgd())

    @tfloop.compile
    def train_step(one, two):
        with tfloop.Tape() as tape:
            z1, z2 = encoder(one), encoder(two)
            p1, p2 = predictor(z1), predictor(z2)
            loss = unlikeness(p1, z2) / 2 + unlikeness(p2, z1) / 2
        grads = tape.backward(loss, nets)
        optim.step(nets, grads)
        world.loss.update_state(loss)
        return world.loss.result()

    return train_step


def test_both_loops_learn_the_same():
    assert_equal(make, by_hand, with_tfloop, PAIRS)
