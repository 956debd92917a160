"""Fine-tune a network with groups: a frozen stem, a rate per depth, no decay for norms and biases.

A small MobileNetV2 first learns the digits 0 to 4. Then it is fine-tuned on the digits 5 to 9, in
the way people fine-tune large networks:

* the stem is frozen (`layer.trainable = False`, seen by the compiled step);
* the deeper a block lies below the head, the smaller its rate (`ModuleLearningRate`);
* norms and biases aren't decayed (a second AdamW, by `with_group`).

It prints the table of who updates what, and the accuracy beside that of a network that was trained
from scratch on the same few samples.

    python examples/finetune.py --quick
"""

import re

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits

import tfloop

_EPOCHS = flags.DEFINE_integer("epochs", 30, "Epochs of fine-tuning.", lower_bound=1)
_SAMPLES = flags.DEFINE_integer("samples", 100, "Samples to fine-tune on.", lower_bound=10)
_LR = flags.DEFINE_float("lr", 2e-3, "Rate of the head; blocks below take less.", lower_bound=0.0)
_DEPTH_DECAY = flags.DEFINE_float("depth_decay", 0.9, "Factor of the rate from block to block.")
_QUICK = flags.DEFINE_bool("quick", False, "A few epochs, to see that everything works.")

_BLOCKS = 6  # of MobileNetV2's 17: what 32 x 32 pixels can feed


def load(classes: range) -> tuple[np.ndarray, np.ndarray]:
    """The real 8x8 digits of some classes: (n, 32, 32, 3) images in [-1, 1], labels from 0."""
    digits = load_digits()
    chosen = np.isin(digits.target, classes)
    images = digits.images[chosen].astype("float32")[..., np.newaxis] / 8.0 - 1.0
    images = tf.image.resize(images, (32, 32)).numpy().repeat(3, axis=-1)
    return images, (digits.target[chosen] - classes.start).astype("int32")


def build_model() -> keras.Model:
    """The first blocks of a narrow MobileNetV2, with a head for five classes."""
    backbone = keras.applications.MobileNetV2(
        input_shape=(32, 32, 3), alpha=0.35, include_top=False, weights=None
    )
    for layer in backbone.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.9  # 0.999 would need thousands of steps to forget its start
    features = backbone.get_layer(f"block_{_BLOCKS - 1}_add").output
    pooled = keras.layers.GlobalAveragePooling2D()(features)
    return keras.Model(backbone.input, keras.layers.Dense(5, name="head")(pooled))


def make_step(net: keras.Model, optim: tfloop.ModuleOptimizer):
    """The usual step; rates go in as an argument and cost no retrace."""
    model = tfloop.train(net)

    @tfloop.compile
    def step(images, labels, rates):
        with tfloop.Tape() as tape:
            logits = model(images)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        grads = tape.backward(loss, model)
        optim.step(rates, model, grads)
        return loss

    return step


def fit(step, data, rates, epochs: int) -> None:
    """Runs the step over shuffled batches."""
    for images, labels in (batch for _ in range(epochs) for batch in data):
        step(images, labels, rates)


def accuracy(net: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """The share of images that are classified right, in inference mode."""
    logits = tfloop.valid(net)(images)
    return float(np.mean(np.argmax(logits, axis=-1) == labels))


def adamw_without_decay_of_norms() -> tfloop.ModuleOptimizer:
    """One AdamW for everything, and one without decay for norms and biases."""
    plain = tfloop.ParamGroup.from_name("bias", "gamma", "beta")
    optim = tfloop.ModuleOptimizer(
        keras.optimizers.AdamW(weight_decay=0.05),
        clipping=tfloop.GradientClipping.by_global_norm(5.0),
    )
    return optim.with_group(plain, keras.optimizers.AdamW(weight_decay=0.0))


def depth_of(path: str) -> int:
    """0 for the head, 1 for the last block, and so on down to the stem."""
    if path.startswith("head"):
        return 0
    block = re.match(r"block_(\d+)_", path)
    return _BLOCKS - int(block[1]) if block else _BLOCKS


def rates_by_depth(net: keras.Model) -> tfloop.ModuleLearningRate:
    """The base rate times `depth_decay` to the power of the depth."""
    rates = tfloop.ModuleLearningRate(_LR.value)
    for depth in sorted({depth_of(path) for path in tfloop.named_parameters(net)}):
        group = tfloop.ParamGroup.from_predicate(
            lambda path, _, depth=depth: depth_of(path) == depth
        )
        rates = rates.with_group(group, multiplier=_DEPTH_DECAY.value**depth)
    return rates


def freeze_stem(net: keras.Model) -> None:
    """Freezes everything before block_1: weights, and the statistics of its norms."""
    for layer in net.layers:
        if layer.name.startswith(("Conv1", "bn_Conv1", "expanded_conv")):
            layer.trainable = False


def main(_: list[str]) -> None:
    """Pretrains, fine-tunes, and compares."""
    tfloop.seed(0)
    epochs = 5 if _QUICK.value else _EPOCHS.value

    net = build_model()
    pretraining = tfloop.DataLoader(load(range(0, 5)), batch_size=64, shuffle=0)
    fit(make_step(net, adamw_without_decay_of_norms()), pretraining, 3e-3, 4 if _QUICK.value else 8)

    images, labels = load(range(5, 10))
    few, rest = slice(None, _SAMPLES.value), slice(_SAMPLES.value, None)
    data = tfloop.DataLoader((images[few], labels[few]), batch_size=20, shuffle=1)

    freeze_stem(net)
    optim = adamw_without_decay_of_norms()
    optim.summary(net)
    fit(make_step(net, optim), data, rates_by_depth(net), epochs)

    scratch = build_model()
    fit(make_step(scratch, adamw_without_decay_of_norms()), data, _LR.value, epochs)

    tuned, alone = (accuracy(model, images[rest], labels[rest]) for model in (net, scratch))
    print(f"{_SAMPLES.value} samples of the digits 5 to 9, {epochs} epochs:")
    print(f"  fine-tuned    accuracy {100 * tuned:.1f} %")
    print(f"  from scratch  accuracy {100 * alone:.1f} %")


if __name__ == "__main__":
    app.run(main)
