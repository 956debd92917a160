"""Keras' example "Deep Q-Learning for Atari Breakout" (keras.io, `rl/deep_q_network_breakout`).

Remembered transitions are judged by a target network, a copy that is renewed now and then; a state
after which nothing comes is worth -1. Huber loss on the worth of the action that was taken, Adam
with the norm of each gradient clipped. Here states are vectors, and the memory is a random one.
"""

import keras
import numpy as np
import tensorflow as tf
from side_by_side import STEPS, World, assert_equal

import tfloop

ACTIONS, DISCOUNT, RENEWED = 4, 0.99, 5
RNG = np.random.default_rng(0)
huber = keras.losses.Huber()


def transitions():
    """States, actions, rewards, next states, and whether it was the end."""
    states, after = 3.0 * RNG.normal(size=(2, 16, 6)).astype("float32")
    actions, rewards = RNG.integers(0, ACTIONS, 16), RNG.normal(size=16).astype("float32")
    return states, actions, rewards, after, (RNG.random(16) < 0.2).astype("float32")


BATCHES = [(number, transitions()) for number in range(STEPS)]


def make():
    def q_network():
        dense = keras.layers.Dense
        return keras.Sequential([keras.Input((6,)), dense(16, "relu"), dense(ACTIONS)])

    return World(net=q_network(), target=q_network())


def wanted_worth(future, rewards, ended):
    worth = rewards + DISCOUNT * tf.reduce_max(future, axis=1)
    return worth * (1.0 - ended) - ended


def worth_of(q_values, actions):
    return tf.reduce_sum(q_values * tf.one_hot(actions, ACTIONS), axis=1)


def by_hand(world):
    net, target = world.net, world.target
    optimizer = keras.optimizers.Adam(2.5e-3, clipnorm=1.0)

    @tf.function
    def train_step(states, actions, rewards, after, ended):
        wanted = wanted_worth(target(after, training=False), rewards, ended)
        with tf.GradientTape() as tape:
            loss = huber(wanted, worth_of(net(states, training=True), actions))
        grads = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
        return loss

    def turn(number, batch):
        if number % RENEWED == 0:
            target.set_weights(net.get_weights())
        return train_step(*batch)

    return turn


def with_tfloop(world):
    model, target = tfloop.train(world.net), tfloop.valid(world.target)
    clipping = tfloop.GradientClipping.by_norm(1.0)
    optim = tfloop.ModuleOptimizer(keras.optimizers.Adam(2.5e-3), clipping=clipping)

    @tfloop.compile
    def train_step(states, actions, rewards, after, ended):
        wanted = wanted_worth(target(after), rewards, ended)
        with tfloop.Tape() as tape:
            loss = huber(wanted, worth_of(model(states), actions))
        grads = tape.backward(loss, model)
        optim.step(model, grads)
        return loss

    def turn(number, batch):
        if number % RENEWED == 0:
            tfloop.blend(target, model)
        return train_step(*batch)

    return turn


def test_both_loops_learn_the_same():
    assert_equal(make, by_hand, with_tfloop, BATCHES)
