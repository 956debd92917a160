"""Mean teacher: the moving average of a student's weights teaches the student.

`--labels` digits have a label, the others have none. The student sees each image with noise and
dropout, and is to agree with what the teacher says of the image as it is. The teacher is never
trained: after each step `tfloop.blend` moves it a little towards the student, so it is an average
of the students so far, the last ones above all.

It prints the accuracy of the same network trained on the labels alone, of the student, and of its
teacher.

    python examples/ema_teacher.py --quick
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tfloop

_EPOCHS = flags.DEFINE_integer("epochs", 100, "Passes over the images.", lower_bound=1)
_LABELS = flags.DEFINE_integer("labels", 50, "Images that have a label.", 10, 1200)
_MOMENTUM = flags.DEFINE_float("momentum", 0.95, "Of the teacher: 0 copies the student.", 0.0, 1.0)
_CONSISTENCY = flags.DEFINE_float("consistency", 30.0, "Weight of agreeing with the teacher.")
_LR = flags.DEFINE_float("lr", 2e-3, "Learning rate.", lower_bound=0.0)
_QUICK = flags.DEFINE_bool("quick", False, "A few epochs, to see that everything works.")


def build_model() -> keras.Model:
    """64 pixels in, logits for ten classes out; noise and dropout only where it trains."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.GaussianNoise(0.2),
            layers.Dense(128, "relu"),
            layers.Dropout(0.3),
            layers.Dense(64, "relu"),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )


def make_step(net: keras.Model, teacher: keras.Model, few, consistency: float):
    """A step on all labels and, by the teacher, on a batch without."""
    model = tfloop.train(net)
    optim = tfloop.ModuleOptimizer(keras.optimizers.Adam())
    pixels, labels = few

    @tfloop.compile
    def step(unlabelled, lr):
        with tfloop.Tape() as tape:
            logits = model(pixels)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            # The teacher's answer is a target: a `valid()` view puts nothing of it on the tape.
            answer = tf.nn.softmax(tfloop.valid(teacher)(unlabelled))
            apart = tf.nn.softmax(model(unlabelled)) - answer
            loss += consistency * tf.reduce_mean(apart**2)
        optim.step(lr, model, tape.backward(loss, model))
        tfloop.blend(teacher, model, rate=1.0 - _MOMENTUM.value)

    return step


def accuracy(net: keras.Model, pixels: np.ndarray, labels: np.ndarray) -> float:
    """The share of images that are classified right, in percent."""
    logits = tfloop.valid(net)(pixels)
    return 100.0 * float(np.mean(np.argmax(logits, axis=-1) == labels))


def main(_: list[str]) -> None:
    """Trains with and without the images that have no label."""
    epochs = 20 if _QUICK.value else _EPOCHS.value
    digits = load_digits()
    pixels = (digits.data / 16.0).astype("float32")
    labels = digits.target.astype("int32")
    held_out = pixels[1200:], labels[1200:]
    few = pixels[: _LABELS.value], labels[: _LABELS.value]

    def fit(consistency: float) -> tuple[keras.Model, keras.Model]:
        tfloop.seed(0)
        student, teacher = build_model(), build_model()
        tfloop.blend(teacher, student)  # a copy, to begin with
        step = make_step(student, teacher, few, consistency)
        data = tfloop.DataLoader(pixels[:1200], batch_size=50, shuffle=0)
        for batch in (batch for _ in range(epochs) for batch in data):
            step(batch, _LR.value)
        return student, teacher

    alone, _ = fit(consistency=0.0)
    student, teacher = fit(_CONSISTENCY.value)
    print(f"{_LABELS.value} labels, {epochs} epochs:")
    for name, net in ("labels alone", alone), ("student", student), ("teacher", teacher):
        print(f"  {name:<12}  accuracy {accuracy(net, *held_out):.1f} %")


if __name__ == "__main__":
    app.run(main)
