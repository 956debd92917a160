"""The registry of programs: small steps, each with a feature that somebody may put in one.

To add one, write what you would write in a training loop:

    @program()
    def moving_average_in_a_variable(kit):
        def step(w, x):
            w.mean.assign(0.9 * w.mean + 0.1 * tf.reduce_mean(x))
            return w.mean + 0.0

        return World(step, mean=tf.Variable(0.0))

The name is the feature. `kit` writes what differs between the loop by hand and tfloop (see
`kits.py`): `kit.step(optim, net, loss_fn)`. The `World` holds the step and everything that it uses;
all that is in it is observed. Each way of `ways.py` makes the world anew, with one seed, calls the
step eight times with `inputs(0)` to `inputs(7)`, and applies the world's `change` before the fifth.
A pair that can't work is a row of `CANT` in `test_pairs.py`.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import tempfile
import types
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from since import MUON, SCHEDULE_FREE, has

layers = keras.layers
CALLS = 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(CALLS, 4, 3)).astype("float32")
Y = RNG.normal(size=(CALLS, 4, 2)).astype("float32")
IDS = RNG.integers(0, 5, size=(CALLS, 4, 3)).astype("int32")
TIMES = RNG.normal(size=(CALLS, 4, 3, 2)).astype("float32")


class Keywords(dict):
    """Inputs that are given by name: the last of `inputs(number)`."""


def nothing(number):
    return ()


def rows(number):
    return (tf.constant(X[number]),)


def pairs(number):
    """A batch of rows and targets."""
    return ((tf.constant(X[number]), tf.constant(Y[number])),)


def sentences(number):
    return ((tf.constant(IDS[number]), tf.constant(Y[number])),)


def series(number):
    return ((tf.constant(TIMES[number]), tf.constant(Y[number])),)


class World:
    """What a step uses. `step(world, *inputs)`, or `step(*inputs)` if it is `bare`.

    A bare step is what is compiled, with all its names: for programs about names.
    """

    def __init__(self, step, *, change=None, bare=False, **parts):
        self._step, self._change, self._bare = step, change, bare
        self._scope = contextlib.nullcontext
        self.__dict__.update(parts)

    def function(self):
        if self._bare:
            return self._step
        return lambda *args, **kwargs: self._step(self, *args, **kwargs)

    def change(self):
        if self._change is not None:
            with self._scope():
                self._change(self)

    def parts(self):
        return {name: thing for name, thing in vars(self).items() if not name.startswith("_")}


@dataclasses.dataclass(frozen=True)
class Program:
    """One entry of the registry.

    Attributes:
      make: kit -> World.
      inputs: number of the call -> arguments.
      trains: It has an update, so results are equal to 1e-6 of the norm; else to the last bit.
      changes: Its world changes before the fifth call.
      bare: Its step is no function of the world, so that copies of the world don't have one.
      copies: `copy.deepcopy` copies all of its world. Keras' metrics come back empty, random layers
        with the seed that they began with, recurrent ones without their states, LoRA merged; its
        seed generators and models of local classes raise.
      saved: All that counts is in variables, so that another process can go on.
      pure: Nothing but its output counts, and that can be differentiated by its input.
      order_free: Calls may be made in any order, and at the same time.
      raises: Some calls are to raise tf.errors.InvalidArgumentError.
      rowwise: A mean over rows, or no rows at all: replicas are to give what one device gives.
      narrow: Computes in 16 bits, so that the means of replicas are rounded there.
    """

    name: str
    make: Callable[[Any], World]
    inputs: Callable[[int], tuple]
    trains: bool
    changes: bool = False
    bare: bool = False
    copies: bool = True
    saved: bool = False
    pure: bool = False
    order_free: bool = False
    raises: bool = False
    rowwise: bool = False
    narrow: bool = False


PROGRAMS: dict[str, Program] = {}


def program(inputs=rows, *, trains=False, pure=False, rowwise=None, **marks):
    """Registers a program under its name."""

    def register(make):
        name = make.__name__
        assert name not in PROGRAMS, name
        more = {"saved": trains or pure, "rowwise": trains if rowwise is None else rowwise}
        more |= {"order_free": pure, "copies": not marks.get("bare")} | marks
        PROGRAMS[name] = Program(name, make, inputs, trains, pure=pure, **more)
        return make

    return register


random = functools.partial(program, nothing)


def training(inputs=pairs, **marks):
    """Registers a program that has an update."""
    return program(inputs, trains=True, **marks)


def mse(found, y):
    return tf.reduce_mean(tf.square(tf.cast(found, tf.float32) - y))


def network(*parts, size=3, units=2):
    return keras.Sequential(
        [keras.Input((size,)), layers.Dense(4, "tanh", name="stem"), *parts]
        + [layers.Dense(units, name="head")]
    )


def sgd(**options):
    return keras.optimizers.SGD(0.125, **({"momentum": 0.5} | options))


def trains(kit, net, optimizer=None, *groups, loss=mse, change=None, lr=None, **options):
    """The world of a step on pairs: the model in training mode, a loss, an update."""

    def step(w, batch):
        x, y = batch
        return kit.step(w.optim, w.net, lambda: loss(kit.train(w.net)(x), y), lr)

    optim = kit.optim(net, optimizer or sgd(), *groups, **options)
    return World(step, net=net, optim=optim, change=change)


def calls(fn, **parts):
    """The world of a function that needs nothing, or these parts."""
    return World(lambda w, *args, **kwargs: fn(*args, **kwargs), **parts)


# Random sources.


@random()
def random_normal_by_the_global_seed(kit):
    return calls(lambda: tf.random.normal((2,)))


@random()
def random_uniform_by_a_seed_of_its_own(kit):
    return calls(lambda: tf.random.uniform((2,), seed=3))


@random()
def random_scalar_alone(kit):
    return calls(lambda: tf.random.normal(()))


@random()
def random_integers_and_shuffles(kit):
    return calls(lambda: (tf.random.uniform((2,), 0, 9, tf.int32), tf.random.shuffle(tf.range(9))))


@random()
def random_gamma_poisson_and_truncated(kit):
    draw = tf.random
    return calls(lambda: (draw.gamma([2], 1.0), draw.poisson([2], 4.0), draw.truncated_normal([2])))


@program()
def random_categorical(kit):
    return calls(lambda x: tf.random.categorical(x, 2))


@random()
def random_in_a_nested_function(kit):
    draw = tf.function(lambda: tf.random.normal((2,)))
    return calls(lambda: draw() + draw())


@random()
def random_in_a_while_loop(kit):
    body = lambda n, total: (n + 1, total + tf.random.normal(()))  # noqa: E731
    return calls(
        lambda: tf.while_loop(lambda n, _: n < 3, body, (0, 0.0), parallel_iterations=1)[1]
    )


@random()
def random_in_a_branch(kit):
    def step(w):
        w.n.assign_add(1)
        return tf.cond(w.n % 2 == 0, lambda: tf.random.normal(()), lambda: tf.random.uniform(()))

    return World(step, n=tf.Variable(0))


@program()
def random_in_map_fn(kit):
    # Side by side, which row gets which number is left to chance.
    return calls(
        lambda x: tf.map_fn(lambda row: row + tf.random.normal(()), x, parallel_iterations=1)
    )


@program()
def random_flips_of_images(kit):
    return calls(lambda x: tf.image.random_flip_left_right(x[:, :, None], seed=1))


@program()
def dropout_of_tensorflow(kit):
    return calls(lambda x: tf.nn.dropout(x, 0.5))


@program()
def dropout_of_tensorflow_with_a_seed(kit):
    return calls(lambda x: tf.nn.dropout(x, 0.5, seed=1))


@random(saved=True)
def stateless_random_by_a_counter(kit):
    def step(w):
        w.n.assign_add(1)
        return tf.random.stateless_normal((2,), tf.stack([w.n, 7]))

    return World(step, n=tf.Variable(0))


@random(saved=True)
def random_generator_of_ones_own(kit):
    generator = tf.random.Generator.from_seed(3)
    return World(lambda w: w.generator.normal((2,)), generator=generator)


@random()
def random_generator_of_the_process(kit):
    tf.random.get_global_generator().reset_from_seed(5)
    return calls(lambda: tf.random.get_global_generator().uniform((2,)))


@random(saved=True)
def random_generator_split(kit):
    generator = tf.random.Generator.from_seed(3)
    return World(lambda w: w.generator.make_seeds(2), generator=generator)


@random(saved=True, copies=False)
def keras_random_with_a_seed_generator(kit):
    seeds = keras.random.SeedGenerator(4)
    return World(lambda w: keras.random.normal((2,), seed=w.seeds), seeds=seeds)


@random()
def keras_random_by_the_global_seed(kit):
    return calls(lambda: keras.random.uniform((2,)))


@program(saved=True, copies=False)
def keras_shuffle(kit):
    seeds = keras.random.SeedGenerator(4)
    return World(lambda w, x: keras.random.shuffle(x, seed=w.seeds), seeds=seeds)


@training(rowwise=False, copies=False)
def dropout_of_keras_with_a_seed(kit):
    return trains(kit, network(layers.Dropout(0.5, seed=3)))


@training(rowwise=False, copies=False)
def dropout_of_keras_without_a_seed(kit):
    return trains(kit, network(layers.Dropout(0.5)))


@training(rowwise=False, copies=False)
def noise_of_keras(kit):
    return trains(kit, network(layers.GaussianNoise(0.5), layers.GaussianDropout(0.2)))


@training(rowwise=False)
def dropout_of_tensorflow_in_a_loss(kit):
    return trains(kit, network(), loss=lambda found, y: mse(tf.nn.dropout(found, 0.5, seed=2), y))


@program()
def augmentation_of_keras(kit):
    flip = layers.RandomFlip("horizontal", seed=2)
    return World(lambda w, x: w.flip(x[..., None, None], training=True), flip=flip)


@random()
def random_numbers_of_numpy(kit):
    generator = np.random.default_rng(0)
    return calls(lambda: tf.numpy_function(lambda: generator.normal(size=2), [], tf.float64))


# Side effects.


@program()
def python_is_called(kit):
    def step(w, x):
        tf.py_function(lambda x: w.seen.append(float(x)), [x[0, 0]], [])
        return tf.reduce_sum(x)

    return World(step, seen=[])


@program(bare=True)
def python_gives_a_number(kit):
    seen = []

    def step(x):
        return tf.numpy_function(lambda x: seen.append(1) or np.float32(len(seen)), [x], tf.float32)

    return World(step, bare=True, seen=seen)


class File:
    """The text of a file, as something to be observed."""

    def __init__(self):
        self.path = os.path.join(tempfile.mkdtemp(), "lines")

    def __repr__(self):
        return "a file"

    def text(self):
        with open(self.path) as file:
            return file.read()


@program()
def printing(kit):
    def step(w, x):
        tf.print(x[0, 0] > 0.0, output_stream=f"file://{w.file.path}")
        return tf.reduce_sum(x)

    return World(step, file=File())


@program()
def mutable_table(kit):
    def step(w, x):
        key = tf.cast(x[0, :1] > 0.0, tf.int64)
        w.table.insert(key, w.table.lookup(key) + 1)
        return w.table.lookup(key)

    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    return World(step, table=table)


@program(sentences, order_free=True)
def static_table(kit):
    items = tf.lookup.KeyValueTensorInitializer(tf.range(5), tf.range(10, 15))
    table = tf.lookup.StaticHashTable(items, -1)
    return calls(lambda batch: table.lookup(batch[0]))


@program()
def queue(kit):
    def step(w, x):
        w.queue.enqueue(x[0])
        return w.queue.dequeue() if w.queue.size() > 2 else tf.zeros(3)

    return World(step, queue=tf.queue.FIFOQueue(9, [tf.float32], [(3,)]))


@program(saved=True, rowwise=False)
def variables_assigned_in_order(kit):
    def step(w, x):
        w.a.assign_add(1.0)
        before = w.a + 0.0
        w.a.assign(2.0 * w.a + x[0, 0])
        w.b.scatter_nd_update([[1]], [w.a])
        return before, w.a * w.b[1]

    return World(step, a=tf.Variable(1.0), b=tf.Variable([0.0, 0.0]))


@program(saved=True)
def moving_average_in_a_variable(kit):
    def step(w, x):
        w.mean.assign(0.9 * w.mean + 0.1 * tf.reduce_mean(x))
        return w.mean + 0.0

    return World(step, mean=tf.Variable(0.0))


@program()
def variable_made_by_the_first_call(kit):
    def step(w, x):
        if w.made is None:
            w.made = tf.Variable(1.0)
        return w.made.assign_add(tf.reduce_sum(x))

    return World(step, made=None)


@program(pairs, saved=True, copies=False)
def metrics_of_keras(kit):
    def step(w, batch):
        x, y = batch
        w.mean.update_state(x)
        w.error.update_state(y, x[:, :2])
        return w.mean.result(), w.error.result()

    return World(step, mean=keras.metrics.Mean(), error=keras.metrics.MeanSquaredError())


@program(saved=True, copies=False)
def metric_reset_in_the_step(kit):
    def step(w, x):
        if tf.reduce_sum(x) > 0.0:
            w.mean.reset_state()
        w.mean.update_state(x)
        return w.mean.result()

    return World(step, mean=keras.metrics.Mean())


@program()
def summaries(kit):
    def step(w, x):
        with w.writer.as_default(step=w.n):
            tf.summary.write("x", tf.reduce_sum(x))
        w.n.assign_add(1)
        w.writer.flush()
        return w.n + 0

    folder = tempfile.mkdtemp()
    writer = tf.summary.create_file_writer(folder)
    return World(step, writer=writer, n=tf.Variable(0, dtype=tf.int64), events=Events(folder))


class Events:
    """The values in a folder of summaries, as something to be observed."""

    def __init__(self, folder):
        self.folder = folder

    def __repr__(self):
        return "events"

    def text(self):
        found = []
        for name in sorted(os.listdir(self.folder)):
            for record in tf.data.TFRecordDataset(os.path.join(self.folder, name)):
                event = tf.compat.v1.Event.FromString(record.numpy())
                found += [f"{event.step} {value.tag}" for value in event.summary.value]
        return "\n".join(found)


@program(order_free=True)
def asserts_that_hold(kit):
    def step(x):
        tf.debugging.assert_less(x, 100.0)
        return tf.reduce_sum(x)

    return calls(step)


@program(saved=True, raises=True)
def assert_that_fails_later(kit):
    def step(w, x):
        with tf.control_dependencies([tf.debugging.assert_less(w.n, 5, "too far")]):
            w.n.assign_add(1)
        return w.n + 0

    return World(step, n=tf.Variable(0))


@program()
def resource_made_in_the_step(kit):
    def step(x):
        array = tf.TensorArray(tf.float32, 0, dynamic_size=True, clear_after_read=False)
        for number in tf.range(3):
            array = array.write(number, x[number, 0])
        return array.stack(), array.read(0)

    return calls(step)


@program(saved=True)
def order_by_control_dependencies(kit):
    def step(w, x):
        with tf.control_dependencies([w.n.assign_add(tf.reduce_sum(x))]):
            return w.n * 2.0

    return World(step, n=tf.Variable(0.0))


# Control flow.


@program(pure=True)
def while_loop(kit):
    body = lambda n, x: (n + 1, x * 1.5 + 1.0)  # noqa: E731
    return calls(lambda x: tf.while_loop(lambda n, _: n < 3, body, (0, x), maximum_iterations=9)[1])


@program(order_free=True)
def loop_of_python_with_break_and_return(kit):
    def step(x):
        total = 0.0
        for row in x:
            if tf.reduce_sum(row) > 2.0:
                break
            total += tf.reduce_sum(row)
        if total < 0.0:
            return -total
        return total

    return calls(step)


@program(pure=True)
def map_and_scan(kit):
    add = lambda total, row: total + row  # noqa: E731
    return calls(lambda x: (tf.map_fn(lambda row: row**2, x), tf.scan(add, x)))


@program(pure=True)
def branches(kit):
    def step(x):
        y = tf.cond(tf.reduce_sum(x) > 0.0, lambda: x * 2.0, lambda: x - 1.0)
        index = tf.cast(tf.reduce_sum(x) > 1.0, tf.int32)
        return tf.switch_case(index, [lambda: y + 1.0, lambda: y * y])

    return calls(step)


@program(pure=True)
def vectorized_map(kit):
    return calls(lambda x: tf.vectorized_map(lambda row: row * tf.reduce_sum(row), x))


@program(pure=True)
def nested_function_of_tensorflow(kit):
    inner = tf.function(lambda x: tf.sin(x) * 2.0)
    return calls(lambda x: inner(inner(x)))


@training(bare=True)
def nested_step_that_trains(kit):
    net = network()
    optim = kit.optim(net, sgd())
    inner = kit.compile(lambda b: kit.step(optim, net, lambda: mse(kit.train(net)(b[0]), b[1])))
    return World(lambda batch: 2.0 * inner(batch), bare=True, net=net, optim=optim)


# Gradients.


@tf.custom_gradient
def clipped_backwards(x):
    return x, lambda upstream: tf.clip_by_value(upstream, -0.1, 0.1)


@training(rowwise=False)
def custom_gradient(kit):
    return trains(kit, network(), loss=lambda found, y: mse(clipped_backwards(found), y))


@program(pure=True)
def custom_gradient_alone(kit):
    return calls(lambda x: clipped_backwards(x * 3.0))


@training()
def recompute_grad(kit):
    net = network()

    def step(w, batch):
        x, y = batch
        again = tf.recompute_grad(lambda x: kit.train(w.net)(x))
        return kit.step(w.optim, w.net, lambda: mse(again(x), y))

    return World(step, net=net, optim=kit.optim(net, sgd()))


@training()
def second_order(kit):
    def step(w, batch):
        x, y = batch

        def loss():
            with tf.GradientTape() as tape:
                tape.watch(x)
                found = kit.train(w.net)(x)
            slope = tape.gradient(found, x)
            return mse(found, y) + tf.reduce_mean(slope**2)

        return kit.step(w.optim, w.net, loss)

    net = network()
    return World(step, net=net, optim=kit.optim(net, sgd()))


@training()
def forward_mode_in_the_loss(kit):
    def step(w, batch):
        x, y = batch

        def loss():
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
                found = kit.train(w.net)(x)
            return mse(found, y) + tf.reduce_mean(accumulator.jvp(found) ** 2)

        return kit.step(w.optim, w.net, loss)

    net = network()
    return World(step, net=net, optim=kit.optim(net, sgd()))


@training(rowwise=False)
def gradients_stopped_by_a_valid_view(kit):
    def step(w, batch):
        x, y = batch
        target = kit.valid(w.net)
        return kit.step(w.optim, w.net, lambda: mse(kit.train(w.net)(x) - 0.5 * target(x), y))

    net = network(layers.BatchNormalization())
    return World(step, net=net, optim=kit.optim(net, sgd()))


@training(copies=False)
def some_parameters_have_no_gradient(kit):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = layers.Dense(2), layers.Dense(2)

        def build(self, shape):
            self.used.build(shape)
            self.unused.build(shape)

        def call(self, x):
            return self.used(x)

    net = Net()
    net.build((None, 3))
    return trains(kit, net, keras.optimizers.AdamW(0.1, weight_decay=0.1))


@training(sentences)
def sparse_gradients_with_repeated_rows(kit):
    net = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Embedding(5, 2)])
    net.add(layers.Flatten())
    net.add(layers.Dense(2))
    return trains(kit, net, keras.optimizers.Adam(0.1))


@training()
def two_models_take_turns(kit):
    def step(w, batch):
        x, y = batch
        one = kit.step(w.optim, w.net, lambda: mse(kit.train(w.net)(x), y))
        fool = lambda: mse(kit.train(w.other)(kit.train(w.net)(x)), y)  # noqa: E731
        return one, kit.step(w.optim_of_other, w.other, fool)

    net, other = network(), network(size=2)
    optims = {"optim": kit.optim(net, sgd()), "optim_of_other": kit.optim(other, sgd())}
    return World(step, net=net, other=other, **optims)


# Inputs.


@program(lambda n: (tf.constant(["a", f"b{n}"]),), order_free=True)
def strings(kit):
    return calls(lambda text: (tf.strings.upper(text), tf.strings.length(text)))


@program(lambda n: (tf.ragged.constant([[1.0] * (n % 3), [2.0]]),), order_free=True)
def ragged_tensors(kit):
    return calls(lambda x: (tf.reduce_sum(x, axis=1), x * 2.0))


@program(lambda n: (tf.sparse.from_dense([[0.0, n], [1.0, 0.0]]),), order_free=True)
def sparse_tensors(kit):
    return calls(lambda x: tf.sparse.reduce_sum(x, axis=1))


@program(lambda n: ({"a": tf.constant(X[n]), "b": {"c": tf.constant(Y[n])}},), order_free=True)
def dicts(kit):
    return calls(lambda x: {"sum": tf.reduce_sum(x["a"]), "b": x["b"]["c"] * 2.0})


def _named_otherwise(number):
    one, other = tf.constant([float(number)]), tf.constant([10.0])
    return ({"a": one, "b": other} if number % 2 else {"b": one, "a": other},)


@program(_named_otherwise, order_free=True)
def dicts_with_the_keys_in_another_order(kit):
    return calls(lambda x: x["a"] - x["b"])


@program(lambda n: ({"ab"[n % 2]: tf.constant([float(n)])},), order_free=True)
def dicts_with_other_keys(kit):
    return calls(lambda x: x["a"] * 2.0 if "a" in x else -x["b"])


Point = collections.namedtuple("Point", "x y")


@program(lambda n: (Point(tf.constant(X[n]), float(n)),), order_free=True)
def named_tuples(kit):
    return calls(lambda point: Point(point.y * point.x, point.x))


@dataclasses.dataclass
class Batch:
    x: Any
    y: Any

    def __tf_flatten__(self):
        return (), (self.x, self.y)

    @classmethod
    def __tf_unflatten__(cls, metadata, parts):
        return cls(*parts)


@program(lambda n: (Batch(tf.constant(X[n]), tf.constant(Y[n])),), order_free=True)
def dataclasses_that_tf_nest_takes(kit):
    return calls(lambda batch: tf.reduce_sum(batch.x) + tf.reduce_sum(batch.y))


@program(lambda n: (tf.constant(X[n]), None, n % 3 == 0), order_free=True)
def none_and_flags(kit):
    return calls(lambda x, nothing, flag: x * 2.0 if flag and nothing is None else x)


@program(lambda n: (tf.constant(X[n]), float(n), np.float32(n), np.ones(3, "f4")), order_free=True)
def numbers_and_arrays(kit):
    return calls(lambda x, one, two, three: x * one + two * three)


@program(lambda n: (tf.constant(X[n, : (4, 3, 0, 4, 1)[n % 5]]),), order_free=True)
def batches_of_other_sizes_and_empty_ones(kit):
    return calls(lambda x: (tf.reduce_sum(x), tf.shape(x)))


@program(lambda n: (tf.zeros([2] * (n % 3 + 1)) + n,), order_free=True)
def ranks_that_change(kit):
    return calls(lambda x: (tf.rank(x), tf.reduce_sum(x)))


@program(lambda n: (tf.cast(X[n] > 0, (tf.float32, tf.int32, tf.float64)[n % 3]),), order_free=True)
def dtypes_that_change(kit):
    return calls(lambda x: x * 2)


@program(lambda n: (1.5 * n, *([float(n)] if n % 2 else [])), order_free=True)
def arguments_left_to_their_default(kit):
    return calls(lambda x, scale=None: x if scale is None else x * scale)


def _by_name(number):
    names = {"x": tf.constant(X[number]), "rate": 0.5 * number}
    return (Keywords(names if number % 2 else dict(reversed(names.items()))),)


@program(_by_name, order_free=True)
def arguments_by_name(kit):
    return calls(lambda x, rate, scale=2.0: x * rate * scale)


@program(lambda n: ([tf.constant(X[n]), (tf.constant(Y[n]), [1.0])],), order_free=True)
def lists_in_tuples_in_lists(kit):
    return calls(lambda x: [tf.reduce_sum(part) for part in tf.nest.flatten(x)])


@program(lambda n: (tf.constant([1 + 2j, 3.0]), tf.constant([True, n > 3]), tf.constant([n])))
def complex_bool_and_integer_tensors(kit):
    return calls(lambda z, flag, number: (tf.math.conj(z), tf.logical_not(flag), number // 2))


# Layers with state of their own.


@training(series, rowwise=False, copies=False)
def stateful_recurrence(kit):
    net = keras.Sequential(
        [keras.Input(batch_shape=(4, 3, 2)), layers.LSTM(3, stateful=True), layers.Dense(2)]
    )
    return trains(kit, net)


@training(series, copies=False)
def recurrence_in_both_directions(kit):
    parts = [keras.Input((3, 2)), layers.Bidirectional(layers.GRU(2)), layers.Dense(2)]
    return trains(kit, keras.Sequential(parts))


@training(rowwise=False)
def spectral_normalization(kit):
    return trains(kit, network(layers.SpectralNormalization(layers.Dense(3))))


@training(rowwise=False)
def batch_normalization(kit):
    return trains(kit, network(layers.BatchNormalization()))


@training(rowwise=False)
def batch_normalization_with_renorm(kit):
    return trains(kit, network(layers.BatchNormalization(renorm=True)))


@training()
def batch_normalization_synchronized(kit):
    return trains(kit, network(layers.BatchNormalization(synchronized=True)))


@program(saved=True, rowwise=True, order_free=True)
def batch_normalization_in_a_valid_view(kit):
    net = network(layers.BatchNormalization())
    return World(lambda w, x: kit.valid(w.net)(x), net=net)


@training()
def batch_normalization_that_is_frozen(kit):
    net = network(layers.BatchNormalization())
    net.layers[1].trainable = False
    return trains(kit, net)


@training()
def normalization_that_was_adapted(kit):
    norm = layers.Normalization()
    norm.adapt(X.reshape(-1, 3) * 3.0 + 1.0)
    return trains(kit, keras.Sequential([keras.Input((3,)), norm, layers.Dense(2)]))


@program(lambda n: (tf.constant([("a b", "b c")[n % 2], "b"]),), order_free=True)
def text_vectorization(kit):
    words = layers.TextVectorization(output_sequence_length=3, vocabulary=["a", "b"])
    return calls(lambda text: words(text))


@program(sentences, order_free=True)
def lookups_and_hashes_of_keras(kit):
    known, hashed = layers.IntegerLookup(vocabulary=[1, 3]), layers.Hashing(4)
    return calls(lambda batch: (known(batch[0]), hashed(batch[0])))


@training(copies=False)
def lora(kit):
    net = network()
    net.layers[0].enable_lora(2)
    return trains(kit, net)


@training(copies=False)
def quantized_layers_with_lora(kit):
    net = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Keras' own, of NumPy 2
        net.layers[0].quantize("int8")
    net.layers[0].enable_lora(2)
    return trains(kit, net)


@training(sentences, rowwise=False, copies=False)
def masks_of_embeddings(kit):
    parts = [layers.Embedding(5, 2, mask_zero=True), layers.GRU(2), layers.Dense(2)]
    return trains(kit, keras.Sequential([keras.Input((3,), dtype="int32"), *parts]))


@program(sentences, rowwise=False, order_free=True)
def masks_reach_a_loss_object_through_a_valid_view(kit):
    parts = [layers.Embedding(5, 4, mask_zero=True), layers.Dense(2)]
    net = keras.Sequential([keras.Input((3,), dtype="int32"), *parts])
    loss = keras.losses.MeanSquaredError()
    zeros = tf.zeros((4, 3, 2))

    def step(w, batch):
        found = w.net(batch[0]) if kit.name == "plain" else kit.valid(w.net)(batch[0])
        return loss(zeros, found)

    return World(step, net=net)


@training()
def attention(kit):
    x = keras.Input((3,))
    parts = layers.Reshape((3, 1))(x)
    mixed = layers.MultiHeadAttention(2, 2)(parts, parts)
    return trains(kit, keras.Model(x, layers.Dense(2)(layers.Flatten()(mixed))))


@training()
def regularizers_and_activity_losses(kit):
    net = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, kernel_regularizer="l2"),
            layers.ActivityRegularization(0.01),
            layers.Dense(4, "tanh", activity_regularizer="l2"),
            layers.Dense(2, bias_regularizer=keras.regularizers.L1(0.1)),
        ]
    )

    def step(w, batch):
        x, y = batch
        return kit.step(w.optim, w.net, lambda: kit.total_loss(mse(kit.train(w.net)(x), y), w.net))

    return World(step, net=net, optim=kit.optim(net, sgd()))


@training()
def layers_that_are_shared(kit):
    x, shared = keras.Input((3,)), layers.Dense(3, "tanh")
    return trains(kit, keras.Model(x, layers.Dense(2)(shared(shared(x)))))


@training()
def loss_objects_of_keras(kit):
    loss = keras.losses.MeanSquaredError()
    return trains(kit, network(), loss=lambda found, y: loss(y, found))


# Variables of odd kinds.


class Odd(tf.Module):
    """A linear model with another variable that its call may use."""

    def __init__(self, other, use=lambda other, found: found, dtype=tf.float32):
        super().__init__()
        self.w = tf.Variable(tf.ones((3, 2), dtype) / 4)
        self.other, self.use = other, use

    def __call__(self, x, training=False):
        return self.use(self.other, tf.cast(x, self.w.dtype) @ self.w)


def _counted(counter, found):
    counter.assign_add(1)
    return found * tf.cast(counter, found.dtype)


@training(saved=False)
def counters_in_modules(kit):
    return trains(kit, Odd(tf.Variable(0, trainable=False), _counted))


@training(saved=False)
def flags_in_variables(kit):
    def use(flag, found):
        flag.assign(tf.logical_not(flag))
        return tf.where(flag, found, 2.0 * found)

    return trains(kit, Odd(tf.Variable(False, trainable=False), use))


@training()
def complex_parameters(kit):
    use = lambda z, found: found * tf.math.real(z * tf.math.conj(z))  # noqa: E731
    return trains(kit, Odd(tf.Variable(tf.constant(1.0 + 0.5j, tf.complex64)), use))


@training()
def strings_in_variables(kit):
    return trains(kit, Odd(tf.Variable("a", trainable=False)))


@training()
def parameters_without_elements(kit):
    use = lambda empty, found: found + tf.reduce_sum(empty)  # noqa: E731
    return trains(kit, Odd(tf.Variable(tf.zeros((0, 2))), use))


@training()
def scalar_parameters(kit):
    return trains(kit, Odd(tf.Variable(0.5), lambda scale, found: found * scale))


@training()
def parameters_in_float64(kit):
    return trains(kit, Odd(tf.Variable(0, trainable=False), dtype=tf.float64), sgd(momentum=0.0))


@training(rowwise=False, copies=False)  # TensorFlow copies a variable with the shape it has.
def variables_of_open_shape(kit):
    open_ = tf.Variable([1.0], shape=(None,), trainable=False)

    def use(kept, found):
        kept.assign(tf.reshape(found, [-1])[:3])
        return found

    return trains(kit, Odd(open_, use))


@training(copies=False)
def tied_parameters(kit):
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.mix = layers.Dense(3, "tanh")

        def call(self, x):
            return (self.mix(x) @ tf.transpose(self.mix.kernel))[:, :2]

    net = Net()
    net(X[0])
    return trains(kit, net)


@training(rowwise=False)
def mixed_precision_with_a_scale(kit):
    net = keras.Sequential([keras.Input((3,)), layers.Dense(2, dtype="mixed_float16")])
    return trains(kit, net, scale=None if kit.name == "plain" else 1024.0)


class OverwrittenScale(layers.Layer):
    """As a layer in float8 does: what its gradient says becomes the value."""

    def build(self, shape):
        self.amax = self.add_weight(shape=(), initializer="zeros", name="amax")
        self.amax.overwrite_with_gradient = True

    def call(self, x):
        @tf.custom_gradient
        def through(x, amax):
            return x + 0.0, lambda upstream: (upstream, tf.reduce_max(tf.abs(x)))

        return through(x, tf.convert_to_tensor(self.amax))


@training(copies=False)
def values_overwritten_with_their_gradient(kit):
    return trains(kit, network(OverwrittenScale()), keras.optimizers.Adam(0.1))


# Optimizers with options.


@training()
def adam_with_amsgrad_and_decay(kit):
    return trains(kit, network(), keras.optimizers.Adam(0.05, amsgrad=True, weight_decay=0.1))


@training()
def decay_with_exclusions(kit):
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return trains(kit, network(), optimizer)


@training()
def moving_averages_of_parameters(kit):
    ema = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)
    return trains(kit, network(), ema)


@training()
def constraints(kit):
    net = keras.Sequential(
        [keras.Input((3,)), layers.Dense(2, kernel_constraint=keras.constraints.MaxNorm(0.5))]
    )
    return trains(kit, net)


@training()
def schedules_of_keras(kit):
    rate = keras.optimizers.schedules.ExponentialDecay(0.2, 2, 0.5, staircase=True)
    return trains(kit, network(), keras.optimizers.SGD(rate))


class Signs(keras.optimizers.Optimizer):
    """A rule of somebody's own."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self._sums = self.add_optimizer_variables(variables, "sum")

    def update_step(self, gradient, variable, learning_rate):
        total = self._sums[self._get_variable_index(variable)]
        self.assign_add(total, gradient)
        self.assign_sub(variable, learning_rate * keras.ops.sign(total))

    def get_config(self):
        return super().get_config()


