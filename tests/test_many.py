"""`fn.run`: several steps in one call are those of as many single calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop
from tfloop import GradientsParams, ModuleLrScheduler, ModuleOptimizer

X = np.random.default_rng(0).normal(size=(45, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def parts(jit=False, scheduler=None, dropout=0.0):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dropout(dropout), keras.layers.Dense(1)]
    model = tfloop.train(keras.Sequential([keras.Input((3,)), *layers]))
    optim = ModuleOptimizer(keras.optimizers.Adam())

    @tfloop.compile(jit_compile=jit)
    def step(batch, lr):
        x, y = batch
        with tfloop.Tape() as tape:
            predicted = model(x)
            loss = tf.reduce_mean((predicted - y) ** 2)
        rate = lr if scheduler is None else scheduler.step()
        optim.step(rate, model, GradientsParams.from_grads(tape.backward(loss), model))
        return {"loss": loss, "nothing": None, "sums": (tf.reduce_sum(predicted, axis=0),)}

    return model, step


def loader(**options):
    return tfloop.DataLoader((X, Y), batch_size=4, shuffle=1, **options)


def weights(model):
    return [v.numpy() for v in model.variables]


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 5, 100])
def test_it_equals_as_many_single_calls(jit, steps):
    # 45 rows in batches of 4: eleven, and one of a single row.
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    model, step = parts(jit, ModuleLrScheduler(schedule), dropout=0.3)
    twin, single = parts(jit, ModuleLrScheduler(schedule), dropout=0.3)
    for _ in range(2):
        expected = [single(batch, 0.0) for batch in batches_of(twin)]
        batches = iter(batches_of(model))
        found, counts = [], []
        while True:
            results = step.run(batches, 0.0, steps=steps)
            counts.append(len(results["loss"]))
            if not counts[-1]:
                break
            assert results["nothing"] is None
            assert results["sums"][0].shape == (counts[-1], 1)
            found += list(results["loss"].numpy())
        assert sum(counts) == 12
        assert all(count <= steps for count in counts)
        np.testing.assert_allclose(found, [float(e["loss"]) for e in expected], rtol=1e-5)
        for one, other in zip(weights(model), weights(twin), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert results["sums"][0].shape == (0, 1)
    assert step.trace_count <= 3  # the loop, and single steps on both sizes


_LOADERS = {}


def batches_of(model):
    """The next epoch of a loader that belongs to a model."""
    return _LOADERS.setdefault(id(model), (model, loader()))[1]


def test_runs_of_any_iterator_are_the_same():
    def batches():
        return [(tf.constant(X[i : i + 4]), tf.constant(Y[i : i + 4])) for i in range(0, 45, 4)]

    def arrays():
        return [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 45, 4)]

    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    mapped = tfloop.DataLoader((X, Y), lambda batch: (batch[0] * 1.0, batch[1]), batch_size=4)
    items = tfloop.DataLoader(tf.data.Dataset.from_tensor_slices((X, Y)), batch_size=4)
    ends = []
    for source in (
        batches(),
        arrays(),
        (batch for batch in batches()),
        dataset,
        tfloop.DataLoader((X, Y), batch_size=4, num_workers=0, prefetch=False),
        mapped,
        items,
    ):
        model, step = parts()
        iterator, counts = iter(source), []
        while not counts or counts[-1]:
            counts.append(len(step.run(iterator, 0.1, steps=5)["loss"]))
        assert counts == [5, 5, 2, 0]
        ends.append(weights(model))
    for end in ends[1:]:
        for one, other in zip(ends[0], end, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_batches_that_cannot_be_stacked_run_one_by_one():
    x, other = tf.constant(X[:4]), tf.constant(X[4:7])
    step = tfloop.compile(lambda batch: tf.reduce_sum(tf.cast(batch["x"], tf.float32)))
    for batches in (
        [{"x": x, "y": x}, {"y": x, "x": other}],  # lengths
        [{"x": x, "y": x}, {"x": x, "z": x}],  # names
        [{"x": x}, {"x": x, "y": x}],  # numbers
        [{"x": x}, {"x": tf.cast(x, tf.float64)}],  # dtypes
        [{"x": x, "y": "a"}, {"x": x, "y": "b"}],  # texts
    ):
        expected = [float(tf.reduce_sum(tf.cast(batch["x"], tf.float32))) for batch in batches]
        found = step.run(iter(batches), steps=2)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_batches_of_other_names_or_containers_are_given_as_they_are(jit):
    one, two = tf.constant(1.0), tf.constant(2.0)

    @tfloop.compile(jit_compile=jit)
    def step(batch):
        if isinstance(batch, dict):
            return batch["a"] - batch.get("b", 0.0)
        return 10.0 * batch[0] + (batch[1] if isinstance(batch, tuple) else 0.0)

    for batches in (
        [{"a": one, "b": two}, {"a": one, "c": two}],
        [(one, two), [one, two]],
        [(one, two), {"a": two, "b": one}],
    ):
        expected = [float(step(batch)) for batch in batches]
        assert step.run(iter(batches), steps=2).numpy().tolist() == expected


def test_stacked_and_single_batches_are_one_order():
    mixed, plain = loader(), loader()
    expected = [batch[0].numpy() for batch in plain]
    batches = iter(mixed)
    found = [next(batches)[0].numpy()]
    found += list(batches.stack(3)[0].numpy())
    found += [next(batches)[0].numpy(), next(batches)[0].numpy()]
    found += list(batches.stack(2)[0].numpy())
    found += list(batches.stack(3)[0].numpy())
    assert batches.stack(3) is None
    found += [batch[0].numpy() for batch in batches]
    assert len(found) == len(expected) == 12
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert list(batches) == []


def test_a_loader_resumes_after_a_stack():
    first, second = loader(), loader()
    batches = iter(first)
    next(batches)
    batches.stack(4)
    second.deserialize(first.serialize())
    left = [batch[0].numpy() for batch in second]
    assert len(left) == 7
    for one, other in zip(left, batches, strict=True):
        np.testing.assert_array_equal(one, other[0])
    again = [batch[0].numpy() for batch in second]  # the next epoch is whole
    assert len(again) == 12


@pytest.mark.parametrize("options", [{"drop_last": True}, {"shuffle": None}, {"num_workers": 2}])
def test_stacks_follow_the_options_and_views(options):
    made = tfloop.DataLoader((X, Y), **({"batch_size": 4, "shuffle": 3} | options))
    other = tfloop.DataLoader((X, Y), **({"batch_size": 4, "shuffle": 3} | options))
    view, twin = made.skip(2).take(7), other.skip(2).take(7)
    expected = [batch[0].numpy() for batch in twin]
    batches = iter(view)
    found = [*batches.stack(3)[0].numpy(), *batches.stack(3)[0].numpy()]
    assert batches.stack(3) is None
    found += [batch[0].numpy() for batch in batches]
    assert len(found) == 7
    for one, expected_one in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, expected_one)


def test_stacks_of_rows_of_different_lengths_are_left_to_single_calls():
    ragged = tf.data.Dataset.from_generator(
        lambda: (np.ones(n, "float32") for n in (2, 2, 3, 3)),
        output_signature=tf.TensorSpec((None,), tf.float32),
    )
    ragged = ragged.apply(tf.data.experimental.assert_cardinality(4))
    batches = iter(tfloop.DataLoader(ragged, batch_size=2))
    step = tfloop.compile(lambda batch: tf.reduce_sum(batch))
    np.testing.assert_array_equal(step.run(batches, steps=2), [4.0, 6.0])


def test_a_step_that_returns_nothing_counts_itself():
    total = tf.Variable(0.0)

    @tfloop.compile
    def step(x):
        total.assign_add(tf.reduce_sum(x))

    assert step.run(iter([tf.ones(2)] * 5), steps=5) is None
    assert float(total) == 10.0


def test_a_frozen_parameter_stops_in_a_loop_too():
    model, step = parts()
    batches = iter(loader())
    step.run(batches, 0.1, steps=3)
    model.module.trainable = False
    model.module.layers[-1].trainable = True
    before = weights(model)
    model.module.trainable = True
    model.module.layers[0].trainable = False
    step.run(batches, 0.1, steps=3)
    after = weights(model)
    np.testing.assert_array_equal(before[0], after[0])
    assert (before[-1] != after[-1]).all()


def test_wrong_calls_are_refused():
    _, step = parts()
    with pytest.raises(TypeError, match=r"needs an iterator: got .*`batches = iter\(loader\)`"):
        step.run(loader(), 0.1, steps=3)
    with pytest.raises(ValueError, match="`steps`: got 0, expected an int of at least 1"):
        step.run(iter(loader()), 0.1, steps=0)
    with pytest.raises(ValueError, match="got an iterator at its end, expected at least one batch"):
        step.run(iter([]), 0.1, steps=3)
    batches = iter(loader())
    with pytest.raises(RuntimeError, match="was called in a trace: got a graph"):
        tf.function(lambda: step.run(batches, 0.1, steps=3))()
