"""`Learner`: the hand loop, written once; Keras' callbacks, metrics and history around it."""

import csv
import functools
import importlib
import re
import runpy
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import message, read, values
from processes import ROOT, run
from since import EMPTY_EPOCHS, has

import tfloop
from tfloop import GradientsParams, ModuleLearningRate, ModuleLrScheduler, ParamGroup

# Keras 3.15 copies variables in a way that NumPy 2 will drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(25, 3)).astype("float32")
Y = RNG.integers(0, 2, size=25)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
HEAD = ParamGroup.from_name("head")


def net(**options) -> keras.Model:
    tfloop.seed(3)
    layers = keras.layers
    stack = [layers.Dense(6, **options), layers.BatchNormalization(), layers.Dropout(0.3, seed=1)]
    return keras.Sequential([keras.Input((3,)), *stack, layers.Dense(2, name="head")])


def grouped() -> tfloop.ModuleOptimizer:
    optim = tfloop.ModuleOptimizer(keras.optimizers.Adam(0.01))
    clipping = tfloop.GradientClipping.by_global_norm(0.1)
    return optim.with_group(HEAD, keras.optimizers.SGD(0.1, momentum=0.9), clipping)


def small(loss=LOSS, **options) -> tfloop.Learner:
    """A learner for what asks nothing of its model: its steps are soon traced."""
    tfloop.seed(3)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
    optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1))
    return tfloop.Learner(model, optim, loss, **options)


def loader(batch_size=5, shuffle=7, short=0):
    """Whole batches, 5 of 5 or 8 of 3; or the last one short, which every step is traced for."""
    rows = len(X) // batch_size * batch_size - short
    return tfloop.DataLoader((X[:rows], Y[:rows]), batch_size=batch_size, shuffle=shuffle)


def scheduler():
    decay = keras.optimizers.schedules.PolynomialDecay(0.05, 12, 0.0)
    return ModuleLrScheduler(decay).with_group(HEAD, multiplier=2.0)


RATES = {
    "float": lambda: 0.02,
    "groups": lambda: ModuleLearningRate(0.02).with_group(HEAD, multiplier=0.1),
    "scheduler": scheduler,
    "given": lambda: None,
}


def hand_loop(model, optim, lr, data, epochs, accumulate=1):
    view = tfloop.train(model)
    window = tfloop.GradientsAccumulator(reduction="mean")

    @tfloop.compile
    def step(x, y, rates):
        with tfloop.Tape() as tape:
            loss = LOSS(y, view(x))
        grads = GradientsParams.from_grads(tape.backward(loss), model)
        if accumulate > 1:
            window.accumulate(model, grads, weight=tf.shape(x)[0])
        else:
            optim.step(lr.step() if scheduled else rates, model, grads)

    @tfloop.compile
    def update(rates):
        optim.step(lr.step() if scheduled else rates, model, window)

    scheduled = isinstance(lr, ModuleLrScheduler)
    rates = None if scheduled else lr
    for _ in range(epochs):
        for number, (x, y) in enumerate(data, start=1):
            step(x, y, rates)
            if accumulate > 1 and (number % accumulate == 0 or number == len(data)):
                update(rates)


def assert_equal(got, wanted):
    got, wanted = values(got), values(wanted)
    for path, value in wanted.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)


@pytest.mark.parametrize(
    ("rates", "accumulate", "short"),
    [
        *((rates, accumulate, 0) for rates in RATES for accumulate in (1, 3)),
        ("groups", 1, 3),
        ("scheduler", 3, 3),
    ],
)
def test_fit_equals_the_hand_loop_bit_for_bit(rates, accumulate, short):
    ours, theirs = net(), net()
    optim, other = grouped(), grouped()
    learner = tfloop.Learner(ours, optim, LOSS, lr=RATES[rates](), accumulate=accumulate)
    learner.fit(loader(short=short), epochs=2)
    hand_loop(theirs, other, RATES[rates](), loader(short=short), 2, accumulate)
    assert_equal(ours, theirs)
    assert learner._train.trace_count == (2 if short else 1)
    assert int(optim.iterations) == (10 if accumulate == 1 else 4)


def test_accumulated_batches_are_one_large_batch():
    def without_chance():
        tfloop.seed(3)
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])

    small, large = without_chance(), without_chance()
    rows = [slice(0, 5), slice(5, 7), slice(7, 16), slice(16, 25)]
    weights = np.linspace(0.1, 2.0, 25).astype("float32")
    pieces = [(X[piece], Y[piece], weights[piece]) for piece in rows]
    for reduction in ("sum_over_batch_size", "mean_with_sample_weight"):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
        sgd = lambda: tfloop.ModuleOptimizer("sgd")  # noqa: E731
        many = tfloop.Learner(small, sgd(), loss, lr=0.5, accumulate=4)
        one = tfloop.Learner(large, sgd(), loss, lr=0.5)
        logs = many.fit(pieces, epochs=1).history, one.fit([(X, Y, weights)], epochs=1).history
        np.testing.assert_allclose(read(small.layers[0].kernel), read(large.layers[0].kernel), 1e-5)
        assert logs[0]["loss"] == pytest.approx(logs[1]["loss"], rel=1e-5)


