"""Keras' example "Actor Critic Method" (keras.io, `rl/actor_critic_cartpole`, by A. Nandan).

One episode is one update, eagerly: the tape is open while the pole is balanced. The actor is pushed
towards what turned out better than the critic had thought, the critic towards what turned out.
Here the pole is an equation of a few lines, and an episode is short.
"""

import keras
import numpy as np
import tensorflow as tf
from side_by_side import STEPS, World, assert_equal

import tfloop

DISCOUNT, LONGEST = 0.99, 8
huber = keras.losses.Huber()


def make():
    x = keras.Input((4,))
    hidden = keras.layers.Dense(16, "relu")(x)
    heads = [keras.layers.Dense(2, "softmax")(hidden), keras.layers.Dense(1)(hidden)]
    return World(net=keras.Model(x, heads), random=np.random.default_rng(0))


def push(state, action):
    """The next state of the cart and its pole; only roughly the equations of CartPole."""
    place, speed, angle, spin = state
    force = 1.0 if action == 1 else -1.0
    return np.array(
        [place + 0.2 * speed, speed + force - 0.1 * angle, angle + 0.2 * spin, spin + angle - force]
    )


def play(policy, random):
    """Chances of what was done, what the critic thought of each state, and the rewards."""
    state = random.uniform(-0.5, 0.5, 4)
    chances, thoughts, rewards = [], [], []
    while len(rewards) < LONGEST and abs(state[2]) < 2.0:
        probabilities, thought = policy(tf.constant(state[None], tf.float32))
        action = random.choice(2, p=np.squeeze(probabilities))
        chances.append(tf.math.log(probabilities[0, action]))
        thoughts.append(thought[0, 0])
        rewards.append(1.0 - abs(state[2]))
        state = push(state, action)
    return chances, thoughts, rewards


def loss_of(chances, thoughts, rewards):
    returns = [0.0]
    for reward in reversed(rewards):
        returns.insert(0, reward + DISCOUNT * returns[0])
    returns = np.array(returns[:-1], "float32")
    returns = (returns - returns.mean()) / (returns.std() + np.finfo("float32").eps)
    surprises = [then - thought for then, thought in zip(returns, thoughts, strict=True)]
    actor = -sum(chance * surprise for chance, surprise in zip(chances, surprises, strict=True))
    critic = sum(huber(t[None], r[None]) for t, r in zip(thoughts, returns, strict=True))
    return actor + critic


def by_hand(world):
    net = world.net
    optimizer = keras.optimizers.Adam(0.01)

    def episode():
        with tf.GradientTape() as tape:
            loss = loss_of(*play(net, world.random))
        grads = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
        return loss

    return episode


def with_tfloop(world):
    model = tfloop.train(world.net)
    optim = tfloop.ModuleOptimizer(keras.optimizers.Adam(0.01))

    def episode():
        with tfloop.Tape() as tape:
            loss = loss_of(*play(model, world.random))
        grads = tape.backward(loss, model)
        optim.step(model, grads)
        return loss

    return episode


def test_both_loops_learn_the_same():
    assert_equal(make, by_hand, with_tfloop, [()] * STEPS)
