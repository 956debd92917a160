"""PPO with a clipped objective, as in TF-Agents (github.com/tensorflow/agents, `ppo_clip_agent`).

Steps that were driven by an older policy are used several times over. How much likelier an action
has become is held within bounds; the value network learns the returns; a bonus is paid for an
undecided policy. One Adam for both networks, each gradient clipped by its norm.
"""

import keras
import numpy as np
import tensorflow as tf
from side_by_side import STEPS, World, assert_equal

import tfloop

EPOCHS, BOUND, VALUE, ENTROPY = 2, 0.2, 0.5, 0.01
RNG = np.random.default_rng(0)


def driven():
    """Observations, actions, their log-chances when they were taken, returns and advantages."""
    actions, chances = RNG.integers(0, 3, 16), RNG.uniform(0.2, 0.6, 16).astype("float32")
    returns, advantages = RNG.normal(size=(2, 16)).astype("float32")
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return RNG.normal(size=(16, 5)).astype("float32"), actions, np.log(chances), returns, advantages


BATCHES = [driven() for _ in range(STEPS)]


def make():
    def network(outputs):
        dense = keras.layers.Dense
        return keras.Sequential([keras.Input((5,)), dense(16, "tanh"), dense(outputs)])

    return World(actor=network(3), critic=network(1))


def loss_of(logits, values, actions, old, returns, advantages):
    chances = tf.nn.log_softmax(logits)
    ratio = tf.exp(tf.gather(chances, actions, batch_dims=1) - old)
    bounded = tf.clip_by_value(ratio, 1.0 - BOUND, 1.0 + BOUND)
    policy = -tf.reduce_mean(tf.minimum(ratio * advantages, bounded * advantages))
    value = tf.reduce_mean(tf.math.squared_difference(returns, values[:, 0]))
    entropy = -tf.reduce_mean(tf.reduce_sum(tf.exp(chances) * chances, axis=1))
    return policy + VALUE * value - ENTROPY * entropy


def by_hand(world):
    actor, critic = world.actor, world.critic
    optimizer = keras.optimizers.Adam(1e-3, epsilon=1e-5)

    @tf.function
    def train_step(observations, *rest):
        total = 0.0
        for _ in range(EPOCHS):
            with tf.GradientTape() as tape:
                logits = actor(observations, training=True)
                loss = loss_of(logits, critic(observations, training=True), *rest)
            variables = actor.trainable_variables + critic.trainable_variables
            grads = [tf.clip_by_norm(grad, 0.5) for grad in tape.gradient(loss, variables)]
            optimizer.apply_gradients(zip(grads, variables, strict=True))
            total += loss
        return total / EPOCHS

    return train_step


def with_tfloop(world):
    nets = tfloop.train({"actor": world.actor, "critic": world.critic})
    adam, clipping = keras.optimizers.Adam(1e-3, epsilon=1e-5), tfloop.GradientClipping.by_norm(0.5)
    optim = tfloop.ModuleOptimizer(adam, clipping=clipping)

    @tfloop.compile
    def train_step(observations, *rest):
        total = 0.0
        for _ in range(EPOCHS):
            with tfloop.Tape() as tape:
                logits = nets["actor"](observations)
                loss = loss_of(logits, nets["critic"](observations), *rest)
            grads = tape.backward(loss, nets)
            optim.step(nets, grads)
            total += loss
        return total / EPOCHS

    return train_step


def test_both_loops_learn_the_same():
    assert_equal(make, by_hand, with_tfloop, BATCHES)
