"""Groups inside Keras' `fit`: `ModuleOptimizer.as_keras` in the place of an optimizer.

A small network learns scikit-learn's digits. Norms and biases aren't decayed, the head has a rate
and a clipping of its own. The rest is plain Keras: `compile`, `fit`, a callback that lowers the
rates (all of them, in proportion), and one that keeps the best model in a `.keras` file, which
knows the groups when it is loaded and trained on.

    python examples/keras_fit.py --quick
"""

import os
import tempfile

import keras
import numpy as np
from absl import app, flags
from sklearn.datasets import load_digits

import tfloop

_EPOCHS = flags.DEFINE_integer("epochs", 15, "Epochs of training.", lower_bound=1)
_LR = flags.DEFINE_float("lr", 3e-3, "Rate of the network; the head takes three times as much.")
_QUICK = flags.DEFINE_bool("quick", False, "A few epochs, to see that everything works.")


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The real 8x8 digits, (n, 8, 8, 1) in [-1, 1] with their labels; every fifth is for tests."""
    digits = load_digits()
    images = digits.images[..., np.newaxis].astype("float32") / 8.0 - 1.0
    is_test = np.arange(len(images)) % 5 == 4
    return (images[~is_test], digits.target[~is_test]), (images[is_test], digits.target[is_test])


def build_model() -> keras.Model:
    """Two convolutions with norms, and a head for ten classes."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.Conv2D(32, 3, activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10, name="head"),
        ]
    )


def build_optimizer() -> tfloop.ModuleOptimizer:
    """AdamW, without decay for norms and biases, with a rate and a clipping for the head."""
    optim = tfloop.ModuleOptimizer(keras.optimizers.AdamW(_LR.value, weight_decay=0.05))
    plain = tfloop.ParamGroup.from_name("bias", "gamma", "beta")
    optim.with_group(plain, keras.optimizers.AdamW(_LR.value, weight_decay=0.0))
    return optim.with_group(
        tfloop.ParamGroup.from_path("head.kernel"),
        keras.optimizers.AdamW(3 * _LR.value, weight_decay=0.05),
        tfloop.GradientClipping.by_norm(1.0),
    )


def main(_: list[str]) -> None:
    """Trains, loads the best model, and trains that one on."""
    tfloop.seed(0)
    train, test = load()
    model, optim = build_model(), build_optimizer()
    optim.summary(model)
    model.compile(
        optimizer=optim.as_keras(model),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    with tempfile.TemporaryDirectory() as folder:
        best = os.path.join(folder, "best.keras")
        callbacks = [
            keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True),
            keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.3, patience=2),
        ]
        model.fit(
            *train,
            batch_size=64,
            epochs=4 if _QUICK.value else _EPOCHS.value,
            validation_data=test,
            callbacks=callbacks,
            verbose=2,
        )
        loaded = keras.models.load_model(best)

    before = loaded.evaluate(*test, verbose=0, return_dict=True)
    loaded.fit(*train, batch_size=64, epochs=1, verbose=0)  # with the groups it was saved with
    after = loaded.evaluate(*test, verbose=0, return_dict=True)
    print(f"best model   accuracy {100 * before['accuracy']:.1f} %")
    print(f"an epoch on  accuracy {100 * after['accuracy']:.1f} %")


if __name__ == "__main__":
    app.run(main)
