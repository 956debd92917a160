"""Train two tasks over one trunk: two batches, two backward passes, one update.

Few digits are labelled with the number they show (`--labels` of them). All are labelled with
something cheap: is it below 5, and is it odd? Each task has its own data, its own graph and its own
backward pass. `merge` joins their gradients: the sum where both have one, so in the trunk, and
each head's own. Then one optimizer steps, with a group for each head.

It prints who updates what, and the accuracy on numbers with the cheap task and without.

    python examples/multitask.py --quick
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tfloop

_EPOCHS = flags.DEFINE_integer("epochs", 60, "Passes over the cheap labels.", lower_bound=1)
_LABELS = flags.DEFINE_integer("labels", 50, "Digits labelled with their number.", 10, 1200)
_LR = flags.DEFINE_float("lr", 2e-3, "Learning rate.", lower_bound=0.0)
_QUICK = flags.DEFINE_bool("quick", False, "A few epochs, to see that everything works.")


def build_network() -> dict[str, keras.Model]:
    """A trunk for 64 pixels, a head for the number, and one for the two cheap questions."""
    dense, features = keras.layers.Dense, keras.Input((64,))
    return {
        "trunk": keras.Sequential([keras.Input((64,)), dense(128, "relu"), dense(64, "relu")]),
        "number": keras.Sequential([features, dense(10)]),
        "cheap": keras.Sequential([features, dense(2)]),
    }


def loss_of_number(model, pixels, numbers) -> tf.Tensor:
    """The mean over a batch, of ten classes."""
    logits = model["number"](model["trunk"](pixels))
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(numbers, logits))


def loss_of_cheap(model, pixels, answers) -> tf.Tensor:
    """The mean over a batch, of two questions with yes or no."""
    logits = model["cheap"](model["trunk"](pixels))
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(answers, logits))


def make_optimizer() -> tfloop.ModuleOptimizer:
    """Adam for the trunk; for each head one of its own, with decay where labels are few."""
    optim = tfloop.ModuleOptimizer(keras.optimizers.Adam())
    number, cheap = (tfloop.ParamGroup.from_name(head) for head in ("number", "cheap"))
    optim.with_group(number, keras.optimizers.AdamW(weight_decay=0.1))
    return optim.with_group(cheap, keras.optimizers.Adam())


def make_step(networks, optim: tfloop.ModuleOptimizer, few, with_cheap: bool):
    """A step on all digits with a number, and on a batch of the cheap task."""
    model = tfloop.train(networks)  # a dict of views

    @tfloop.compile
    def step(pixels, answers, lr):
        with tfloop.Tape() as tape:
            loss = loss_of_number(model, *few)
        grads = tape.backward(loss, model)
        if with_cheap:
            with tfloop.Tape() as tape:
                loss = loss_of_cheap(model, pixels, answers)
            cheap = tape.backward(loss, model)
            grads = grads.merge(cheap)
        optim.step(lr, model, grads)  # a head without a gradient stays untouched

    return step


def main(_: list[str]) -> None:
    """Trains with and without the cheap task."""
    epochs = 15 if _QUICK.value else _EPOCHS.value
    digits = load_digits()
    pixels = (digits.data / 16.0).astype("float32")
    numbers = digits.target.astype("int32")
    answers = np.stack([numbers < 5, numbers % 2 == 1], axis=1).astype("float32")
    few = pixels[: _LABELS.value], numbers[: _LABELS.value]

    results = {}
    for name, with_cheap in ("number alone", False), ("both tasks", True):
        tfloop.seed(0)
        networks, optim = build_network(), make_optimizer()
        if with_cheap:
            optim.summary(networks)
        data = tfloop.DataLoader((pixels[:1200], answers[:1200]), batch_size=50, shuffle=0)
        step = make_step(networks, optim, few, with_cheap)
        for batch in (batch for _ in range(epochs) for batch in data):
            step(*batch, _LR.value)
        model = tfloop.valid(networks)
        logits = model["number"](model["trunk"](pixels[1200:]))
        results[name] = np.mean(np.argmax(logits, axis=-1) == numbers[1200:])

    print(f"{_LABELS.value} digits with a number, {epochs} epochs:")
    for name, accuracy in results.items():
        print(f"  {name:<12}  accuracy {100 * accuracy:.1f} %")


if __name__ == "__main__":
    app.run(main)