@training()
def optimizer_of_ones_own(kit):
    return trains(kit, network(), Signs(0.03))


@training()
def clipping_of_all_gradients_together(kit):
    return trains(kit, network(), sgd(global_clipnorm=0.1))


@training()
def clipping_of_each_gradient(kit):
    return trains(kit, network(), sgd(clipnorm=0.1), ("head", sgd(clipvalue=0.01)))


@training()
def groups_of_several_optimizers(kit):
    others = [("bias", keras.optimizers.Adam(0.1)), ("stem", keras.optimizers.Lion(0.01))]
    return trains(kit, network(layers.Dense(3)), None, *others)


@training()
def group_that_is_frozen(kit):
    return trains(kit, network(), None, ("stem", None))


if has(SCHEDULE_FREE):

    @training()
    def schedule_free(kit):
        return trains(kit, network(), keras.optimizers.ScheduleFreeAdamW(0.05, warmup_steps=3))


@training(saved=False)  # Nothing is there to restore into before its first call.
def moving_averages_of_a_model_without_input(kit):
    net = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(2)])
    if kit.name == "plain":
        net.build((None, 3))
    return trains(kit, net, keras.optimizers.Adam(0.05, use_ema=True))


@training()
def nadam_and_ftrl(kit):
    return trains(
        kit, network(), keras.optimizers.Nadam(0.05), ("head", keras.optimizers.Ftrl(0.1))
    )


