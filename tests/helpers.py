"""What several tests share: a registry of models that people write, and how to compare them.

`ZOO` maps a name to a `Case`. A case builds its model anew on every call, in the dtype that is
set when it is called, so that twins can be trained side by side.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import sonnet as snt
import tensorflow as tf

import tfloop

layers = keras.layers


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, an input, and where its variables are without tfloop's help.

    Attributes:
      build: Makes the built model.
      x: Makes the input.
      call: (model, input, training) -> outputs; on a view, without a flag.
      parameters: The trainable variables in any order, found by hand.
      is_random: Does its output depend on seeds?
      xla: Can XLA compile it?
      clones: Does `keras.models.clone_model` copy it?
    """

    build: Callable[[], Any]
    x: Callable[[], Any]
    call: Callable[..., Any] = lambda model, x, **flag: model(x, **flag)
    parameters: Callable[[Any], list[Any]] = lambda model: model.trainable_variables
    is_random: bool = False
    xla: bool = True
    clones: bool = True
    heavy: bool = False


ZOO: dict[str, Case] = {}


def case(**options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Enters a function that builds a model into the registry, under its own name."""

    def enter(build: Callable[[], Any]) -> Callable[[], Any]:
        ZOO[build.__name__] = Case(build, **({"x": lambda: rows(4, 3)} | options))
        return build

    return enter


def rows(*shape: int) -> tf.Tensor:
    """A fixed input of the dtype that is set, away from zero and of both signs."""
    values = np.cos(1.7 * np.arange(np.prod(shape)) + 0.3).reshape(shape)
    return tf.constant(values, keras.config.floatx())


def tokens(*shape: int) -> tf.Tensor:
    """Numbers 0 to 4, with repetitions."""
    return tf.constant((np.arange(np.prod(shape)) * 3 % 5).reshape(shape), tf.int32)


@contextlib.contextmanager
def floating(dtype: str) -> Iterator[None]:
    """Builds everything inside in a dtype."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


def fill(model: Any) -> None:
    """Gives every variable a fixed value that depends on its path; floating ones are small."""
    for path, variable in tfloop.named_variables(model).items():
        dtype = tf.as_dtype(variable.dtype)
        if path.endswith("seed_generator.state"):
            variable.assign(tf.constant([len(path), 0], dtype))
        if dtype.is_floating:
            shift = sum(map(ord, path))
            values = np.sin(0.7 * np.arange(np.prod(variable.shape)) + shift)
            if re.search("variance|gamma", path):
                values = 2.5 + 0.1 * np.abs(values)
            scale = 0.8 / max(2.0, np.sqrt(np.prod(variable.shape[:-1])))
            variable.assign(tf.constant(scale * values.reshape(variable.shape), dtype))


def values(model: Any) -> dict[str, np.ndarray]:
    """The values of all variables by path."""
    return {path: read(variable) for path, variable in tfloop.named_variables(model).items()}


def read(variable: Any) -> np.ndarray:
    """A variable's value, a copy."""
    return tf.convert_to_tensor(variable).numpy().copy()


def assert_close(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray], rtol: float) -> None:
    """Each tensor within `rtol` of its norm."""
    assert list(got) == list(wanted)
    for path, value in wanted.items():
        gap = np.linalg.norm((got[path] - value).ravel().astype(np.float64))
        norm = np.linalg.norm(value.ravel().astype(np.float64))
        assert gap <= rtol * max(norm, 1e-3), f"{path}: {gap} of {norm}"


def loss_of(outputs: Any) -> tf.Tensor:
    """A scalar that depends on every element of every output, unevenly."""
    total = 0.0
    for output in tf.nest.flatten(outputs):
        weight = tf.reshape(tf.range(1, tf.size(output) + 1), tf.shape(output))
        total += tf.reduce_mean(tf.square(output - 0.1 * tf.cast(weight, output.dtype)))
    return total


