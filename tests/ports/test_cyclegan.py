"""TensorFlow's tutorial of CycleGAN (github.com/tensorflow/docs, `generative/cyclegan`).

Two generators translate between two kinds of images without pairs, two discriminators tell made
from real. There and back again must give the image (cycle), and what is of the right kind already
must stay (identity). One persistent tape gives the gradients of four losses, each for its network.
"""

import keras
import numpy as np
import tensorflow as tf
from side_by_side import STEPS, World, assert_equal

import tfloop

CYCLE = 10.0
RNG = np.random.default_rng(0)
BATCHES = [tuple(np.tanh(RNG.normal(size=(2, 1, 8, 8, 3))).astype("float32")) for _ in range(STEPS)]
layers = keras.layers
cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)


def make():
    def generator():
        return keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                layers.Conv2D(4, 4, strides=2, padding="same"),
                layers.LeakyReLU(),
                layers.Conv2DTranspose(3, 4, strides=2, padding="same", activation="tanh"),
            ]
        )

    def discriminator():
        first = layers.Conv2D(4, 4, strides=2, padding="same")
        return keras.Sequential(
            [keras.Input((8, 8, 3)), first, layers.LeakyReLU(), layers.Conv2D(1, 3)]
        )

    return World(g=generator(), f=generator(), dx=discriminator(), dy=discriminator())


def losses_of(g, f, dx, dy, x, y):
    """The loss of each network; the translators take x to y (g) and y to x (f)."""
    made_y, made_x = g(x), f(y)
    cycle = CYCLE * (distance(x, f(made_y)) + distance(y, g(made_x)))
    judged_x, judged_y = dx(made_x), dy(made_y)
    return {
        "g": called_real(judged_y) + cycle + 0.5 * CYCLE * distance(y, g(y)),
        "f": called_real(judged_x) + cycle + 0.5 * CYCLE * distance(x, f(x)),
        "dx": 0.5 * (called_real(dx(x)) + called_made(judged_x)),
        "dy": 0.5 * (called_real(dy(y)) + called_made(judged_y)),
    }


def distance(one, other):
    return tf.reduce_mean(tf.abs(one - other))


def called_real(judged):
    return cross_entropy(tf.ones_like(judged), judged)


def called_made(judged):
    return cross_entropy(tf.zeros_like(judged), judged)


def adam():
    return keras.optimizers.Adam(2e-4, beta_1=0.5)


def by_hand(world):
    nets = {"g": world.g, "f": world.f, "dx": world.dx, "dy": world.dy}
    optimizers = {name: adam() for name in nets}

    @tf.function
    def train_step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            losses = losses_of(**nets, x=x, y=y)
        grads = {n: tape.gradient(losses[n], nets[n].trainable_variables) for n in nets}
        for name, net in nets.items():
            pairs = zip(grads[name], net.trainable_variables, strict=True)
            optimizers[name].apply_gradients(pairs)
        return losses

    return train_step


def with_tfloop(world):
    nets = tfloop.train({"g": world.g, "f": world.f, "dx": world.dx, "dy": world.dy})
    optim = tfloop.ModuleOptimizer(adam())

    @tfloop.compile
    def train_step(x, y):
        with tfloop.Tape(persistent=True) as tape:
            losses = losses_of(**nets, x=x, y=y)
        grads = tfloop.GradientsParams()
        for name, loss in losses.items():
            grads = grads.merge(tape.backward(loss, {name: nets[name]}))
        optim.step(nets, grads)
        return losses

    return train_step


def test_both_loops_learn_the_same():
    assert_equal(make, by_hand, with_tfloop, BATCHES)