def test_schedules_count_updates():
    rates = scheduler()
    learner = tfloop.Learner(net(), grouped(), LOSS, lr=rates, accumulate=2)
    learner.fit(loader(), epochs=2)
    assert int(rates.count) == 6  # 5 batches an epoch: windows of 2, 2 and 1


def test_validation_counts_every_sample_once():
    model = net()
    accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
    learner = tfloop.Learner(model, grouped(), LOSS, lr=0.0, metrics=[accuracy])
    history = learner.fit(loader(), loader(4, None, short=2), epochs=1).history
    logits, y = model(X[:22], training=False), Y[:22]  # 22 = 5 * 4 + 2 samples
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
    assert history["val_loss"][0] == pytest.approx(float(np.mean(each)), rel=1e-5)
    hits = np.argmax(logits, 1) == y
    assert history["val_accuracy"][0] == pytest.approx(np.mean(hits), rel=1e-6)


@pytest.mark.parametrize("loss", ["sparse_categorical_crossentropy", LOSS], ids=["name", "object"])
def test_losses_metrics_and_weights_mean_what_they_mean_in_keras(loss):
    def built():
        return net(kernel_regularizer="l2", activity_regularizer="l1")

    if isinstance(loss, str):
        softmax = keras.layers.Activation("softmax")
        ours, theirs = (keras.Sequential([built(), softmax]) for _ in range(2))
    else:
        ours, theirs = built(), built()
    weights = np.linspace(0.1, 2.0, 25).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((X, Y, weights)).batch(6)  # 25 = 4 * 6 + 1 rows
    metrics = lambda: [keras.metrics.SparseCategoricalAccuracy("accuracy")]  # noqa: E731
    optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1))
    learner = tfloop.Learner(ours, optim, loss, metrics=metrics())
    got = learner.fit(data, data, epochs=3)
    theirs.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics())
    wanted = theirs.fit(data, validation_data=data, epochs=3, verbose=0, shuffle=False)
    assert got.epoch == wanted.epoch
    assert got.history.keys() == wanted.history.keys()
    for name, numbers in wanted.history.items():
        assert got.history[name] == pytest.approx(numbers, rel=1e-4), name


def test_a_function_is_a_loss():
    def squares(y, outputs):
        return tf.reduce_sum((outputs - tf.one_hot(tf.cast(y, tf.int32), 2)) ** 2, -1)

    history = small(squares).fit(loader(), epochs=8).history
    assert history["loss"][-1] < history["loss"][0]
    nameless = small(lambda y, outputs: squares(y, outputs))
    assert nameless.fit(loader(), epochs=8).history == history


def test_inputs_of_several_parts():
    tfloop.seed(1)
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    model = keras.Model({"a": a, "b": b}, keras.layers.Dense(2)(keras.layers.add([a, b])))
    data = tfloop.DataLoader(({"a": X, "b": X}, Y), batch_size=4)
    learner = tfloop.Learner(tfloop.train(model), tfloop.ModuleOptimizer("adam"), LOSS)
    history = learner.fit(data, epochs=2).history
    assert history["loss"][1] < history["loss"][0]


def test_steps_by_hand_are_those_of_fit():
    ours, theirs = net(), net()
    learner = tfloop.Learner(ours, grouped(), LOSS, lr=0.02, accumulate=2)
    other = tfloop.Learner(theirs, grouped(), LOSS, lr=0.02, accumulate=2)
    batches = [(X[:4], Y[:4]), (X[4:10], Y[4:10])]
    for batch in batches:
        logs = learner.train_step(batch)
    history = other.fit(batches, epochs=1).history
    assert_equal(ours, theirs)
    assert float(logs["loss"]) == pytest.approx(history["loss"][0])
    before = values(ours)
    assert learner.valid_step(batches[0]).keys() == {"loss"}
    assert all(np.array_equal(before[path], value) for path, value in values(ours).items())


