"""Keras' example "Knowledge Distillation" (keras.io, `vision/knowledge_distillation`, by K. Borup).

A small network learns from labels, and more from what a fixed larger one says when both are made
less sure by a temperature.
"""

import keras
import numpy as np
import tensorflow as tf
from side_by_side import STEPS, World, assert_equal

import tfloop

CLASSES, ALPHA, TEMPERATURE = 4, 0.1, 10.0
RNG = np.random.default_rng(0)
BATCHES = [
    (RNG.normal(size=(8, 8, 8, 1)).astype("float32"), RNG.integers(0, CLASSES, 8))
    for _ in range(STEPS)
]
layers = keras.layers
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
divergence = keras.losses.KLDivergence()


def make():
    def network(filters):
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(filters, 3, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.MaxPooling2D(2, strides=1, padding="same"),
                layers.Flatten(),
                layers.Dense(CLASSES),
            ]
        )

    accuracy = keras.metrics.SparseCategoricalAccuracy()
    return World(teacher=network(8), student=network(3), accuracy=accuracy)


def loss_of(labels, logits, teacher_logits):
    soft = [tf.nn.softmax(values / TEMPERATURE) for values in (teacher_logits, logits)]
    return ALPHA * cross_entropy(labels, logits) + (1.0 - ALPHA) * divergence(*soft)


def by_hand(world):
    teacher, student = world.teacher, world.student
    optimizer = keras.optimizers.Adam()

    @tf.function
    def train_step(images, labels):
        teacher_logits = teacher(images, training=False)
        with tf.GradientTape() as tape:
            logits = student(images, training=True)
            loss = loss_of(labels, logits, teacher_logits)
        grads = tape.gradient(loss, student.trainable_variables)
        optimizer.apply_gradients(zip(grads, student.trainable_variables, strict=True))
        world.accuracy.update_state(labels, logits)
        return loss

    return train_step


def with_tfloop(world):
    teacher, student = tfloop.valid(world.teacher), tfloop.train(world.student)
    optim = tfloop.ModuleOptimizer(keras.optimizers.Adam())

    @tfloop.compile
    def train_step(images, labels):
        with tfloop.Tape() as tape:
            logits = student(images)
            loss = loss_of(labels, logits, teacher(images))
        grads = tape.backward(loss, student)
        optim.step(student, grads)
        world.accuracy.update_state(labels, logits)
        return loss

    return train_step


def test_both_loops_learn_the_same():
    assert_equal(make, by_hand, with_tfloop, BATCHES)
