"""What is trained: models, optimizers, and random data of the right shapes.

Everything follows from fixed seeds, so that all variants begin with the same weights and see the
same batches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfloop

RATE = 1e-3
NO_DECAY = ("bias", "gamma", "beta")

layers = keras.layers


@dataclasses.dataclass(frozen=True)
class Data:
    """Batches in memory: `x` and `y` as whole arrays, and cut into tensors of `batch_size` rows."""

    x: np.ndarray
    y: np.ndarray
    batch_size: int

    @functools.cached_property
    def batches(self) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """The batches in order, ready to be passed to a step."""
        cuts = range(0, len(self.x), self.batch_size)
        x, y = (
            [tf.constant(array[cut : cut + self.batch_size]) for cut in cuts]
            for array in (self.x, self.y)
        )
        return list(zip(x, y, strict=True))

    def dataset(self) -> tf.data.Dataset:
        """The same batches from `tf.data`."""
        dataset = tf.data.Dataset.from_tensor_slices((self.x, self.y))
        return dataset.batch(self.batch_size).prefetch(tf.data.AUTOTUNE)

    def loader(self) -> tfloop.DataLoader:
        """The same batches from ours."""
        return tfloop.DataLoader((self.x, self.y), batch_size=self.batch_size)


@dataclasses.dataclass(frozen=True)
class Task:
    """A classification: a model, its optimizer, and how to draw inputs.

    Attributes:
      build: Makes the model; its outputs are logits.
      draw: `draw(rng, rows)` -> inputs, an array of so many rows.
      classes: Targets are whole numbers below this.
      batch_size: Rows of a batch; of a micro-batch where gradients are accumulated.
      micro_batches: Batches behind one update.
      weight_decay: None is Adam; otherwise AdamW, which spares biases and norms.
    """

    build: Callable[[], keras.Model]
    draw: Callable[[np.random.Generator, int], np.ndarray]
    classes: int
    batch_size: int
    micro_batches: int = 1
    weight_decay: float | None = None

    def model(self) -> keras.Model:
        """A new model, with the same weights every time."""
        keras.utils.set_random_seed(0)
        return self.build()

    def data(self, updates: int) -> Data:
        """The batches of so many updates."""
        rows = updates * self.micro_batches * self.batch_size
        # A generator for each, so that fewer updates get the first of the same batches.
        x = self.draw(np.random.default_rng(0), rows)
        y = np.random.default_rng(1).integers(self.classes, size=rows).astype("int32")
        return Data(x, y, self.batch_size)

    def keras_optimizer(self, **options: int) -> keras.optimizers.Optimizer:
        """One Keras optimizer that does everything."""
        if self.weight_decay is None:
            return keras.optimizers.Adam(RATE, **options)
        optimizer = keras.optimizers.AdamW(RATE, weight_decay=self.weight_decay, **options)
        optimizer.exclude_from_weight_decay(var_names=list(NO_DECAY))
        return optimizer

    def tfloop_optimizer(self, **options: Any) -> tfloop.ModuleOptimizer:
        """The same with tfloop: decay is a matter of groups."""
        if self.weight_decay is None:
            return tfloop.ModuleOptimizer(keras.optimizers.Adam(RATE), **options)
        decaying, sparing = (
            keras.optimizers.AdamW(RATE, weight_decay=decay) for decay in (self.weight_decay, 0.0)
        )
        words = tfloop.ParamGroup.from_name(*NO_DECAY)
        return tfloop.ModuleOptimizer(decaying, **options).with_group(words, sparing)


def _cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28)),
            layers.Reshape((28, 28, 1)),
            layers.Conv2D(8, 3),
            layers.Dropout(0.5, seed=1),
            layers.Conv2D(16, 3),
            layers.Dropout(0.5, seed=2),
            layers.ReLU(),
            layers.AveragePooling2D(3),
            layers.Flatten(),
            layers.Dense(512),
            layers.Dropout(0.5, seed=3),
            layers.ReLU(),
            layers.Dense(10),
        ]
    )


def _mlp() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(64, "relu"),
            layers.Dense(32, "relu"),
            layers.Dense(10),
        ]
    )


def _transformer() -> keras.Model:
    """100 variables."""
    tokens = keras.Input((32,), dtype="int32")
    x = layers.Embedding(1024, 64)(tokens)
    for _ in range(6):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(num_heads=4, key_dim=16)(y, y)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(64)(layers.Dense(256, "relu")(y))
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(tokens, layers.Dense(10, use_bias=False)(x))


def _large_embedding() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((32,), dtype="int32"),
            layers.Embedding(50_000, 64),
            layers.GlobalAveragePooling1D(),
            layers.Dense(10),
        ]
    )


def _narrow(variables: int) -> keras.Model:
    """A residual chain of small dense layers, each with two variables."""
    x = inputs = keras.Input((16,))
    for _ in range(variables // 2):
        x = x + layers.Dense(16, "tanh", kernel_initializer="zeros")(x)
    return keras.Model(inputs, x)


def _normal(*shape: int) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, rows: rng.normal(size=(rows, *shape)).astype("float32")


def _distinct_ids(rng: np.random.Generator, rows: int) -> np.ndarray:
    """No id twice in a batch: there Keras' Adam isn't the Adam of the dense gradient.

    It adds the squares of repeated rows instead of squaring their sum, so P1 would do other work.
    """
    blocks = [rng.permutation(1024).reshape(32, 32) for _ in range(0, rows, 32)]
    return np.concatenate(blocks)[:rows].astype("int32")


def _repeated_ids(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Word frequencies of a natural language, roughly: few ids make most of the text."""
    return (rng.zipf(1.2, size=(rows, 32)) % 50_000).astype("int32")


def _pixels(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.integers(256, size=(rows, 28, 28), dtype="uint8")


MNIST = Task(_cnn, _normal(28, 28), 10, batch_size=64)
MNIST_8 = dataclasses.replace(MNIST, micro_batches=8)
MLP = Task(_mlp, _normal(64), 10, batch_size=32)
TRANSFORMER = Task(_transformer, _distinct_ids, 10, batch_size=16, weight_decay=0.01)
TRANSFORMER_8 = dataclasses.replace(TRANSFORMER, micro_batches=8)
EMBEDDING = Task(_large_embedding, _repeated_ids, 10, batch_size=32, micro_batches=4)
IMAGES = Task(lambda: None, _pixels, 10, batch_size=64)  # There is nothing to train.


def narrow(variables: int) -> Task:
    """A network of so many small variables."""
    return Task(functools.partial(_narrow, variables), _normal(16), 16, batch_size=16)
