"""Keras' example "WGAN-GP overriding `Model.train_step`" (keras.io, `generative/wgan_gp`).

The critic takes several steps for each of the generator's. Its loss holds a penalty: between a real
and a made image the gradient of the critic by its input is to have norm 1, so a step differentiates
twice. Here images have 8 x 8 pixels, and the critic two steps.
"""

import keras
import numpy as np
import tensorflow as tf
from side_by_side import STEPS, World, assert_equal

import tfloop

NOISE, CRITIC_STEPS, PENALTY = 5, 2, 10.0
RNG = np.random.default_rng(0)
BATCHES = [(np.tanh(RNG.normal(size=(6, 8, 8, 1))).astype("float32"),) for _ in range(STEPS)]
layers = keras.layers


def make():
    critic = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 5, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    generator = keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(4 * 4 * 2, use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(0.2),
            layers.Reshape((4, 4, 2)),
            layers.UpSampling2D(2),
            layers.Conv2D(1, 3, padding="same", use_bias=False, activation="tanh"),
        ]
    )
    return World(critic=critic, generator=generator, random=tf.random.Generator.from_seed(0))


def adam():
    return keras.optimizers.Adam(2e-4, beta_1=0.5, beta_2=0.9)


def between(random, real, made):
    return real + random.normal((len(real), 1, 1, 1)) * (made - real)


def penalty_of(slope):
    norm = tf.sqrt(tf.reduce_sum(tf.square(slope), axis=[1, 2, 3]))
    return PENALTY * tf.reduce_mean(tf.square(norm - 1.0))


def by_hand(world):
    critic, generator, random = world.critic, world.generator, world.random
    critic_optimizer, generator_optimizer = adam(), adam()

    @tf.function
    def train_step(real):
        for _ in range(CRITIC_STEPS):
            noise = random.normal((len(real), NOISE))
            with tf.GradientTape() as tape:
                made = generator(noise, training=True)
                scores = critic(made, training=True), critic(real, training=True)
                critic_loss = tf.reduce_mean(scores[0]) - tf.reduce_mean(scores[1])
                mixed = between(random, real, made)
                with tf.GradientTape() as inner:
                    inner.watch(mixed)
                    score = critic(mixed, training=True)
                critic_loss += penalty_of(inner.gradient(score, mixed))
            grads = tape.gradient(critic_loss, critic.trainable_variables)
            critic_optimizer.apply_gradients(zip(grads, critic.trainable_variables, strict=True))
        noise = random.normal((len(real), NOISE))
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(critic(generator(noise, training=True), training=True))
        grads = tape.gradient(loss, generator.trainable_variables)
        generator_optimizer.apply_gradients(zip(grads, generator.trainable_variables, strict=True))
        return critic_loss, loss

    return train_step


def with_tfloop(world):
    critic, generator = tfloop.train(world.critic), tfloop.train(world.generator)
    critic_optim, generator_optim = tfloop.ModuleOptimizer(adam()), tfloop.ModuleOptimizer(adam())
    random = world.random

    @tfloop.compile
    def train_step(real):
        for _ in range(CRITIC_STEPS):
            noise = random.normal((len(real), NOISE))
            with tfloop.Tape() as tape:
                made = generator(noise)
                critic_loss = tf.reduce_mean(critic(made)) - tf.reduce_mean(critic(real))
                mixed = between(random, real, made)
                with tfloop.Tape(watch=[mixed]) as inner:
                    score = critic(mixed)
                critic_loss += penalty_of(inner.backward(score, wrt=[mixed]).wrt(mixed))
            grads = tape.backward(critic_loss, critic)
            critic_optim.step(critic, grads)
        noise = random.normal((len(real), NOISE))
        with tfloop.Tape() as tape:
            loss = -tf.reduce_mean(critic(generator(noise)))
        grads = tape.backward(loss, generator)
        generator_optim.step(generator, grads)
        return critic_loss, loss

    return train_step


def test_both_loops_learn_the_same():
    assert_equal(make, by_hand, with_tfloop, BATCHES)