if has(MUON):

    @training()
    def muon_and_adafactor(kit):
        muon = keras.optimizers.Muon(0.05, exclude_layers=["head"])
        return trains(kit, network(), muon, ("head", keras.optimizers.Adafactor(0.1)))


@program(lambda n: (*pairs(n), 0.1 / (n + 1)), trains=True)
def rate_as_an_argument(kit):
    def step(w, batch, lr):
        return kit.step(w.optim, w.net, lambda: mse(kit.train(w.net)(batch[0]), batch[1]), lr)

    net = network()
    return World(step, net=net, optim=kit.optim(net, sgd()))


@program(lambda n: (*pairs(n), 0.1 / (n + 1)), trains=True)
def rate_captured_by_the_loss_of_keras(kit):
    loss = keras.losses.MeanSquaredError()

    def step(w, batch, lr):
        inside = lambda: loss(batch[1], kit.train(w.net)(batch[0]))  # noqa: E731
        return kit.step(w.optim, w.net, inside, lr)

    net = network()
    return World(step, net=net, optim=kit.optim(net, keras.optimizers.Adam(0.1)))


@training(rowwise=False)
def windows_of_three(kit):
    def step(w, batch):
        x, y = batch
        w.n.assign_add(1)
        loss = kit.accumulate(w.window, w.net, lambda: mse(kit.train(w.net)(x), y), w.n)
        if w.n % 3 == 0:
            kit.update(w.optim, w.net, w.window)
        return loss

    net = network()
    parts = {"net": net, "optim": kit.optim(net, sgd()), "window": kit.window(net)}
    return World(step, n=tf.Variable(0), **parts)


