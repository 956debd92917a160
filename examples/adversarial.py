"""Train a network that withstands adversarial examples, with gradients of the inputs.

`Tape(watch=[images])` watches a tensor as it watches variables, and `grads.wrt(images)` is the
direction in which the loss grows. FGSM goes one step along its sign; PGD goes several small ones
and stays within `--epsilon` of every pixel.

Two networks learn 8 x 8 handwritten digits: one from the images, one from the worst images that PGD
finds for it at each step. It prints the accuracy of both on clean images and under both attacks.

    python examples/adversarial.py --quick
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tfloop

_EPOCHS = flags.DEFINE_integer("epochs", 40, "Passes over the training digits.", lower_bound=1)
_EPSILON = flags.DEFINE_float("epsilon", 0.15, "The most a pixel in [0, 1] may change.", 0.0, 1.0)
_LR = flags.DEFINE_float("lr", 2e-3, "Learning rate.", lower_bound=0.0)
_QUICK = flags.DEFINE_bool("quick", False, "A few epochs, to see that everything works.")


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Training and test digits: (n, 8, 8, 1) images in [0, 1], and labels."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16.0).astype("float32")
    labels = digits.target.astype("int32")
    return (images[:1300], labels[:1300]), (images[1300:], labels[1300:])


def build_model() -> keras.Model:
    """A small convolutional network: images in, logits for ten classes out."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(64, "relu"),
            layers.Dense(10),
        ]
    )


def cross_entropy(labels, logits) -> tf.Tensor:
    """The mean loss over a batch."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def attack(net: keras.Model, images, labels, steps: int) -> tf.Tensor:
    """Images within epsilon of these that the network gets wrong; FGSM for one step, else PGD.

    It calls the network itself in inference mode: what a `valid()` view gives has no gradient.
    """
    epsilon = _EPSILON.value
    size = epsilon if steps == 1 else 2.5 * epsilon / steps
    found = tf.convert_to_tensor(images)
    if steps > 1:  # from a random place, since the slope may be flat at the image itself
        found += tf.random.uniform(tf.shape(images), -epsilon, epsilon)
    for _ in range(steps):
        with tfloop.Tape(watch=[found]) as tape:
            loss = cross_entropy(labels, net(found, training=False))
        uphill = tape.backward(loss, wrt=found).wrt(found)  # for the images, not the weights
        found += size * tf.sign(uphill)
        found = tf.clip_by_value(found, images - epsilon, images + epsilon)
        found = tf.clip_by_value(found, 0.0, 1.0)
    return found


def make_step(net: keras.Model, steps: int):
    """The usual step, on images that an attack of so many steps has changed first."""
    model = tfloop.train(net)
    optim = tfloop.ModuleOptimizer(keras.optimizers.Adam())

    @tfloop.compile
    def step(images, labels, lr):
        if steps:
            images = attack(net, images, labels, steps)
        with tfloop.Tape() as tape:
            loss = cross_entropy(labels, model(images))
        optim.step(lr, model, tape.backward(loss, model))
        return loss

    return step


def accuracy(net: keras.Model, images, labels) -> float:
    """The share of images that are classified right, in percent."""
    logits = tfloop.valid(net)(images)
    return 100.0 * float(np.mean(np.argmax(logits, axis=-1) == labels))


def main(_: list[str]) -> None:
    """Trains both networks, and attacks them."""
    epochs = 8 if _QUICK.value else _EPOCHS.value
    train, (images, labels) = load()

    print(f"Accuracy in % under attacks of epsilon {_EPSILON.value}, {epochs} epochs:")
    print(f"  {'trained on':<20}  clean   FGSM    PGD")
    for name, steps in ("images", 0), ("adversarial images", 5):
        tfloop.seed(0)
        net = build_model()
        step = make_step(net, steps)
        data = tfloop.DataLoader(train, batch_size=64, shuffle=0)
        for batch in (batch for _ in range(epochs) for batch in data):
            step(*batch, _LR.value)
        fgsm, pgd = (attack(net, images, labels, steps) for steps in (1, 20))
        results = [accuracy(net, x, labels) for x in (images, fgsm, pgd)]
        print(f"  {name:<20}  " + "  ".join(f"{percent:5.1f}" for percent in results))


if __name__ == "__main__":
    app.run(main)