@pytest.mark.parametrize(
    ("rates", "accumulate", "short"),
    [
        ("groups", 1, 0),
        ("groups", 3, 0),
        ("scheduler", 1, 2),
        ("scheduler", 3, 0),
        ("given", 1, 0),
        ("given", 3, 2),
    ],
)
def test_several_steps_a_call_give_the_same(rates, accumulate, short):
    class Calls(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.ends = []

        def on_train_batch_end(self, batch, logs=None):
            self.ends.append(batch)

        def on_test_batch_end(self, batch, logs=None):
            self.ends.append(-batch)

    def run(steps):
        model, calls = net(), Calls()
        learner = tfloop.Learner(model, grouped(), LOSS, lr=RATES[rates](), accumulate=accumulate)
        data = loader(3, short=short)  # 8 batches of 3, or 7 and one of 1
        history = learner.fit(
            data, loader(), epochs=2, steps_per_execution=steps, callbacks=[calls]
        )
        return model, history.history, calls.ends

    (ours, got, ends), (theirs, wanted, _) = run(2), run(1)
    assert (
        ends[: len(ends) // 2]
        == {
            1: [1, 3, 5, 7, -1, -3, -5],
            3: [1, 2, 4, 5, 7, -1, -3, -5],
        }[accumulate]
    )
    for name, numbers in wanted.items():
        assert got[name] == pytest.approx(numbers, rel=1e-5)
    for path, value in values(theirs).items():
        np.testing.assert_allclose(values(ours)[path], value, rtol=1e-4, atol=1e-6, err_msg=path)


class Recorder(keras.callbacks.Callback):
    """What a callback hears, and the loss after each call; stops after so many calls."""

    def __init__(self, stop_after=None):
        super().__init__()
        self.heard, self.losses, self.stop_after = [], [], stop_after

    def on_epoch_begin(self, epoch, logs=None):
        self.heard.append(("epoch begins", epoch))

    def on_epoch_end(self, epoch, logs=None):
        self.heard.append(("epoch ends", epoch))

    def on_train_batch_begin(self, batch, logs=None):
        self.heard.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.heard.append(("end", batch))
        self.losses.append(float(logs["loss"]))
        self.model.stop_training |= len(self.losses) == self.stop_after

    def on_test_batch_begin(self, batch, logs=None):
        self.heard.append(("test begins", batch))

    def on_test_batch_end(self, batch, logs=None):
        self.heard.append(("test ends", batch))


@functools.cache
def heard_in_keras(steps):
    """What callbacks hear of two epochs of 7 batches of 3 rows and one of 1."""
    model, calls = small().model, Recorder()
    model.compile("sgd", LOSS, steps_per_execution=steps)
    batches = tf.data.Dataset.from_tensor_slices((X[:22], Y[:22])).batch(3)
    options = {"epochs": 2, "callbacks": [calls], "verbose": 0, "shuffle": False}
    model.fit(batches, validation_data=batches, **options)
    return calls.heard


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 50])
@pytest.mark.parametrize("kind", ["loader", "list", "dataset"])
def test_callbacks_hear_of_the_batches_that_keras_names(kind, steps):
    data = loader(3, shuffle=None, short=2)
    if kind == "list":
        data = list(data)
    elif kind == "dataset":
        data = tf.data.Dataset.from_tensor_slices((X[:22], Y[:22])).batch(3)
    calls = Recorder()
    small().fit(data, data, epochs=2, steps_per_execution=steps, callbacks=[calls])
    assert calls.heard == heard_in_keras(steps)


def test_data_of_unknown_length_begins_no_call_that_has_no_batch():
    def batches():
        for start in range(0, 24, 3):
            yield X[start : start + 3], Y[start : start + 3]

    specs = tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.int64)
    data = tf.data.Dataset.from_generator(batches, output_signature=specs)
    items = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24])).filter(lambda x, y: True)
    for given in (data, tfloop.DataLoader(items, batch_size=3)):
        calls = Recorder()
        small().fit(given, epochs=1, steps_per_execution=4, callbacks=[calls])
        assert calls.heard[1:-1] == [("begin", 0), ("end", 3), ("begin", 4), ("end", 7)]


def test_early_stopping_stops_and_restores():
    learner = small()
    model = learner.model
    stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=9.0, restore_best_weights=1)
    weights = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: weights.append(read(model.layers[0].kernel))
    )
    history = learner.fit(loader(), epochs=9, callbacks=[note, stop])
    assert history.epoch == [0, 1]
    np.testing.assert_array_equal(read(model.layers[0].kernel), weights[0])


def test_a_callback_can_stop_within_an_epoch():
    class AfterTwo(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    learner = small()
    learner.fit(loader(), epochs=3, callbacks=[AfterTwo()])
    assert int(learner.optim.iterations) == 2


def test_files_of_callbacks(tmp_path):
    model = net()
    saver = keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras"))
    callbacks = [keras.callbacks.CSVLogger(str(tmp_path / "log.csv")), saver]
    history = tfloop.Learner(model, grouped(), LOSS).fit(
        loader(), loader(), epochs=2, callbacks=callbacks
    )
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [float(row["val_loss"]) for row in rows] == history.history["val_loss"]
    loaded = keras.models.load_model(tmp_path / "2.keras")
    for wanted, found in zip(model.weights, loaded.weights, strict=True):
        np.testing.assert_array_equal(read(found), read(wanted))


def test_tensorboard_writes_or_names_what_it_lacks(tmp_path):
    board = keras.callbacks.TensorBoard(str(tmp_path), write_graph=False)
    learner = small()
    try:
        importlib.import_module("tensorboard.summary.v2")
    except ImportError:
        with pytest.raises(ValueError, match=message("TensorBoard", "pip install tensorboard")):
            learner.fit(loader(), epochs=1, callbacks=[board])
    else:
        learner.fit(loader(), loader(), epochs=1, callbacks=[board])
        assert list(tmp_path.glob("*/events*"))


@pytest.mark.parametrize("rates", ["float", "groups", "given"])
def test_reduce_on_plateau_reduces_every_rate(rates):
    ours, theirs = net(), net()
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.25, patience=1, min_delta=9.0)
    optim, other = grouped(), grouped()
    learner = tfloop.Learner(ours, optim, LOSS, lr=RATES[rates]())
    history = learner.fit(loader(), epochs=3, callbacks=[plateau]).history
    base = {"float": 0.02, "groups": 0.02, "given": 0.01}[rates]
    assert history["learning_rate"] == pytest.approx([base, base, base / 4])
    assert learner._train.trace_count == 1

    data = loader()
    hand_loop(theirs, other, RATES[rates](), data, 2)
    reduced = {
        "float": lambda: 0.005,
        "groups": lambda: ModuleLearningRate(0.005).with_group(HEAD, multiplier=0.1),
        "given": lambda: ModuleLearningRate(0.0025).with_group(HEAD, 0.025),
    }[rates]()
    hand_loop(theirs, other, reduced, data, 1)
    for path, value in values(theirs).items():
        np.testing.assert_allclose(values(ours)[path], value, atol=1e-6, err_msg=path)