def in_every_mode(fn: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The function as it is, as a `tf.function`, and compiled by XLA."""
    return {
        "eager": fn,
        "graph": tf.function(fn),
        "jit": tf.function(fn, jit_compile=True),
    }


def message(*parts: str) -> str:
    """A pattern that finds these texts in this order."""
    return "(?s)" + ".*".join(map(re.escape, parts))


# The models. Names of functions are the names in the registry.


@case()
def sequential():
    return keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2), layers.Dense(2, name="head")]
    )


@case()
def functional():
    x = keras.Input((3,))
    left, right = layers.Dense(4)(x), layers.Dense(4, "tanh")(x)
    return keras.Model(x, [layers.Dense(2)(layers.add([left, right])), right])


@case()
def nested_functional():
    inner = keras.Input((4,))
    encoder = keras.Model(inner, layers.Dense(3, "tanh")(inner), name="encoder")
    x = keras.Input((3,))
    return keras.Model(x, layers.Dense(2)(encoder(layers.Dense(4)(x))))


@case(clones=False)
def functional_subclass():
    class Net(keras.Model):
        def __init__(self):
            x = keras.Input((3,))
            hidden = layers.Dense(4, "tanh")
            super().__init__(x, layers.Dense(2)(hidden(x)))
            self.trunk = hidden

    return Net()


class Block(layers.Layer):
    def __init__(self, units, **options):
        super().__init__(**options)
        self.dense = layers.Dense(units, "tanh")
        self.norm = layers.LayerNormalization()

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build(self.dense.compute_output_shape(shape))

    def call(self, x):
        return self.norm(self.dense(x))


def built(model: Any, x: Any = None) -> Any:
    """The model after its first call."""
    model(rows(2, 3) if x is None else x)
    return model


@case(clones=False)
def subclass_with_attributes():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = Block(4)
            self.scale = self.add_weight(shape=(4,), initializer="ones", name="s")
            self.head = layers.Dense(2)

        def call(self, x):
            return self.head(self.encoder(x) * self.scale)

    return built(Net())


@case(clones=False)
def subclass_with_containers():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [Block(4), Block(3)]
            self.heads = {"mean": layers.Dense(2), 7: layers.Dense(2), "a.b": layers.Dense(2)}
            self.pair = (layers.Dense(3), [layers.Dense(3)])
            self.rest = {layers.Dense(3)}

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            x = self.pair[1][0](self.pair[0](x))
            for layer in self.rest:
                x = layer(x)
            return {str(key): head(x) for key, head in self.heads.items()}

    return built(Net())


@case(clones=False)
def private_attributes():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self._hidden = layers.Dense(4, "tanh")
            self.__deep = layers.Dense(4, "tanh")
            self._out = self.out = layers.Dense(2)

        def call(self, x):
            return self.out(self.__deep(self._hidden(x)))

    return built(Net())


@case(clones=False)
def anonymous_weights():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.add_weight(shape=(3, 2))
            self.add_weight(shape=(2,))
            self.add_weight(shape=(2,), name="named")
            self.bare = keras.Variable(keras.ops.ones((2,)))
            self.listed = [self.add_weight(shape=(2,)), self.add_weight(shape=(2,))]

        def call(self, x):
            first, second, third = self._trainable_variables[:3]
            x = x @ first + second
            return x * third + self.bare * self.listed[0] - self.listed[1]

    return built(Net())


@case(clones=False)
def shared_layers():
    class Tower(layers.Layer):
        def __init__(self, shared):
            super().__init__()
            self.shared = shared
            self.own = layers.Dense(3, "tanh")

        def call(self, x):
            return self.own(self.shared(x))

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            shared = layers.Dense(3)
            self.left, self.right = Tower(shared), Tower(shared)
            self.again = shared

        def call(self, x):
            return self.again(self.left(x) + self.right(x))

    return built(Net())


@case()
def shared_in_functional():
    x, shared = keras.Input((3,)), layers.Dense(3, "tanh")
    return keras.Model(x, shared(layers.Dense(3)(shared(x))))


@case(x=lambda: tokens(4, 3), clones=False)
def embedding():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(6, 4)
            self.head = layers.Dense(2)

        def call(self, ids):
            return self.head(keras.ops.mean(self.table(ids), axis=1))

    return built(Net(), tokens(2, 3))


@case(x=lambda: tokens(4, 3), clones=False)
def tied_embedding():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(6, 4)
            self.mix = layers.Dense(4, "tanh")

        def call(self, ids):
            hidden = self.mix(keras.ops.mean(self.table(ids), axis=1))
            return hidden @ keras.ops.transpose(self.table.embeddings)

    return built(Net(), tokens(2, 3))


@case(x=lambda: rows(2, 4, 3))
def rnn_cells():
    return keras.Sequential([keras.Input((4, 3)), layers.RNN(layers.GRUCell(3)), layers.Dense(2)])


@case(x=lambda: rows(2, 4, 3))
def stacked_cells():
    cells = [layers.LSTMCell(3), layers.SimpleRNNCell(2)]
    return keras.Sequential([keras.Input((4, 3)), layers.RNN(cells)])


@case(x=lambda: rows(2, 4, 3))
def bidirectional():
    return keras.Sequential([keras.Input((4, 3)), layers.Bidirectional(layers.LSTM(2))])


@case(x=lambda: rows(2, 4, 3), clones=False)
def attention():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.attend = layers.MultiHeadAttention(2, 2)
            self.norm = layers.LayerNormalization()

        def call(self, x):
            return self.norm(x + self.attend(x, x))

    return built(Net(), rows(2, 4, 3))


@case(x=lambda: rows(2, 4, 3))
def time_distributed():
    return keras.Sequential([keras.Input((4, 3)), layers.TimeDistributed(layers.Dense(2))])


@case(is_random=True)
def seed_generators():
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(6),
            layers.Dropout(0.5, seed=3),
            layers.GaussianNoise(0.1, seed=4),
            layers.Dense(2),
        ]
    )


@case(x=lambda: rows(2, 6, 6, 2))
def convolutions():
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.Conv2D(3, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2),
        ]
    )


@case(x=lambda: rows(2, 32, 32, 3), heavy=True)
def application():
    return keras.applications.MobileNet(
        input_shape=(32, 32, 3), alpha=0.25, dropout=0.0, weights=None, classes=3
    )


@case()
def frozen_part():
    model = sequential()
    model.layers[0].trainable = False
    return model


class Affine(tf.Module):
    def __init__(self, size, out, name=None):
        super().__init__(name)
        dtype = keras.config.floatx()
        self.w = tf.Variable(tf.ones((size, out), dtype), name="w")
        self._shift = tf.Variable(tf.zeros((out,), dtype), name="w")
        self.calls = tf.Variable(0, trainable=False)

    def __call__(self, x):
        return tf.tanh(x @ self.w + self._shift)


@case(clones=False)
def module_tree():
    class Net(tf.Module):
        def __init__(self):
            super().__init__()
            self.steps = [Affine(3, 4), Affine(4, 3)]
            self.heads = {"a": Affine(3, 2), "b": Affine(3, 2)}
            self.me = self

        def __call__(self, x):
            for step in self.steps:
                x = step(x)
            return self.heads["a"](x) - self.heads["b"](x)

    return Net()


@case(clones=False)
def sonnet_mlp():
    return built(snt.nets.MLP([4, 2], activation=tf.tanh))


@case(
    clones=False,
    parameters=lambda m: [
        m.gain,
        *m.keras_part.trainable_variables,
        *m.parts[0].trainable_variables,
    ],
)
def module_holding_keras():
    class Net(tf.Module):
        def __init__(self):
            super().__init__()
            self.gain = tf.Variable(tf.ones((2,), keras.config.floatx()))
            self.keras_part = layers.Dense(4, "tanh")
            self.parts = [layers.Dense(2)]

        def __call__(self, x):
            return self.parts[0](self.keras_part(x)) * self.gain

    return built(Net())


@case(
    clones=False,
    parameters=lambda m: [*m.trainable_variables, m.gain, *m.listed, *m.affine.trainable_variables],
)
def keras_holding_module():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.affine = Affine(3, 4)
            self.head = layers.Dense(2)
            self.gain = tf.Variable(tf.ones((2,), keras.config.floatx()))
            self.listed = [tf.Variable(tf.ones((2,), keras.config.floatx()))]

        def call(self, x):
            return self.head(self.affine(x)) * self.gain + self.listed[0]

    return built(Net())


@case(
    clones=False,
    call=lambda m, x, **flag: m["body"](m["parts"][0](x, **flag), **flag) / m["temperature"],
    parameters=lambda m: [
        *m["body"].trainable_variables,
        *m["parts"][0].trainable_variables,
        m["temperature"],
    ],
)
def dict_root():
    return {
        "body": keras.Sequential([keras.Input((3,)), layers.Dense(2)]),
        "parts": [keras.Sequential([keras.Input((3,)), layers.Dense(3, "tanh")])],
        "temperature": tf.Variable(tf.ones((), keras.config.floatx())),
    }


@case(
    clones=False,
    call=lambda m, x, **flag: m[0](x, **flag) * m[1] + m[2],
    parameters=lambda m: [*m[0].trainable_variables, m[1], m[2]],
)
def list_root():
    dense = layers.Dense(2)
    dense.build((None, 3))
    gain = tf.Variable(tf.ones((2,), keras.config.floatx()))
    return [dense, gain, keras.Variable(keras.ops.zeros((2,)))]


@case(clones=False)
def same_names():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = layers.Dense(4, "tanh", name="fc")
            self.b = layers.Dense(2, name="fc")
            self.nets = [keras.Sequential([layers.Dense(2)], name="net") for _ in range(2)]
            self.add_weight(shape=(2,), name="w")
            self.add_weight(shape=(2,), name="w")

        def call(self, x):
            x = self.nets[1](self.nets[0](self.b(self.a(x))))
            return x * self._trainable_variables[0] + self._trainable_variables[1]

    return built(Net())
