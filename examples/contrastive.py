"""Contrastive learning: features without labels, from negatives within the batch (InfoNCE).

Each 8 x 8 digit is distorted twice. The projections of the two are to be alike, and unlike those of
all other digits of the batch. The root is a dict of an encoder, which is kept, and of a projector,
which is only there for the loss.

It prints the accuracy of a linear classifier that learns from `--labels` digits: on their pixels,
on the features of the encoder before training, and on those after.

    python examples/contrastive.py --quick --strategy cpu:2
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import tfloop

_EPOCHS = flags.DEFINE_integer("epochs", 100, "Passes over the digits.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 128, "Digits that are told apart.", 2, 1200)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.2, "Small ones look at near negatives.", 0.01)
_LABELS = flags.DEFINE_integer("labels", 50, "Labels for the linear classifier.", 10, 1200)
_LR = flags.DEFINE_float("lr", 1e-3, "Learning rate.", lower_bound=0.0)
_STRATEGY = flags.DEFINE_string("strategy", "auto", "Devices: auto, cpu, cpu:2, gpu, tpu.")
_QUICK = flags.DEFINE_bool("quick", False, "A few epochs, to see that everything works.")


def build_networks() -> dict[str, keras.Model]:
    """Images `[B, 8, 8, 1]` to features `[B, 128]`, and features to projections `[B, 32]`."""
    layers = keras.layers
    encoder = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(128, "relu"),
        ]
    )
    projector = keras.Sequential([keras.Input((128,)), layers.Dense(64, "relu"), layers.Dense(32)])
    return {"encoder": encoder, "projector": projector}


def build_distortion() -> keras.Model:
    """Moves, turns and scales each image a little and adds noise; each by its own draw."""
    layers = keras.layers
    options = {"fill_mode": "constant", "fill_value": 0.0}
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.RandomTranslation(0.15, 0.15, **options),
            layers.RandomRotation(0.08, **options),
            layers.RandomZoom(0.2, 0.2, **options),
            layers.GaussianNoise(0.1),
        ]
    )


def gather(features) -> tf.Tensor:
    """The features of the whole batch.

    On several replicas each sees a part of the batch. The digits of the others are negatives, too:
    with those of its own part alone, more replicas would make an easier task.
    """
    context = tf.distribute.get_replica_context()
    if context and context.num_replicas_in_sync > 1:
        features = context.all_gather(features, axis=0)
    return features


def contrast(features, others) -> tf.Tensor:
    """How well each row of `[B, D]` finds its partner among the others of the whole batch.

    logsumexp_j(f_i o_j / temperature) - f_i o_i / temperature, the mean over i
    """
    similarity = tf.matmul(features, gather(others), transpose_b=True) / _TEMPERATURE.value
    partner = tf.reduce_sum(features * others, axis=1) / _TEMPERATURE.value
    return tf.reduce_mean(tf.reduce_logsumexp(similarity, axis=1) - partner)


def make_step(networks: dict[str, keras.Model], distortion: keras.Model, strategy):
    """A step on a batch of images, without labels; each replica gets its share."""
    model, distort = tfloop.train(networks), tfloop.train(distortion)  # the first: a dict of views
    optim = tfloop.ModuleOptimizer(keras.optimizers.Adam())

    @tfloop.compile(strategy=strategy)
    def step(images, lr):
        first, second = distort(images), distort(images)
        with tfloop.Tape() as tape:
            first, second = (
                tf.math.l2_normalize(model["projector"](model["encoder"](view)), axis=1)
                for view in (first, second)
            )
            loss = (contrast(first, second) + contrast(second, first)) / 2.0
        optim.step(lr, model, tape.backward(loss, model))
        return loss

    return step


def probe(features: np.ndarray, labels: np.ndarray) -> float:
    """The accuracy in percent of a linear classifier that sees the first labels, on the last."""
    few, held_out = slice(None, _LABELS.value), slice(1200, None)
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    classifier.fit(features[few], labels[few])
    return 100.0 * classifier.score(features[held_out], labels[held_out])


def main(_: list[str]) -> None:
    """Trains the encoder, and probes it before and after."""
    strategy = tfloop.strategy(_STRATEGY.value)  # before TensorFlow is used
    tfloop.seed(0)
    epochs = 15 if _QUICK.value else _EPOCHS.value
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16.0).astype("float32")
    data = tfloop.DataLoader(images[:1200], batch_size=_BATCH.value, shuffle=0, drop_last=True)

    with strategy.scope():  # on one device it changes nothing
        networks, distortion = build_networks(), build_distortion()
    encoder = tfloop.valid(networks["encoder"])
    features = {"pixels": digits.data, "untrained encoder": encoder(images).numpy()}

    step = make_step(networks, distortion, strategy)
    for batch in (batch for _ in range(epochs) for batch in data):
        step(batch, _LR.value)
    features["trained encoder"] = encoder(images).numpy()

    print(f"A linear classifier from {_LABELS.value} labels, {epochs} epochs without any:")
    for name, found in features.items():
        print(f"  {name:<17}  accuracy {probe(found, digits.target):.1f} %")


if __name__ == "__main__":
    app.run(main)
