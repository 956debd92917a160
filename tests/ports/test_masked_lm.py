"""Masked language modelling of the Model Garden (github.com/tensorflow/models, `masked_lm`).

An encoder has to tell tokens that were hidden; places that only pad the batch weigh nothing. AdamW
with warm-up, no decay of biases and norms, and one norm over all gradients. The embedding meets a
token several times in a batch. Keras 2, for which it was written, added such rows up; Keras 3
doesn't, so the loop by hand makes them dense.
"""

import keras
import numpy as np
import tensorflow as tf
from side_by_side import STEPS, World, assert_equal

import tfloop

TOKENS, LENGTH, WIDTH, HIDDEN = 12, 6, 8, 2
RNG = np.random.default_rng(0)
layers = keras.layers


def sentences():
    """Tokens, hidden places, what stood there, and how much each place weighs."""
    places = np.sort(RNG.permuted(np.tile(np.arange(LENGTH), (4, 1)), axis=1)[:, :HIDDEN])
    weights = (RNG.random((4, HIDDEN)) < 0.8).astype("float32")
    return (
        RNG.integers(0, TOKENS, (4, LENGTH)),
        places,
        RNG.integers(0, TOKENS, (4, HIDDEN)),
        weights,
    )


BATCHES = [sentences() for _ in range(STEPS)]


def make():
    tokens, places = keras.Input((LENGTH,), dtype="int64"), keras.Input((HIDDEN,), dtype="int64")
    x = layers.Embedding(TOKENS, WIDTH)(tokens)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(WIDTH, "gelu")(x))
    hidden = keras.ops.take_along_axis(x, places[:, :, None], axis=1)
    logits = layers.Dense(TOKENS)(layers.Dropout(0.1)(hidden))
    return World(net=keras.Model([tokens, places], logits), loss=keras.metrics.Mean())


def adamw(**options):
    warm = tfloop.schedulers.Warmup(keras.optimizers.schedules.PolynomialDecay(1e-2, 30, 0.0), 5)
    return keras.optimizers.AdamW(warm, epsilon=1e-6, **options)


def loss_of(targets, logits, weights):
    each = keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)
    return tf.math.divide_no_nan(tf.reduce_sum(each * weights), tf.reduce_sum(weights))


def by_hand(world):
    net = world.net
    optimizer = adamw(weight_decay=0.1, global_clipnorm=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])

    @tf.function
    def train_step(tokens, places, targets, weights):
        with tf.GradientTape() as tape:
            loss = loss_of(targets, net([tokens, places], training=True), weights)
        grads = tape.gradient(loss, net.trainable_variables)
        grads = [tf.convert_to_tensor(grad) for grad in grads]
        optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
        world.loss.update_state(loss)
        return loss

    return train_step


def with_tfloop(world):
    model = tfloop.train(world.net)
    optim = tfloop.ModuleOptimizer(adamw(weight_decay=0.1))
    no_decay = tfloop.ParamGroup.from_name("bias", "gamma", "beta")
    optim.with_group(no_decay, adamw(weight_decay=0.0))

    @tfloop.compile
    def train_step(tokens, places, targets, weights):
        with tfloop.Tape() as tape:
            loss = loss_of(targets, model([tokens, places]), weights)
        grads = tape.backward(loss, model)
        # One norm over both groups; `clipping=` takes that of each group.
        grads = grads.scale(1.0 / tf.maximum(grads.global_norm(), 1.0))
        optim.step(model, grads)
        world.loss.update_state(loss)
        return loss

    return train_step


def test_both_loops_learn_the_same():
    assert_equal(make, by_hand, with_tfloop, BATCHES)