@training()
def window_in_one_step(kit):
    def step(w, batch):
        x, y = batch
        loss = lambda: mse(kit.train(w.net)(x), y)  # noqa: E731
        for weight in (1.0, 3.0):
            found = kit.accumulate(w.window, w.net, loss, weight)
        kit.update(w.optim, w.net, w.window, 0.1)
        return found

    net = network()
    parts = {"net": net, "optim": kit.optim(net, sgd()), "window": kit.window(net)}
    return World(step, **parts)


@training()
def microbatches(kit):
    def step(w, batch):
        loss = lambda part: mse(kit.train(w.net)(part[0]), part[1])  # noqa: E731
        return kit.micro_step(w.optim, w.net, loss, batch, 2)

    net = network()
    return World(step, net=net, optim=kit.optim(net, sgd()))


@program(lambda n: ((X[n] * (1.0, np.inf)[n == 2], Y[n]),), trains=True)
def steps_that_are_not_finite_are_skipped(kit):
    return trains(kit, network(), skip_nonfinite=True)


# What changes between the calls. The change comes before the fifth.


def _append(w):
    w.net.add(layers.Dense(2, kernel_initializer="ones"))


@training(changes=True)
def layer_added(kit):
    return trains(kit, network(), change=_append)


@training(changes=True)
def layer_removed(kit):
    net = network(layers.Dense(3), layers.Dense(2))
    return trains(kit, net, change=lambda w: w.net.pop())