def test_a_scheduled_rate_is_logged_but_not_set():
    learner = tfloop.Learner(net(), grouped(), LOSS, lr=scheduler())
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=9)
    history = learner.fit(loader(), epochs=2, callbacks=[plateau]).history
    assert history["learning_rate"] == pytest.approx([0.05 * 7 / 12, 0.05 * 2 / 12])
    fixed = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1)
    with pytest.raises(TypeError, match=message("ModuleLrScheduler", "Learner(..., lr=1e-3)")):
        learner.fit(loader(), epochs=1, callbacks=[fixed])


def test_attributes_set_by_a_callback_reach_the_model():
    model = net()

    def freeze(epoch, logs):
        seen.model.layers[0].trainable = epoch == 0
        seen.model.note = epoch

    seen = keras.callbacks.LambdaCallback(on_epoch_begin=freeze)
    kernels = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: kernels.append(read(model.layers[0].kernel))
    )
    tfloop.Learner(model, grouped(), LOSS).fit(loader(), epochs=2, callbacks=[seen, note])
    np.testing.assert_array_equal(*kernels)
    assert model.note == 1
    assert not hasattr(model, "history") or model.history is None


def test_a_line_an_epoch_in_a_pipe_and_a_bar_on_a_terminal(capsys, monkeypatch):
    learner = small()
    learner.fit(loader(), loader(), epochs=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("Epoch")] == ["Epoch 1/2", "Epoch 2/2"]
    assert len([line for line in lines if "val_loss" in line]) == 2
    assert len(lines) == 4
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    learner.fit(loader(), epochs=1)
    assert "━━" in capsys.readouterr().out
    learner.fit(loader(), epochs=1, verbose=2)
    shown = capsys.readouterr().out
    assert "loss" in shown
    assert "━━" not in shown
    learner.fit(loader(), epochs=1, verbose=0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("accumulate", [1, 3])
def test_endless_data_have_epochs_of_so_many_batches(accumulate, tmp_path):
    batches = [(X[i : i + 3], Y[i : i + 3]) for i in range(0, 12, 3)]
    endless = tf.data.Dataset.from_tensor_slices((X[:12], Y[:12])).batch(3).repeat()
    whole = [tfloop.Learner(net(), grouped(), LOSS, accumulate=accumulate) for _ in range(3)]
    unrolled = [batches[i % 4] for i in range(18)]  # what 3 epochs of 6 batches draw
    for epoch in range(3):
        whole[0].fit(unrolled[6 * epoch : 6 * epoch + 6], epochs=1)
    history = whole[1].fit(endless, epochs=3, steps_per_epoch=6, steps_per_execution=4)
    assert len(history.history["loss"]) == 3
    assert_equal(whole[1].model, whole[0].model)
    whole[2].fit(batches, epochs=3, steps_per_epoch=6)  # begun again at their end
    assert_equal(whole[2].model, whole[0].model)


def test_portions_of_a_loader_go_on_where_they_were_left(tmp_path):
    def run(folder, *epochs):
        for count in epochs:
            learner = tfloop.Learner(net(), grouped(), LOSS)
            learner.fit(loader(), epochs=count, steps_per_epoch=5, checkpoint=tmp_path / folder)
        return learner.model

    assert_equal(run("parts", 1, 2, 4), run("whole", 4))


@pytest.mark.parametrize(("frequency", "validated"), [(1, 4), (2, 2), ([1, 4], 2), ({3}, 1)])
def test_validation_follows_every_so_many_epochs_or_these(frequency, validated):
    learner = tfloop.Learner(net(), grouped(), LOSS)
    history = learner.fit(loader(), loader(), epochs=4, validation_freq=frequency)
    assert (len(history.history["loss"]), len(history.history["val_loss"])) == (4, validated)


@pytest.mark.parametrize("rates", RATES)
def test_a_resumed_run_is_the_whole_run(rates, tmp_path):
    def run(folder, epochs, **options):
        model, optim = net(), grouped()
        learner = tfloop.Learner(model, optim, LOSS, lr=RATES[rates](), accumulate=2)
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        callbacks = [] if rates == "scheduler" else [halve]
        history = learner.fit(
            loader(), epochs=epochs, callbacks=callbacks, checkpoint=folder, **options
        )
        return model, optim, history

    whole, optim, history = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 1)
    run(tmp_path / "parts", 2)
    model, other, rest = run(tmp_path / "parts", 4)
    assert_equal(model, whole)
    assert rest.epoch == [2, 3]
    for name, numbers in rest.history.items():
        assert numbers == history.history[name][2:]
    assert int(other.iterations) == int(optim.iterations) == 12
    for path in optim.state("head.kernel"):
        np.testing.assert_array_equal(
            other.state("head.kernel")[path], optim.state("head.kernel")[path]
        )
    assert run(tmp_path / "parts", 4)[2].epoch == []
    assert run(tmp_path / "parts", 1, resume=False)[2].epoch == [0]


