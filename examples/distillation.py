"""Distil a large network into a small one: a few labels, and the teacher's view of the rest.

A convolutional teacher has learned 8 x 8 digits from 1,000 labels. A student with a twentieth of
its parameters gets `--labels` of these labels, and all 1,000 images. From the images it learns the
teacher's probabilities, softened by `--temperature` so that it also sees which wrong classes the
teacher finds likely.

The teacher is used as a `.valid()` view: its dropout is off, nothing in it moves, and no gradient
goes into it. It prints the accuracy of the student with the teacher, and without.

    python examples/distillation.py --quick
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tfloop

_EPOCHS = flags.DEFINE_integer("epochs", 60, "Passes over all images.", lower_bound=1)
_LABELS = flags.DEFINE_integer("labels", 50, "Labels that the student sees.", 10, 1000)
_TEMPERATURE = flags.DEFINE_float("temperature", 3.0, "Softens the targets.", lower_bound=1.0)
_LR = flags.DEFINE_float("lr", 2e-3, "Learning rate.", lower_bound=0.0)
_QUICK = flags.DEFINE_bool("quick", False, "A few epochs, to see that everything works.")


def build_teacher() -> keras.Model:
    """A convolutional network with dropout: 109,994 parameters."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(192, "relu"),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )


def build_student() -> keras.Model:
    """One hidden layer: 4,810 parameters."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(10)]
    )


def cross_entropy(labels, logits) -> tf.Tensor:
    """The mean loss over a batch."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def soft_cross_entropy(teacher_logits, logits) -> tf.Tensor:
    """Against the teacher's softened probabilities.

    Softening makes gradients smaller by the square of the temperature, which is put back.
    """
    temperature = _TEMPERATURE.value
    targets = tf.nn.softmax(teacher_logits / temperature)
    losses = tf.nn.softmax_cross_entropy_with_logits(targets, logits / temperature)
    return temperature**2 * tf.reduce_mean(losses)


def fit(net: keras.Model, data: tfloop.DataLoader, epochs: int, loss_of) -> None:
    """Minimises `loss_of(model, batch)`."""
    model = tfloop.train(net)
    optim = tfloop.ModuleOptimizer(keras.optimizers.Adam())

    @tfloop.compile
    def step(batch, lr):
        with tfloop.Tape() as tape:
            loss = loss_of(model, batch)
        optim.step(lr, model, tape.backward(loss, model))

    for batch in (batch for _ in range(epochs) for batch in data):
        step(batch, _LR.value)


def accuracy(net: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images that are classified right, in percent."""
    logits = tfloop.valid(net)(images)
    return 100.0 * float(np.mean(np.argmax(logits, axis=-1) == labels))


def main(_: list[str]) -> None:
    """Trains the teacher, then both students for as many updates."""
    tfloop.seed(0)
    epochs = 15 if _QUICK.value else _EPOCHS.value
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16.0).astype("float32")
    labels = digits.target.astype("int32")
    held_out = images[1000:], labels[1000:]
    images, labels = images[:1000], labels[:1000]
    few = slice(None, _LABELS.value)

    def loss_of_labels(model, batch):
        return cross_entropy(batch[1], model(batch[0]))

    net = build_teacher()
    labelled = tfloop.DataLoader((images, labels), batch_size=50, shuffle=0)
    fit(net, labelled, 10 if _QUICK.value else 30, loss_of_labels)
    teacher = tfloop.valid(net)

    def loss_of_few(model, _):
        return cross_entropy(labels[few], model(images[few]))

    def loss_of_teacher(model, batch):
        # Only the student is on the tape: what a `valid()` view gives carries no gradient.
        return loss_of_few(model, batch) + soft_cross_entropy(teacher(batch), model(batch))

    alone, taught = build_student(), build_student()
    unlabelled = tfloop.DataLoader(images, batch_size=50, shuffle=1)
    fit(alone, unlabelled, epochs, loss_of_few)
    fit(taught, unlabelled, epochs, loss_of_teacher)

    print(f"{_LABELS.value} labels for the student, {epochs} epochs:")
    rows = ("teacher", net), ("student alone", alone), ("student with teacher", taught)
    for name, model in rows:
        parameters = model.count_params()
        percent = accuracy(model, *held_out)
        print(f"  {name:<20}  {parameters:7,} parameters  accuracy {percent:.1f} %")


if __name__ == "__main__":
    app.run(main)