@training(changes=True, copies=False)
def lora_enabled(kit):
    return trains(kit, network(), change=lambda w: w.net.layers[0].enable_lora(2))


@training(changes=True, copies=False)
def lora_enabled_on_a_frozen_layer(kit):
    net = network()
    net.layers[0].trainable = False

    def enable(w):
        w.net.layers[0].trainable = True
        w.net.layers[0].enable_lora(2)

    return trains(kit, net, change=enable)


def _flag(value):
    def change(w):
        w.net.layers[0].trainable = value

    return change


@training(changes=True)
def layer_frozen(kit):
    return trains(kit, network(), change=_flag(False))


@training(changes=True)
def layer_unfrozen(kit):
    net = network()
    net.layers[0].trainable = False
    return trains(kit, net, change=_flag(True))


@training(changes=True, narrow=True)
def dtype_policy_changed(kit):
    def change(w):
        w.net.layers[0].dtype_policy = "mixed_bfloat16"

    return trains(kit, network(), change=change)


@training(changes=True)
def group_added(kit):
    return trains(
        kit, network(), change=lambda w: kit.add_group(w.optim, "head", sgd(momentum=0.9))
    )


@training(changes=True)
def rate_of_the_optimizer_set(kit):
    return trains(kit, network(), change=lambda w: kit.set_rate(w.optim, w.net, 0.5))