def test_a_run_interrupted_within_a_window_goes_on_exactly(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if self.epoch == 1 and batch == 2:
                raise KeyboardInterrupt

    whole, model = net(), net()
    tfloop.Learner(whole, grouped(), LOSS, accumulate=2).fit(loader(), epochs=3)
    learner = tfloop.Learner(model, grouped(), LOSS, accumulate=2)
    data = loader()
    with pytest.raises(KeyboardInterrupt):
        learner.fit(data, epochs=3, checkpoint=tmp_path, callbacks=[Interrupt()])
    learner.fit(data, epochs=3, checkpoint=tmp_path)
    assert_equal(model, whole)


class TestAnEpochLeftInTheMiddle:
    """Every step once, with the losses and the history of the run that wasn't stopped."""

    def learner(self, rates="float", **options):
        accuracy = keras.metrics.SparseCategoricalAccuracy("accuracy")
        options = {"metrics": [accuracy], "accumulate": 1, **options}
        return tfloop.Learner(net(), grouped(), LOSS, lr=RATES[rates](), **options)

    def fit(self, learner, folder=None, data=None, *, stop_after=None, halving=False, **options):
        calls = Recorder(stop_after)
        halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        history = learner.fit(
            loader(3) if data is None else data,  # 8 batches of 3
            options.pop("valid", None),
            epochs=options.pop("epochs", 3),
            callbacks=[calls, halve] if halving else [calls],
            checkpoint=folder,
            **options,
        )
        return calls, history

    @pytest.mark.parametrize(
        ("rates", "accumulate", "steps", "stop_after"),
        [
            ("float", 1, 1, 2),
            ("groups", 1, 3, 1),
            ("given", 3, 1, 4),
            ("scheduler", 3, 2, 3),
            ("given", 1, 1, 11),
        ],
    )
    def test_goes_on_where_a_callback_stopped_it(
        self, rates, accumulate, steps, stop_after, tmp_path
    ):
        def make():
            return self.learner(rates, accumulate=accumulate)

        def fit(learner, folder=None, **more):
            data = {"data": loader(3), "valid": loader()}
            options = {"halving": rates != "scheduler", "steps_per_execution": steps}
            return self.fit(learner, folder, **data, **options, **more)

        whole = make()
        calls, history = fit(whole)
        first, _ = fit(make(), tmp_path, stop_after=stop_after)
        learner = make()
        rest, found = fit(learner, tmp_path)
        assert_equal(learner.model, whole.model)
        assert int(learner.optim.iterations) == int(whole.optim.iterations)
        assert first.losses + rest.losses == calls.losses
        assert found.epoch == history.epoch[-len(found.epoch) :]
        for name, numbers in history.history.items():
            assert found.history[name] == numbers[-len(found.epoch) :], name

    def test_may_be_stopped_after_every_batch(self, tmp_path):
        def fit(learner, folder=None, **options):
            return self.fit(learner, folder, loader(), epochs=2, **options)

        whole = self.learner(accumulate=3)
        calls, _ = fit(whole)
        learner, losses = None, []
        for _ in range(10):  # 5 batches an epoch
            learner = self.learner(accumulate=3)
            losses += fit(learner, tmp_path, stop_after=1)[0].losses
        assert losses == calls.losses
        assert_equal(learner.model, whole.model)
        assert fit(learner, tmp_path)[1].epoch == []

    @pytest.fixture(scope="class")
    @classmethod
    def undisturbed(cls):
        """The model of three epochs in windows of 3."""
        learner = cls().learner(accumulate=3)
        learner.fit(loader(3), epochs=3)
        return learner.model

    # Objects that are gone begin as they would without a checkpoint; after the first epoch is one.
    @pytest.mark.parametrize(
        ("kind", "batch"),
        [*(("exception", batch) for batch in (0, 3, 7, 12)), ("killed", 7), ("killed", 12)],
    )
    def test_begins_anew_where_nothing_could_be_saved(self, kind, batch, undisturbed, tmp_path):
        class Fails(keras.callbacks.Callback):
            calls = 0

            def on_train_batch_end(self, number, logs=None):
                self.calls += 1
                if self.calls == batch + 1:
                    raise KeyboardInterrupt

        learner, data = self.learner(accumulate=3), loader(3)
        with pytest.raises(KeyboardInterrupt):
            learner.fit(data, epochs=3, checkpoint=tmp_path, callbacks=[Fails()])
        if kind == "killed":  # the objects are gone, too
            learner, data = self.learner(accumulate=3), loader(3)
        self.fit(learner, tmp_path, data)
        assert_equal(learner.model, undisturbed)

    def test_is_saved_under_the_number_of_whole_epochs(self, tmp_path):
        learner = self.learner()
        data = loader(3)
        self.fit(learner, tmp_path, data, stop_after=11)
        place = data.serialize()
        fresh = self.learner()
        saved = tfloop.Checkpoint(tmp_path, model=fresh.model, optim=fresh.optim)
        assert saved.restore(strict=False) == 1
        assert int(fresh.optim.iterations) == 11
        assert_equal(fresh.model, learner.model)
        other = loader(3)
        tfloop.Checkpoint(tmp_path, train=other).restore(strict=False)
        assert other.serialize() == place
        assert len(list(other)) == 5

    def test_is_over_with_its_last_batch(self, tmp_path):
        learner = self.learner()
        self.fit(learner, tmp_path, stop_after=8)
        assert self.fit(learner, tmp_path)[0].heard[0] == ("epoch begins", 1)

    def test_is_no_epoch_that_early_stopping_ended(self, tmp_path):
        learner = self.learner()
        stop = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=9.0)
        data = loader(3)
        learner.fit(data, epochs=4, checkpoint=tmp_path, callbacks=[stop])
        rest, history = self.fit(learner, tmp_path, data, epochs=4)
        assert history.epoch == [2, 3]
        assert rest.heard[:2] == [("epoch begins", 2), ("begin", 0)]

    def test_begins_anew_without_resume_and_is_then_the_one_to_go_on_with(self, tmp_path):
        self.fit(self.learner(), tmp_path, stop_after=2)
        whole, learner = self.learner("groups"), self.learner("groups")
        self.fit(whole)
        calls, _ = self.fit(learner, tmp_path, stop_after=1, resume=False)
        assert calls.heard[1] == ("begin", 0)
        again = self.learner("groups")
        self.fit(again, tmp_path)
        assert_equal(again.model, whole.model)

    @pytest.mark.parametrize("kind", ["dataset", "own checkpoint"])
    def test_begins_anew_where_its_place_in_the_data_is_not_saved(self, kind, tmp_path):
        dataset = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24])).batch(3)
        whole, learner = self.learner(), self.learner()
        self.fit(whole, data=dataset)
        folder = tmp_path
        if kind == "own checkpoint":
            folder = tfloop.Checkpoint(tmp_path, model=learner.model, optim=learner.optim)
        self.fit(learner, folder, dataset, stop_after=10)
        rest, _ = self.fit(learner, folder, dataset)
        assert rest.heard[:2] == [("epoch begins", 1), ("begin", 0)]
        assert_equal(learner.model, whole.model)
        assert int(learner.optim.iterations) == 24

    def test_may_be_a_part_of_the_loaders(self, tmp_path):
        whole, learner = self.learner(), self.learner()
        calls, _ = self.fit(whole, data=loader(3).skip(1).take(6), valid=loader().take(2))
        first, _ = self.fit(
            learner, tmp_path, loader(3).skip(1).take(6), valid=loader().take(2), stop_after=4
        )
        learner = self.learner()
        view = loader(3).skip(1).take(6)
        rest, _ = self.fit(learner, tmp_path, view, valid=loader().take(2))
        assert first.losses + rest.losses == calls.losses
        assert_equal(learner.model, whole.model)

    def test_may_have_a_length_that_nobody_knows(self, tmp_path):
        def data():
            items = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24]))
            items = items.filter(lambda x, y: True)
            return tfloop.DataLoader(items, batch_size=3, shuffle=1)

        whole = self.learner()
        calls, history = self.fit(whole, data=data())
        # After the last batch, that it was the last isn't known yet.
        for stop_after in (3, 8) if has(EMPTY_EPOCHS) else (3,):
            folder = tmp_path / str(stop_after)
            first, _ = self.fit(self.learner(), folder, data(), stop_after=stop_after)
            learner = self.learner()
            rest, found = self.fit(learner, folder, data())
            assert first.losses + rest.losses == calls.losses
            assert found.history == history.history
            assert_equal(learner.model, whole.model)

    def test_keeps_metrics_that_make_their_variables_late(self, tmp_path):
        class OneHotF1(keras.metrics.F1Score):
            def update_state(self, y, outputs, sample_weight=None):
                super().update_state(tf.one_hot(tf.cast(y, tf.int32), 2), outputs)

        def make():
            return self.learner(metrics=[OneHotF1(name="f1")])

        _, history = self.fit(make())
        self.fit(make(), tmp_path, stop_after=5)
        _, found = self.fit(make(), tmp_path)
        for name, numbers in history.history.items():
            np.testing.assert_array_equal(found.history[name], numbers)


