"""Groups: who serves whom, what changes when one is added, and what is refused."""

import random
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizer_helpers import (
    OPTIMIZERS,
    RATE,
    Many,
    Words,
    assert_close,
    assert_equal,
    gradient_table,
    row_of,
    run_keras,
    run_tfloop,
    values_of,
)

import tfloop
from tfloop import GradientClipping, GradientsParams, ModuleOptimizer, ParamGroup

EMBEDDINGS, KERNEL, BIAS = "embedding.embeddings", "dense.kernel", "dense.bias"
NAME = ParamGroup.from_name


def grads_of(model, seed=1, *, only=None):
    row = row_of(gradient_table(model, 1, seed), 0)
    return GradientsParams({path: row[path] for path in only or row})


def a_stack(depth=5):
    """Several small layers by name, one of them without bias."""
    layers = [keras.layers.Dense(3, name=f"part_{i}", use_bias=i != 2) for i in range(depth)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    rng = np.random.default_rng(0)
    for variable in model.weights:
        variable.assign(rng.normal(size=variable.shape))
    return model


# n groups are n optimizers.


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_group_equals_a_hand_split_optimizer(name):
    reference, model = Words(), Words()
    table = gradient_table(model, 10)
    split = [
        (OPTIMIZERS[name](), [EMBEDDINGS, KERNEL]),
        (keras.optimizers.Adam(RATE), [BIAS]),
    ]
    expected = run_keras(split, reference, table, "eager", 10)
    optim = ModuleOptimizer(keras.optimizers.Adam(RATE)).with_group(
        NAME("embedding") | NAME("kernel"), OPTIMIZERS[name]()
    )
    assert_close(run_tfloop(optim, model, table, "eager", None, 10), expected)


@pytest.mark.parametrize("seed", range(10))
def test_any_split_into_groups_equals_hand_split_optimizers(seed):
    draw = random.Random(seed)
    reference, model = a_stack(), a_stack()
    table = gradient_table(model, steps=5, seed=seed)
    count = draw.randint(1, 4)
    kinds = [draw.choice(sorted(OPTIMIZERS)) for _ in range(count)]
    bounds = [draw.choice([None, "clipnorm", "clipvalue", "global_clipnorm"]) for _ in range(count)]
    owner = {path: draw.randrange(count) for path in table}

    def make(n):
        optimizer = OPTIMIZERS[kinds[n]]()
        if bounds[n]:
            setattr(optimizer, bounds[n], 1.5)
        return optimizer

    paths = {n: [path for path in table if owner[path] == n] for n in range(count)}
    split = [(make(n), paths[n]) for n in range(count) if paths[n]]
    expected = run_keras(split, reference, table, "eager", 5)
    optim = ModuleOptimizer(make(0))
    for n in draw.sample(range(1, count), count - 1):
        if paths[n]:
            optim.with_group(ParamGroup.from_path(*paths[n]), make(n))
    assert_close(run_tfloop(optim, model, table, "eager", None, 5), expected)


def test_the_last_matching_group_wins():
    model = Words()
    before = values_of(model)
    sgd = keras.optimizers.SGD
    optim = (
        ModuleOptimizer(sgd(1.0))
        .with_group(NAME("dense"), sgd(2.0))
        .with_group(NAME("bias"), sgd(4.0))
    )
    ones = {path: tf.ones(v.shape) for path, v in tfloop.named_parameters(model).items()}
    optim.step(None, model, GradientsParams(ones))
    moved = {path: round(float(np.mean(before[path] - v)), 4) for path, v in values(model)}
    assert moved == {EMBEDDINGS: 1.0, KERNEL: 2.0, BIAS: 4.0}


def values(model):
    return values_of(model).items()


def test_groups_of_every_kind_route():
    model = Words()
    groups = {
        "ids": ParamGroup.from_ids([model.dense.bias]),
        "layers": ParamGroup.from_layers(model.dense),
        "path": ParamGroup.from_path(BIAS),
        "text": ParamGroup.from_predicate("bia"),
        "function": ParamGroup.from_predicate(lambda path, v: v.shape == (3,)),
        "regex": ParamGroup.from_regex(r"bias$"),
        "algebra": NAME("dense") - NAME("kernel"),
        "complement": ~(NAME("kernel") | NAME("embedding")),
    }
    for name, group in groups.items():
        optim = ModuleOptimizer("sgd").with_group(group, "adam").build(model)
        assert set(optim.state(BIAS)) == {"momentums", "velocities"}, name
        assert bool(optim.state(KERNEL)) == (name == "layers"), name
        assert optim.state(EMBEDDINGS) == {}, name


def test_a_tied_variable_is_matched_by_any_of_its_paths():
    model = tf.Module()
    model.encoder, model.decoder = tf.Module(), tf.Module()
    model.decoder.w = model.encoder.w = tf.Variable(1.0)
    optim = ModuleOptimizer("sgd").with_group(NAME("encoder"), keras.optimizers.SGD(0.5))
    other = ModuleOptimizer("sgd").with_group(NAME("decoder"), keras.optimizers.SGD(0.25))
    path = next(iter(tfloop.named_parameters(model)))
    optim.step(None, model, GradientsParams({path: tf.constant(1.0)}))
    other.step(None, model, GradientsParams({path: tf.constant(1.0)}))
    assert float(model.encoder.w) == 0.25


# Frozen groups.


def test_a_frozen_group_is_never_touched_nor_counted():
    model = Words()
    given = keras.optimizers.AdamW(weight_decay=0.5, use_ema=True, ema_overwrite_frequency=1)
    optim = ModuleOptimizer(given, clipping=GradientClipping.by_global_norm(1.0))
    optim.with_group(NAME("embedding"), None).build(model)
    before = values_of(model)
    # Without the frozen gradient the norm is 0.5, so that nothing is clipped.
    grads = {
        EMBEDDINGS: tf.fill((6, 4), 1000.0),
        BIAS: tf.constant([0.3, 0.4, 0.0]),
    }
    optim.step(0.1, model, GradientsParams(grads))
    np.testing.assert_array_equal(model.embedding.embeddings, before[EMBEDDINGS])
    np.testing.assert_allclose(optim.state(BIAS)["momentums"], [0.03, 0.04, 0.0], rtol=1e-6)
    assert optim.state(EMBEDDINGS) == {}


def test_a_frozen_layer_isnt_counted_in_a_norm():
    model = Words()
    model.embedding.trainable = False
    optim = ModuleOptimizer("sgd", clipping=GradientClipping.by_global_norm(1.0))
    model.dense.bias.assign(tf.zeros(3))
    grads = {EMBEDDINGS: tf.fill((6, 4), 1000.0), BIAS: tf.constant([0.25, 0.5, 0.0])}
    optim.step(1.0, model, GradientsParams(grads))
    np.testing.assert_array_equal(model.dense.bias, [-0.25, -0.5, 0.0])


def test_unfreezing_a_layer_builds_its_state_at_the_next_step():
    for mode in ("eager", "graph", "compile"):
        model = Words()
        model.dense.trainable = False
        optim = ModuleOptimizer("adam").build(model)
        assert optim.state(KERNEL) == {}

        def step(grads, optim=optim, model=model):
            optim.step(0.1, model, GradientsParams(grads))

        # A tf.function of the user's is traced anew: an old trace can't know of the flag.
        compiled = tfloop.compile(step) if mode == "compile" else step
        grads, before = dict(grads_of(model)), values_of(model)
        for _ in range(2):
            (tf.function(step) if mode == "graph" else compiled)(grads)
        row = dict(grads_of(Words()))
        np.testing.assert_array_equal(model.dense.kernel, before[KERNEL])
        kept = optim.state(EMBEDDINGS)
        model.dense.trainable = True
        (tf.function(step) if mode == "graph" else compiled)({KERNEL: row[KERNEL]})
        assert set(optim.state(KERNEL)) == {"momentums", "velocities"}
        assert not np.array_equal(model.dense.kernel, before[KERNEL])
        assert_equal(optim.state(EMBEDDINGS), kept)
        model.dense.trainable = False  # and back: the state stays
        frozen, state = model.dense.kernel.numpy(), optim.state(KERNEL)
        (tf.function(step) if mode == "graph" else compiled)(row)
        np.testing.assert_array_equal(model.dense.kernel, frozen)
        assert_equal(optim.state(KERNEL), state)


def test_a_layer_added_later_gets_state():
    net = tf.Module()
    net.a = tf.Variable(1.0)
    optim = ModuleOptimizer("adam")
    optim.step(0.5, net, GradientsParams({"a": tf.constant(1.0)}))
    kept = optim.state("a")
    net.b = tf.Variable(1.0)
    optim.step(0.5, net, GradientsParams({"b": tf.constant(1.0)}))
    assert set(optim.state("b")) == {"momentums", "velocities"}
    assert_equal(optim.state("a"), kept)
    net.a = tf.Variable([1.0, 2.0])  # another variable under the old path starts anew
    optim.step(0.5, net, GradientsParams({"a": tf.ones(2)}))
    assert optim.state("a")["momentums"].shape == (2,)


# Groups in mid-training.


@pytest.mark.parametrize("make_model", [Words, Many])
def test_a_group_added_later_clears_what_it_takes_and_nothing_else(make_model):
    model = make_model()
    optim = ModuleOptimizer(keras.optimizers.Nadam(use_ema=True)).with_group(
        NAME("bias"), keras.optimizers.Adam()
    )
    for seed in range(3):
        optim.step(RATE, model, grads_of(model, seed))
    others = [path for path in tfloop.named_parameters(model) if path != KERNEL]
    values, kept = values_of(model), {path: optim.state(path) for path in others}
    counters = [group.update.state.counters() for group in optim._assembly.groups]
    counters = [{name: c.numpy() for name, c in counter.items()} for counter in counters]
    assert optim.with_group(ParamGroup.from_path(KERNEL), keras.optimizers.Nadam()) is optim
    assert float(tf.norm(optim.state(KERNEL)["momentums"])) == 0.0
    for path, state in kept.items():
        assert_equal(optim.state(path), state)
    for group, expected in zip(optim._assembly.groups, [*counters, {}], strict=True):
        found = {name: c.numpy() for name, c in group.update.state.counters().items()}
        assert found == (expected or {"iterations": 0, "u_product": 1.0})
    assert_equal(values_of(model), values)
    assert int(optim.iterations) == 3


def test_the_next_call_of_a_compiled_step_uses_a_new_group():
    model = Words()
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0))

    @tfloop.compile
    def step():
        optim.step(None, model, GradientsParams({BIAS: tf.ones(3), KERNEL: tf.ones((4, 3))}))

    step()
    before = values_of(model)
    optim.with_group(NAME("bias"), keras.optimizers.SGD(0.25))
    step()
    np.testing.assert_allclose(before[BIAS] - model.dense.bias, tf.fill(3, 0.25), rtol=1e-5)
    np.testing.assert_allclose(before[KERNEL] - model.dense.kernel, tf.ones((4, 3)), rtol=1e-5)
    optim.with_clipping(GradientClipping.by_value(0.5))
    before = values_of(model)
    step()
    np.testing.assert_allclose(before[BIAS] - model.dense.bias, tf.fill(3, 0.25), rtol=1e-5)
    np.testing.assert_allclose(before[KERNEL] - model.dense.kernel, tf.fill((4, 3), 0.5), rtol=1e-5)
    assert step.trace_count == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda optim: optim.with_group(NAME("bias"), "sgd"),
        lambda optim: optim.with_clipping(GradientClipping.by_norm(1.0)),
    ],
    ids=["group", "clipping"],
)
def test_a_foreign_trace_that_is_too_old_raises_and_names_build(change):
    model = Words()
    optim = ModuleOptimizer("adam")

    @tf.function
    def step():
        optim.step(0.1, model, GradientsParams({BIAS: tf.ones(3)}))

    step()
    change(optim)
    before = values_of(model), optim.state(BIAS)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`optim.build\(model\)` before trac"):
        step()
    assert_equal(values_of(model), before[0])
    assert_equal(optim.state(BIAS), before[1])
    fresh = tf.function(step.python_function)
    fresh()
    assert int(optim.iterations) == 2


