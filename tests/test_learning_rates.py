"""ModuleLearningRate and ModuleLrScheduler: who gets which rate, in every mode."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.optimizers.schedules import CosineDecay, ExponentialDecay, PolynomialDecay
from processes import run

from tfloop._groups.group import ParamGroup
from tfloop._tracing import traces
from tfloop.schedulers import Plateau, Warmup
from tfloop.schedulers._module import ModuleLrScheduler
from tfloop.schedulers._rates import ModuleLearningRate, as_tensors, bucket_of, values_of

ENCODER, HEAD = ParamGroup.from_name("encoder"), ParamGroup.from_name("head")
BIAS = ParamGroup.from_name("bias")


def rate(rates, path, variable=None):
    return float(rates.rate_of((path,), variable))


# ModuleLearningRate: routing.


def test_without_groups_every_parameter_has_the_base_rate():
    rates = ModuleLearningRate(0.1)
    assert rates.base == rates.rate_of(("any",)) == 0.1
    assert bucket_of(rates, ("any",)) == -1
    assert values_of(rates) == [0.1]


def test_the_last_matching_group_wins():
    rates = ModuleLearningRate(1.0).with_group(ENCODER, 0.1).with_group(BIAS, 0.2)
    assert [rate(rates, p) for p in ("encoder.kernel", "encoder.bias", "head.bias")] == [
        0.1,
        0.2,
        0.2,
    ]
    assert rate(rates.with_group(ParamGroup.all(), 0.3), "encoder.bias") == 0.3


def test_a_group_of_variables_gets_its_own_rate():
    mine, other = tf.Variable(0.0), tf.Variable(0.0)
    rates = ModuleLearningRate(0.001).with_group(ParamGroup.from_ids([mine]), 0.1)
    assert (rate(rates, "a", mine), rate(rates, "b", other)) == (0.1, 0.001)


def test_a_groups_rate_is_its_own_or_the_base_times_the_multiplier():
    rates = ModuleLearningRate(0.5).with_group(ENCODER, multiplier=0.5)
    rates.with_group(HEAD, 2.0, multiplier=0.25).with_group(BIAS, 0)
    assert values_of(rates) == [0.25, 0.5, 0.0, 0.5]
    assert rates.groups == (ENCODER, HEAD, BIAS)


def test_every_path_of_a_tied_weight_counts():
    rates = ModuleLearningRate(1.0).with_group(HEAD, 0.1)
    assert rates.rate_of(("embedding.kernel", "head.kernel")) == 0.1


def test_buckets_index_the_rates_and_tell_who_shares_one():
    rates = ModuleLearningRate(1.0).with_group(ENCODER, 0.1).with_group(BIAS, 0.1)
    buckets = [bucket_of(rates, (p,)) for p in ("encoder.kernel", "encoder.w", "bias", "x")]
    assert buckets == [0, 0, 1, -1]
    assert [values_of(rates)[bucket] for bucket in buckets] == [0.1, 0.1, 0.1, 1.0]


def test_a_variable_is_read_when_the_rate_is_asked_for():
    base, factor = tf.Variable(1.0), keras.Variable(0.5)
    rates = ModuleLearningRate(base).with_group(ENCODER, multiplier=factor)
    base.assign(4.0)
    factor.assign(0.25)
    assert (float(rates.base), rate(rates, "encoder.w")) == (4.0, 1.0)


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float64(2), np.float32(2), np.array(2.0), tf.constant(2), tf.Variable(2.0)],
)
def test_every_kind_of_scalar_is_a_rate(value):
    rates = ModuleLearningRate(value).with_group(ENCODER, value, multiplier=value)
    assert (float(rates.base), rate(rates, "encoder.w")) == (2.0, 4.0)
    assert isinstance(rates.base, float) or rates.base.dtype == tf.float32


def test_rates_read_as_the_calls_that_make_them():
    rates = ModuleLearningRate(0.5).with_group(ENCODER, tf.constant(0.25), multiplier=0.5)
    assert repr(rates) == (
        "ModuleLearningRate(0.5).with_group(ParamGroup.from_name('encoder'), 0.125)"
    )
    shown = []
    tf.function(lambda r: shown.append(repr(r)))(rates)
    assert shown == [
        "ModuleLearningRate(<tensor>).with_group(ParamGroup.from_name('encoder'), <tensor>)"
    ]


# ModuleLearningRate: through tf.function.


@pytest.mark.parametrize("jit", [False, True])
def test_new_rates_enter_a_compiled_step_without_a_retrace(jit):
    @tf.function(jit_compile=jit)
    def step(rates):
        return rates.base, rates.rate_of(("encoder.w",)), rates.rate_of(("head.w",))

    def asked(base, own, factor):
        rates = ModuleLearningRate(base).with_group(ENCODER, own)
        return [float(x) for x in step(rates.with_group(HEAD, multiplier=factor))]

    assert asked(1.0, 2.0, 3.0) == [1.0, 2.0, 3.0]
    assert asked(4, np.float32(5), 0.5) == [4.0, 5.0, 2.0]
    assert asked(tf.Variable(2.0), tf.constant(3.0), keras.Variable(0.5)) == [2.0, 3.0, 1.0]
    assert asked(tf.constant(2.0, tf.float64), None, 1.0) == [2.0, 2.0, 2.0]
    assert step.experimental_get_tracing_count() == 1


def test_other_groups_are_another_trace_and_equal_groups_are_not():
    step = tf.function(lambda rates: rates.rate_of(("encoder.w",)))
    for group in (ENCODER, ParamGroup.from_name("encoder"), HEAD, ParamGroup.from_name("head")):
        step(ModuleLearningRate(1.0).with_group(group, 0.5))
    assert step.experimental_get_tracing_count() == 2
    assert float(step(ModuleLearningRate(1.0).with_group(ENCODER, 0.25))) == 0.25


def test_groups_of_variables_keep_matching_inside():
    variable = tf.Variable(1.0)
    step = tf.function(lambda rates: rates.rate_of(("w",), variable))
    rates = ModuleLearningRate(1.0).with_group(ParamGroup.from_ids([variable]), 0.5)
    assert float(step(rates)) == 0.5


def test_rates_come_out_of_a_function_and_go_through_control_flow():
    @tf.function
    def halved(rates, often):
        halve = lambda r: tf.nest.map_structure(lambda x: x / 2.0, r, expand_composites=True)  # noqa: E731
        return tf.while_loop(lambda i, r: i < often, lambda i, r: (i + 1, halve(r)), (0, rates))[1]

    rates = halved(ModuleLearningRate(8.0).with_group(ENCODER, multiplier=0.5), tf.constant(2))
    assert isinstance(rates, ModuleLearningRate)
    assert (float(rates.base), rate(rates, "encoder.w")) == (2.0, 1.0)


def test_rates_made_in_a_function_can_leave_it():
    variable = tf.Variable(0.5)

    @tf.function
    def make(base):
        return ModuleLearningRate(base).with_group(ENCODER, multiplier=variable)

    for base in (2.0, 4.0):
        rates = make(tf.constant(base))
        assert (float(rates.base), rate(rates, "encoder.w")) == (base, base / 2)


def test_as_tensors_gives_what_a_function_sees():
    rates = as_tensors(ModuleLearningRate(0.5).with_group(ENCODER, multiplier=0.5))
    assert [(float(x), x.dtype, x.shape) for x in values_of(rates)] == [
        (0.25, tf.float32, ()),
        (0.5, tf.float32, ()),
    ]
    assert rates.groups == (ENCODER,)


# ModuleLrScheduler: Burn's tests first.


def test_a_constant_base_stays():
    scheduler = ModuleLrScheduler(0.1)
    assert [float(scheduler.step().base) for _ in range(3)] == pytest.approx([0.1] * 3)


def test_the_first_step_gives_the_initial_rate_and_each_one_counts():
    scheduler = ModuleLrScheduler(PolynomialDecay(0.9, 4, 0.5))
    rates = [float(scheduler.step().base) for _ in range(6)]
    assert rates == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.5])
    assert int(scheduler.count) == 6


def test_a_group_has_its_own_schedule_and_the_others_the_base():
    variable = tf.Variable(0.0)
    scheduler = ModuleLrScheduler(0.001).with_group(ParamGroup.from_ids([variable]), 0.1)
    rates = scheduler.step()
    assert rate(rates, "a", variable) == pytest.approx(0.1)
    assert rate(rates, "b", tf.Variable(0.0)) == pytest.approx(0.001)


def test_a_group_by_a_part_of_the_path():
    scheduler = ModuleLrScheduler(0.001).with_group(ParamGroup.from_predicate("layer_a"), 0.1)
    rates = scheduler.step()
    assert rate(rates, "layer_a.w") == pytest.approx(0.1)
    assert rate(rates, "layer_b.w") == pytest.approx(0.001)


def three_groups():
    scheduler = ModuleLrScheduler(PolynomialDecay(1.0, 4, 0.0))
    scheduler.with_group(ENCODER, ExponentialDecay(0.8, 1, 0.5))
    scheduler.with_group(HEAD, multiplier=0.5)
    return scheduler.with_group(BIAS, CosineDecay(0.5, 2), multiplier=2.0)


THREE = {
    "x": [1.0, 0.75, 0.5, 0.25, 0.0],
    "encoder.w": [0.8, 0.4, 0.2, 0.1, 0.05],
    "head.w": [0.5, 0.375, 0.25, 0.125, 0.0],
    "encoder.bias": [1.0, 0.5, 0.0, 0.0, 0.0],
}


def asked(rates):
    return [rates.rate_of((path,)) for path in THREE]


def expected(at):
    return pytest.approx([THREE[path][at] for path in THREE], abs=1e-7)


@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
def test_independent_groups_follow_their_schedules_in_every_mode(mode):
    scheduler = three_groups()

    def step():
        return asked(scheduler.step())

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "jit")
    for at in range(5):
        assert [float(x) for x in step()] == expected(at)
    assert int(scheduler.count) == 5


def test_steps_inside_a_loop_of_the_graph_count_each_time():
    scheduler = ModuleLrScheduler(PolynomialDecay(1.0, 4, 0.0))

    @tf.function
    def several(n):
        total = tf.constant(0.0)
        for _ in tf.range(n):
            total += scheduler.step().base
        return total

    assert float(several(tf.constant(3))) == pytest.approx(1.0 + 0.75 + 0.5)
    assert float(scheduler.step().base) == pytest.approx(0.25)


def test_step_gives_its_rates_out_of_a_function():
    scheduler = three_groups()
    step = tf.function(scheduler.step)
    assert [float(x) for x in asked(step())] == expected(0)
    assert [float(x) for x in asked(step())] == expected(1)


@pytest.mark.parametrize("jit", [False, True])
def test_peek_gives_what_step_would_and_changes_nothing(jit):
    scheduler = three_groups()
    peek = tf.function(lambda at: asked(scheduler.peek(at)), jit_compile=jit)
    for at in (3, 0, 4):
        assert [float(x) for x in asked(scheduler.peek(at))] == expected(at)
        assert [float(x) for x in peek(tf.constant(at))] == expected(at)
    assert [float(x) for x in asked(scheduler.peek(scheduler.count))] == expected(0)
    assert int(scheduler.count) == 0


def test_a_plateau_lowers_the_rate_of_its_group_alone():
    plateau = Plateau(1.0, 0.5, patience=1)
    scheduler = ModuleLrScheduler(1.0).with_group(HEAD, Warmup(plateau, 1))
    step = tf.function(lambda: asked(scheduler.step()))
    assert [float(x) for x in step()] == [1.0, 1.0, 0.0, 1.0]
    plateau.update(1.0)
    plateau.update(1.0)
    assert [float(x) for x in step()] == [1.0, 1.0, 0.5, 1.0]


def test_a_multiplier_that_is_a_variable_works_in_a_compiled_step():
    factor = tf.Variable(1.0)
    scheduler = ModuleLrScheduler(0.5).with_group(HEAD, multiplier=factor)
    step = tf.function(lambda: scheduler.step().rate_of(("head.w",)))
    assert float(step()) == 0.5
    factor.assign(0.5)
    assert float(step()) == 0.25


def test_a_scheduler_made_inside_a_function_counts_outside():
    made = {}

    @tf.function
    def step(x):
        scheduler = made.setdefault(x.shape[0], ModuleLrScheduler(PolynomialDecay(1.0, 4, 0.0)))
        return scheduler.step().base

    for size in (1, 2):  # the second one is a retrace, where plain variables can't be made
        assert [float(step(tf.ones(size))) for _ in range(2)] == pytest.approx([1.0, 0.75])


@pytest.mark.parametrize("rates", [ModuleLrScheduler(1.0), ModuleLearningRate(1.0)])
def test_a_new_group_makes_watched_traces_stale(rates):
    found = {}

    @tf.function
    def step():
        with traces.recording() as read:
            (rates.step() if isinstance(rates, ModuleLrScheduler) else rates).rate_of(("w",))
        found.update(read)

    step()
    before = found[id(rates)].fingerprint()
    assert before == rates.fingerprint()
    rates.with_group(HEAD, multiplier=0.5)
    assert before != rates.fingerprint()


def test_a_scheduler_reads_well():
    scheduler = ModuleLrScheduler(0.5).with_group(HEAD, multiplier=0.5)
    assert repr(scheduler) == (
        "ModuleLrScheduler(0.5).with_group(ParamGroup.from_name('head'), ...)"
    )
    assert repr(ModuleLrScheduler(CosineDecay(1.0, 2))) == "ModuleLrScheduler(CosineDecay)"


# Saving: by group, not by position.


def check_save_load(make, steps, path):
    """A fresh scheduler that restores in the middle goes on as the uninterrupted one."""
    uninterrupted = make()
    expected_ = [np.array(asked(uninterrupted.step())) for _ in range(steps)]
    for cut in range(steps):
        before, after = make(), make()
        rates = [np.array(asked(before.step())) for _ in range(cut)]
        saved = tf.train.Checkpoint(scheduler=before).write(f"{path}/cut{cut}")
        tf.train.Checkpoint(scheduler=after).read(saved).assert_consumed()
        rates += [np.array(asked(after.step())) for _ in range(steps - cut)]
        np.testing.assert_array_equal(rates, expected_)


def test_a_scheduler_without_groups_goes_on_after_a_restore(tmp_path):
    check_save_load(lambda: ModuleLrScheduler(PolynomialDecay(1.0, 4, 0.0)), 5, tmp_path)


def test_a_scheduler_with_groups_goes_on_after_a_restore(tmp_path):
    check_save_load(three_groups, 5, tmp_path)


def with_plateaus(order):
    plateaus = {group: Plateau(1.0, 0.5, patience=1) for group in (ENCODER, HEAD, BIAS)}
    scheduler = ModuleLrScheduler(Plateau(1.0))
    for group in order:
        scheduler.with_group(group, plateaus[group])
    return scheduler, plateaus


def test_states_are_found_by_group_whatever_the_order(tmp_path):
    scheduler, plateaus = with_plateaus((ENCODER, HEAD, BIAS))
    scheduler.step()
    for updates, group in enumerate((ENCODER, HEAD, BIAS), start=1):
        for _ in range(updates):
            plateaus[group].update(1.0)
    saved = tf.train.Checkpoint(scheduler=scheduler).write(str(tmp_path / "saved"))
    other, restored = with_plateaus((BIAS, ENCODER, HEAD))
    tf.train.Checkpoint(scheduler=other).read(saved).assert_consumed()
    rates = [float(restored[group].rate) for group in (ENCODER, HEAD, BIAS)]
    assert rates == [1.0, 0.5, 0.25]
    assert int(other.count) == 1


def test_the_state_has_readable_keys(tmp_path):
    scheduler, _ = with_plateaus((ENCODER, BIAS))
    saved = tf.train.Checkpoint(scheduler=scheduler).write(str(tmp_path / "saved"))
    names = {name for name, _ in tf.train.list_variables(saved)}
    stem = "scheduler/_schedules/from_name('encoder')/rate/.ATTRIBUTES/VARIABLE_VALUE"
    assert stem in names
    assert len(scheduler.variables) == 1 + 3 * 4


def test_groups_that_read_alike_keep_a_state_each(tmp_path):
    def make():
        plateaus = [Plateau(1.0, 0.5, patience=1) for _ in range(2)]
        scheduler = ModuleLrScheduler(1.0)
        for plateau in plateaus:
            scheduler.with_group(ParamGroup.from_predicate(lambda path, v: True), plateau)
        return scheduler, plateaus

    scheduler, plateaus = make()
    for metric in (1.0, 1.0):
        plateaus[1].update(metric)
    saved = tf.train.Checkpoint(scheduler=scheduler).write(str(tmp_path / "saved"))
    other, restored = make()
    tf.train.Checkpoint(scheduler=other).read(saved).assert_consumed()
    assert [float(plateau.rate) for plateau in restored] == [1.0, 0.5]


# Several replicas, in a process of their own: logical devices come before everything else.

_REPLICAS = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from keras.optimizers.schedules import PolynomialDecay
from tfloop._tracing import traces
from tfloop.schedulers import Plateau
from tfloop.schedulers._module import ModuleLrScheduler

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
outside = ModuleLrScheduler(PolynomialDecay(1.0, 4, 0.0))
with strategy.scope():
    inside = ModuleLrScheduler(PolynomialDecay(1.0, 4, 0.0))

for scheduler in (outside, inside):
    @tf.function
    def step():
        return strategy.run(lambda: scheduler.step().base)

    with traces.recording() as found:
        step.get_concrete_function()
    assert id(scheduler) in found
    for at in range(3):
        rates = [float(r) for r in strategy.experimental_local_results(step())]
        assert rates == [1.0 - at / 4] * 2, rates
    assert scheduler.count.numpy() == 3
    assert float(scheduler.step().base) == 0.25

try:
    strategy.run(Plateau(1.0).update, args=(1.0,))
except RuntimeError as error:
    assert "was called in a replica: got 2 calls, expected one" in str(error), error
else:
    raise AssertionError("Plateau.update took two updates for one")
print("replicas agree")
"""


