"""The short way into a trace: the same results, errors, traces and tapes as the ordinary one."""

import threading
import traceback
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop
from tfloop import GradientsParams, ModuleOptimizer
from tfloop._compile import launch


@pytest.fixture
def short(monkeypatch):
    """Counts the calls that went the short way."""
    calls = []
    ordinary = tf.raw_ops.StatefulPartitionedCall

    def counted(**options):
        calls.append(options["f"])
        return ordinary(**options)

    monkeypatch.setattr(tf.raw_ops, "StatefulPartitionedCall", counted)
    return calls


class Batch(NamedTuple):
    x: tf.Tensor
    y: tf.Tensor


def test_the_third_call_of_a_kind_goes_the_short_way(short):
    step = tfloop.compile(lambda batch, lr: {"b": batch.x * lr, "a": (batch.y, [None, lr])})
    batch = Batch(tf.ones((2, 3)), tf.zeros((4,), tf.int32))
    found = [step(batch, lr) for lr in (0.5, 1.5, 2.5, 3.5)]
    assert len(short) == 2
    assert step.trace_count == 1
    for result, lr in zip(found, (0.5, 1.5, 2.5, 3.5), strict=True):
        assert list(result) == list(found[0])
        np.testing.assert_array_equal(result["b"], np.full((2, 3), lr, "float32"))
        assert type(result["a"]) is tuple
        np.testing.assert_array_equal(result["a"][0], [0] * 4)
        assert result["a"][1][0] is None
        assert float(result["a"][1][1]) == lr


def test_the_order_of_arguments_and_results_is_kept(short):
    def fn(a, b, *rest, z, m):
        return rest[0] - a, {"z": z, "b": b["q"] - b["c"], "m": m}

    step = tfloop.compile(fn)
    for n in range(5):
        values = [tf.constant(float(10 * n + k)) for k in range(6)]
        found = step(
            values[0], {"q": values[1], "c": values[2]}, values[3], m=values[4], z=values[5]
        )
        assert float(found[0]) == 3.0
        assert {k: float(v) for k, v in found[1].items()} == {
            "z": 10 * n + 5.0,
            "b": -1.0,
            "m": 10 * n + 4.0,
        }
        assert list(found[1]) == ["z", "b", "m"]
    assert len(short) == 3


def test_one_tensor_in_two_places(short):
    step = tfloop.compile(lambda a, b: a - 2.0 * b)
    one = tf.constant(3.0)
    assert [float(step(one, one)) for _ in range(4)] == [-3.0] * 4
    assert float(step(tf.constant(5.0), one)) == -1.0
    assert len(short) == 3


def test_other_kinds_of_arguments_go_the_ordinary_way(short):
    variable = tf.Variable(2.0)
    step = tfloop.compile(lambda x, y: x * y)
    grads = GradientsParams({"w": tf.constant(2.0)})
    scaled = tfloop.compile(lambda grads: grads.scale(2.0))
    for _ in range(4):
        assert float(step(variable, 3.0)) == 6.0
        np.testing.assert_array_equal(step(np.ones(2, "float32"), 3.0), [3, 3])
        assert float(scaled(grads)["w"]) == 4.0
    assert short == []


def test_what_a_trace_depends_on_by_value_is_told_apart():
    step = tfloop.compile(lambda x, flag, name: x + (1.0 if flag else 2.0) + len(name or ""))
    x = tf.constant(0.0)
    for _ in range(4):
        assert float(step(x, True, "ab")) == 3.0
        assert float(step(x, False, "ab")) == 4.0
        assert float(step(x, True, None)) == 1.0
        assert float(step(x, True, "abc")) == 4.0
    assert step.trace_count == 4


def test_numbers_that_look_alike_are_told_apart():
    step = tfloop.compile(lambda x: 1.0 / tf.cast(x, tf.float32))
    for _ in range(3):
        assert float(step(0.0)) == np.inf
        assert np.isnan(float(step(float("nan"))))
        assert float(step(1)) == 1.0
        assert float(step(1.0)) == 1.0
    assert step.trace_count == 2  # whole and floating numbers


def test_new_shapes_and_dtypes_lead_to_their_own_traces():
    step = tfloop.compile(lambda x: tf.reduce_sum(x))
    for size in (3, 4, 5, 3, 4, 5, 3, 4, 5, 3):
        assert float(step(tf.ones((size,)))) == size
    assert step.trace_count == 2
    assert step(tf.ones((3,), tf.int32)).dtype == tf.int32
    assert float(step(tf.ones((3, 3)))) == 9.0