def test_a_foreign_trace_inside_a_compiled_step_raises_too():
    model = Words()
    optim = ModuleOptimizer("sgd")

    @tf.function
    def inner():
        optim.step(0.1, model, GradientsParams({BIAS: tf.ones(3)}))

    @tfloop.compile
    def step():
        inner()

    step()
    optim.with_clipping(GradientClipping.by_value(1.0))
    before = values_of(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"`optim.build\(model\)`"):
        step()
    assert_equal(values_of(model), before)


def test_late_clipping_of_the_fallback_is_honoured_and_not_inherited():
    model = Words()
    model.dense.bias.assign(tf.zeros(3))
    model.dense.kernel.assign(tf.zeros((4, 3)))
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0, momentum=0.5)).with_group(NAME("bias"), "sgd")
    grads = GradientsParams({BIAS: tf.fill(3, 8.0), KERNEL: tf.fill((4, 3), 8.0)})
    optim.step(1.0, model, grads.copy())
    assert optim.with_clipping(GradientClipping.by_value(1.0)) is optim
    optim.step(1.0, model, grads.copy())
    np.testing.assert_array_equal(model.dense.bias, tf.fill(3, -16.0))
    np.testing.assert_array_equal(model.dense.kernel, tf.fill((4, 3), -8.0 - 4.0 - 1.0))
    optim.with_clipping(None).step(1.0, model, grads)
    np.testing.assert_array_equal(model.dense.kernel, tf.fill((4, 3), -13.0 - 2.5 - 8.0))