def test_a_validation_that_a_callback_stops_is_over(tmp_path):
    class AfterOne(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            self.model.stop_evaluating = True

    data, calls = loader(), Recorder()
    small().fit(loader(), data, epochs=2, callbacks=[AfterOne(), calls], checkpoint=tmp_path)
    ends = [number for kind, number in calls.heard if kind == "test ends"]
    assert ends == [0, 0]
    assert '"epoch": 2, "batch": 0' in data.serialize()


def test_metrics_of_several_results_are_logged_as_in_keras():
    class Counts(keras.metrics.Sum):
        def update_state(self, y, outputs, sample_weight=None):
            super().update_state(tf.ones_like(y))

        def result(self):
            return {"rows": self.total, "twice": 2 * self.total}

    class Both(Counts):
        def result(self):
            total = tf.convert_to_tensor(self.total)
            return tf.stack([total, -total])

    for steps in (1, 2):
        learner = small(metrics=[Counts("counts"), Both("both")])
        history = learner.fit(loader(), epochs=1, steps_per_execution=steps).history
        assert history.keys() == {"loss", "rows", "twice", "both"}
        assert (history["rows"], history["twice"]) == ([25.0], [50.0])
        np.testing.assert_array_equal(history["both"], [[25.0, -25.0]])


def test_no_epochs_leave_the_weights_alone():
    model, optim = net(), tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1, use_ema=True))
    learner = tfloop.Learner(model, optim, LOSS)
    learner.train_step((X, Y))
    before = values(model)
    learner.fit(loader(), epochs=0)
    for path, value in values(model).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)


