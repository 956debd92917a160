"""`GradientsAccumulator`: what it adds, what it leaves alone, and whose it is."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop
from tfloop import GradientsAccumulator, GradientsParams, ModuleOptimizer, ParamGroup

MODES = ("eager", "graph", "jit")
GRAPHS = ("foreign", "foreign jit", "graph", "jit")


def compiled(mode):
    """The decorator of a mode: none, a plain `tf.function`, or ours."""
    if mode == "eager":
        return lambda fn: fn
    if mode.startswith("foreign"):
        return tf.function(jit_compile=True) if mode.endswith("jit") else tf.function
    return tfloop.compile(jit_compile=mode == "jit")


def dense(inputs=2, units=2, **kwargs):
    net = keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(units, **kwargs)])
    return net


def filled(model, value, paths=None):
    """The same number as every gradient."""
    parameters = tfloop.named_parameters(model)
    chosen = parameters if paths is None else {path: parameters[path] for path in paths}
    return GradientsParams(
        {p: tf.fill(v.shape, tf.cast(value, v.dtype)) for p, v in chosen.items()}
    )


def values(model):
    return {path: v.numpy() for path, v in tfloop.named_variables(model).items()}


def live_bytes():
    """The bytes of all variables that there are, seed states and counters included."""
    gc.collect()
    # By their handles: asking everything for its class wakes lazy modules.
    found = [thing for thing in gc.get_objects() if type(thing).__name__ == "ResourceVariable"]
    return sum(v.dtype.size * int(np.prod(v.shape)) for v in found)


# What is added.


@pytest.mark.parametrize("mode", MODES)
def test_a_sum_is_the_sum_and_is_taken_once(mode):
    net, window = dense(), GradientsAccumulator()

    @compiled(mode)
    def micro(value):
        window.accumulate(net, filled(net, value))

    micro(1.0)
    micro(2.5)
    assert (int(window.count), float(window.weight)) == (2, 2.0)
    grads = window.grads()
    assert list(grads) == ["dense.kernel", "dense.bias"]
    np.testing.assert_array_equal(grads["dense.kernel"], np.full((2, 2), 3.5))
    assert (int(window.count), float(window.weight)) == (0, 0.0)
    micro(7.0)
    np.testing.assert_array_equal(window.grads()["dense.bias"], [7.0, 7.0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weights", [(1, 3), (0.5, 1.5), (np.int64(1), np.float32(3))])
def test_a_mean_is_over_the_weights(mode, weights):
    net, window = dense(), GradientsAccumulator(reduction="mean")

    @compiled(mode)
    def micro(value, weight):
        window.accumulate(net, filled(net, value), weight=weight)

    micro(2.0, weights[0])
    micro(6.0, weights[1])
    np.testing.assert_array_equal(window.grads()["dense.kernel"], np.full((2, 2), 5.0))


def test_a_mean_without_weights_counts_each_micro_batch_once():
    net, window = dense(), GradientsAccumulator(reduction="mean")
    window.accumulate(net, filled(net, 1.0))
    window.accumulate(net, filled(net, 2.0))
    np.testing.assert_array_equal(window.grads()["dense.bias"], [1.5, 1.5])


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_of_weight_0_adds_nothing_even_if_its_mean_is_nan(mode):
    net, window = dense(), GradientsAccumulator(reduction="mean")

    @compiled(mode)
    def micro(value, weight):
        window.accumulate(net, filled(net, value), weight=weight)

    micro(2.0, 4.0)
    micro(float("nan"), 0.0)
    np.testing.assert_array_equal(window.grads()["dense.kernel"], np.full((2, 2), 2.0))


def test_a_nan_that_counts_is_kept():
    net, window = dense(), GradientsAccumulator(reduction="mean")
    window.accumulate(net, filled(net, float("nan")), weight=1)
    window.accumulate(net, filled(net, 1.0), weight=1)
    assert not bool(window.grads().all_finite())


@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients_are_scattered_and_never_made_dense(mode):
    net = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(5, 2)])
    window = GradientsAccumulator(reduction="mean")

    @compiled(mode)
    def micro(ids):
        with tfloop.Tape() as tape:
            loss = tf.reduce_sum(net(ids))
        grads = GradientsParams.from_grads(tape.backward(loss), net)
        assert isinstance(grads["embedding.embeddings"], tf.IndexedSlices)
        window.accumulate(net, grads, weight=2.0)

    micro(tf.constant([[1, 1, 4]]))
    micro(tf.constant([[1, 0, 0]]))
    expected = np.array([2, 3, 0, 0, 1])[:, np.newaxis] / 2.0 * np.ones((5, 2))
    np.testing.assert_array_equal(window.grads()["embedding.embeddings"], expected)
    if mode == "graph":
        kinds = [op.type for op in graph_of(micro.python_function, tf.constant([[1, 1, 4]]))]
        assert "ResourceScatterAdd" in kinds
        assert "ScatterNd" not in kinds


def graph_of(fn, *args):
    return tf.function(fn).get_concrete_function(*args).graph.get_operations()


def test_reset_empties_the_window():
    net, window = dense(), GradientsAccumulator()
    window.accumulate(net, filled(net, 1.0))
    window.reset()
    assert int(window.count) == 0
    with pytest.raises(RuntimeError, match="empty window"):
        window.grads()


def test_reset_works_before_build():
    window = GradientsAccumulator()
    window.reset()
    assert int(window.count) == 0


# What the step does with it.


@pytest.mark.parametrize("mode", MODES)
def test_what_got_nothing_stays_bit_equal_with_its_state_whatever_the_windows_hold(mode):
    keras.utils.set_random_seed(0)
    parts = {name: dense(use_bias=False) for name in "abc"}
    groups = {"a": "adam", "b": keras.optimizers.SGD(0.1, momentum=0.9)}

    def optimizer():
        optim = ModuleOptimizer(keras.optimizers.AdamW(weight_decay=0.1))
        for name, rule in groups.items():
            clipping = tfloop.GradientClipping.by_global_norm(1.0)
            optim.with_group(ParamGroup.from_name(name), rule, clipping)
        return optim

    def state(optim):
        found = {f"{path}": v.numpy() for path, v in tfloop.named_parameters(parts).items()}
        for path in list(found):
            found |= {f"{path}/{k}": v.numpy() for k, v in optim.state(path).items()}
        for group in optim._assembly.records():
            name = next(iter(group.slots), "total")
            counters = {k: v for k, v in group.counters.items() if k != "learning_rate"}
            found |= {f"{name}/{k}": v.numpy() for k, v in counters.items()}
        return found

    # Each window: which parts each of its micro-batches reaches.
    windows = [("abc", "a"), ("b", "b"), ("c", "ca"), ("a",), ("abc",), ("c",)]
    optim, window = optimizer(), GradientsAccumulator()

    def micro(names):
        window.accumulate(parts, filled(parts, 0.5, [f"{name}.dense.kernel" for name in names]))

    micros = {n: compiled(mode)(lambda n=n: micro(n)) for w in windows for n in w}

    @compiled(mode)
    def update():
        optim.step(0.1, parts, window)

    optim.build(parts)
    begin = {path: v.numpy() for path, v in tfloop.named_parameters(parts).items()}
    history = [state(optim)]
    for names in windows:
        for each in names:
            micros[each]()
        update()
        history.append(state(optim))
        for key, value in history[-1].items():
            reached = key[0] in "".join(names) or key == "total/iterations"
            assert np.array_equal(value, history[-2][key]) != reached, (names, key)
    counts = {k: int(v) for k, v in history[-1].items() if k.endswith("/iterations")}
    assert counts == {
        "a.dense.kernel/iterations": 4,
        "b.dense.kernel/iterations": 3,
        "c.dense.kernel/iterations": 4,
        "total/iterations": 6,
    }
    # The same as steps that are told outright what there is.
    for path, variable in tfloop.named_parameters(parts).items():
        variable.assign(begin[path])
    told = optimizer()
    for names in windows:
        joined = "".join(names)
        grads = {f"{n}.dense.kernel": tf.fill((2, 2), 0.5 * joined.count(n)) for n in set(joined)}
        told.step(0.1, parts, GradientsParams(grads))
    for key, value in state(told).items():
        np.testing.assert_allclose(value, history[-1][key], rtol=1e-6, atol=1e-8, err_msg=key)


@pytest.mark.parametrize("mode", MODES)
def test_counters_that_a_group_shares_stay_too(mode):
    # Nadam multiplies a momentum schedule up at each update.
    parts = {"a": dense(), "b": dense()}
    optim = ModuleOptimizer("sgd").with_group(ParamGroup.from_name("b"), keras.optimizers.Nadam())
    window = GradientsAccumulator()
    optim.build(parts)

    @compiled(mode)
    def update():
        optim.step(0.1, parts, window)

    def counters():
        return {
            f"{group.optimizer}.{name}": counter.numpy()
            for group in optim._assembly.records()
            for name, counter in group.counters.items()
            if name not in ("learning_rate", "skipped")
        }

    before = counters()
    window.accumulate(parts, filled(parts, 1.0, ["a.dense.kernel"]))
    update()
    moved = {key for key, value in counters().items() if value != before[key]}
    assert moved == {"SGD.iterations", "ModuleOptimizer.iterations"}
    window.accumulate(parts, filled(parts, 1.0))
    update()
    assert {k for k, v in counters().items() if v == before[k]} == set()


def test_compiled_steps_are_traced_once_whatever_the_windows_hold():
    parts = {"a": dense(), "b": dense()}
    optim, window = ModuleOptimizer("adam"), GradientsAccumulator(reduction="mean")
    micro_a = tfloop.compile(
        lambda w: window.accumulate(parts, filled(parts, 1.0, ["a.dense.kernel"]), weight=w)
    )
    micro = tfloop.compile(lambda w: window.accumulate(parts, filled(parts, 1.0), weight=w))
    update = tfloop.compile(lambda lr: optim.step(lr, parts, window) and None)
    for number in range(1, 5):
        micro_a(number)
        if number % 2:
            micro(2.0 * number)
        update(0.1 / number)
    assert (micro_a.trace_count, micro.trace_count, update.trace_count) == (1, 1, 1)


@pytest.mark.parametrize("mode", MODES)
def test_one_function_can_accumulate_and_step_behind_a_condition(mode):
    net, window = dense(use_bias=False), GradientsAccumulator(reduction="mean")
    net.layers[0].kernel.assign(tf.zeros((2, 2)))
    optim = ModuleOptimizer("sgd")

    @compiled(mode)
    def micro(value, last):
        window.accumulate(net, filled(net, value), weight=1.0)
        if last:
            optim.step(1.0, net, window)

    for number in range(6):
        micro(float(number), tf.constant(number % 3 == 2))
    np.testing.assert_array_equal(net.layers[0].kernel, np.full((2, 2), -5.0))
    assert int(optim.iterations) == 2
    assert int(window.count) == 0


@pytest.mark.parametrize("mode", ["graph", "jit"])
def test_in_a_trace_taken_gradients_hold_every_parameter_an_absent_one_as_zeros(mode):
    net, window = dense(), GradientsAccumulator()
    window.accumulate(net, filled(net, 2.0, ["dense.kernel"]))
    assert list(window.grads()) == ["dense.kernel"]
    window.accumulate(net, filled(net, 2.0, ["dense.kernel"]))
    grads = compiled(mode)(window.grads)()
    np.testing.assert_array_equal(grads["dense.kernel"], np.full((2, 2), 2.0))
    np.testing.assert_array_equal(grads["dense.bias"], [0.0, 0.0])
    assert int(window.count) == 0


@pytest.mark.parametrize("mode", ["foreign", "graph"])
def test_an_empty_window_raises_when_a_trace_runs(mode):
    net, window, optim = dense(), GradientsAccumulator(), ModuleOptimizer("sgd")
    before = values(net)
    update = compiled(mode)(lambda: optim.step(1.0, net, window) and None)
    taken = compiled(mode)(lambda: window.grads())
    for call in (update, taken):
        with pytest.raises(tf.errors.InvalidArgumentError, match="found an empty window"):
            call()
    assert int(optim.iterations) == 0
    np.testing.assert_array_equal(values(net)["dense.kernel"], before["dense.kernel"])


@pytest.mark.parametrize("weight", [None, 0.0])
def test_under_xla_which_drops_asserts_an_empty_window_changes_nothing(weight):
    net, window = dense(), GradientsAccumulator(reduction="mean")
    optim = ModuleOptimizer(keras.optimizers.AdamW(weight_decay=0.1)).build(net)
    if weight is not None:
        window.accumulate(net, filled(net, 1.0), weight=weight)
    before = values(net)
    tfloop.compile(lambda: optim.step(1.0, net, window) and None, jit_compile=True)()
    for path, value in values(net).items():
        np.testing.assert_array_equal(value, before[path])
    assert int(optim.iterations) == 0


# Errors that lose nothing.


def held(window):
    return {key: value.numpy().tobytes() for key, value in window.state().items()}


def test_a_step_with_the_accumulator_of_another_root_raises_and_loses_nothing():
    mine, other = dense(), dense()
    window, optim = GradientsAccumulator(), ModuleOptimizer("sgd")
    window.accumulate(mine, filled(mine, 1.0))
    before = held(window), values(other)["dense.kernel"].tobytes()
    with pytest.raises(
        ValueError, match=r"step\(lr, model, grads\)` got .*, expected .*One|window"
    ):
        optim.step(1.0, other, window)
    with pytest.raises(ValueError, match="window belongs to one root"):
        window.accumulate(other, filled(other, 1.0))
    with pytest.raises(ValueError, match="window belongs to one root"):
        window.build({"net": mine})
    assert (held(window), values(other)["dense.kernel"].tobytes()) == before


@pytest.mark.parametrize("rate", [float("nan"), -1.0, "fast"])
def test_a_step_that_raises_eagerly_loses_nothing(rate):
    net, window, optim = dense(), GradientsAccumulator(), ModuleOptimizer("sgd")
    window.accumulate(net, filled(net, 1.0))
    before = held(window)
    with pytest.raises((ValueError, TypeError), match="rate"):
        optim.step(rate, net, window)
    assert held(window) == before


@pytest.mark.parametrize("mode", ["foreign", "graph"])
def test_a_step_that_raises_when_its_trace_runs_loses_nothing(mode):
    net, window, optim = dense(), GradientsAccumulator(), ModuleOptimizer("sgd")
    window.accumulate(net, filled(net, 1.0))
    before = held(window), values(net)["dense.bias"].tobytes()
    update = compiled(mode)(lambda rate: optim.step(rate, net, window) and None)
    with pytest.raises(tf.errors.InvalidArgumentError, match="rate"):
        update(tf.constant(float("nan")))
    assert (held(window), values(net)["dense.bias"].tobytes()) == before
    update(tf.constant(1.0))
    assert int(window.count) == 0


@pytest.mark.parametrize("weight", [float("nan"), -1.0, float("inf")])
@pytest.mark.parametrize("mode", ["foreign", "graph"])
def test_a_bad_tensor_weight_raises_when_its_trace_runs_and_adds_nothing(mode, weight):
    net, window = dense(), GradientsAccumulator(reduction="mean")
    micro = compiled(mode)(lambda w: window.accumulate(net, filled(net, 1.0), weight=w))
    micro(tf.constant(2.0))
    before = held(window)
    with pytest.raises(tf.errors.InvalidArgumentError, match="negative or not finite"):
        micro(tf.constant(weight))
    assert held(window) == before


def test_a_trace_of_somebody_elses_that_is_older_than_the_buffers_raises_and_loses_nothing():
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    net.layers[1].trainable = False
    window, optim = GradientsAccumulator(), ModuleOptimizer("sgd")
    micro = tf.function(lambda: window.accumulate(net, filled(net, 1.0, ["dense.kernel"])))
    update = tf.function(lambda: optim.step(1.0, net, window) and None)
    taken = tf.function(lambda: window.grads())
    micro()
    taken()
    micro()
    update()
    net.layers[1].trainable = True
    window.accumulate(net, filled(net, 3.0))  # builds the new buffers
    before = held(window)
    for call in (micro, update, taken):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"before .*build\(model\)"):
            call()
    assert held(window) == before


# Where buffers come from.


@pytest.mark.parametrize("mode", GRAPHS)
def test_buffers_are_made_at_the_first_use_inside_anybodys_trace_and_on_retraces(mode):
    net = dense(use_bias=False)
    window, optim = GradientsAccumulator(reduction="mean"), ModuleOptimizer("adam")

    @compiled(mode)
    def other(x):
        return x + 1

    @compiled(mode)
    def step(x):  # each shape is a trace, and the first of them isn't the function's first
        if x.shape[0] == 1:
            return other(x)
        window.accumulate(net, filled(net, 1.0), weight=tf.shape(x)[0])
        optim.step(0.1, net, window)
        return x

    step(tf.ones((1,)))
    step(tf.ones((2,)))
    step(tf.ones((3, 1)))
    assert int(optim.iterations) == 2


def test_buffers_are_one_copy_of_the_trainable_parameters():
    net = keras.Sequential(
        [keras.Input((30,)), keras.layers.Dense(50), keras.layers.BatchNormalization()]
    )
    net.layers[0].trainable = False
    trainable = sum(4 * int(np.prod(v.shape)) for v in tfloop.named_parameters(net).values())
    before = live_bytes()
    window = GradientsAccumulator(reduction="mean").build(net)
    counters = 3 * 8 + 2 * 4  # count, weight, layout; a flag for each of gamma and beta
    assert live_bytes() - before == trainable + counters
    assert trainable == 2 * 4 * 50
    for _ in range(3):
        window.accumulate(net, filled(net, 1.0), weight=2)
    window.grads()
    assert live_bytes() - before == trainable + counters


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32")]
    + [("float64", "float64")],
)
def test_buffers_are_float32_or_float64_where_the_parameter_is(dtype, expected):
    net = dense(use_bias=False, dtype=dtype)
    window, optim = GradientsAccumulator(), ModuleOptimizer("sgd")
    window.accumulate(net, filled(net, 1.0))
    assert window.state()["sum/dense.kernel"].dtype == expected
    before = values(net)["dense.kernel"].astype("float64")
    optim.step(0.5, net, window)
    assert net.layers[0].kernel.dtype == dtype
    np.testing.assert_allclose(
        values(net)["dense.kernel"].astype("float64"), before - 0.5, atol=0.01
    )


def test_accumulators_of_two_models_have_windows_of_their_own():
    keras.utils.set_random_seed(0)
    generator, critic = dense(2, 2), dense(2, 1)
    windows = {"g": GradientsAccumulator(), "d": GradientsAccumulator(reduction="mean")}
    optims = {"g": ModuleOptimizer("adam"), "d": ModuleOptimizer("sgd")}

    @tfloop.compile
    def micro(z, x):
        with tfloop.Tape() as tape:
            fake = tf.reduce_mean(critic(generator(z)))
            loss = fake - tf.reduce_mean(critic(x))
        grads = tape.backward(loss)
        windows["d"].accumulate(critic, GradientsParams.from_grads(grads, critic), weight=2)
        windows["g"].accumulate(generator, GradientsParams.from_grads(grads, generator).scale(-1))

    updates = {
        name: tfloop.compile(lambda n=name, m=model: optims[n].step(0.1, m, windows[n]) and None)
        for name, model in (("g", generator), ("d", critic))
    }
    for number in range(1, 13):
        micro(tf.ones((2, 2)), tf.ones((2, 2)))
        if number % 2 == 0:
            updates["d"]()
        if number % 3 == 0:
            updates["g"]()
        assert (int(windows["d"].count), int(windows["g"].count)) == (number % 2, number % 3)
    assert (int(optims["d"].iterations), int(optims["g"].iterations)) == (6, 4)


# Whose parameters these are.


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_unfrozen_in_the_middle_of_a_window_joins_it(mode):
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    net.layers[0].trainable = False
    window = GradientsAccumulator()

    @compiled(mode)
    def micro(value):
        window.accumulate(net, filled(net, value))

    micro(1.0)
    net.layers[0].trainable = True
    micro(2.0)
    grads = window.grads()
    np.testing.assert_array_equal(grads["dense.bias"], [2.0, 2.0])
    np.testing.assert_array_equal(grads["dense_1.bias"], [3.0, 3.0])


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_a_frozen_layer_are_dropped(mode):
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    window, optim = GradientsAccumulator(), ModuleOptimizer("sgd")
    everything = {path: tf.ones(v.shape) for path, v in tfloop.named_parameters(net).items()}

    @compiled(mode)
    def micro():
        window.accumulate(net, GradientsParams(everything))

    @compiled(mode)
    def update():
        optim.step(1.0, net, window)

    micro()
    net.layers[0].trainable = False  # what it holds of the window is dropped by the step
    micro()
    before = values(net)
    update()
    after = values(net)
    np.testing.assert_array_equal(after["dense.kernel"], before["dense.kernel"])
    np.testing.assert_allclose(after["dense_1.bias"], before["dense_1.bias"] - 2.0, rtol=1e-6)


def test_a_layer_put_in_before_others_leaves_each_variable_its_sum():
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    window = GradientsAccumulator().build(net)
    window.accumulate(net, filled(net, 1.0))
    last = net.layers[-1]
    net.pop()
    net.add(keras.layers.Dense(2))
    net.add(last)
    window.accumulate(net, filled(net, 10.0, ["dense_1.bias"]))
    grads = window.grads()
    assert list(grads) == ["dense_1.kernel", "dense_1.bias"]  # where it has moved
    np.testing.assert_array_equal(grads["dense_1.bias"], [11.0, 11.0])


def test_a_variable_that_took_the_path_of_another_begins_at_zero():
    class Slot(tf.Module):
        def __init__(self, size):
            super().__init__()
            self.w = tf.Variable(tf.zeros(size))

    slot, window = Slot(2), GradientsAccumulator()
    window.accumulate(slot, filled(slot, 1.0))
    slot.w = tf.Variable(tf.zeros(3))
    window.accumulate(slot, filled(slot, 5.0))
    np.testing.assert_array_equal(window.grads()["w"], [5.0, 5.0, 5.0])


class Linear(tf.Module):
    def __init__(self):
        super().__init__()
        self.w = tf.Variable(tf.ones((2, 2)))


class Tied(keras.Model):
    def __init__(self):
        super().__init__()
        self.one = keras.layers.Dense(2, use_bias=False)
        self.other = self.one

    def call(self, x):
        return self.other(self.one(x))


def tied():
    net = Tied()
    net(tf.ones((1, 2)))
    return net


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (Linear, ["w"]),
        (lambda: [Linear(), dense(use_bias=False)], ["0.w", "1.dense.kernel"]),
        (
            lambda: {"net": dense(use_bias=False), "temperature": tf.Variable(1.0)},
            ["net.dense.kernel", "temperature"],
        ),
        (lambda: tfloop.train(dense(use_bias=False)), ["dense.kernel"]),
        (tied, ["one.kernel"]),
    ],
    ids=["module", "list", "dict", "view", "tied"],
)
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_root_is_served(make, paths, mode):
    root = make()
    window, optim = GradientsAccumulator(), ModuleOptimizer("sgd")

    @compiled(mode)
    def micro():
        window.accumulate(root, filled(root, 0.5))

    @compiled(mode)
    def update():
        optim.step(1.0, root, window)

    before = values(root)
    micro()
    micro()
    assert [key.partition("/")[2] for key in window.state() if "/" in key] == paths
    update()
    for path, value in values(root).items():
        np.testing.assert_allclose(value, before[path] - 1.0, rtol=1e-6)


def test_every_path_to_a_tied_variable_leads_to_one_sum():
    net, window = tied(), GradientsAccumulator()
    window.accumulate(net, GradientsParams({"other.kernel": tf.ones((2, 2))}))
    window.accumulate(net, GradientsParams({"one.kernel": tf.ones((2, 2))}))
    np.testing.assert_array_equal(window.grads()["one.kernel"], np.full((2, 2), 2.0))


def test_views_of_a_model_are_the_model():
    net, window = dense(), GradientsAccumulator()
    window.accumulate(tfloop.train(net), filled(net, 1.0))
    window.accumulate(tfloop.valid(net), filled(net, 1.0))
    window.accumulate(net, filled(net, 1.0))
    assert int(window.count) == 3


# BatchNormalization.


def test_batch_normalization_moves_per_micro_batch_and_sees_it_alone():
    """What the docstring says of it, measured."""
    x = tf.constant([[0.0], [2.0], [10.0], [12.0]])
    momentum = 0.5

    def trained(pieces, momentum):
        net = keras.Sequential(
            [keras.Input((1,)), keras.layers.BatchNormalization(momentum=momentum, epsilon=0.0)]
        )
        net.layers[0].moving_mean.assign([64.0])
        window = GradientsAccumulator(reduction="mean")
        outputs = []
        for piece in tf.split(x, pieces):
            with tfloop.Tape() as tape:
                outputs.append(tfloop.train(net)(piece))
                loss = tf.reduce_mean(outputs[-1] * piece)
            grads = GradientsParams.from_grads(tape.backward(loss), net)
            window.accumulate(net, grads, weight=len(piece))
        return tf.concat(outputs, 0), window.grads(), net.layers[0]

    whole, whole_grads, whole_layer = trained(1, momentum)
    parts, parts_grads, parts_layer = trained(2, momentum)
    # Normalised by their own mean and variance, both micro-batches look alike.
    np.testing.assert_allclose(parts[:, 0], [-1.0, 1.0, -1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(whole[:, 0], (np.array([0, 2, 10, 12]) - 6) / np.sqrt(26), rtol=1e-6)
    gamma = "batch_normalization.gamma"
    np.testing.assert_allclose(parts_grads[gamma], [1.0], rtol=1e-6)
    np.testing.assert_allclose(whole_grads[gamma], [np.sqrt(26)], rtol=1e-6)
    # The statistics move twice: a quarter of 64 is left, not a half.
    np.testing.assert_allclose(whole_layer.moving_mean, [0.5 * 64 + 0.5 * 6], rtol=1e-6)
    np.testing.assert_allclose(
        parts_layer.moving_mean, [0.25 * 64 + 0.25 * 1 + 0.5 * 11], rtol=1e-6
    )
    # With the root of the momentum a half of it is left again.
    root = momentum**0.5
    *_, layer = trained(2, root)
    expected = 0.5 * 64 + (1 - root) * (root * 1 + 11)
    np.testing.assert_allclose(layer.moving_mean, [expected], rtol=1e-6)


# `tf.train.Checkpoint`.


def stored(window, tmp_path):
    return tf.train.Checkpoint(window=window).write(str(tmp_path / "window"))


def restore(window, path):
    tf.train.Checkpoint(window=window).read(path).assert_consumed()


@pytest.mark.parametrize("built", [True, False])
def test_tensorflows_checkpoint_resumes_in_the_middle_of_a_window(built, tmp_path):
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(2)])
    first = GradientsAccumulator(reduction="mean")
    first.accumulate(net, filled(net, 1.5, ["dense.kernel", "dense_1.bias"]), weight=3)
    path = stored(first, tmp_path)
    second = GradientsAccumulator(reduction="mean")
    if built:
        second.accumulate(net, filled(net, 100.0), weight=7)
    restore(second, path)
    assert (int(second.count), float(second.weight)) == (1, 3.0)
    for window in (first, second):
        window.accumulate(net, filled(net, 0.1, ["dense.bias", "dense.kernel"]), weight=2)
    assert held(second) == held(first)
    assert list(second.grads()) == ["dense.kernel", "dense.bias", "dense_1.bias"]


def test_a_restored_window_can_be_stepped_with_saved_again_or_dropped_before_anything_else(
    tmp_path,
):
    net = dense(use_bias=False)
    first = GradientsAccumulator()
    first.accumulate(net, filled(net, 1.5))
    path = stored(first, tmp_path)
    second, third, fourth = (GradientsAccumulator() for _ in range(3))
    restore(second, path)
    with pytest.raises(RuntimeError, match=r"restored window .*build\(model\)"):
        second.grads()
    restore(third, stored(second, tmp_path))
    before = values(net)["dense.kernel"]
    ModuleOptimizer("sgd").step(1.0, net, third)
    np.testing.assert_array_equal(values(net)["dense.kernel"], before - np.float32(1.5))
    restore(fourth, path)
    fourth.reset()
    assert int(fourth.count) == 0
    fourth.accumulate(net, filled(net, 2.0))
    np.testing.assert_array_equal(fourth.grads()["dense.kernel"], np.full((2, 2), 2.0))


def test_a_window_saved_empty_empties_the_one_it_is_restored_into(tmp_path):
    net, window = dense(), GradientsAccumulator()
    path = stored(window, tmp_path)  # not even built
    window.accumulate(net, filled(net, 1.0))
    restore(window, path)
    assert int(window.count) == 0
    window.accumulate(net, filled(net, 2.0, ["dense.bias"]))
    grads = window.grads()
    assert list(grads) == ["dense.bias"]
    np.testing.assert_array_equal(grads["dense.bias"], [2.0, 2.0])
    waiting = GradientsAccumulator()
    waiting.deserialize(window.serialize())
    with pytest.raises(RuntimeError, match="found an empty window"):
        waiting.grads()


def deep():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dense(3)])


@pytest.mark.parametrize(
    ("saved", "live", "reduction", "match"),
    [
        (deep, dense, "sum", "sums for 'dense_1.kernel', 'dense_1.bias', expected only"),
        (dense, lambda: dense(3, 2), "sum", r"shape \(2, 2\) .*'dense.kernel', expected \(3, 2\)"),
        (dense, lambda: dense(dtype="float64"), "sum", "dtype float32 for .*float64"),
        (dense, dense, "mean", "window of reduction='sum', expected 'mean'"),
    ],
)
def test_a_window_that_does_not_fit_raises_and_changes_nothing(saved, live, reduction, match):
    first, other = GradientsAccumulator(), saved()
    first.accumulate(other, filled(other, 1.0))
    net, window = live(), GradientsAccumulator(reduction=reduction)
    window.accumulate(net, filled(net, 4.0))
    before = held(window)
    with pytest.raises(ValueError, match=match):
        window.deserialize(first.serialize())
    assert held(window) == before
    late = GradientsAccumulator(reduction=reduction)
    late.deserialize(first.serialize())
    for _ in range(2):  # it waits on, and isn't lost by the attempt
        with pytest.raises(ValueError, match=match):
            late.build(net)
    assert late.root is None


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"x" * 50])
def test_a_damaged_window_raises_and_changes_nothing(damage):
    net, window = dense(), GradientsAccumulator()
    window.accumulate(net, filled(net, 1.0))
    before = held(window)
    with pytest.raises(ValueError, match="can't read the state: got .* bytes that are no window"):
        window.deserialize(damage(window.serialize()))
    assert held(window) == before


# Bad input.


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda net, window: GradientsAccumulator(reduction="avg"), ValueError, "str 'avg', exp"),
        (lambda net, window: GradientsAccumulator(reduction=None), ValueError, "None, expected 'm"),
        (
            lambda net, window: window.accumulate(net, {"dense.bias": tf.ones(2)}),
            TypeError,
            r"needs a GradientsParams: got dict\(dense.bias\)",
        ),
        (lambda net, window: window.accumulate(net, None), TypeError, "needs a GradientsParams"),
        (lambda net, window: window.accumulate(3, filled(net, 1.0)), TypeError, "needs a model"),
        (
            lambda net, window: window.accumulate(keras.layers.Dense(2), filled(net, 1.0)),
            ValueError,
            "needs a built model",
        ),
        (
            lambda net, window: window.accumulate(net, GradientsParams({})),
            ValueError,
            "got none, exp",
        ),
        (
            lambda net, window: window.accumulate(
                net, GradientsParams({"dense.kernl": tf.ones(2)})
            ),
            ValueError,
            "dense.kernl",
        ),
        (
            lambda net, window: window.accumulate(net, GradientsParams({"dense.bias": tf.ones(3)})),
            ValueError,
            "'dense.bias'",
        ),
        (lambda net, window: window.grads(), RuntimeError, "empty window: got 0 micro-batches"),
        (
            lambda net, window: ModuleOptimizer("sgd").step(1.0, net, window),
            RuntimeError,
            r"step\(lr, model, grads\)` found an empty window",
        ),
        (lambda net, window: window.build("net"), TypeError, "needs a model"),
    ],
)
def test_bad_input_raises_and_says_how_to_mend_it(call, error, match):
    net, window = dense(), GradientsAccumulator()
    with pytest.raises(error, match=match):
        call(net, window)
    assert int(window.count) == 0


@pytest.mark.parametrize(
    ("weight", "error", "match"),
    [
        (-1, ValueError, "the weight -1.0, expected a finite number of at least 0"),
        (float("nan"), ValueError, "the weight nan"),
        (np.float32("inf"), ValueError, "the weight inf"),
        (tf.constant(-2.0), ValueError, "the weight -2.0"),
        (np.array(-3), ValueError, "the weight -3.0"),
        (tf.constant([1.0, 2.0]), ValueError, r"a weight of shape \(2,\), expected a scalar"),
        (np.ones((1, 1)), ValueError, r"a weight of shape \(1, 1\)"),
        (True, TypeError, "got bool True as weight"),
        (tf.constant(True), TypeError, "got dtype bool as weight"),
        ("many", TypeError, "got str 'many' as weight"),
        ([3], TypeError, "an object of type list as weight"),
    ],
)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_bad_weight_raises_before_anything_changes(weight, error, match, mode):
    net, window = dense(), GradientsAccumulator(reduction="mean")
    window.accumulate(net, filled(net, 1.0), weight=1)
    before = held(window)
    with pytest.raises(error, match=match):
        compiled(mode)(lambda: window.accumulate(net, filled(net, 1.0), weight=weight))()
    assert held(window) == before


def test_a_sum_takes_no_weight():
    net, window = dense(), GradientsAccumulator()
    with pytest.raises(ValueError, match="weight=int 3 with reduction='sum', expected none"):
        window.accumulate(net, filled(net, 1.0), weight=3)


def test_weights_that_sum_to_0_raise_and_can_be_dropped():
    net, window = dense(), GradientsAccumulator(reduction="mean")
    window.accumulate(net, filled(net, 1.0), weight=0)
    with pytest.raises(ValueError, match=r"can't take the mean: .*sum to 0.*reset\(\)"):
        window.grads()
    window.reset()
    window.accumulate(net, filled(net, 1.0), weight=2)
    assert len(window.grads()) == 2


def test_gradients_are_consumed():
    net, window = dense(), GradientsAccumulator()
    grads = filled(net, 1.0)
    window.accumulate(net, grads)
    with pytest.raises(RuntimeError, match=r"consumed.*grads.copy\(\)"):
        window.accumulate(net, grads)
    assert int(window.count) == 1


def test_its_text_says_what_it_does_and_holds():
    net, window = dense(), GradientsAccumulator(reduction="mean")
    assert repr(window) == "GradientsAccumulator(not built, reduction='mean', 0 micro-batches)"
    window.accumulate(net, filled(net, 1.0))
    assert "(Sequential), reduction='mean', 1 micro-batches)" in repr(window)
    assert tf.function(lambda: tf.constant(repr(window)))().numpy().endswith(b"'mean')")
