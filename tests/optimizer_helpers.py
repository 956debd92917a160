"""What the tests of the optimizer rooms share: every Keras optimizer, and runs side by side.

A run applies a table of gradients, one row per step, in one of three modes. The reference is
Keras' own `apply` on dense gradients, run in the same mode, since modes differ by rounding.
"""

import keras
import numpy as np
import tensorflow as tf
from since import MUON, SCHEDULE_FREE, has

import tfloop
from tfloop import GradientsParams

STEPS = 50
RATE = 0.01
MODES = ("eager", "graph", "jit")
ROWS = 6
IDS = np.array([[0, 2, 2, 5], [1, 1, 1, 4], [5, 0, 3, 3]], np.int32)  # repeated; not all rows

# Every optimizer that Keras has, with the arguments that give it the most state.
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(RATE),
    "momentum": lambda: keras.optimizers.SGD(RATE, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(RATE, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda: keras.optimizers.Adam(RATE),
    "amsgrad": lambda: keras.optimizers.Adam(RATE, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda: keras.optimizers.AdamW(RATE, weight_decay=0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(RATE),
    "centered": lambda: keras.optimizers.RMSprop(RATE, momentum=0.9, centered=True),
    "Adagrad": lambda: keras.optimizers.Adagrad(RATE),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "Adafactor": lambda: keras.optimizers.Adafactor(RATE),
    "Adamax": lambda: keras.optimizers.Adamax(RATE),
    "Nadam": lambda: keras.optimizers.Nadam(RATE),
    "Ftrl": lambda: keras.optimizers.Ftrl(RATE, l1_regularization_strength=0.001, beta=0.1),
    "Lion": lambda: keras.optimizers.Lion(RATE, weight_decay=0.1),
    "Lamb": lambda: keras.optimizers.Lamb(RATE, weight_decay=0.1),
    "Muon": lambda: keras.optimizers.Muon(RATE, exclude_embeddings=False),
    "ScheduleFreeAdamW": lambda: keras.optimizers.ScheduleFreeAdamW(RATE, weight_decay=0.1),
}
for name, release in {"Muon": MUON, "ScheduleFreeAdamW": SCHEDULE_FREE}.items():
    if not has(release):
        del OPTIMIZERS[name]
# Those that update many small variables as one vector.
ELEMENTWISE = [name for name in OPTIMIZERS if name not in ("Adafactor", "Lamb", "Muon")]
# Those that stand for a kind of rule, where all classes would take too long.
KINDS = [name for name in ("momentum", "AdamW", "Nadam", "Ftrl", "Muon") if name in OPTIMIZERS]


class Words(keras.Model):
    """An embedding, a matrix and a vector: `embedding.embeddings`, `dense.kernel`, `dense.bias`."""

    def __init__(self, dtype="float32"):
        super().__init__()
        self.embedding = keras.layers.Embedding(ROWS, 4, dtype=dtype)
        self.dense = keras.layers.Dense(3, dtype=dtype)
        self.more = self.further_layers(dtype)
        self(np.zeros((1, 2), np.int32))
        rng = np.random.default_rng(0)
        for variable in self.weights:
            variable.assign(rng.normal(size=variable.shape))

    def further_layers(self, dtype):
        return []

    def call(self, ids):
        x = self.dense(self.embedding(ids))
        for layer in self.more:
            x = layer(x)
        return x


class Many(Words):
    """So many small variables that elementwise rules update them as one vector."""

    def further_layers(self, dtype):
        return [keras.layers.Dense(size, dtype=dtype) for size in (2, 5, 1)]


def gradient_table(model, steps=STEPS, seed=1, sparse=True):
    """Path -> a row per step: (indices, values) for the embedding, else dense values."""
    rng = np.random.default_rng(seed)
    table = {}
    for path, variable in tfloop.named_parameters(model).items():
        shape = tuple(variable.shape)
        if sparse and path.endswith("embeddings"):
            ids = np.tile(IDS, (steps // len(IDS) + 1, 1))[:steps]
            values = rng.normal(size=(steps, ids.shape[1], shape[1]))
            table[path] = (tf.constant(ids), tf.constant(values, variable.dtype))
        else:
            table[path] = tf.constant(rng.normal(size=(steps, *shape)), variable.dtype)
    return table


def row_of(table, step, dense=False):
    """Path -> the gradient of one step."""
    grads = {}
    for path, rows in table.items():
        if isinstance(rows, tuple):
            shape = tf.constant([ROWS, rows[1].shape[-1]])
            grad = tf.IndexedSlices(rows[1][step], rows[0][step], shape)
            grads[path] = tf.convert_to_tensor(grad) if dense else grad
        else:
            grads[path] = rows[step]
    return grads


def repeat(step, mode, steps=STEPS):
    """Runs `step(i)` for every i in one of the modes."""

    def loop():
        for i in tf.range(steps):
            step(i)

    if mode == "eager":
        for i in range(steps):
            step(i)
    else:
        tf.function(loop, jit_compile=mode == "jit")()


def run_tfloop(optim, model, table, mode, lr=RATE, steps=STEPS):
    optim.build(model)
    repeat(lambda i: optim.step(lr, model, GradientsParams(row_of(table, i))), mode, steps)
    return values_of(model)


def run_keras(optimizers, model, table, mode, steps=STEPS):
    """The hand-split loop: [(optimizer, its paths), ...]."""
    named = tfloop.named_parameters(model)
    for optimizer, paths in optimizers:
        optimizer.build([named[path] for path in paths])

    def step(i):
        grads = row_of(table, i, dense=True)
        for optimizer, paths in optimizers:
            optimizer.apply([grads[path] for path in paths], [named[path] for path in paths])

    repeat(step, mode, steps)
    return values_of(model)


def values_of(model):
    return {path: v.numpy().copy() for path, v in tfloop.named_variables(model).items()}


def assert_close(found, expected, tolerance=1e-6):
    """Equal to a fraction of each tensor's norm."""
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        distance = np.linalg.norm(np.asarray(found[path], "f8") - np.asarray(value, "f8"))
        assert distance <= tolerance * np.linalg.norm(np.asarray(value, "f8")), (path, distance)


def assert_equal(found, expected):
    """Equal to the last bit."""
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