def test_a_scaler_scales_and_never_shows():
    ours, theirs = net(), net()
    optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1), scaler=tfloop.LossScaler(64.0))
    got = tfloop.Learner(ours, optim, LOSS).fit(loader(), epochs=2).history
    plain = tfloop.ModuleOptimizer(keras.optimizers.SGD(0.1))
    wanted = tfloop.Learner(theirs, plain, LOSS).fit(loader(), epochs=2).history
    assert got["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    np.testing.assert_allclose(read(ours.layers[3].kernel), read(theirs.layers[3].kernel), 1e-4)


def test_a_checkpoint_of_ones_own(tmp_path):
    model, optim = net(), grouped()
    checkpoint = tfloop.Checkpoint(tmp_path, model=model, optim=optim)
    tfloop.Learner(model, optim, LOSS).fit(loader(), epochs=2, checkpoint=checkpoint)
    assert checkpoint.restore() == 2


def test_moving_averages_end_up_in_the_model():
    averaged = keras.optimizers.SGD(0.1, use_ema=True)
    model, optim = net(), tfloop.ModuleOptimizer(averaged)
    tfloop.Learner(model, optim, LOSS).fit(loader(), epochs=1)
    average = optim.state("head.kernel")["model_variables_moving_average"]
    np.testing.assert_array_equal(read(model.layers[3].kernel), average)


def test_a_module_of_tensorflow_is_a_model():
    class Affine(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable(tf.zeros((3, 2)))

        def __call__(self, x):
            return x @ self.w

    learner = tfloop.Learner(Affine(), tfloop.ModuleOptimizer("sgd"), LOSS)
    history = learner.fit(loader(), loader(), epochs=2).history
    assert history["val_loss"][1] < np.log(2)


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"model": 3}, TypeError, ["int 3", "keras.Model"]),
        ({"optim": keras.optimizers.Adam()}, TypeError, ["Adam", "tfloop.ModuleOptimizer("]),
        ({"loss": None}, TypeError, ["needs a loss", "None"]),
        ({"loss": "mean_squard"}, ValueError, ["'mean_squard'", "keras.losses."]),
        ({"loss": keras.losses.MeanSquaredError(reduction=None)}, ValueError, ["reduction=None"]),
        (
            {"loss": keras.losses.MeanSquaredError(reduction="sum"), "accumulate": 2},
            ValueError,
            ["'sum'", "accumulate=2", "MeanSquaredError(..., reduction='mean')"],
        ),
        ({"lr": -1.0}, ValueError, ["-1.0"]),
        ({"lr": "fast"}, TypeError, ["str 'fast'"]),
        (
            {"lr": keras.optimizers.schedules.ExponentialDecay(1.0, 2, 0.5)},
            TypeError,
            ["ExponentialDecay", "ModuleLrScheduler(schedule)"],
        ),
        ({"metrics": ["accuracy"]}, TypeError, ["'accuracy'", "SparseCategoricalAccuracy()"]),
        ({"metrics": [keras.metrics.Mean("loss")]}, ValueError, ["one name", "'loss'"]),
        ({"accumulate": 0}, ValueError, ["accumulate=4"]),
        ({"strategy": "cpu"}, TypeError, ["str 'cpu'", "tfloop.strategy('auto')"]),
        (
            {
                "strategy": tf.distribute.get_strategy(),
                "optim": tfloop.ModuleOptimizer("sgd", reduction="sum"),
            },
            ValueError,
            ["reduction='sum'", "'mean'"],
        ),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_what_a_learner_refuses(options, error, parts):
    given = {"model": net(), "optim": grouped(), "loss": LOSS} | options
    with pytest.raises(error, match=message(*parts)):
        tfloop.Learner(**given)


def test_replicas_give_what_one_device_gives():
    options = ["-W", "error", "-W", "ignore:__array__:DeprecationWarning"]
    done = run(*options, "tests/learner_replicas.py")
    assert done.returncode == 0, done.stderr
    words = ["given-1", "groups-2", "schedule-1", "schedule-2"]
    said = [line for line in done.stdout.split("\n") if re.fullmatch(r"[a-z]+-\w+", line)]
    assert said == [*words, "stopped-2", "fit-mean", "fit-sum", "fit-None"]