def test_replicas_together_count_one_step_and_a_plateau_wants_one_update():
    done = run("-c", _REPLICAS)
    assert "replicas agree" in done.stdout, done.stderr


# Bad input, by its words.

_RATES = ModuleLearningRate(0.1)
_SCHEDULER = ModuleLrScheduler(0.1)
_WRONG = [
    (lambda: ModuleLearningRate(-0.1), ValueError, "a base out of range: got -0.1, expected a fin"),
    (lambda: ModuleLearningRate(float("nan")), ValueError, "a base out of range: got nan"),
    (lambda: ModuleLearningRate(np.float32("inf")), ValueError, "a base out of range: got .*inf"),
    (lambda: ModuleLearningRate(np.array(-1.0)), ValueError, "a base out of range: got -1.0"),
    (lambda: ModuleLearningRate(None), TypeError, "needs a rate: got base=None, expected a number"),
    (lambda: ModuleLearningRate("0.1"), TypeError, "needs a rate: got base=str '0.1'"),
    (lambda: ModuleLearningRate(True), TypeError, "needs a rate: got base=bool True"),
    (lambda: ModuleLearningRate(tf.constant([1.0])), ValueError, r"base of shape \(1,\), expected"),
    (lambda: ModuleLearningRate(np.ones(2)), ValueError, r"needs one rate: got base of shape \(2,"),
    (lambda: ModuleLearningRate(tf.constant("a")), TypeError, "got base=dtype string, expected"),
    (
        lambda: ModuleLearningRate(CosineDecay(1.0, 2)),
        TypeError,
        r"Write `ModuleLrScheduler\(sched",
    ),
    (lambda: _RATES.with_group("a", 0.1), TypeError, r"`ModuleLearningRate.with_group.*str 'a'"),
    (
        lambda: _RATES.with_group(HEAD, -1),
        ValueError,
        "a lr out of range: got -1, expected a finite",
    ),
    (
        lambda: _RATES.with_group(HEAD, [1]),
        TypeError,
        "needs a rate: got lr=an object of type list",
    ),
    (lambda: _RATES.with_group(HEAD, multiplier=-1), ValueError, "multiplier out of range: got -1"),
    (lambda: _RATES.with_group(HEAD, multiplier=None), TypeError, "rate: got multiplier=None"),
    (
        lambda: ModuleLrScheduler("a"),
        TypeError,
        r"`ModuleLrScheduler\(schedule\)` needs a schedule",
    ),
    (
        lambda: ModuleLrScheduler(-1.0),
        ValueError,
        r"ModuleLrScheduler\(sch.*out of range: got -1.0",
    ),
    (lambda: _SCHEDULER.with_group("a"), TypeError, r"`ModuleLrScheduler.with_group.*got str 'a'"),
    (
        lambda: _SCHEDULER.with_group(HEAD, "a"),
        TypeError,
        "with_group.*needs a schedule: got str 'a",
    ),
    (lambda: _SCHEDULER.with_group(HEAD, np.nan), ValueError, "schedule out of range: got nan"),
    (
        lambda: _SCHEDULER.with_group(HEAD, multiplier=-1),
        ValueError,
        "multiplier out of range: got",
    ),
    (
        lambda: _SCHEDULER.peek(-1),
        ValueError,
        r"`ModuleLrScheduler.peek\(step\)` takes no such `step`",
    ),
    (
        lambda: _SCHEDULER.peek(0.5),
        TypeError,
        "takes no such `step`: got float 0.5, expected an int",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), _WRONG)
def test_bad_input_is_refused_in_words(call, error, text):
    with pytest.raises(error, match=text):
        call()
    assert _RATES.groups == ()
    assert repr(_SCHEDULER) == "ModuleLrScheduler(0.1)"