@training(changes=True)
def values_set_by_hand(kit):
    def change(w):
        w.net.set_weights([0.5 * value for value in w.net.get_weights()])

    return trains(kit, network(), change=change)


@training(changes=True)
def optimizer_rebound_as_an_attribute(kit):
    def change(w):
        w.optim = kit.optim(w.net, keras.optimizers.SGD(0.5))

    return trains(kit, network(), change=change)


@training(changes=True, copies=False)  # Making a copy takes of the seeds of the next model.
def model_rebound_as_an_attribute(kit):
    def change(w):
        w.net = network()
        w.optim = kit.optim(w.net, sgd())

    return trains(kit, network(), change=change)


def _loss(kit, net, batch):
    return lambda: mse(kit.train(net)(batch[0]), batch[1])


renamed = functools.partial(training, changes=True, bare=True)


@renamed()
def optimizer_rebound_in_a_closure(kit):
    net = network()
    optim = kit.optim(net, sgd())

    def step(batch):
        return kit.step(optim, net, _loss(kit, net, batch))

    def change(w):
        nonlocal optim
        optim = kit.optim(net, keras.optimizers.SGD(0.5))

    return World(step, change=change, bare=True, net=net)


OPTIM: Any = None


@renamed()
def optimizer_rebound_as_a_global_of_a_nested_function(kit):
    global OPTIM
    net = network()
    OPTIM = kit.optim(net, sgd())

    def step(batch):
        def inner():
            return kit.step(OPTIM, net, _loss(kit, net, batch))

        return inner()

    def change(w):
        global OPTIM
        OPTIM = kit.optim(net, keras.optimizers.SGD(0.5))

    return World(step, change=change, bare=True, net=net)


