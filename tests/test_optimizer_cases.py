"""Reported faults of hand-written loops, as they should go: optimizers, groups, rates, traces.

The numbers are those of the list of cases that the project keeps; expectations are exact for
a scalar weight under `SGD(1.0)` unless said otherwise.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizer_helpers import OPTIMIZERS, Words, assert_close, assert_equal, values_of

import tfloop
from tfloop import (
    GradientClipping,
    GradientsAccumulator,
    GradientsParams,
    ModuleLearningRate,
    ModuleOptimizer,
    ParamGroup,
)

MODES = ("eager", "graph", "compile", "jit")
NAME = ParamGroup.from_name


class Scalar(tf.Module):
    def __init__(self, value=0.0):
        super().__init__()
        self.w = tf.Variable(value, name="w")


def scalar_grads(value):
    return GradientsParams({"w": tf.constant(value)})


def in_mode(mode, step):
    """The step as it is run in a mode; it takes and gives tensors."""
    if mode == "eager":
        return step
    if mode == "compile":
        return tfloop.compile(step)
    return tf.function(step, jit_compile=mode == "jit")


def normed_net(name="norm"):
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(3, name="encoder"),
            keras.layers.LayerNormalization(name=name),
            keras.layers.Dense(2, name="norm_head"),
        ]
    )


@pytest.mark.parametrize("mode", MODES)
def test_case_2_the_average_moves_once_per_update(mode):
    model = Scalar(1.0)
    optim = ModuleOptimizer(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)).build(model)
    window = GradientsAccumulator(reduction="mean").build(model)
    add = in_mode(mode, lambda: window.accumulate(model, scalar_grads(1.0)))
    update = in_mode(mode, lambda: optim.step(None, model, window) and None)
    plain_model = Scalar(1.0)
    plain = ModuleOptimizer(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5))
    averages = []
    for _ in range(3):
        for _ in range(2):
            add()
        update()
        averages.append(float(optim.state("w")["model_variables_moving_average"]))
        plain.step(None, plain_model, scalar_grads(1.0))
        assert averages[-1] == float(plain.state("w")["model_variables_moving_average"])
    assert averages == [0.5, 0.25, -0.125]
    assert float(model.w) == -0.5


@pytest.mark.parametrize("mode", MODES)
def test_case_3_schedules_count_updates_not_micro_batches(mode):
    model = Scalar()
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.125])
    optim = ModuleOptimizer(keras.optimizers.SGD(schedule)).build(model)
    window = GradientsAccumulator(reduction="mean").build(model)
    add = in_mode(mode, lambda: window.accumulate(model, scalar_grads(-1.0)))
    update = in_mode(mode, lambda: optim.step(None, model, window) and None)
    values = []
    for _ in range(3):
        for _ in range(4):
            add()
        update()
        values.append(float(model.w))
    assert values == [1.0, 1.125, 1.25]


@pytest.mark.parametrize("mode", MODES)
def test_case_10_two_nets_take_turns_on_one_optimizer(mode):
    nets = {"g": Scalar(0.0), "d": Scalar(0.0)}
    optim = ModuleOptimizer(keras.optimizers.Adam(1.0, epsilon=0.0)).with_group(
        NAME("d"), keras.optimizers.Adam(1.0, epsilon=0.0)
    )
    alone = {name: Scalar(0.0) for name in nets}
    singles = {name: keras.optimizers.Adam(1.0, epsilon=0.0) for name in nets}

    def turn(name):
        return lambda g: optim.step(None, nets, GradientsParams({f"{name}.w": g})) and None

    turns = {name: in_mode(mode, turn(name)) for name in nets}
    for i, value in enumerate((-1.0, -3.0, 2.0, -1.0)):
        name = "gd"[i % 2]
        other = nets["dg"[i % 2]].w.numpy()
        turns[name](tf.constant(value))
        assert nets["dg"[i % 2]].w.numpy() == other
        singles[name].apply([tf.constant(value)], [alone[name].w])
        np.testing.assert_allclose(nets[name].w, alone[name].w, rtol=1e-6)
        if i < 2:  # bias correction: the first update of each moves by the whole rate
            np.testing.assert_allclose(nets[name].w, 1.0, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_case_12_gradients_are_added_before_they_are_clipped(mode):
    # One replica: the two parts come as micro-batches, or as two graphs over one parameter.
    model = Scalar()
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0), clipping=GradientClipping.by_norm(1.0))
    window = GradientsAccumulator(reduction="sum").build(model)
    optim.build(model)

    def step():
        for part in (3.0, -3.5):
            window.accumulate(model, scalar_grads(part))
        optim.step(None, model, window)

    in_mode(mode, step)()
    assert float(model.w) == 0.5
    merged = in_mode(
        mode,
        lambda: optim.step(None, model, scalar_grads(3.0).merge(scalar_grads(-3.5))) and None,
    )
    merged()
    assert float(model.w) == 1.0


@pytest.mark.parametrize("mode", MODES)
def test_case_13_two_names_for_two_norms(mode):
    def moved(clipping):
        model = {"a": tf.Variable([0.0, 0.0]), "b": tf.Variable(0.0), "c": tf.Variable(0.0)}
        optim = (
            ModuleOptimizer(keras.optimizers.SGD(1.0), clipping=clipping)
            .with_group(NAME("c"), keras.optimizers.SGD(1.0))
            .build(model)
        )
        grads = {"a": tf.constant([3.0, 0.0]), "b": tf.constant(4.0), "c": tf.constant(100.0)}
        in_mode(mode, lambda: optim.step(None, model, GradientsParams(grads)) and None)()
        return [-float(tf.norm(v)) if v.shape.rank else float(v) for v in model.values()]

    np.testing.assert_allclose(moved(GradientClipping.by_norm(1.0)), [-1.0, -1.0, -100.0])
    # The norm over a and b is 5; c is another group's.
    np.testing.assert_allclose(moved(GradientClipping.by_global_norm(1.0)), [-0.6, -0.8, -100.0])


def test_case_14_a_pattern_that_matches_nothing_raises_before_the_first_update():
    model = normed_net("layernorm")
    optim = ModuleOptimizer(keras.optimizers.AdamW()).with_group(
        NAME("layer_norm"), keras.optimizers.Adam()
    )
    before = values_of(model)
    grads = GradientsParams({"encoder.bias": tf.ones(3)})
    with pytest.raises(ValueError, match="matches nothing.*Did you mean 'layernorm.gamma'"):
        optim.step(0.1, model, grads)
    assert_equal(values_of(model), before)
    ModuleOptimizer("adamw").with_group(NAME("layernorm"), "adam").step(0.1, model, grads)


def test_case_15_words_and_texts_are_two_things_and_the_summary_lists_the_members():
    model = normed_net()

    def spared(group):
        optim = ModuleOptimizer(keras.optimizers.AdamW()).with_group(group, keras.optimizers.Adam())
        rows = [line.split() for line in optim.summary(model).splitlines()[2:]]
        return [row[0] for row in rows if "Adam" in row]

    assert spared(NAME("norm")) == ["norm.gamma", "norm.beta"]
    assert spared(ParamGroup.from_predicate("norm")) == [
        *("norm.gamma", "norm.beta", "norm_head.kernel", "norm_head.bias")
    ]


@pytest.mark.parametrize("kind", ["float", "tensor", "variable", "given", "schedule", "callable"])
def test_case_16_a_new_rate_is_used_without_a_new_trace(kind):
    model, rates = Scalar(), (1.0, 0.5, 0.25)
    variable = tf.Variable(0.0)
    given = {
        "schedule": keras.optimizers.SGD(
            keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], rates)
        ),
        "callable": keras.optimizers.SGD(lambda: now["rate"]),
    }.get(kind, keras.optimizers.SGD(9.0))
    optim, now = ModuleOptimizer(given), {"rate": 0.0}

    @tfloop.compile
    def step(lr):
        optim.step(lr, model, scalar_grads(-1.0))

    values = []
    for rate in rates:
        now["rate"] = rate
        variable.assign(rate)
        if kind == "given":
            given.learning_rate = rate
        step({"float": rate, "tensor": tf.constant(rate), "variable": variable}.get(kind))
        values.append(float(model.w))
    assert values == [1.0, 1.5, 1.75]
    assert step.trace_count == 1


def test_case_16_rates_by_group_cost_no_trace_either():
    model = Words()
    optim = ModuleOptimizer("sgd")
    bias = NAME("bias")

    @tfloop.compile
    def step(rates):
        optim.step(rates, model, GradientsParams({"dense.bias": tf.ones(3)}))

    before = model.dense.bias.numpy()
    for rate in (1.0, 0.5, 0.25):
        step(ModuleLearningRate(9.0).with_group(bias, rate))
    np.testing.assert_allclose(before - model.dense.bias, tf.fill(3, 1.75), rtol=1e-5)
    assert step.trace_count == 1


@pytest.mark.parametrize("jit", [False, True])
def test_case_17_a_layer_frozen_after_the_trace_stops_and_moves_again(jit):
    model = Words()
    optim = ModuleOptimizer(keras.optimizers.AdamW(0.1))

    @tfloop.compile(jit_compile=jit)
    def step(ids):
        with tfloop.Tape() as tape:
            loss = tf.reduce_sum(tfloop.train(model)(ids) ** 2)
        optim.step(None, model, GradientsParams.from_grads(tape.backward(loss), model))

    ids = np.array([[0, 1]], np.int32)
    step(ids)
    for moves in (False, True, False):
        model.dense.trainable = moves
        before, state = model.dense.kernel.numpy(), optim.state("dense.kernel")
        step(ids)
        assert np.array_equal(model.dense.kernel, before) is not moves
        if not moves:
            assert_equal(optim.state("dense.kernel"), state)
    assert step.trace_count == 4


def test_case_18_an_optimizer_in_other_hands_is_copied_or_refused():
    model, group = Words(), NAME("bias")
    bound = keras.optimizers.Adam(0.1)
    bound.build([keras.Variable(tf.ones(2))])
    shared = ModuleOptimizer(bound).with_group(group, bound).build(model)
    one, two = (row.update.state.optimizer for row in shared._assembly.groups)
    assert len({id(one), id(two), id(bound)}) == 3
    for wrong, message in (
        (keras.optimizers.Adam(gradient_accumulation_steps=2), "tfloop.GradientsAccumulator"),
        (keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "one scale must serve all"),
    ):
        with pytest.raises(ValueError, match=message):
            ModuleOptimizer(wrong)
        with pytest.raises(ValueError, match=message):
            ModuleOptimizer("sgd").with_group(group, wrong)


def test_case_19_state_is_restored_by_path_or_not_at_all(tmp_path):
    model, other = Words(), Words()
    optim = (
        ModuleOptimizer("adam")
        .with_group(NAME("bias"), "nadam")
        .with_group(NAME("kernel"), keras.optimizers.SGD(momentum=0.9))
    )
    grads = {path: tf.ones(v.shape) for path, v in tfloop.named_parameters(model).items()}
    for _ in range(2):
        optim.step(0.1, model, GradientsParams(grads))
    path = tf.train.Checkpoint(optim=optim).write(str(tmp_path / "saved"))
    fresh = (
        ModuleOptimizer("nadam")
        .with_group(NAME("kernel"), keras.optimizers.SGD(momentum=0.9))
        .with_group(NAME("embedding"), "adam")
    )
    tf.train.Checkpoint(optim=fresh).read(path)
    fresh.build(other)
    for name in grads:
        assert_equal(fresh.state(name), optim.state(name))
    late = ModuleOptimizer("adam")
    tf.train.Checkpoint(optim=late).read(path)
    with pytest.raises(ValueError, match="found other parameters in the state: got unknown 'embed"):
        late.build({"dense": model.dense})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_case_20_repeated_ids_give_the_dense_result(name):
    sparse, dense = Words(), Words()
    optims = [ModuleOptimizer(OPTIMIZERS[name]()) for _ in range(2)]
    for ids in ([1, 1, 4], [4, 2, 4], [0, 0, 0]):
        rows = tf.IndexedSlices(
            tf.constant([[1.0, -2.0, 3.0, 0.5], [0.5, 1.0, -1.0, 2.0], [2.0, 2.0, 1.0, -1.0]]),
            tf.constant(ids),
            tf.constant([6, 4]),
        )
        path = "embedding.embeddings"
        optims[0].step(0.1, sparse, GradientsParams({path: rows}))
        optims[1].step(0.1, dense, GradientsParams({path: tf.convert_to_tensor(rows)}))
    assert_close(values_of(sparse), values_of(dense))


def test_case_28_six_rates_and_six_batch_sizes_are_two_traces():
    model = Words()
    optim = ModuleOptimizer("adam")

    @tfloop.compile
    def step(ids, lr):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean(tfloop.train(model)(ids) ** 2)
        optim.step(lr, model, GradientsParams.from_grads(tape.backward(loss), model))
        return loss

    rates = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    for size, rate in zip((32, 32, 7, 32, 5, 9), rates, strict=True):
        step(np.zeros((size, 2), np.int32), rate)
    assert step.trace_count <= 2
    assert int(optim.iterations) == 6


@pytest.mark.parametrize("jit", [False, True])
def test_case_29_state_is_made_on_the_first_trace_and_on_a_retrace(jit):
    model = Words()
    optim = ModuleOptimizer(keras.optimizers.Adam())
    window = GradientsAccumulator()

    @tf.function(jit_compile=jit)
    def step(ids, which):
        with tfloop.Tape() as tape:
            loss = tf.reduce_sum(model(ids) ** 2)
        grads = GradientsParams.from_grads(tape.backward(loss), model)
        if which == "plain":
            return loss
        if which == "window":
            window.accumulate(model, grads)
            optim.step(0.1, model, window)
        else:
            optim.step(0.1, model, grads)
        return loss

    step(np.zeros((1, 2), np.int32), "plain")
    before = model.dense.kernel.numpy()
    step(np.zeros((1, 2), np.int32), "step")  # a retrace makes the state
    step(np.zeros((3, 2), np.int32), "step")
    step(np.zeros((3, 2), np.int32), "window")
    assert int(optim.iterations) == 3
    assert not np.array_equal(model.dense.kernel, before)
