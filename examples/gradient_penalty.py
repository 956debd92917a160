"""Penalise the gradient of a network: second order, by a tape inside a tape.

A critic learns to tell 8 x 8 images of 3 from images of 8. If its slope is at most 1 everywhere,
the mean difference of its scores is at most the Wasserstein distance of the two sets of images,
and the best critic reaches it. WGAN-GP keeps the slope near 1 by a penalty on the norm of the
gradient by the input, so the loss holds a gradient itself: the inner tape gives it, the outer one
differentiates through it.

It prints this norm and the difference of the scores, with the penalty and without, beside the
exact distance. (In a GAN the critic's images of 8 would be those of a generator; see gan.py.)

    python examples/gradient_penalty.py --quick
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_digits
from sklearn.metrics import pairwise_distances

import tfloop

_STEPS = flags.DEFINE_integer("steps", 4000, "Steps of the critic.", lower_bound=1)
_PENALTY = flags.DEFINE_float("penalty", 10.0, "Weight of the penalty.", lower_bound=0.0)
_LR = flags.DEFINE_float("lr", 1e-3, "Learning rate.", lower_bound=0.0)
_QUICK = flags.DEFINE_bool("quick", False, "A few steps, to see that everything works.")


def build_critic() -> keras.Model:
    """Images `[B, 64]` in, scores `[B, 1]` out; no batch norm, which would mix the images."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(128),
            layers.LeakyReLU(0.2),
            layers.Dense(128),
            layers.LeakyReLU(0.2),
            layers.Dense(1),
        ]
    )


def slopes(model, images) -> tf.Tensor:
    """The norm of the gradient of each image's score by the image: `[B]`."""
    with tfloop.Tape(watch=[images]) as tape:
        scores = model(images)  # summed by `backward`; an image's score depends on it alone
    gradient = tape.backward(scores, wrt=images).wrt(images)
    return tf.norm(gradient, axis=1)


def make_step(net: keras.Model, penalty: float):
    """Raises the scores of one set over those of the other, and holds the slope near 1."""
    model = tfloop.train(net)
    optim = tfloop.ModuleOptimizer(keras.optimizers.Adam(beta_1=0.5, beta_2=0.9))

    @tfloop.compile
    def step(threes, eights, lr):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean(model(eights)) - tf.reduce_mean(model(threes))
            if penalty:
                # On the way from one set to the other, where the best critic's slope is 1.
                mix = tf.random.uniform((tf.shape(threes)[0], 1))
                between = mix * threes + (1.0 - mix) * eights
                loss += penalty * tf.reduce_mean((slopes(model, between) - 1.0) ** 2)
        optim.step(lr, model, tape.backward(loss, model))

    return step


def exact_distance(images: np.ndarray, others: np.ndarray) -> float:
    """The least mean way that takes one set to the other, of as many images."""
    ways = pairwise_distances(images, others)
    return float(ways[linear_sum_assignment(ways)].mean())


def main(_: list[str]) -> None:
    """Trains both critics."""
    steps = 400 if _QUICK.value else _STEPS.value
    digits = load_digits()
    pixels = (digits.data / 16.0).astype("float32")
    threes, eights = (pixels[digits.target == digit][:170] for digit in (3, 8))
    distance = exact_distance(threes, eights)

    print(f"Critics of 3 and 8 after {steps} steps; the exact distance is {distance:.3f}:")
    print(f"  {'':<16}  gradient norm  difference of scores")
    for name, penalty in ("without penalty", 0.0), ("with penalty", _PENALTY.value):
        tfloop.seed(0)
        net = build_critic()
        step = make_step(net, penalty)
        for _ in range(steps):
            step(threes, np.random.permutation(eights), _LR.value)
        norm = tf.reduce_mean(slopes(net, tf.concat([threes, eights], axis=0)))
        difference = tf.reduce_mean(net(threes)) - tf.reduce_mean(net(eights))
        print(f"  {name:<16}  {float(norm):13.3f}  {float(difference):20.3f}")


if __name__ == "__main__":
    app.run(main)
