"""A physics-informed network (github.com/janblechschmidt/PDEsByNNs, `PINN_Solver`).

The network is to obey the Burgers equation, u_t + u u_x = (0.01 / pi) u_xx, at drawn points, and to
have given values at time 0 and at the ends. The loss holds second derivatives by its input, so the
step differentiates three times. The rate falls in stairs.
"""

import keras
import numpy as np
import tensorflow as tf
from side_by_side import STEPS, World, assert_equal

import tfloop

RNG = np.random.default_rng(0)
INSIDE = RNG.uniform([0, -1], [1, 1], (24, 2)).astype("float32")
START = np.stack([np.zeros(8), RNG.uniform(-1, 1, 8)], axis=1).astype("float32")
ENDS = np.stack([RNG.uniform(0, 1, 8), RNG.choice([-1.0, 1.0], 8)], axis=1).astype("float32")
GIVEN = tf.constant(np.concatenate([START, ENDS]))
VALUES = tf.constant(np.concatenate([-np.sin(np.pi * START[:, 1:]), np.zeros((8, 1))]), tf.float32)


def make():
    def dense():
        return keras.layers.Dense(8, "tanh", kernel_initializer="glorot_normal")

    scale = keras.layers.Rescaling([2.0, 1.0], [-1.0, 0.0])  # Times to [-1, 1] as places are.
    layers = [keras.Input((2,)), scale, dense(), dense(), keras.layers.Dense(1)]
    return World(net=keras.Sequential(layers))


def adam():
    stairs = keras.optimizers.schedules.PiecewiseConstantDecay([5, 12], [1e-2, 1e-3, 5e-4])
    return keras.optimizers.Adam(stairs)


def at(net, time, place):
    return net(tf.concat([time, place], axis=1))


def loss_of(net, u, u_t, u_x, u_xx):
    residual = u_t + u * u_x - 0.01 / np.pi * u_xx
    return tf.reduce_mean(residual**2) + 2.0 * tf.reduce_mean((VALUES - net(GIVEN)) ** 2)


def by_hand(world):
    net = world.net
    optimizer = adam()

    @tf.function
    def train_step(points):
        time, place = points[:, :1], points[:, 1:]
        with tf.GradientTape() as tape:
            with tf.GradientTape(persistent=True) as inner:
                inner.watch((time, place))
                u = at(net, time, place)
                u_x = inner.gradient(u, place)
            u_t, u_xx = inner.gradient(u, time), inner.gradient(u_x, place)
            loss = loss_of(net, u, u_t, u_x, u_xx)
        grads = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
        return loss

    return train_step


def with_tfloop(world):
    model = tfloop.train(world.net)
    optim = tfloop.ModuleOptimizer(adam())

    @tfloop.compile
    def train_step(points):
        time, place = points[:, :1], points[:, 1:]
        with tfloop.Tape() as tape:
            with tfloop.Tape(watch=[time, place], persistent=True) as inner:
                u = at(model, time, place)
                u_x = inner.backward(u, wrt=place).wrt(place)
            u_t = inner.backward(u, wrt=time).wrt(time)
            u_xx = inner.backward(u_x, wrt=place).wrt(place)
            loss = loss_of(model, u, u_t, u_x, u_xx)
        grads = tape.backward(loss, model)
        optim.step(model, grads)
        return loss

    return train_step


def test_both_loops_learn_the_same():
    assert_equal(make, by_hand, with_tfloop, [(tf.constant(INSIDE),)] * STEPS)
