"""Keras' example "Denoising Diffusion Probabilistic Model" (keras.io, `generative/ddpm`).

Images are mixed with noise, more of it the later the drawn time is, and the network has to tell the
noise. A second network follows as a moving average; it is the one that samples. Here the network is
two convolutions that are told the time.
"""

import keras
import numpy as np
import tensorflow as tf
from side_by_side import STEPS, World, assert_equal

import tfloop

TIMES, DECAY = 50, 0.99
RNG = np.random.default_rng(0)
BATCHES = [(RNG.uniform(-1, 1, (4, 6, 6, 1)).astype("float32"),) for _ in range(STEPS)]
KEPT = tf.constant(np.cumprod(1.0 - np.linspace(1e-4, 0.02, TIMES)), tf.float32)
layers = keras.layers
mean_squared_error = keras.losses.MeanSquaredError()


def make():
    def network():
        image, time = keras.Input((6, 6, 1)), keras.Input((), dtype="int64")
        x = layers.Conv2D(8, 3, padding="same")(image)
        when = layers.Reshape((1, 1, 8))(layers.Embedding(TIMES, 8)(time))
        x = keras.activations.silu(layers.GroupNormalization(2)(x + when))
        return keras.Model([image, time], layers.Conv2D(1, 3, padding="same")(x))

    net, average = network(), network()
    average.set_weights(net.get_weights())
    return World(net=net, average=average, random=tf.random.Generator.from_seed(0))


def drawn(random, images):
    """Times, noise, and the images mixed with it."""
    time = random.uniform((len(images),), 0, TIMES, tf.int64)
    noise = random.normal(tf.shape(images))
    kept = tf.reshape(tf.gather(KEPT, time), (-1, 1, 1, 1))
    return time, noise, tf.sqrt(kept) * images + tf.sqrt(1.0 - kept) * noise


def by_hand(world):
    net, average, random = world.net, world.average, world.random
    optimizer = keras.optimizers.Adam(2e-3)

    @tf.function
    def train_step(images):
        time, noise, mixed = drawn(random, images)
        with tf.GradientTape() as tape:
            loss = mean_squared_error(noise, net([mixed, time], training=True))
        grads = tape.gradient(loss, net.trainable_variables)
        # The same time may be drawn twice, and Keras' Adam doesn't add up repeated rows.
        grads = [tf.convert_to_tensor(grad) for grad in grads]
        optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
        for weight, mean in zip(net.weights, average.weights, strict=True):
            mean.assign(DECAY * mean + (1.0 - DECAY) * weight)
        return loss

    return train_step


def with_tfloop(world):
    model, average, random = tfloop.train(world.net), world.average, world.random
    optim = tfloop.ModuleOptimizer(keras.optimizers.Adam(2e-3))

    @tfloop.compile
    def train_step(images):
        time, noise, mixed = drawn(random, images)
        with tfloop.Tape() as tape:
            loss = mean_squared_error(noise, model([mixed, time]))
        grads = tape.backward(loss, model)
        optim.step(model, grads)
        tfloop.blend(average, model, rate=1.0 - DECAY)
        return loss

    return train_step


def test_both_loops_learn_the_same():
    assert_equal(make, by_hand, with_tfloop, BATCHES)
