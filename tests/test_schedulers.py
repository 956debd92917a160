"""Schedules: exact sequences, in every mode, through configs and checkpoints; what they refuse."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers.schedules import (
    CosineDecay,
    ExponentialDecay,
    LearningRateSchedule,
    PiecewiseConstantDecay,
    PolynomialDecay,
)

from tfloop import schedulers
from tfloop.schedulers import Composed, Noam, OneCycle, Plateau, Sequential, Warmup
from tfloop.schedulers._module import ModuleLrScheduler

# Keras reads variables in a way that NumPy 2 warns about.
keras_reads = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def noam(i, factor, warmup, size):
    s = i + 1
    return factor * size**-0.5 * min(s**-0.5, s * warmup**-1.5)


def one_cycle(i, top, total, pct, div, final_div, linear=False):
    start, end, peak, last = top / div, top / div / final_div, pct * total - 1, total - 1

    def anneal(a, b, t):
        return a + (b - a) * t if linear else b + (a - b) * (1 + math.cos(math.pi * t)) / 2

    i = min(i, last)
    if i <= peak:
        return anneal(start, top, i / peak)
    return anneal(top, end, (i - peak) / (last - peak))


def three_in_turn():
    linear = PolynomialDecay(0.1, 2, 0.3)
    return Sequential([linear, ExponentialDecay(0.5, 1, 0.5), CosineDecay(0.8, 2)], [2, 5])


# What each schedule gives from step 0 on. Burn's sequences first, the Keras classes for Burn's
# names among them.
SEQUENCES = {
    "constant": (lambda: Composed([0.3]), [0.3] * 4),
    "linear": (lambda: PolynomialDecay(0.9, 4, 0.5, power=1), [0.9, 0.8, 0.7, 0.6, 0.5, 0.5]),
    # Burn's cosine would go up again: 0.3, 0.5 in place of the last two.
    "cosine": (lambda: CosineDecay(0.5, 2, alpha=0.1 / 0.5), [0.5, 0.3, 0.1, 0.1, 0.1]),
    "exponential": (lambda: ExponentialDecay(0.8, 1, 0.1), [0.8, 0.08, 0.008, 0.0008]),
    "step": (
        lambda: ExponentialDecay(0.5, 3, 0.1, staircase=True),
        [0.5] * 3 + [0.05] * 3 + [0.005],
    ),
    "sequential": (three_in_turn, [0.1, 0.2, 0.5, 0.25, 0.125, 0.8, 0.4, 0.0]),
    "sequential of one": (lambda: Sequential([0.5], []), [0.5, 0.5]),
    "sequential of sequentials": (
        lambda: Sequential([Sequential([1.0, 2.0], [1]), Sequential([3.0, 4.0], [2])], [3]),
        [1, 2, 2, 3, 3, 4, 4],
    ),
    "noam": (lambda: Noam(2.0, 3, 16), [noam(i, 2.0, 3, 16) for i in range(8)]),
    "product": (lambda: Composed([0.5, PolynomialDecay(1.0, 2, 0.5)]), [0.5, 0.375, 0.25, 0.25]),
    "sum": (lambda: Composed([0.5, PolynomialDecay(1.0, 2, 0.5)], "sum"), [1.5, 1.25, 1.0, 1.0]),
    "mean": (lambda: Composed([0.5, 1.0, PolynomialDecay(3.0, 2, 0.0)], "mean"), [1.5, 1.0, 0.5]),
    "warmup of a number": (lambda: Warmup(0.4, 4), [0.0, 0.1, 0.2, 0.3, 0.4, 0.4]),
    "warmup of a schedule": (
        lambda: Warmup(PolynomialDecay(1.0, 4, 0.0), 2, start=0.5),
        [0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0],
    ),
    "warmup of a staircase": (
        lambda: Warmup(PiecewiseConstantDecay([1], [8.0, 2.0]), 2),
        [0.0, 4.0, 8.0, 8.0, 2.0, 2.0],
    ),
    "one cycle": (
        lambda: OneCycle(2.0, 10),
        [one_cycle(i, 2.0, 10, 0.3, 25, 1e4) for i in range(13)],
    ),
    "one cycle, linear": (
        lambda: OneCycle(1.0, 25, 0.25, 10, 100, "linear"),
        [one_cycle(i, 1.0, 25, 0.25, 10, 100, linear=True) for i in range(27)],
    ),
    "one cycle without a rise": (lambda: OneCycle(1.0, 3, 0.1, 10, 1.0), [1.0, 0.55, 0.1, 0.1]),
    "plateau": (lambda: Plateau(0.7), [0.7] * 3),
    "rates above 1": (lambda: Warmup(100.0, 2), [0.0, 50.0, 100.0]),
}
every_schedule = pytest.mark.parametrize("name", SEQUENCES)


def assert_close(rates, expected):
    """Equal to float32 arithmetic on the scale of the largest rate."""
    np.testing.assert_allclose(rates, expected, rtol=2e-6, atol=1e-7 * max(expected))


def check_sequence(schedule, expected):
    """The same values eager, in a graph and under XLA, for every kind of step."""
    kinds = [int, float, tf.constant, np.int64, lambda i: tf.constant(i, tf.float32)]
    for kind in kinds:
        rates = [schedule(kind(i)) for i in range(len(expected))]
        assert_close(rates, expected)
    variable = keras.Variable(0, dtype="int64", trainable=False)
    for jit in (False, True):
        compiled = tf.function(lambda step: schedule(step), jit_compile=jit)
        inside = tf.function(lambda: schedule(variable), jit_compile=jit)
        rates, of_variable = [], []
        for i in range(len(expected)):
            variable.assign(i)
            rates.append(compiled(tf.constant(i, tf.int64)))
            of_variable.append(inside())
        assert_close(rates, expected)
        assert_close(of_variable, expected)
        assert compiled.experimental_get_tracing_count() == 1


def check_save_load(make, expected, directory):
    """A fresh object that restores in the middle goes on as if nothing had happened."""
    half = len(expected) // 2
    scheduler = ModuleLrScheduler(make())
    first = [scheduler.step().base for _ in range(half)]
    path = tf.train.Checkpoint(scheduler=scheduler).save(f"{directory}/saved")
    fresh = ModuleLrScheduler(make())
    tf.train.Checkpoint(scheduler=fresh).restore(path).assert_consumed()
    rest = [fresh.step().base for _ in range(half, len(expected))]
    assert_close(first + rest, expected)


@every_schedule
def test_a_schedule_gives_its_sequence_in_every_mode(name):
    make, expected = SEQUENCES[name]
    check_sequence(make(), expected)


@every_schedule
def test_a_schedule_goes_on_after_a_restore(name, tmp_path):
    make, expected = SEQUENCES[name]
    check_save_load(make, expected, tmp_path)


@every_schedule
def test_a_schedule_survives_its_config(name):
    make, expected = SEQUENCES[name]
    config = keras.optimizers.schedules.serialize(make())
    back = keras.optimizers.schedules.deserialize(json.loads(json.dumps(config)))
    assert_close([back(i) for i in range(len(expected))], expected)
    assert keras.optimizers.schedules.serialize(back) == config


@every_schedule
def test_a_schedule_is_the_rate_of_a_keras_optimizer(name):
    make, expected = SEQUENCES[name]
    variable = keras.Variable(0.0)
    optimizer = keras.optimizers.SGD(make())
    for rate in expected[:3]:
        before = float(variable)
        optimizer.apply([tf.constant(1.0)], [variable])
        assert before - float(variable) == pytest.approx(rate, rel=1e-5)


def test_every_schedule_of_ours_is_in_the_table_above():
    made = {type(make()).__name__ for make, _ in SEQUENCES.values()}
    assert set(schedulers.__all__) <= made
    for name in schedulers.__all__:
        kind = getattr(schedulers, name)
        assert issubclass(kind, LearningRateSchedule)
        assert keras.saving.get_registered_name(kind) == f"tfloop>{name}"


@pytest.mark.parametrize("name", schedulers.__all__)
def test_a_rate_is_a_float32_scalar(name):
    make = next(make for make, _ in SEQUENCES.values() if type(make()).__name__ == name)
    for step in (0, 1.0, np.float64(1), tf.constant(2, tf.uint8), tf.constant(3.0, tf.float64)):
        rate = make()(step)
        assert (rate.dtype, rate.shape) == (tf.float32, ())


def test_noam_rises_while_it_warms_up_then_falls():
    rates = [float(Noam(1.0, 10, 64)(i)) for i in range(40)]
    assert all(a < b for a, b in zip(rates[:9], rates[1:10], strict=True))
    assert all(a > b for a, b in zip(rates[9:-1], rates[10:], strict=True))
    assert max(rates) == pytest.approx(1 / math.sqrt(64 * 10))


def test_one_cycle_has_the_known_corners():
    rates = [float(OneCycle(1.0, 10)(i)) for i in range(11)]
    assert rates[0] == pytest.approx(1 / 25)
    assert rates[1] == pytest.approx((1 / 25 + 1) / 2)
    assert rates[2] == 1.0
    assert rates[9] == rates[10] == pytest.approx(1 / 25 / 1e4)


def test_step_counts_beyond_float32_choose_the_right_schedule():
    turn = 2**24 + 1
    schedule = Sequential([1.0, 2.0], [turn])
    assert [float(schedule(step)) for step in (turn - 1, turn)] == [1.0, 2.0]
    assert float(schedule(2**40)) == 2.0


def test_a_schedule_of_the_user_can_be_nested():
    class Inverse(LearningRateSchedule):
        def __call__(self, step):
            return 1.0 / (tf.cast(step, tf.float64) + 1.0)

        def get_config(self):
            return {}

    schedule = Sequential([Inverse(), Warmup(Inverse(), 1)], [2])
    check_sequence(schedule, [1.0, 0.5, 0.0, 1.0, 0.5])
    config = keras.saving.serialize_keras_object(schedule)
    with keras.saving.custom_object_scope({"Inverse": Inverse}):
        back = keras.saving.deserialize_keras_object(config)
    assert float(back(4)) == 0.5


@keras_reads
def test_a_compiled_model_with_nested_schedules_is_saved_and_trained_on(tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(Warmup(Composed([0.5, Plateau(0.5)]), 2)), "mse")
    x = np.ones((8, 1), "float32")
    model.fit(x, x, batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    back = keras.models.load_model(tmp_path / "model.keras")
    assert float(back.optimizer.learning_rate) == 0.25
    assert int(back.optimizer.iterations) == 4
    back.fit(x, x, batch_size=2, verbose=0)


# Plateau: the state.


def test_plateau_lowers_the_rate_after_patience_updates_without_improvement():
    plateau = Plateau(1.0, factor=0.5, patience=2)
    losses = [3.0, 2.0, 2.5, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    expected = [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]
    assert [float(plateau.update(loss)) for loss in losses] == expected
    assert float(plateau(123)) == 0.125


@keras_reads
@pytest.mark.parametrize("seed", range(6))
def test_plateau_lowers_as_keras_reduce_lr_on_plateau(seed):
    rng = np.random.default_rng(seed)
    arguments = {
        "factor": 0.5,
        "patience": int(rng.integers(0, 4)),
        "mode": ("min", "max")[seed % 2],
        "min_delta": 0.1,
        "cooldown": int(rng.integers(0, 3)),
        "min_lr": 0.05,
    }
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    callback = keras.callbacks.ReduceLROnPlateau("metric", **arguments)
    callback.set_model(model)
    callback.on_train_begin()
    plateau = Plateau(1.0, **arguments)
    for epoch, metric in enumerate(rng.integers(0, 8, 40) / 4):
        rate = plateau.update(metric)
        callback.on_epoch_end(epoch, {"metric": metric})
        assert float(rate) == pytest.approx(float(model.optimizer.learning_rate))
    assert float(plateau.rate) < 1.0


def test_plateau_updates_in_a_graph_and_under_xla_as_eagerly():
    metrics = [1.0, 2.0, 0.5, 0.5, 0.5, math.nan, 0.5, 0.1, 0.1, 0.1]
    plateaus = [Plateau(1.0, 0.5, 1, cooldown=1) for _ in range(3)]
    updates = [plateaus[0].update, tf.function(plateaus[1].update)]
    updates.append(tf.function(plateaus[2].update, jit_compile=True))
    for metric in metrics:
        rates = {float(update(tf.constant(metric))) for update in updates}
        assert len(rates) == 1
    assert [float(v) for v in plateaus[1].variables] == [float(v) for v in plateaus[0].variables]
    assert not plateaus[0].trainable_variables


def test_nan_never_improves_and_doesnt_end_improvement():
    plateau = Plateau(1.0, 0.5, patience=2)
    rates = [float(plateau.update(metric)) for metric in (math.nan, 1.0, math.nan, 0.5, 0.5, 0.5)]
    assert rates == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    assert float(plateau.best) == 0.5


@pytest.mark.parametrize(
    "wrap", [lambda p: p, lambda p: Warmup(p, 1), lambda p: Composed([1.0, p])]
)
def test_the_state_of_a_plateau_is_restored_wherever_it_is_nested(wrap, tmp_path):
    def make():
        plateau = Plateau(1.0, 0.5, patience=1, cooldown=2)
        return plateau, wrap(plateau)

    metrics = [1.0, 2.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9]
    whole, _ = make()
    expected = [float(whole.update(metric)) for metric in metrics]
    for cut in range(1, len(metrics)):
        (before, saved), (after, loaded) = make(), make()
        rates = [float(before.update(metric)) for metric in metrics[:cut]]
        path = tf.train.Checkpoint(schedule=saved).write(str(tmp_path / f"cut{cut}"))
        tf.train.Checkpoint(schedule=loaded).read(path).assert_consumed()
        assert rates + [float(after.update(metric)) for metric in metrics[cut:]] == expected


def test_a_plateau_made_inside_a_function_has_its_state_outside():
    made = []

    @tf.function
    def use(x):
        if not made or made[-1].patience != x.shape[0]:
            made.append(Plateau(1.0, patience=x.shape[0]))
        return made[-1].update(2.0)

    assert float(use(tf.ones(1))) == 1.0
    assert float(use(tf.ones(2))) == 1.0  # a retrace, where plain variables can't be made
    assert [float(plateau.best) for plateau in made] == [2.0, 2.0]


# Bad input, by its words.

_WRONG = [
    (lambda: Noam(0), ValueError, r"`Noam\(factor.*a factor out of range: got 0, expected a n"),
    (lambda: Noam(math.nan), ValueError, "factor out of range: got nan"),
    (lambda: Noam("1"), TypeError, "needs a number: got factor=str '1', expected a number > 0"),
    (lambda: Noam(True), TypeError, "needs a number: got factor=bool True"),
    (lambda: Noam(1.0, 0), ValueError, "no such `warmup_steps`: got 0, expected an int of"),
    (lambda: Noam(1.0, 2.5), TypeError, "no such `warmup_steps`: got float 2.5"),
    (lambda: Noam(1.0, 4, -1), ValueError, "no such `model_size`: got -1, expected an int"),
    (lambda: OneCycle(-1, 10), ValueError, r"`OneCycle\(max_lr.*max_lr out of range: got -1"),
    (lambda: OneCycle(1.0, 1), ValueError, "no such `total_steps`: got 1, expected an int"),
    (lambda: OneCycle(1.0, 10, 1.0), ValueError, r"pct_start out of range: got 1.0, .*in \(0, 1\)"),
    (lambda: OneCycle(1.0, 10, 0.3, 0.5), ValueError, "div_factor out of range: got 0.5"),
    (lambda: OneCycle(1.0, 10, 0.3, 2, 0), ValueError, "final_div_factor out of range: got 0"),
    (
        lambda: OneCycle(1.0, 10, anneal="cos"),
        ValueError,
        "this anneal: got 'cos', expected one of",
    ),
    (lambda: Warmup(0.1, 0), ValueError, r"`Warmup\(schedule, steps.*no such `steps`: got 0"),
    (
        lambda: Warmup(0.1, 2, -1.0),
        ValueError,
        "start out of range: got -1.0, expected a rate >= 0",
    ),
    (lambda: Warmup(-0.1, 2), ValueError, "schedule out of range: got -0.1, expected a finite"),
    (lambda: Warmup(CosineDecay, 2), TypeError, "needs a schedule: got .*A class must be called"),
    (lambda: Warmup(lambda step: 0.1, 2), TypeError, "needs a schedule: got .*a function belongs"),
    (
        lambda: Sequential([], []),
        ValueError,
        r"`Sequential\(schedules.*has no schedules: got an em",
    ),
    (lambda: Sequential(0.1, []), TypeError, r"`Sequential\(.*needs a list: got float 0.1"),
    (
        lambda: Sequential([1, 2], []),
        ValueError,
        r"don't fit: got \[\] for 2 schedules, expected 1",
    ),
    (lambda: Sequential([1, 2, 3], [4, 4]), ValueError, r"don't fit: got \[4, 4\] for 3 schedules"),
    (
        lambda: Sequential([1, 2], [0]),
        ValueError,
        "no such `milestones`: got 0, expected an int",
    ),
    (lambda: Sequential([1, 2], ["a"]), TypeError, "no such `milestones`: got str 'a'"),
    (lambda: Sequential([1, 2], 1.5), TypeError, "no such `milestones`: got float 1.5"),
    (lambda: Sequential([1, "a"], [3]), TypeError, "needs a schedule: got str 'a'"),
    (
        lambda: Composed([]),
        ValueError,
        r"`Composed\(schedules.*has no schedules: got an empty list",
    ),
    (lambda: Composed(0.5), TypeError, r"`Composed\(.*needs a list: got float 0.5"),
    (
        lambda: Composed([0.5], "avg"),
        ValueError,
        "this reduction: got 'avg', expected one of 'prod'",
    ),
    (lambda: Plateau(0.0), ValueError, "initial_learning_rate out of range: got 0.0, expected a n"),
    (lambda: Plateau(0.1, factor=1.0), ValueError, r"factor out of range: got 1.0, .*in \(0, 1\)"),
    (lambda: Plateau(0.1, patience=-1), ValueError, "no such `patience`: got -1, expected an int"),
    (lambda: Plateau(0.1, mode="auto"), ValueError, "this mode: got 'auto', expected one of 'min'"),
    (lambda: Plateau(0.1, min_delta=-1), ValueError, "min_delta out of range: got -1"),
    (lambda: Plateau(0.1, cooldown=1.5), TypeError, "no such `cooldown`: got float 1.5"),
    (lambda: Plateau(0.1, min_lr=math.inf), ValueError, "min_lr out of range: got inf"),
    (lambda: Plateau(0.1).update(None), TypeError, "needs a number: got None, expected a scalar"),
    (lambda: Plateau(0.1).update("a"), TypeError, "needs a number: got str 'a'"),
    (lambda: Plateau(0.1).update(keras.metrics.Mean()), TypeError, r"Write `plateau.*result\(\)"),
    (
        lambda: Plateau(0.1).update([1.0, 2.0]),
        ValueError,
        r"one number: got shape \(2,\), expected",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), _WRONG)
def test_bad_input_is_refused_in_words(call, error, text):
    with pytest.raises(error, match=text):
        call()