def test_an_outer_tape_sees_the_step():
    weight = tf.Variable(3.0)
    step = tfloop.compile(lambda x: weight * x * x)
    x = tf.constant(2.0)
    for _ in range(4):
        step(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = step(x)
    grads = tape.gradient(y, [x, weight])
    assert [float(grad) for grad in grads] == [12.0, 4.0]
    with tfloop.Tape(watch=[x]) as tape:
        y = step(x)
    assert float(tape.backward(y).wrt(x)) == 12.0


def test_an_open_strategy_and_eager_functions_go_the_ordinary_way(short):
    step = tfloop.compile(lambda x: x + 1.0)
    x = tf.constant(1.0)
    for _ in range(3):
        step(x)
    assert len(short) == 1
    with tf.distribute.OneDeviceStrategy("/CPU:0").scope():
        assert float(step(x)) == 2.0
    tf.config.run_functions_eagerly(True)
    try:
        assert float(step(x)) == 2.0
    finally:
        tf.config.run_functions_eagerly(False)
    assert len(short) == 1


def test_a_stale_trace_is_left_also_on_the_short_way(short):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    optim = ModuleOptimizer("sgd")

    @tfloop.compile
    def step(grad):
        optim.step(1.0, model, GradientsParams({"dense.kernel": grad}))

    kernel = model.layers[0].kernel
    kernel.assign([[0.0]])
    one = tf.ones((1, 1))
    for _ in range(4):
        step(one)
    assert len(short) == 2
    assert float(kernel[0, 0]) == -4.0
    model.layers[0].trainable = False
    for _ in range(4):
        step(one)
    assert float(kernel[0, 0]) == -4.0
    model.layers[0].trainable = True
    for _ in range(4):
        step(one)
    assert float(kernel[0, 0]) == -8.0


def test_errors_name_the_users_line(short):
    def checked(x):
        tf.debugging.assert_less(x, 5.0, message="too large")
        return x

    step = tfloop.compile(checked)
    for _ in range(3):
        step(tf.constant(1.0))
    assert len(short) == 1
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large") as raised:
        step(tf.constant(7.0))
    text = "".join(traceback.format_exception(raised.value))
    assert "test_launch.py" in str(raised.value)
    assert "too large" in text
    assert float(step(tf.constant(2.0))) == 2.0


def test_a_step_may_be_launched_from_many_threads(short):
    total = tf.Variable(0.0)

    def add(x):
        total.assign_add(x)
        return x

    step = tfloop.compile(add)
    step(tf.constant(0.0))
    faults = []

    def work(value):
        for _ in range(200):
            if float(step(tf.constant(value))) != value:
                faults.append(value)

    threads = [threading.Thread(target=work, args=(float(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert float(total) == 200 * (0 + 1 + 2 + 3)
    assert len(short) >= 700
    assert step.trace_count == 1


def test_the_way_is_chosen_by_the_graph():
    def gains(fn, *specs):
        return launch._gains(tf.function(fn).get_concrete_function(*specs))

    small, large = tf.TensorSpec((4, 4)), tf.TensorSpec((1024, 1024))
    assert gains(lambda x: x @ x, small)
    assert gains(lambda x: tf.reduce_sum(x), large)  # nothing to run beside it
    assert not gains(lambda x: tf.reduce_sum(tf.exp(x) + tf.sin(x) + tf.cos(x)), large)
    image, filters = tf.TensorSpec((1, 8, 8, 1)), tf.TensorSpec((3, 3, 1, 2))
    assert not gains(lambda x, f: tf.nn.conv2d(x, f, 1, "SAME"), image, filters)


@pytest.mark.parametrize("jit", [False, True])
def test_training_is_the_same_on_both_ways(short, monkeypatch, jit):
    ends = []
    for way in ("short", "ordinary"):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        optim = ModuleOptimizer(keras.optimizers.Adam())
        if way == "ordinary":
            monkeypatch.setattr(launch, "_gains", lambda concrete: False)

        @tfloop.compile(jit_compile=jit)
        def step(x, lr, model=model, optim=optim):
            with tfloop.Tape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            optim.step(lr, model, GradientsParams.from_grads(tape.backward(loss), model))
            return loss

        x = tf.random.stateless_normal((8, 3), (1, 2))
        losses = [float(step(x, 0.01)) for _ in range(10)]
        ends.append((losses, [v.numpy() for v in model.variables]))
    assert len(short) == 8
    assert ends[0][0] == ends[1][0]
    for one, other in zip(ends[0][1], ends[1][1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_clusters_asked_of_tensorflow_are_made(short):
    step = tfloop.compile(lambda x: x + 1.0)
    tf.config.optimizer.set_jit(True)
    try:
        for _ in range(4):
            assert float(step(tf.constant(1.0))) == 2.0
    finally:
        tf.config.optimizer.set_jit(False)
    assert short == []


def test_the_rate_before_is_not_taken_for_another(short):
    step = tfloop.compile(lambda x: x)
    for value in (1.0, 0.0, 2.0, 1.0, 0.5, 1.0):
        assert float(step(value)) == value
    keras.config.set_floatx("float64")
    try:
        assert step(1.0).dtype == tf.float64
    finally:
        keras.config.set_floatx("float32")
    assert step(1.0).dtype == tf.float32
    assert step(1).dtype == tf.int32
    assert len(short) == 5


RANDOM = {
    "normal": lambda: tf.random.normal(()),
    "uniform with a seed": lambda: tf.random.uniform((), seed=3),
    "dropout of tf.nn": lambda: tf.reduce_sum(tf.nn.dropout(tf.ones(8), 0.5)),
    "shuffle": lambda: tf.random.shuffle(tf.range(5))[0],
    "in a loop": lambda: tf.map_fn(
        # In parallel, which element gets which number would be left to chance.
        lambda x: x + tf.random.normal(()),
        tf.ones(2),
        parallel_iterations=1,
    )[1],
}


@pytest.mark.parametrize("name", RANDOM)
def test_seeded_random_numbers_go_on_as_those_of_a_tf_function(name):
    def drawn(wrap):
        tf.random.set_seed(0)
        fn = wrap(RANDOM[name])
        return [float(fn()) for _ in range(8)]

    assert drawn(tfloop.compile) == drawn(tf.function)


def test_seeded_random_numbers_go_on_in_runs_and_in_nested_steps():
    def noisy(x):
        return x + tf.random.normal(())

    def drawn(wrap):
        tf.random.set_seed(0)
        fn = wrap(noisy)
        return [float(fn(tf.constant(0.0))) for _ in range(6)]

    def nested(fn):
        inner = tfloop.compile(fn)
        return tfloop.compile(lambda x: inner(x))

    wanted = drawn(lambda fn: tf.function(fn, reduce_retracing=True))
    assert drawn(nested) == wanted
    tf.random.set_seed(0)
    step, batches = tfloop.compile(noisy), iter([tf.constant(0.0)] * 6)
    found = [step.run(batches, steps=2).numpy().tolist() for _ in range(3)]
    assert sum(found, []) == wanted


def test_a_step_with_a_table_goes_the_ordinary_way(short):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    @tfloop.compile
    def count(key):
        table.insert(key, table.lookup(key) + 1)
        return table.lookup(key)

    assert [int(count(tf.constant(7, tf.int64))) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert short == []


def test_side_effects_happen_once_for_each_call():
    calls = []

    @tfloop.compile
    def step(x):
        tf.py_function(lambda value: calls.append(float(value)), [x], [])
        return x

    for number in range(5):
        step(float(number))
    assert calls == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_names_in_a_dict_tell_its_values():
    @tfloop.compile
    def step(batch):
        return batch["a"] - batch["b"]

    one, two = tf.constant(3.0), tf.constant(1.0)
    for _ in range(3):
        assert float(step({"a": one, "b": two})) == 2.0
        assert float(step({"b": one, "a": two})) == -2.0
        with pytest.raises(KeyError):
            step({"a": one, "c": two})


@pytest.mark.parametrize("kind", ["recurrent step", "loop"])
def test_a_loop_in_xla_under_a_tape_is_refused_before_it_runs(kind):
    net = keras.Sequential([keras.Input((4, 3)), keras.layers.LSTM(2)])
    optim = ModuleOptimizer("sgd")

    def recurrent(x):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean(net(x))
        optim.step(0.1, net, GradientsParams.from_grads(tape.backward(loss), net))
        return loss

    def loop(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, v * x), (0, x))[1]

    step = tfloop.compile(loop if kind == "loop" else recurrent, jit_compile=True)
    x = tf.ones((2, 4, 3))
    before = [variable.numpy() for variable in net.variables]
    with tf.GradientTape(), pytest.raises(RuntimeError, match="under an open tape: got a loop"):
        step(x)
    for variable, value in zip(net.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    step(x)


def test_a_jitted_step_without_loops_is_differentiable():
    step, x = tfloop.compile(lambda x: tf.reduce_sum(x**2), jit_compile=True), tf.ones(3)
    for _ in range(3):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = step(x)
        assert tape.gradient(loss, x).numpy().tolist() == [2.0, 2.0, 2.0]