def test_the_bound_of_an_optimizer_is_its_groups():
    model = Words()
    for variable in model.weights:
        variable.assign(tf.zeros(variable.shape))
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0)).with_group(
        NAME("dense"), keras.optimizers.SGD(1.0, global_clipnorm=5.0)
    )
    grads = {
        EMBEDDINGS: tf.fill((6, 4), 100.0),
        BIAS: tf.constant([6.0, 0.0, 0.0]),
        KERNEL: tf.concat([[[8.0, 0.0, 0.0]], tf.zeros((3, 3))], 0),
    }
    optim.step(None, model, GradientsParams(grads))  # ||(6, 8)|| is 10
    np.testing.assert_allclose(model.dense.bias, [-3.0, 0.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(model.dense.kernel[0], [-4.0, 0.0, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(model.embedding.embeddings, grads[EMBEDDINGS] * -1.0)


# What is refused.


BAD_GROUPS = {
    "a text": (
        lambda m: ("bias", "sgd"),
        TypeError,
        r"needs a ParamGroup: got.*`tfloop.ParamGroup.from_name\('bias'\)`",
    ),
    "a variable": (lambda m: (m.dense.bias, "sgd"), TypeError, "needs a ParamGroup"),
    "nothing": (lambda m: (None, "sgd"), TypeError, "needs a ParamGroup"),
    "exchanged": (lambda m: ("sgd", NAME("bias")), TypeError, "needs a ParamGroup"),
    "a misspelt name": (
        lambda m: (NAME("kernal"), "sgd"),
        ValueError,
        r"group from_name\('kernal'\) matches nothing: got 0 floating-point variables of 'words.*"
        r"Did you mean 'dense.kernel'.*strict=False.*\ngroup",
    ),
    "an unknown path": (
        lambda m: (ParamGroup.from_path("dense.gamma"), "sgd"),
        ValueError,
        r"from_path\('dense.gamma'\) matches nothing",
    ),
    "a regular expression": (
        lambda m: (ParamGroup.from_regex("^kernel"), "sgd"),
        ValueError,
        r"from_regex\('\^kernel'\) matches nothing.*dense.kernel",
    ),
    "another model's variables": (
        lambda m: (ParamGroup.from_layers(Words().dense), "sgd"),
        ValueError,
        "matches nothing.*Its variables or layers belong to another model",
    ),
    "a function that says no": (
        lambda m: (ParamGroup.from_predicate(lambda path, v: False), "sgd"),
        ValueError,
        "matches nothing.*its function says no to all",
    ),
    "an empty algebra": (
        lambda m: (NAME("bias") - NAME("bias"), "sgd"),
        ValueError,
        "matches nothing",
    ),
    "frozen and misspelt": (lambda m: (NAME("beta"), None), ValueError, "matches nothing"),
    "frozen and clipped": (
        lambda m: (NAME("bias"), None, GradientClipping.by_norm(1.0)),
        ValueError,
        r"got GradientClipping.by_norm\(1.0\) for a frozen group, expected none",
    ),
    "clipped by a number": (
        lambda m: (NAME("bias"), "sgd", 1.0),
        TypeError,
        r"got float 1.0 as clipping, expected a GradientClipping or None.*by_global_norm",
    ),
    "clipped twice": (
        lambda m: (NAME("bias"), keras.optimizers.SGD(clipvalue=1.0), GradientClipping.by_value(2)),
        ValueError,
        r"got two clippings: GradientClipping.by_value\(2.0\) and.*by_value\(1.0\), expected one",
    ),
    "all that another takes": (
        lambda m: (ParamGroup.all(), "sgd"),
        ValueError,
        r"the group from_name\('embedding'\) serves nothing: got 1 variables that it matches, "
        r"'embedding.embeddings', all taken by later groups \(all\(\)\).*\ngroup .* paths",
    ),
}


@pytest.mark.parametrize("name", BAD_GROUPS)
def test_a_wrong_group_raises_and_changes_nothing(name):
    make, error, message = BAD_GROUPS[name]
    model = Words()
    optim = ModuleOptimizer("adam").with_group(NAME("embedding"), "sgd").build(model)
    optim.step(RATE, model, grads_of(model))
    arguments = make(model)

    def all_of_it():
        state = {path: optim.state(path) for path in tfloop.named_parameters(model)}
        flat = {f"{p}/{name}": s for p, slots in state.items() for name, s in slots.items()}
        return values_of(model) | flat

    before, text, version = all_of_it(), repr(optim), optim._assembly.fingerprint()
    with pytest.raises(error, match="(?s)`ModuleOptimizer.*" + message):
        optim.with_group(*arguments)
    assert_equal(all_of_it(), before)
    assert (repr(optim), optim._assembly.fingerprint()) == (text, version)
    optim.step(RATE, model, grads_of(model))
    if error is ValueError and "matches nothing" in message:  # the same before `build`
        late = ModuleOptimizer("adam").with_group(*arguments)
        with pytest.raises(ValueError, match="(?s)" + message):
            late.step(RATE, model, grads_of(model))


def test_the_clipping_of_the_fallback_is_checked():
    with pytest.raises(
        TypeError, match=r"`ModuleOptimizer\(optimizer\)` got float 1.0 as clipping"
    ):
        ModuleOptimizer("sgd", clipping=1.0)
    with pytest.raises(ValueError, match=r"two clippings: GradientClipping.by_value\(1.0\)"):
        ModuleOptimizer(keras.optimizers.SGD(clipnorm=2.0), clipping=GradientClipping.by_value(1.0))
    optim = ModuleOptimizer("sgd")
    with pytest.raises(TypeError, match=r"`ModuleOptimizer.with_clipping\(clipping\)` got str 'n"):
        optim.with_clipping("norm")


def test_an_idle_group_shows_who_owns_what():
    model = Words()
    optim = ModuleOptimizer("adam").with_group(NAME("bias"), "sgd").with_group(NAME("gama"), None)
    with pytest.raises(ValueError, match="matches nothing") as raised:
        optim.build(model)
    assert str(raised.value).splitlines()[1:] == [
        "group                      variables  paths",
        "-------------------------  ---------  ----------------------------------",
        "all(): Adam                2          embedding.embeddings, dense.kernel",
        "from_name('bias'): SGD     1          dense.bias",
        "from_name('gama'): frozen  0          nothing",
    ]


def test_frozen_parameters_count_as_matched():
    model = Words()
    model.dense.trainable = False
    optim = ModuleOptimizer("adam").with_group(NAME("dense"), "sgd").build(model)
    optim.step(RATE, model, grads_of(model))


def test_a_lenient_optimizer_warns_and_goes_on():
    model = Words()
    optim = ModuleOptimizer("sgd", strict=False).with_group(NAME("kernal"), "adam")
    with pytest.warns(UserWarning, match="(?s)matches nothing.*Did you mean 'dense.kernel'"):
        optim.build(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once, not at every step
        for _ in range(2):
            optim.step(RATE, model, grads_of(model))
    with pytest.warns(UserWarning, match="serves nothing"):
        ModuleOptimizer("sgd", strict=False).with_group(NAME("bias"), "adam").with_group(
            NAME("dense"), "sgd"
        ).build(model)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_misspelt_group_of_rates_raises_before_anything_changes(mode):
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="head")])
    before = net.layers[0].kernel.numpy()

    def step(optim, rates):
        ones = {path: tf.ones(v.shape) for path, v in tfloop.named_parameters(net).items()}
        optim.step(rates, net, tfloop.GradientsParams(ones))

    if mode == "compiled":
        run = lambda *args: tfloop.compile(lambda: step(*args))()  # noqa: E731
    else:
        run = step
    right = tfloop.ModuleLearningRate(1.0).with_group(ParamGroup.from_name("head"), 0.0)
    wrong = tfloop.ModuleLearningRate(1.0).with_group(ParamGroup.from_name("haed"), 0.0)
    optim = ModuleOptimizer("sgd")
    run(optim, right)
    with pytest.raises(ValueError, match=r"group from_name\('haed'\) of its rates matches nothing"):
        run(optim, wrong)
    np.testing.assert_array_equal(net.layers[0].kernel, before)
    assert int(optim.iterations) == 1
    run(ModuleOptimizer("sgd", strict=False), wrong)
    np.testing.assert_array_equal(net.layers[0].kernel, before - 1.0)
