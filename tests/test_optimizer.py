"""`ModuleOptimizer`: what a step takes, checks, and leaves alone, in every kind of trace."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizer_helpers import (
    RATE,
    Words,
    assert_close,
    assert_equal,
    gradient_table,
    row_of,
    values_of,
)

import tfloop
from tfloop import (
    GradientClipping,
    GradientsParams,
    ModuleLearningRate,
    ModuleOptimizer,
    ParamGroup,
)

KERNEL, BIAS = "dense.kernel", "dense.bias"
STEP = r"`ModuleOptimizer.step\(lr, model, grads\)`"


class Scalar(tf.Module):
    """One weight, `w`."""

    def __init__(self, value=1.0):
        super().__init__()
        self.w = tf.Variable(value, name="w")


def scalar_grads(value=1.0):
    return GradientsParams({"w": tf.constant(value)})


def grads_of(model, seed=1):
    return GradientsParams(row_of(gradient_table(model, 1, seed), 0))


def everything(optim, model):
    """All that a step may change."""
    state = {path: optim.state(path) for path in tfloop.named_parameters(model)}
    flat = {f"{path}/{name}": slot for path, slots in state.items() for name, slot in slots.items()}
    return values_of(model) | flat | {"iterations": optim.iterations.numpy()}


# The order of a step.


def test_a_step_clips_then_decays_then_updates():
    model = Scalar(2.0)
    given = keras.optimizers.SGD(weight_decay=0.5)
    optim = ModuleOptimizer(given, clipping=GradientClipping.by_value(1.0))
    assert optim.step(0.1, model, scalar_grads(30.0)) is model
    # 2 - 0.1 * 0.5 * 2 - 0.1 * clip(30): decay isn't clipped, and isn't part of the gradient.
    np.testing.assert_allclose(model.w, 1.8)


def test_iterations_count_the_steps_in_which_anything_was_updated():
    model = Words()
    optim = ModuleOptimizer("sgd").with_group(ParamGroup.from_name("bias"), None)
    optim.step(0.1, model, GradientsParams({BIAS: tf.ones(3)}))  # frozen: dropped
    assert int(optim.iterations) == 0
    optim.step(0.1, model, grads_of(model))
    assert int(optim.iterations) == 1
    assert optim.iterations.dtype == tf.int64


def test_each_group_counts_the_steps_that_it_took_part_in():
    model = Words()
    optim = ModuleOptimizer(keras.optimizers.Adam(0.1)).with_group(
        ParamGroup.from_name("dense"), keras.optimizers.Adam(0.1)
    )
    grads = GradientsParams({BIAS: tf.ones(3)})
    for _ in range(3):
        optim.step(None, model, grads.copy())
    before = model.embedding.embeddings.numpy()
    optim.step(None, model, GradientsParams({"embedding.embeddings": tf.ones((6, 4))}))
    # The first update of Adam moves by the rate, whatever the other group has done.
    np.testing.assert_allclose(before - model.embedding.embeddings, tf.fill((6, 4), 0.1), rtol=1e-4)


def test_the_gradients_are_consumed_by_a_step_that_succeeds_and_by_no_other():
    model = Scalar()
    optim = ModuleOptimizer("sgd")
    grads = scalar_grads()
    with pytest.raises(ValueError, match="got -1.0 as the rate"):
        optim.step(-1.0, model, grads)
    optim.step(0.5, model, grads)
    with pytest.raises(RuntimeError, match=r"`ModuleOptimizer.step.*copy\(\)"):
        optim.step(0.5, model, grads)
    assert float(model.w) == 0.5


# Rates.


@pytest.mark.parametrize(
    "rate",
    [
        0.25,
        1,
        0,
        np.float32(0.25),
        np.float64(0.25),
        np.int64(1),
        np.array(0.25),
        np.array(1),
        tf.constant(0.25),
        tf.constant(0.25, tf.float64),
        tf.constant(0.25, tf.bfloat16),
        tf.constant(1),
        tf.Variable(0.25),
        keras.Variable(0.25),
        ModuleLearningRate(0.25),
    ],
    ids=lambda rate: f"{type(rate).__name__}-{getattr(rate, 'dtype', '')}",
)
def test_a_rate_is_any_scalar(rate):
    number = float(rate.base if isinstance(rate, ModuleLearningRate) else rate)
    model = Scalar(2.0)
    ModuleOptimizer("sgd").step(rate, model, scalar_grads())
    assert float(model.w) == 2.0 - number
    optim = ModuleOptimizer("sgd").build(model)
    model.w.assign(2.0)
    tf.function(lambda: optim.step(rate, model, scalar_grads()) and None)()
    assert float(model.w) == 2.0 - number


def test_a_rate_keeps_its_digits_where_the_variables_have_them():
    keras.config.set_floatx("float64")
    try:
        model = Scalar(tf.constant(0.0, tf.float64))
        optim = ModuleOptimizer("sgd")
        optim.step(0.1, model, GradientsParams({"w": tf.constant(1.0, tf.float64)}))
        assert float(model.w) == -0.1
    finally:
        keras.config.set_floatx("float32")


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
def test_a_variable_as_rate_is_read_at_every_step(kind):
    model, rate = Scalar(), kind(0.5)
    optim = ModuleOptimizer("sgd").build(model)
    step = tf.function(lambda: optim.step(rate, model, scalar_grads()) and None)
    step()
    rate.assign(0.25)
    step()
    assert float(model.w) == 0.25
    assert step.experimental_get_tracing_count() == 1


def test_without_a_rate_the_optimizer_given_is_asked():
    model = Scalar()
    given = keras.optimizers.SGD(0.5)
    optim = ModuleOptimizer(given).build(model)
    step = tf.function(lambda: optim.step(None, model, scalar_grads()) and None)
    step()
    given.learning_rate = 0.25
    step()
    assert float(model.w) == 0.25
    optim.step(0.125, model, scalar_grads())  # a rate in hand is used instead
    assert float(model.w) == 0.125
    assert float(given.learning_rate.numpy()) == 0.25


def test_a_function_as_rate_is_called():
    rates = iter([0.5, 0.25])
    model = Scalar()
    optim = ModuleOptimizer(keras.optimizers.SGD(lambda: next(rates)))
    optim.step(None, model, scalar_grads())
    optim.step(None, model, scalar_grads())
    assert float(model.w) == 0.25


def test_a_method_as_rate_needs_no_config():
    class Rates:
        value = 0.5

        def now(self):
            return self.value

    rates, model = Rates(), Scalar()
    optim = ModuleOptimizer(keras.optimizers.SGD(rates.now))
    optim.step(None, model, scalar_grads())
    rates.value = 0.25
    optim.step(None, model, scalar_grads())
    assert float(model.w) == 0.25


BAD_RATES = {
    "nan": (
        float("nan"),
        ValueError,
        "got nan as the rate, expected a finite number of at least 0",
    ),
    "infinite": (float("inf"), ValueError, "got inf as the rate"),
    "negative": (-0.1, ValueError, r"got -0.1 as the rate.*Check it: `print\(lr\)`"),
    "numpy nan": (np.float32("nan"), ValueError, "got nan as the rate"),
    "negative array": (np.array(-2.0), ValueError, "got -2.0 as the rate"),
    "nan tensor": (tf.constant(float("nan")), ValueError, "got nan as the rate"),
    "negative variable": (tf.Variable(-1.0), ValueError, "got -1.0 as the rate"),
    "bool": (True, TypeError, "got bool True as the rate, expected a number"),
    "text": ("0.1", TypeError, "got str '0.1' as the rate"),
    "list": ([0.1], TypeError, "got an object of type list as the rate"),
    "vector": (
        tf.constant([0.1, 0.2]),
        TypeError,
        r"got shape \(2,\) as the rate.*with_group\(group, lr\)",
    ),
    "bool tensor": (tf.constant(True), TypeError, "got dtype bool as the rate"),
    "schedule": (
        keras.optimizers.schedules.CosineDecay(0.1, 10),
        TypeError,
        r"got the schedule 'CosineDecay'.*`tfloop.ModuleLrScheduler\(schedule\).step\(\)`",
    ),
}


@pytest.mark.parametrize("name", BAD_RATES)
def test_a_wrong_rate_raises_before_anything_changes(name):
    rate, error, message = BAD_RATES[name]
    model = Words()
    optim = ModuleOptimizer(keras.optimizers.AdamW()).build(model)
    before, grads = everything(optim, model), grads_of(model)
    with pytest.raises(error, match=f"(?s){STEP} .*" + message):
        optim.step(rate, model, grads)
    assert_equal(everything(optim, model), before)
    optim.step(0.1, model, grads)  # not consumed


def test_a_wrong_rate_of_the_optimizer_given_raises_and_names_the_group():
    model = Words()
    given = keras.optimizers.SGD(0.1)
    optim = ModuleOptimizer("adam").with_group(ParamGroup.from_name("dense"), given).build(model)
    given.learning_rate = -1.0
    before = everything(optim, model)
    with pytest.raises(ValueError, match=r"got -1.0 as the rate of from_name\('dense'\), expected"):
        optim.step(None, model, grads_of(model))
    assert_equal(everything(optim, model), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5])
@pytest.mark.parametrize("kind", ["float", "groups", "given", "schedule"])
def test_a_rate_that_goes_wrong_at_run_time_stops_the_step_before_any_change(kind, bad):
    model = Words()
    rate = tf.Variable(RATE)

    class Read(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return tf.identity(rate)

    own = {"given": lambda: rate, "schedule": Read()}.get(kind, 0.1)
    # The momentums of Adam don't wait for the rate by themselves, nor does the other group.
    optim = (
        ModuleOptimizer(keras.optimizers.Adam(use_ema=True))
        .with_group(ParamGroup.from_name("dense"), keras.optimizers.Adam(own))
        .build(model)
    )
    accumulator = tfloop.GradientsAccumulator()

    @tf.function
    def step(lr, grads):
        passed = None if kind in ("given", "schedule") else lr
        if kind == "groups":
            passed = ModuleLearningRate(0.1).with_group(ParamGroup.from_name("kernel"), lr)
        optim.step(passed, model, GradientsParams(grads))

    step(rate, dict(grads_of(model)))
    before = everything(optim, model)
    rate.assign(bad)
    with pytest.raises(tf.errors.InvalidArgumentError, match="got a rate that is not sound"):
        step(rate, dict(grads_of(model)))
    assert_equal(everything(optim, model), before)
    if kind == "float":
        accumulator.accumulate(model, grads_of(model))
        with pytest.raises(tf.errors.InvalidArgumentError, match="is not sound"):
            tf.function(lambda lr: optim.step(lr, model, accumulator) and None)(rate)
        assert_equal(everything(optim, model), before)
        assert int(accumulator.count) == 1
    rate.assign(RATE)
    step(rate, dict(grads_of(model)))
    assert int(optim.iterations) == 2


def test_under_xla_a_wrong_rate_is_used():
    # Documented: XLA drops assertions.
    model = Scalar()
    optim = ModuleOptimizer("sgd").build(model)
    step = tf.function(lambda lr: optim.step(lr, model, scalar_grads()) and None, jit_compile=True)
    step(tf.constant(-1.0))
    assert float(model.w) == 2.0


def test_the_rate_may_be_left_out_in_every_form_of_call():
    forms = [
        lambda optim, model: optim.step(None, model, scalar_grads()),
        lambda optim, model: optim.step(model, scalar_grads()),
        lambda optim, model: optim.step(model, grads=scalar_grads()),
        lambda optim, model: optim.step(model=model, grads=scalar_grads(), weight=2),
        lambda optim, model: optim.step(0.25, model, scalar_grads()),
        lambda optim, model: optim.step(lr=0.25, grads=scalar_grads(), model=model),
    ]
    for step in forms:
        model = Scalar()
        optim = ModuleOptimizer(keras.optimizers.SGD(0.25))
        assert step(optim, model) is model
        assert float(model.w) == 0.75
        tfloop.compile(lambda: step(optim, model) and None)()  # noqa: B023 # at once
        assert float(model.w) == 0.5


MODEL = Scalar()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "needs a model and its gradients: got nothing, expected both"),
        ((0.1,), "needs a model and its gradients: got float 0.1, expected both"),
        ((MODEL,), r"got 'scalar' \(Scalar\), expected both.*`optim.step\(model, grads\)`"),
        ((0.1, MODEL), "needs a GradientsParams: got 'scalar'.*come last"),
        ((0.1, scalar_grads()), "needs a model: got float 0.1"),
        ((scalar_grads(), MODEL), "needs a GradientsParams: got 'scalar'"),
        ((MODEL, 0.1, scalar_grads()), "got 'scalar'.* as the rate.*The rate comes first"),
    ],
)
def test_arguments_that_are_missing_or_in_another_order_are_named(arguments, text):
    with pytest.raises(TypeError, match=f"(?s){STEP}.*" + text):
        ModuleOptimizer("sgd").step(*arguments)


# Gradients.


BAD_GRADIENTS = {
    "a dict": ({KERNEL: tf.ones((4, 3))}, TypeError, r"needs a GradientsParams: got dict\(dense"),
    "a list": ([tf.ones((4, 3))], TypeError, "needs a GradientsParams: got an object of type list"),
    "None": (None, TypeError, "needs a GradientsParams: got None.*from_grads"),
    "nothing": (GradientsParams(), ValueError, "needs a gradient.*expected at least one of 'embed"),
    "an unknown path": (
        GradientsParams({"dense.kernle": tf.ones((4, 3))}),
        ValueError,
        r"path.*'dense.kernle'.*Did you mean 'dense.kernel'",
    ),
    "another shape": (
        GradientsParams({KERNEL: tf.ones((3, 4))}),
        ValueError,
        r"for 'dense.kernel'.*shape \(3, 4\), expected \(4, 3\)",
    ),
    "another rank": (
        GradientsParams({BIAS: tf.ones((3, 1))}),
        ValueError,
        r"for 'dense.bias'.*\(3, 1\)",
    ),
    "other rows": (
        GradientsParams(
            {
                "embedding.embeddings": tf.IndexedSlices(
                    tf.ones((1, 4)), tf.constant([0]), tf.constant([7, 4])
                )
            }
        ),
        ValueError,
        r"for 'embedding.embeddings'.*\(7, 4\)",
    ),
}


@pytest.mark.parametrize("name", BAD_GRADIENTS)
def test_wrong_gradients_raise_before_anything_changes(name):
    grads, error, message = BAD_GRADIENTS[name]
    model = Words()
    optim = ModuleOptimizer("adam").build(model)
    before = everything(optim, model)
    with pytest.raises(error, match=f"(?s){STEP}.* " + message):
        optim.step(0.1, model, grads)
    assert_equal(everything(optim, model), before)


def test_two_paths_to_one_variable_are_one_gradient():
    model = Scalar()
    model.tied = model.w
    optim = ModuleOptimizer("sgd").build(model)
    both = GradientsParams({"w": tf.constant(1.0), "tied": tf.constant(1.0)})
    with pytest.raises(ValueError, match=r"two gradients for one variable.*grads.merge\(other\)"):
        optim.step(0.5, model, both)
    optim.step(0.5, model, GradientsParams({"tied": tf.constant(1.0)}))
    assert float(model.w) == 0.5
    assert optim.state("tied") == optim.state("w") == {}


def test_rows_made_by_hand_need_no_dense_shape():
    model = Words()
    before = model.embedding.embeddings.numpy()
    rows = tf.IndexedSlices(tf.ones((2, 4)), tf.constant([1, 1], tf.int64))
    ModuleOptimizer("adagrad").step(0.1, model, GradientsParams({"embedding.embeddings": rows}))
    moved = np.any(before != model.embedding.embeddings.numpy(), axis=1)
    assert moved.tolist() == [False, True, False, False, False, False]


# Roots.


def test_a_view_is_the_same_root():
    model = Words()
    optim = ModuleOptimizer("sgd").build(tfloop.train(model))
    view = tfloop.valid(model)
    assert optim.step(0.1, view, grads_of(model)) is view
    optim.step(0.1, model, grads_of(model))
    assert int(optim.iterations) == 2


def test_another_root_that_shares_variables_raises_and_names_both():
    model = Words()
    optim = ModuleOptimizer("sgd").build(model)
    before = values_of(model)
    message = (
        f"{STEP} got 'dense.*Dense\\), which shares 2 of its variables, expected 'words.*Words\\)"
    )
    with pytest.raises(ValueError, match=message):
        optim.step(0.1, model.dense, GradientsParams({"bias": tf.ones(3)}))
    with pytest.raises(ValueError, match=r"got 'words.*, another model, expected 'words"):
        optim.step(0.1, Words(), grads_of(model))
    with pytest.raises(ValueError, match=r"`ModuleOptimizer.build\(model\)` got dict\(m\), which"):
        optim.build({"m": model})
    with pytest.raises(ValueError, match=r"`ModuleOptimizer.summary\(model\)` got 'words"):
        optim.summary(Words())
    assert_equal(values_of(model), before)


def test_a_dict_of_models_and_variables_is_a_root():
    temperature = tf.Variable(2.0)
    nets = {"g": Scalar(1.0), "d": Scalar(1.0), "t": temperature}
    optim = ModuleOptimizer(keras.optimizers.SGD(0.5)).with_group(
        ParamGroup.from_name("d"), keras.optimizers.SGD(0.25)
    )
    grads = {"g.w": tf.constant(1.0), "d.w": tf.constant(1.0), "t": tf.constant(1.0)}
    optim.step(None, nets, GradientsParams(grads))
    optim.step(None, dict(nets), GradientsParams(grads))  # another dict of the same is the same
    assert [float(nets["g"].w), float(nets["d"].w), float(temperature)] == [0.0, 0.5, 1.0]
    with pytest.raises(ValueError, match=r"got dict\(d, t\), which shares 2 of its variables"):
        optim.step(None, {"d": nets["d"], "t": temperature}, GradientsParams(grads))
    several = ModuleOptimizer("sgd").build([nets["g"], nets["d"]])
    several.step(0.5, [nets["g"], nets["d"]], GradientsParams({"1.w": tf.constant(1.0)}))
    assert float(nets["d"].w) == 0.0


def test_an_unbuilt_model_and_what_is_no_model_raise():
    grads = GradientsParams({"kernel": tf.ones((1, 1))})
    with pytest.raises(ValueError, match=f"{STEP} needs a built model"):
        ModuleOptimizer("sgd").step(0.1, keras.layers.Dense(1), grads)
    with pytest.raises(TypeError, match=f"{STEP} needs a model: got float 0.1"):
        ModuleOptimizer("sgd").step(0.1, 0.1, grads)  # arguments exchanged


# State, made wherever the first step is.


@pytest.mark.parametrize("jit", [False, True])
def test_the_first_step_may_be_in_anybodys_trace(jit):
    model, reference = Words(), Words()
    optim = ModuleOptimizer(keras.optimizers.Nadam(use_ema=True)).with_group(
        ParamGroup.from_name("bias"), keras.optimizers.Adagrad()
    )
    step = tf.function(
        lambda grads, lr: optim.step(lr, model, GradientsParams(grads)) and None, jit_compile=jit
    )
    table = gradient_table(model, 3, sparse=False)
    for i in range(3):
        step(row_of(table, i), tf.constant(RATE))
    other = ModuleOptimizer(keras.optimizers.Nadam(use_ema=True)).with_group(
        ParamGroup.from_name("bias"), keras.optimizers.Adagrad()
    )
    for i in range(3):
        other.step(RATE, reference, GradientsParams(row_of(table, i)))
    assert_close(values_of(model), values_of(reference), 1e-6)
    assert step.experimental_get_tracing_count() == 1


def test_a_step_may_stand_in_a_branch_or_a_loop_of_the_users():
    model = Scalar(0.0)
    optim = ModuleOptimizer("sgd")

    @tf.function
    def steps(count):
        for i in tf.range(count):
            if i % 2 == 0:
                optim.step(1.0, model, GradientsParams({"w": tf.constant(-1.0)}))

    steps(tf.constant(5))
    assert float(model.w) == 3.0
    assert int(optim.iterations) == 3


def test_building_twice_or_again_changes_nothing():
    model = Words()
    optim = ModuleOptimizer("adam").build(model)
    optim.step(0.1, model, grads_of(model))
    before, version = everything(optim, model), optim._assembly.fingerprint()
    assert optim.build(model) is optim
    assert_equal(everything(optim, model), before)
    assert optim._assembly.fingerprint() == version


def test_state_is_refused_before_build_and_for_unknown_paths():
    optim = ModuleOptimizer("adam")
    with pytest.raises(RuntimeError, match=r"`ModuleOptimizer.state\(path\)` has no state: got an"):
        optim.state(KERNEL)
    optim.build(Words())
    with pytest.raises(KeyError, match="got an unknown path: 'dense.kernal'.*Did you mean 'den"):
        optim.state("dense.kernal")
    state = optim.state(KERNEL)
    assert {name: slot.shape.as_list() for name, slot in state.items()} == {
        "momentums": [4, 3],
        "velocities": [4, 3],
    }
    assert all(isinstance(slot, tf.Tensor) for slot in state.values())


def test_it_reads_well():
    model = Words()
    optim = ModuleOptimizer(keras.optimizers.AdamW(global_clipnorm=1.0)).with_group(
        ParamGroup.from_name("bias"), None
    )
    optim.with_group(ParamGroup.from_name("embedding"), "sgd", GradientClipping.by_value(0.5))
    assert repr(optim) == (
        "ModuleOptimizer(not built, 0 steps\n"
        "  from_name('embedding'): SGD, GradientClipping.by_value(0.5)\n"
        "  from_name('bias'): frozen\n"
        "  all(): AdamW, GradientClipping.by_global_norm(1.0)\n"
        ")"
    )
    optim.step(0.1, model, grads_of(model))
    assert str(optim).splitlines()[0] == f"ModuleOptimizer('{model.name}' (Words), 1 steps"
    assert tf.function(lambda: len(repr(optim)))() > 0


def test_a_step_outside_of_the_replicas_is_refused():
    model = Scalar()
    optim = ModuleOptimizer("sgd").build(model)
    strategy = tf.distribute.OneDeviceStrategy("/CPU:0")
    with strategy.scope(), pytest.raises(RuntimeError, match="outside of the replicas: got OneDev"):
        optim.step(0.1, model, scalar_grads())
    assert float(model.w) == 1.0


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        ("1e-3", r"A text is no number. Write `float\(lr\)`"),
        (
            tfloop.ModuleLrScheduler(0.1),
            r"A scheduler gives the rates of each step. Write `scheduler.step\(\)`",
        ),
        ([0.1, 0.2], "Several rates belong to several groups. Write `tfloop.ModuleLearningRate"),
    ],
)
def test_what_is_no_rate_is_told_what_to_write(rate, words):
    model = Scalar()
    with pytest.raises(TypeError, match=words):
        ModuleOptimizer("sgd").step(rate, model, scalar_grads())
    assert float(model.w) == 1.0


def test_an_optimizer_that_is_made_in_a_trace_raises():
    with pytest.raises(ValueError, match="was called in a tf.function: got AdamW in a trace"):
        tf.function(lambda: ModuleOptimizer(keras.optimizers.AdamW()))()