@renamed()
def optimizer_rebound_in_a_dict(kit):
    net = network()
    held = {"optim": kit.optim(net, sgd())}

    def step(batch):
        return kit.step(held["optim"], net, _loss(kit, net, batch))

    change = lambda w: held.update(optim=kit.optim(net, keras.optimizers.SGD(0.5)))  # noqa: E731
    return World(step, change=change, bare=True, net=net)


@renamed()
def optimizer_rebound_in_a_list(kit):
    net = network()
    held = [kit.optim(net, sgd())]

    def step(batch):
        return kit.step(held[0], net, _loss(kit, net, batch))

    def change(w):
        held[0] = kit.optim(net, keras.optimizers.SGD(0.5))

    return World(step, change=change, bare=True, net=net)


@renamed()
def optimizer_rebound_on_a_class(kit):
    net = network()

    class Settings:
        optim = kit.optim(net, sgd())

    def step(batch):
        return kit.step(Settings.optim, net, _loss(kit, net, batch))

    def change(w):
        Settings.optim = kit.optim(net, keras.optimizers.SGD(0.5))

    return World(step, change=change, bare=True, net=net)


@renamed()
def optimizer_rebound_for_a_partial(kit):
    net = network()
    held = types.SimpleNamespace(optim=kit.optim(net, sgd()))

    def step(held, batch):
        return kit.step(held.optim, net, _loss(kit, net, batch))

    def change(w):
        held.optim = kit.optim(net, keras.optimizers.SGD(0.5))

    return World(functools.partial(step, held), change=change, bare=True, net=net)