@pytest.mark.parametrize(("accumulate", "samples"), [(1, (40, 16)), (3, (44, 11))])
def test_the_example_gives_the_numbers_of_the_loop_of_the_mnist_example(
    accumulate, samples, example
):
    from tfloop.examples import _images, mnist

    rng = np.random.default_rng(5)
    train, test = (
        _images.Images(rng.integers(0, 256, (n, 28, 28), np.uint8), rng.integers(0, 10, n))
        for n in samples
    )
    config = mnist.TrainingConfig(
        num_epochs=2, batch_size=8, lr=1e-3, accumulate=accumulate, num_workers=0
    )
    wanted = mnist.train(config, train, test).averages
    got = example["train"](config, train, test).history
    for split, prefix in (("Train", ""), ("Valid", "val_")):
        losses = [average.loss for average in wanted[split]]
        assert got[f"{prefix}loss"] == pytest.approx(losses, rel=1e-5)
        hits = [average.accuracy / 100 for average in wanted[split]]
        assert got[f"{prefix}accuracy"] == pytest.approx(hits, rel=1e-6)


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(ROOT / "examples" / "learner.py"))


def test_the_example_runs_and_goes_on(tmp_path, example):
    from tfloop.examples import _images, mnist

    config = mnist.TrainingConfig(num_epochs=1, lr=1e-3, dataset="digits", workdir=str(tmp_path))
    example["train"](config, *_images.load("digits", None))
    command = ["examples/learner.py", "--dataset=digits", "--lr=1e-3", "--quick", "--resume"]
    done = run(*command, f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert re.findall("Epoch ./.", done.stdout) == ["Epoch 2/2"]
    assert float(re.search(r"accuracy (\d+\.\d+) %", done.stdout)[1]) > 80.0
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["0", "1"]


def test_an_unbuilt_model_is_refused_at_once():
    model = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="needs a built model"):
        tfloop.Learner(model, tfloop.ModuleOptimizer("sgd"), LOSS)


@pytest.mark.parametrize(
    ("train", "options", "error", "parts"),
    [
        (iter([(X, Y)]), {"epochs": 2}, ValueError, ["iterator", "as train"]),
        (5, {"epochs": 1}, TypeError, ["int 5 as train", "DataLoader"]),
        ({"x": X}, {"epochs": 1}, TypeError, ["as train", "DataLoader"]),
        ([], {"epochs": 1}, ValueError, ["no batches from train"]),
        ([(X, Y)], {"epochs": 1, "valid": []}, ValueError, ["no batches from valid"]),
        ([{"x": X, "y": Y}], {"epochs": 1}, TypeError, ["dict(x, y)", "(x, y)"]),
        (
            tf.data.Dataset.from_tensors((X, Y)).repeat(),
            {"epochs": 1},
            ValueError,
            ["without end", "take(100)", "steps_per_epoch=100"],
        ),
        ([(X,)], {"epochs": 1}, TypeError, ["1 parts"]),
        ([(X, Y)], {"epochs": -1}, ValueError, ["epochs=10"]),
        ([(X, Y)], {"epochs": 1, "verbose": 3}, ValueError, ["`verbose`: got int 3"]),
        ([(X, Y)], {"epochs": 1, "steps_per_epoch": 0}, ValueError, ["steps_per_epoch=100"]),
        ([], {"epochs": 1, "steps_per_epoch": 2}, ValueError, ["no batches from train"]),
        ([(X, Y)], {"epochs": 1, "validation_freq": 0}, ValueError, ["validation_freq=5"]),
        ([(X, Y)], {"epochs": 1, "validation_freq": "2"}, TypeError, ["validation_freq`: got str"]),
        ([(X, Y)], {"epochs": 1, "steps_per_execution": 0}, ValueError, ["steps_per_execution=50"]),
        ([(X, Y)], {"epochs": 1, "callbacks": [print]}, TypeError, ["LambdaCallback"]),
        (
            [(X, Y)],
            {"epochs": 1, "callbacks": [keras.callbacks.BackupAndRestore("runs")]},
            ValueError,
            ["BackupAndRestore", "checkpoint="],
        ),
        (
            [(X, Y)],
            {"epochs": 1, "callbacks": [keras.callbacks.SwapEMAWeights()]},
            ValueError,
            ["SwapEMAWeights", "use_ema=True"],
        ),
        ([(X, Y)], {"epochs": 1, "checkpoint": 3}, TypeError, ["int 3"]),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, dict) else "",
)
def test_what_fit_refuses(train, options, error, parts):
    learner = tfloop.Learner(net(), grouped(), LOSS)
    with pytest.raises(error, match=message(*parts)):
        learner.fit(train, **options)


@pytest.mark.parametrize("data", [(np.ones((4, 2)), np.ones(4)), [tf.ones((4, 2))], np.ones(4)])
def test_arrays_are_no_batches(data):
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    learner = tfloop.Learner(net, tfloop.ModuleOptimizer("sgd"), "mse", lr=0.1)
    with pytest.raises(TypeError, match=r"as train, .*Write `tfloop.DataLoader\(\(x, y\), batch"):
        learner.fit(data, epochs=1)
