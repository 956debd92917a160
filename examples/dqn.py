"""Deep Q-learning: a pole is balanced on a cart, with a target network that follows by `blend`.

Sixteen carts are driven at once, in NumPy. Each turn drives them one step further, mostly as the
network thinks best, and then learns from remembered steps. What the next state is worth is judged
by a target network, a slow copy of the one that is trained: judged by itself, it would chase its
own errors.

It prints how many steps the pole stays up, before training and as it goes on. An episode ends
after 500.

    python examples/dqn.py --quick
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfloop

_TURNS = flags.DEFINE_integer("turns", 3000, "Steps of each cart.", lower_bound=1)
_CARTS = flags.DEFINE_integer("carts", 16, "Carts that are driven at once.", lower_bound=1)
_DISCOUNT = flags.DEFINE_float("discount", 0.99, "What a reward a step later is worth.", 0.0, 1.0)
_FOLLOW = flags.DEFINE_float(
    "follow", 0.02, "Share that the target network takes over a turn.", 0.0, 1.0
)
_LR = flags.DEFINE_float("lr", 1e-3, "Learning rate.", lower_bound=0.0)
_QUICK = flags.DEFINE_bool("quick", False, "Fewer turns, to see that everything works.")

_LIMIT = 500  # steps of an episode


class Carts:
    """Carts with a pole on each (Barto, Sutton and Anderson, 1983); states `[N, 4]`."""

    def __init__(self, number: int, spread: float, seed: int) -> None:
        """Begins an episode on each, up to `spread` from the middle of the track."""
        self._random, self._spread = np.random.default_rng(seed), spread
        self.states, self._steps = np.zeros((number, 4), "float32"), np.zeros(number, "int32")
        self._begin(np.ones(number, bool))

    def drive(self, pushes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pushes each cart left (0) or right (1); gives next states, fallen and lengths.

        A length is 0 unless the episode has ended; then another one begins.
        """
        _, speed, angle, spin = self.states.T
        force = np.where(pushes == 1, 10.0, -10.0)
        sine, cosine = np.sin(angle), np.cos(angle)
        # Of a pole of 0.1 kg and 1 m on a cart of 1 kg, in steps of 0.02 s.
        pull = (force + 0.05 * spin**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * pull) / (0.5 * (4.0 / 3.0 - 0.1 * cosine**2 / 1.1))
        change = np.stack([speed, pull - 0.05 * turn * cosine / 1.1, spin, turn], axis=1)
        after = (self.states + 0.02 * change).astype("float32")

        self.states, self._steps = after.copy(), self._steps + 1
        fallen = (np.abs(after[:, 0]) > 2.4) | (np.abs(after[:, 2]) > 0.2095)
        ended = fallen | (self._steps == _LIMIT)
        lengths = np.where(ended, self._steps, 0)
        self._begin(ended)
        return after, fallen, lengths

    def _begin(self, which: np.ndarray) -> None:
        most = [self._spread, 0.05, 0.05, 0.05]
        self.states[which] = self._random.uniform(-1.0, 1.0, (which.sum(), 4)) * most
        self._steps[which] = 0


def build_model() -> keras.Model:
    """States in, and what each of the two pushes is worth out."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(64, "relu"), layers.Dense(64, "relu"), layers.Dense(2)]
    )


def make_step(net: keras.Model, target: keras.Model):
    """Moves what a push is worth towards its reward and the worth of the state that follows."""
    model = tfloop.train(net)
    optim = tfloop.ModuleOptimizer(
        keras.optimizers.Adam(), clipping=tfloop.GradientClipping.by_global_norm(10.0)
    )
    huber = keras.losses.Huber()

    @tfloop.compile
    def step(states, pushes, after, fallen, lr):
        # The network chooses, the target judges: the largest of two guesses would be too large.
        choice = tf.one_hot(tf.argmax(model.valid()(after), axis=1), 2)
        worth = tf.reduce_sum(choice * tfloop.valid(target)(after), axis=1)
        goal = tf.where(fallen, -1.0, _DISCOUNT.value * worth)  # a fall costs 1, all else nothing
        with tfloop.Tape() as tape:
            loss = huber(goal, tf.reduce_sum(tf.one_hot(pushes, 2) * model(states), axis=1))
        optim.step(lr, model, tape.backward(loss, model))
        tfloop.blend(target, model, rate=_FOLLOW.value)

    return step


def make_policy(net: keras.Model):
    """The push of each cart that the network thinks best."""
    model = tfloop.valid(net)

    @tfloop.compile
    def policy(states):
        return tf.argmax(model(states), axis=1)

    return policy


def mean_length(policy) -> float:
    """How long the pole stays up: the mean over the first episode of each of 50 new carts."""
    carts, lengths = Carts(50, spread=0.05, seed=1), np.zeros(50)
    while not lengths.all():
        _, _, ended = carts.drive(policy(carts.states).numpy())
        lengths = np.where(lengths == 0, ended, lengths)
    return float(lengths.mean())


def main(_: list[str]) -> None:
    """Drives and learns, and prints how long the pole stays up."""
    tfloop.seed(0)
    turns = 1000 if _QUICK.value else _TURNS.value
    net, target = build_model(), build_model()
    tfloop.blend(target, net)  # a copy, to begin with
    step, policy = make_step(net, target), make_policy(net)
    # Begun all over the track, else it rarely sees the ends and never learns to turn back.
    carts, memory = Carts(_CARTS.value, spread=2.0, seed=0), []

    print(f"Steps that the pole stays up, of {_LIMIT}:")
    print(f"  before training    {mean_length(policy):5.1f}")
    for turn in range(1, turns + 1):
        states = carts.states.copy()
        # At first mostly random pushes, in the end one of ten.
        is_random = np.random.random(len(states)) < max(0.1, 1.0 - 3.0 * turn / turns)
        drawn = np.random.randint(0, 2, len(states))
        pushes = np.where(is_random, drawn, policy(states).numpy())
        after, fallen, _ = carts.drive(pushes)
        memory.append((states, pushes, after, fallen))

        chosen = [memory[index] for index in np.random.randint(len(memory), size=16)]
        batch = [np.concatenate(parts) for parts in zip(*chosen, strict=True)]
        step(*batch, _LR.value * (1.0 - turn / turns))
        if turn % (turns // 5 or 1) == 0:
            print(f"  after {turn:5} turns  {mean_length(policy):5.1f}")


if __name__ == "__main__":
    app.run(main)