@renamed()
def optimizer_rebound_as_a_default(kit):
    net = network()

    first = kit.optim(net, sgd())

    def inner(batch, optim=first):
        return kit.step(optim, net, _loss(kit, net, batch))

    def step(batch):
        return inner(batch)

    def change(w):
        inner.__defaults__ = (kit.optim(net, keras.optimizers.SGD(0.5)),)

    return World(step, change=change, bare=True, net=net)


@renamed()
def model_rebound_in_a_closure(kit):
    net = network()
    optims = {id(net): kit.optim(net, sgd())}

    def step(batch):
        return kit.step(optims[id(net)], net, _loss(kit, net, batch))

    def change(w):
        nonlocal net
        w.net = net = network()
        optims[id(net)] = kit.optim(net, sgd())

    return World(step, change=change, bare=True, net=net)


@program(changes=True, bare=True)
def metric_rebound(kit):
    metric = keras.metrics.Mean()

    def step(x):
        metric.update_state(x)
        return metric.result()

    def change(w):
        nonlocal metric
        w.new = metric = keras.metrics.Mean()

    return World(step, change=change, bare=True, metric=metric)


@program(changes=True, bare=True)
def variable_rebound(kit):
    scale = tf.Variable(2.0)

    def change(w):
        nonlocal scale
        w.new = scale = tf.Variable(3.0)

    return World(lambda x: x * scale, change=change, bare=True, scale=scale)


@program(changes=True, bare=True)
def helper_function_rebound(kit):
    helper = tf.sin

    def change(w):
        nonlocal helper
        helper = tf.cos

    return World(lambda x: helper(x), change=change, bare=True)


@program(pairs, changes=True, bare=True)
def loss_object_rebound(kit):
    loss = keras.losses.MeanSquaredError()

    def change(w):
        nonlocal loss
        loss = keras.losses.MeanAbsoluteError()

    return World(lambda batch: loss(batch[1], batch[0][:, :2]), change=change, bare=True)


class Factor:
    """Has its factor from its class, until it gets one of its own."""

    factor = 2.0

    def __call__(self, x):
        return self.factor * x


@program(changes=True, bare=True)
def attribute_that_hides_that_of_the_class(kit):
    factor = Factor()
    return World(lambda x: factor(x), change=lambda w: setattr(factor, "factor", 3.0), bare=True)


@training(changes=True, copies=False)  # Keras doesn't find a local function again.
def code_of_an_activation_rebound(kit):
    inner = tf.tanh

    def activation(x):
        return inner(x)

    def change(w):
        nonlocal inner
        inner = tf.sin

    return trains(kit, network(layers.Dense(2, activation)), change=change)


@training(changes=True, rowwise=False)
def strength_of_a_regularizer_changed(kit):
    net = network(layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.1)))

    def step(w, batch):
        x, y = batch
        return kit.step(
            w.optim, w.net, lambda: mse(kit.train(w.net)(x), y) + tf.add_n(w.net.losses)
        )

    def change(w):
        w.net.layers[1].kernel_regularizer.l2 = 0.5

    return World(step, net=net, optim=kit.optim(net, sgd()), change=change)
