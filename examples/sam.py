"""Sharpness-aware minimisation: two backward passes for a step, the second one from uphill.

SAM looks for weights around which the loss is low everywhere. Each step goes `--radius` uphill
along the gradient, takes the gradient there, and applies it to the weights where they were. Nothing
is assigned and put back for that: `with_values` runs the network with other tensors in place of its
variables, and the gradient flows through them.

A share of the training labels, `--wrong`, is drawn at random, and a large network can learn even
these by heart. It prints how many of the given labels it has learned, the accuracy on clean digits,
and how much the loss rises uphill: for plain SGD and for SAM.

    python examples/sam.py --quick
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tfloop

_EPOCHS = flags.DEFINE_integer("epochs", 150, "Passes over the training digits.", lower_bound=1)
_RADIUS = flags.DEFINE_float("radius", 0.5, "How far uphill SAM looks.", lower_bound=0.0)
_WRONG = flags.DEFINE_float("wrong", 0.4, "Share of labels that are drawn at random.", 0.0, 1.0)
_LR = flags.DEFINE_float("lr", 0.05, "Learning rate.", lower_bound=0.0)
_QUICK = flags.DEFINE_bool("quick", False, "A few epochs, to see that everything works.")


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Training digits, of which many have a wrong label, and clean test digits."""
    digits = load_digits()
    pixels = (digits.data / 16.0).astype("float32")
    labels = digits.target.astype("int32")
    given = labels[:1200].copy()
    drawn = np.random.random(1200) < _WRONG.value
    given[drawn] = np.random.randint(0, 10, drawn.sum())
    return (pixels[:1200], given), (pixels[1200:], labels[1200:])


def build_model() -> keras.Model:
    """64 pixels in, logits for ten classes out; large enough to learn every label by heart."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(256, "relu"),
            layers.Dense(256, "relu"),
            layers.Dense(10),
        ]
    )


def gradients(model, pixels, labels, offsets=None) -> tuple[tfloop.GradientsParams, tf.Tensor]:
    """The gradient and the loss at the weights, or at the weights plus offsets by path."""
    parameters = tfloop.named_parameters(model)
    with tfloop.Tape() as tape:
        if offsets is not None:
            # In the block, so that the sum is on the tape; the offsets are constants for it.
            model = model.with_values(
                {path: parameters[path] + offset for path, offset in offsets.items()}
            )
        logits = model(pixels)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    return tape.backward(loss, model), loss


def uphill(grads: tfloop.GradientsParams, radius: float) -> tfloop.GradientsParams:
    """The offsets that go so far along the gradient."""
    return grads.scale(radius / (grads.global_norm() + 1e-12))


def make_step(net: keras.Model, radius: float):
    """A step of SGD, with the gradient from here, or from uphill."""
    model = tfloop.train(net)
    optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(momentum=0.9))

    @tfloop.compile
    def step(pixels, labels, lr):
        grads, loss = gradients(model, pixels, labels)
        if radius:
            grads, _ = gradients(model, pixels, labels, uphill(grads, radius))
        optim.step(lr, model, grads)
        return loss

    return step


def accuracy(net: keras.Model, pixels: np.ndarray, labels: np.ndarray) -> float:
    """The share of digits that are given this label, in percent."""
    logits = tfloop.valid(net)(pixels)
    return 100.0 * float(np.mean(np.argmax(logits, axis=-1) == labels))


def sharpness(net: keras.Model, pixels: np.ndarray, labels: np.ndarray) -> float:
    """How much the loss rises on the way uphill."""
    model = tfloop.train(net)
    grads, here = gradients(model, pixels, labels)
    _, there = gradients(model, pixels, labels, uphill(grads, _RADIUS.value))
    return float(there - here)


def main(_: list[str]) -> None:
    """Trains with both."""
    tfloop.seed(0)
    epochs = 40 if _QUICK.value else _EPOCHS.value
    train, test = load()

    print(f"{100 * _WRONG.value:.0f} % of the labels drawn at random, {epochs} epochs:")
    print("         given labels  clean digits  sharpness")
    for name, radius in ("SGD", 0.0), ("SAM", _RADIUS.value):
        tfloop.seed(1)
        net = build_model()
        step = make_step(net, radius)
        data = tfloop.DataLoader(train, batch_size=64, shuffle=0)
        for batch in (batch for _ in range(epochs) for batch in data):
            step(*batch, _LR.value)
        by_heart, clean = accuracy(net, *train), accuracy(net, *test)
        print(f"  {name}  {by_heart:12.1f} %  {clean:10.1f} %  {sharpness(net, *train):9.3f}")


if __name__ == "__main__":
    app.run(main)
