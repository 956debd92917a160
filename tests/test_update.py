"""Every Keras rule, one group at a time: equal to Keras in every mode, and by path."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizer_helpers import (
    ELEMENTWISE,
    KINDS,
    MODES,
    OPTIMIZERS,
    RATE,
    STEPS,
    Many,
    Words,
    assert_close,
    assert_equal,
    gradient_table,
    repeat,
    row_of,
    run_keras,
    run_tfloop,
    values_of,
)
from since import MULTI_OPTIMIZER, MUON, has, since

import tfloop
from tfloop import GradientsParams, ModuleLearningRate, ModuleOptimizer, ParamGroup
from tfloop._update.update import GroupUpdate

EMBEDDINGS, KERNEL, BIAS = "embedding.embeddings", "dense.kernel", "dense.bias"


def test_the_registry_holds_every_optimizer_of_keras():
    refused = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
    kinds = {
        kind
        for name, kind in vars(keras.optimizers).items()
        if isinstance(kind, type)
        and issubclass(kind, keras.optimizers.Optimizer)
        and name not in refused
    }
    if not has(MUON):
        kinds.remove(keras.optimizers.Muon)
    assert kinds == {type(make()) for make in OPTIMIZERS.values()}


@pytest.mark.skipif(has(MUON), reason="keeps its state in lists")
def test_a_muon_that_keeps_its_state_by_names_is_refused():
    with pytest.raises(ValueError, match="found state of Muon that no path leads to"):
        ModuleOptimizer(keras.optimizers.Muon()).build(Words())


@pytest.mark.parametrize(
    ("make_model", "name", "mode"),
    [
        *((Words, name, "graph") for name in OPTIMIZERS),
        # The others of all: eagerly below, with several rates; in XLA in case 20.
        *((Words, name, mode) for name in KINDS for mode in ("eager", "jit")),
        *((Many, name, "graph") for name in ELEMENTWISE),
        *((Many, name, "jit") for name in ("Adam", "Nadam", "centered")),
    ],
)
def test_one_group_equals_keras_on_dense_gradients(make_model, name, mode):
    rate = float(OPTIMIZERS[name]().learning_rate.numpy())
    steps = 12 if mode == "eager" else STEPS  # what adds up over many shows in a graph, for less
    reference, model = make_model(), make_model()
    table = gradient_table(model, steps)
    expected = run_keras([(OPTIMIZERS[name](), list(table))], reference, table, mode, steps)
    found = run_tfloop(ModuleOptimizer(OPTIMIZERS[name]()), model, table, mode, rate, steps)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("name", "make_model"),
    [*((name, Words) for name in OPTIMIZERS), *((name, Many) for name in ELEMENTWISE)],
)
def test_several_rates_in_one_optimizer_equal_optimizers_of_these_rates(name, make_model):
    reference, model = make_model(), make_model()
    table = gradient_table(model, steps=5)
    biases = [path for path in table if path.endswith("bias")]
    rest = [path for path in table if path not in (EMBEDDINGS, *biases)]
    split = []
    for paths, rate in (([EMBEDDINGS], 0.01), (rest, 0.003), (biases, 0.03)):
        optimizer = OPTIMIZERS[name]()
        optimizer.learning_rate = rate
        split.append((optimizer, paths))
    expected = run_keras(split, reference, table, "eager", steps=5)
    rates = (
        ModuleLearningRate(0.01)
        .with_group(ParamGroup.from_name("kernel"), 0.003)
        .with_group(ParamGroup.from_name("bias"), multiplier=3.0)
    )
    optim = ModuleOptimizer(OPTIMIZERS[name]())
    assert_close(run_tfloop(optim, model, table, "eager", rates, steps=5), expected)
    assert int(optim.iterations) == 5


def test_a_rule_that_moves_shared_state_itself_takes_one_rate():
    class Shared(keras.optimizers.SGD):
        def _backend_update_step(self, grads, variables, learning_rate):
            super()._backend_update_step(grads, variables, learning_rate)

    model = Words()
    rates = ModuleLearningRate(0.1).with_group(ParamGroup.from_name("bias"), 0.2)
    optim = ModuleOptimizer(Shared())
    before = values_of(model)
    grads = GradientsParams(row_of(gradient_table(model, 1), 0))
    with pytest.raises(
        ValueError, match=r"got 2 rates for the group all\(\), expected one: Shared"
    ):
        optim.step(rates, model, grads)
    assert_equal(values_of(model), before)
    optim.step(rates, model, grads.select(ParamGroup.from_name("bias")))  # one of them is fine


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in KINDS
        for dtype in ("float16", "bfloat16", "float64")
        # Keras itself fails there: 0.999 rounds to 1 and it divides by 0; dtypes don't match.
        if (name, dtype) not in (("Nadam", "bfloat16"), ("Muon", "float64"))
    ],
)
def test_other_dtypes_equal_keras(name, dtype):
    reference, model = Words(dtype), Words(dtype)
    table = gradient_table(model, 5, sparse=False)
    expected = run_keras([(OPTIMIZERS[name](), list(table))], reference, table, "eager", 5)
    found = run_tfloop(ModuleOptimizer(OPTIMIZERS[name]()), model, table, "eager", steps=5)
    assert_equal(found, expected)
    assert {str(v.dtype) for v in found.values()} == {dtype}


def test_repeated_rows_are_summed_before_a_short_dtype_rounds_them():
    model = Words("bfloat16")
    model.embedding.embeddings.assign(tf.zeros((6, 4)))
    # 256 + 256 * 1: in bfloat16 each 1 would be lost.
    values = tf.constant([[256.0] * 4] + [[1.0] * 4] * 256)
    grad = tf.IndexedSlices(values, tf.zeros(257, tf.int32), tf.constant([6, 4]))
    ModuleOptimizer(keras.optimizers.SGD()).step(1.0, model, GradientsParams({EMBEDDINGS: grad}))
    assert float(model.embedding.embeddings[0, 0]) == -512.0


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", [*KINDS, "centered"])
def test_the_gradient_of_a_tape_serves_every_kind_of_rule(name, jit):
    # The shapes of a batch aren't known to the trace; tables above have fixed ones.
    model = Words()
    optim = ModuleOptimizer(OPTIMIZERS[name]())

    @tf.function(
        jit_compile=jit, input_signature=[tf.TensorSpec((None, None), tf.int32), tf.TensorSpec(())]
    )
    def step(ids, lr):
        with tfloop.Tape() as tape:
            loss = tf.reduce_sum(model(ids) ** 2)
        optim.step(lr, model, GradientsParams.from_grads(tape.backward(loss), model))
        return loss

    losses = [float(step(np.array([[1, 2, 2], [2, 5, 1]], np.int32), 0.01)) for _ in range(3)]
    losses.append(float(step(np.array([[4, 4]], np.int32), 0.01)))
    assert np.all(np.isfinite(losses))
    assert losses[0] > losses[2]


@pytest.mark.parametrize(
    ("name", "make_model"),
    [*((name, Words) for name in OPTIMIZERS), *((name, Many) for name in ELEMENTWISE)],
)
def test_a_parameter_without_gradient_is_wholly_untouched(name, make_model):
    given = OPTIMIZERS[name]()
    given.use_ema, given.ema_momentum = True, 0.9
    model = make_model()
    table = gradient_table(model, 6)
    optim = ModuleOptimizer(given).build(model)
    for i in range(2):
        optim.step(RATE, model, GradientsParams(row_of(table, i)))
    before, slots = values_of(model), optim.state(KERNEL)
    for i in range(2, 6):
        grads = GradientsParams(row_of(table, i))
        grads.remove(KERNEL)
        optim.step(RATE, model, grads)
    np.testing.assert_array_equal(model.dense.kernel, before[KERNEL])
    assert_equal(optim.state(KERNEL), slots)
    assert not np.array_equal(model.dense.bias, before[BIAS])


@pytest.mark.parametrize("make_model", [Words, Many])
def test_what_is_assigned_between_two_steps_counts(make_model):
    model = make_model()
    grads = {path: tf.ones(v.shape) for path, v in tfloop.named_parameters(model).items()}
    optim = ModuleOptimizer(keras.optimizers.SGD(0.25, momentum=0.5))
    step = tfloop.compile(lambda: optim.step(None, model, GradientsParams(grads)) and None)
    for move in (0.25, 0.375):
        for variable in model.weights:
            variable.assign(tf.zeros(variable.shape))
        step()
        for variable in model.weights:
            np.testing.assert_array_equal(variable, tf.fill(variable.shape, -move))


def test_a_constraint_among_many_holds():
    model = Many()
    model.more[0].kernel.constraint = keras.constraints.NonNeg()
    optim = ModuleOptimizer(keras.optimizers.Adam(0.5))
    optim.step(None, model, GradientsParams(row_of(gradient_table(model, 1), 0)))
    assert model.more[0].kernel.numpy().min() == 0.0
    assert model.more[1].kernel.numpy().min() < 0.0


@pytest.mark.parametrize(
    ("make_model", "every", "mode"),
    [
        *((Words, every, mode) for every in (None, 3) for mode in MODES),
        (Many, 3, "eager"),
        (Many, 3, "graph"),
    ],
)
def test_moving_averages_equal_keras(make_model, every, mode):
    def make():
        options = {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": every}
        return keras.optimizers.Adam(RATE, **options)

    reference, model, given = make_model(), make_model(), make()
    table = gradient_table(model, 7, sparse=False)
    expected = run_keras([(given, list(table))], reference, table, mode, 7)
    optim = ModuleOptimizer(make())
    assert_close(run_tfloop(optim, model, table, mode, steps=7), expected)
    for path, average in zip(table, given._model_variables_moving_average, strict=True):
        found = optim.state(path)["model_variables_moving_average"]
        np.testing.assert_allclose(found, average.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_constraints_follow_the_average_as_in_keras(mode):
    def make_model():
        model = Words()
        model.dense.kernel.constraint = keras.constraints.NonNeg()
        return model

    def make():
        return keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)

    reference, model, given = make_model(), make_model(), make()
    table = gradient_table(model, 5, sparse=False)
    expected = run_keras([(given, list(table))], reference, table, mode, 5)
    optim = ModuleOptimizer(make())
    found = run_tfloop(optim, model, table, mode, 0.5, 5)
    assert_close(found, expected)
    assert found[KERNEL].min() == 0.0
    average = given._model_variables_moving_average[list(table).index(KERNEL)].numpy()
    assert average.min() < 0.0  # taken before the constraint
    found = optim.state(KERNEL)["model_variables_moving_average"]
    np.testing.assert_allclose(found, average, rtol=1e-5)


def test_a_variable_that_its_gradient_overwrites_takes_the_value_as_it_is():
    model = Words()
    model.dense.bias.overwrite_with_gradient = True
    given = keras.optimizers.AdamW(0.1, weight_decay=0.5, global_clipnorm=1.0, use_ema=True)
    optim = ModuleOptimizer(given)
    scales = tf.constant([3.0, 400.0, 5.0])
    grads = GradientsParams({BIAS: scales, KERNEL: tf.fill((4, 3), 0.1)})
    kernel = model.dense.kernel.numpy()
    optim.step(None, model, grads)
    np.testing.assert_array_equal(model.dense.bias, scales)
    assert optim.state(BIAS) == {}
    # It counts in no norm: ||0.1|| over 12 elements is below 1, so the kernel isn't clipped.
    np.testing.assert_allclose(optim.state(KERNEL)["momentums"], tf.fill((4, 3), 0.01), rtol=1e-6)
    assert not np.array_equal(model.dense.kernel, kernel)
    optim.step(None, model, GradientsParams({BIAS: tf.constant([1.0, 2.0, 3.0])}))  # it alone
    np.testing.assert_array_equal(model.dense.bias, [1.0, 2.0, 3.0])


class Signs(keras.optimizers.Optimizer):
    """A user's rule, for dense tensors alone, that reads the rate from the optimizer."""

    def __init__(self, learning_rate=0.1, factor=1.0, **options):
        super().__init__(learning_rate, **options)
        self.factor = factor

    def build(self, variables):
        super().build(variables)
        self.counts = self.add_optimizer_variables(variables, "count")
        self.total = self.add_variable((), name="total")

    def update_step(self, gradient, variable, learning_rate):
        self.counts[self._get_variable_index(variable)].assign_add(tf.ones(variable.shape))
        self.total.assign_add(tf.reduce_sum(gradient))
        self.assign_sub(variable, self.learning_rate * self.factor * tf.sign(gradient))

    def get_config(self):
        return super().get_config() | {"factor": self.factor}


class Doubled(keras.optimizers.SGD):
    """A user's `apply`, which must not be bypassed."""

    def apply(self, grads, trainable_variables=None):
        super().apply([2.0 * grad for grad in grads], trainable_variables)


class Halved(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(0.5 * g, v) for g, v in grads_and_vars])


@pytest.mark.parametrize("mode", MODES)
def test_a_rule_of_ones_own_gets_dense_gradients_and_keeps_its_arguments(mode):
    model = Words()
    model.embedding.embeddings.assign(tf.zeros((6, 4)))
    optim = ModuleOptimizer(Signs(factor=2.0)).build(model)
    grad = tf.IndexedSlices(tf.ones((3, 4)), tf.constant([1, 1, 4]), tf.constant([6, 4]))
    repeat(lambda i: optim.step(0.5, model, GradientsParams({EMBEDDINGS: grad})), mode, 2)
    np.testing.assert_array_equal(model.embedding.embeddings[:, 0], [0, -2, 0, 0, -2, 0])
    np.testing.assert_array_equal(optim.state(EMBEDDINGS)["counts"], tf.fill((6, 4), 2.0))
    assert float(optim._assembly.groups[0].update.state.counters()["total"]) == 24.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "factor"), [(Doubled, 2.0), (Halved, 0.5)])
def test_an_apply_of_ones_own_is_called(kind, factor, mode):
    model = Words()
    before = values_of(model)
    optim = ModuleOptimizer(kind()).build(model)
    grads = {KERNEL: tf.ones((4, 3))}
    repeat(lambda i: optim.step(0.5, model, GradientsParams(grads)), mode, 4)
    np.testing.assert_allclose(model.dense.kernel, before[KERNEL] - 2.0 * factor, rtol=1e-5)
    np.testing.assert_array_equal(model.dense.bias, before[BIAS])
    assert int(optim._assembly.groups[0].update.state.optimizer.iterations.numpy()) == 4


def test_an_apply_of_ones_own_takes_one_rate_and_no_average():
    model = Words()
    rates = ModuleLearningRate(0.1).with_group(ParamGroup.from_name("bias"), 0.2)
    grads = GradientsParams(row_of(gradient_table(model, 1, sparse=False), 0))
    with pytest.raises(ValueError, match="got 2 rates for the group"):
        ModuleOptimizer(Doubled()).step(rates, model, grads)
    with pytest.raises(ValueError, match=r"got Doubled\(use_ema=True\) with an `apply` of its own"):
        ModuleOptimizer(Doubled(use_ema=True))


def test_an_apply_of_ones_own_cannot_depend_on_a_run():
    model = Words()
    optim, window = ModuleOptimizer(Doubled()).build(model), tfloop.GradientsAccumulator()
    window.accumulate(model, GradientsParams({KERNEL: tf.ones((4, 3))}))
    before = values_of(model)
    with pytest.raises(ValueError, match=r"update of Doubled depend on a run.*accumulator.grads"):
        tf.function(lambda: optim.step(0.5, model, window) and None)()
    assert_equal(values_of(model), before)
    optim.step(0.5, model, window)  # what got a gradient is known here
    np.testing.assert_allclose(model.dense.kernel, before[KERNEL] - 1.0, rtol=1e-5)


class AtLeast(keras.constraints.Constraint):
    def __init__(self, least):
        self.least = least

    def __call__(self, w):
        return keras.ops.maximum(w, self.least)


class Network(tf.Module):
    """Raw TensorFlow variables, one of them constrained."""

    def __init__(self):
        super().__init__()
        self.embedding = tf.Variable(tf.ones((6, 4)), name="table")
        self.kernel = tf.Variable(tf.ones((4, 3)), constraint=AtLeast(0.9))
        self.bias = tf.Variable(tf.zeros(3), name="offset")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_raw_variables_serve_every_rule(name):
    model, reference = Network(), Words()
    for variable, other in zip(
        (model.embedding, model.kernel, model.bias), reference.weights, strict=True
    ):
        variable.assign(other)
    reference.dense.kernel.constraint = AtLeast(0.9)
    names = {"embedding": EMBEDDINGS, "kernel": KERNEL, "bias": BIAS}
    given = OPTIMIZERS[name]()
    table = gradient_table(reference, 5)
    expected = run_keras([(given, list(table))], reference, table, "eager", 5)
    table = {path: table[other] for path, other in names.items()}
    found = run_tfloop(ModuleOptimizer(OPTIMIZERS[name]()), model, table, "eager", None, 5)
    assert_close(found, {path: expected[other] for path, other in names.items()})


@since(MUON)
def test_muon_tells_raw_matrices_by_their_path():
    model = Network()
    given = keras.optimizers.Muon(exclude_layers=["kernel"])
    optim = ModuleOptimizer(given).build(model)
    slots = {path: set(optim.state(path)) for path in ("embedding", "kernel", "bias")}
    both = {"momentums", "adam_velocities"}
    assert slots == {"embedding": both, "kernel": both, "bias": both}
    given = keras.optimizers.Muon(exclude_embeddings=False)
    assert set(ModuleOptimizer(given).build(model).state("embedding")) == {"momentums"}


@pytest.mark.parametrize("make_model", [Words, Many])
def test_decay_comes_before_the_update_and_spares_what_was_excluded(make_model):
    model = make_model()
    for variable in model.weights:
        variable.assign(tf.ones(variable.shape))
    given = keras.optimizers.SGD(weight_decay=0.5)
    given.exclude_from_weight_decay(var_list=[model.dense.kernel], var_names=["bias"])
    grads = {path: tf.ones(v.shape) for path, v in tfloop.named_parameters(model).items()}
    for optim in (ModuleOptimizer(given), ModuleOptimizer(given)):
        optim.step(0.1, model, GradientsParams(grads))
    # 1 - 0.1 * 0.5 * 1 - 0.1 * 1, twice; without decay 1 - 0.1 - 0.1.
    np.testing.assert_allclose(model.embedding.embeddings, tf.fill((6, 4), 0.85 * 0.95 - 0.1))
    np.testing.assert_allclose(model.dense.kernel, tf.fill((4, 3), 0.8))
    np.testing.assert_allclose(model.dense.bias, tf.fill(3, 0.8))


def test_exclusions_survive_a_change_of_the_groups():
    model = Words()
    given = keras.optimizers.SGD(weight_decay=0.5)
    given.exclude_from_weight_decay(var_names=["bias"])
    optim = ModuleOptimizer(given).build(model)
    optim.with_group(ParamGroup.from_name("kernel"), keras.optimizers.SGD())
    update = optim._assembly.groups[0].update
    assert update.state.decay_of(BIAS) is None
    assert update.state.decay_of(EMBEDDINGS) == 0.5


def test_the_object_given_is_never_changed():
    model = Words()
    given = keras.optimizers.Adam(0.25, clipnorm=2.0, weight_decay=0.5)
    table = gradient_table(model, 2)
    optim = ModuleOptimizer(given)
    optim.step(0.1, model, GradientsParams(row_of(table, 0)))
    assert given.built is False
    assert given.clipnorm == 2.0
    assert int(given.iterations.numpy()) == 0
    assert float(given.learning_rate.numpy()) == 0.25
    given.weight_decay = 100.0  # of it, only the rate is read later
    optim.with_group(ParamGroup.from_name("bias"), keras.optimizers.SGD())
    assert optim._assembly.groups[0].update.state.decay_of(KERNEL) == 0.5


def test_optimizers_made_from_one_instance_are_independent():
    given = keras.optimizers.Adam(0.1)
    first, second = Words(), Words()
    one, two = ModuleOptimizer(given), ModuleOptimizer(given)
    table = gradient_table(first, 3)
    for i in range(3):
        one.step(None, first, GradientsParams(row_of(table, i)))
    before = values_of(second)
    two.build(second)
    assert_equal(values_of(second), before)
    assert int(two.iterations) == 0
    assert float(tf.norm(two.state(KERNEL)["momentums"])) == 0.0
    for i in range(3):
        two.step(None, second, GradientsParams(row_of(table, i)))
    assert_equal(values_of(second), values_of(first))


def test_state_is_keyed_by_keras_names_for_every_optimizer():
    model = Words()
    expected = {
        "momentum": {"momentums"},
        "amsgrad": {"momentums", "velocities", "velocity_hats"},
        "centered": {"velocities", "momentums", "average_gradients"},
        "Adagrad": {"accumulators"},
        "Adadelta": {"accumulated_grads", "accumulated_delta_vars"},
        "Adafactor": {"r", "c", "v"},
        "Adamax": {"m", "u"},
        "Ftrl": {"accumulators", "linears"},
        "SGD": set(),
    }
    for name, slots in expected.items():
        assert set(ModuleOptimizer(OPTIMIZERS[name]()).build(model).state(KERNEL)) == slots
    for make in OPTIMIZERS.values():
        update = ModuleOptimizer(make()).build(model)._assembly.groups[0].update
        found = {
            id(slot) for path in update.variables for slot in update.state.slots(path).values()
        }
        assert len(found) == sum(len(update.state.slots(path)) for path in update.variables)


def test_slots_follow_their_paths_when_the_set_of_variables_changes():
    model = Words()
    named = tfloop.named_parameters(model)
    update = GroupUpdate(keras.optimizers.Nadam(0.1), "call")
    update.state = update.state.for_variables(named)
    ones = {path: tf.ones(v.shape) for path, v in named.items()}
    work = update.prepared([(tf.constant(0.1), ones)])
    work.run(tf.distribute.get_strategy(), work.inputs, work.some)
    before = {path: values_of_slots(update, path) for path in named}
    product = float(update.state.counters()["u_product"])
    assert update.state.for_variables(dict(named)) is update.state  # nothing changed, nothing made
    fewer = {path: named[path] for path in (BIAS, EMBEDDINGS)}  # in another order
    update.state = update.state.for_variables(fewer)
    assert {path: values_of_slots(update, path) for path in fewer} == {
        path: before[path] for path in fewer
    }
    assert values_of_slots(update, KERNEL) == {}
    assert float(update.state.counters()["u_product"]) == product
    other = tf.Variable(tf.zeros(3))
    update.state = update.state.for_variables({BIAS: other, EMBEDDINGS: named[EMBEDDINGS]})
    assert np.all(np.array(values_of_slots(update, BIAS)["momentums"]) == 0.0)
    assert values_of_slots(update, EMBEDDINGS) == before[EMBEDDINGS]


def values_of_slots(update, path):
    return {name: slot.numpy().tolist() for name, slot in update.state.slots(path).items()}


class Dictionary(keras.optimizers.Optimizer):
    """Keeps its state where no path leads."""

    def build(self, variables):
        super().build(variables)
        self.notes = {v.path: self.add_variable_from_reference(v, "note") for v in variables}

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient)


class Forgetful(keras.optimizers.SGD):
    def __init__(self, learning_rate=0.1, strength=1.0, **options):
        super().__init__(learning_rate, **options)
        self.strength = strength


class Demanding(keras.optimizers.SGD):
    def __init__(self, model, **options):
        super().__init__(**options)


class Broken(keras.optimizers.SGD):
    def get_config(self):
        raise NotImplementedError("no config")


def used():
    given = keras.optimizers.SGD()
    variable = keras.Variable([1.0])
    given.apply([tf.constant([1.0])], [variable])
    return given


BAD_OPTIMIZERS = {
    "None": (lambda: None, TypeError, "needs an optimizer: got None, expected a keras"),
    "a number": (lambda: 0.1, TypeError, r"needs an optimizer: got float 0.1"),
    "a list": (lambda: [keras.optimizers.SGD()], TypeError, "needs an optimizer: got an object"),
    "a class": (
        lambda: keras.optimizers.Adam,
        TypeError,
        r"got the class Adam, expected an instance. Make one: `keras.optimizers.Adam\(\)`",
    ),
    "a model": (Words, TypeError, "needs an optimizer: got 'words.*Words"),
    "a name that Keras doesn't find": (
        lambda: "lamb",
        ValueError,
        r"got 'lamb', .*serialize`\. A class.*Write `keras.optimizers.Lamb\(\)`",
    ),
    "a misspelt name": (
        lambda: "adamm",
        ValueError,
        "got 'adamm', expected a name such as 'adam'.*Did you mean 'adam'",
    ),
    "a config of nothing": (lambda: {"a": 1}, ValueError, "can't make an optimizer: got {'a': 1}"),
    "accumulation": (
        lambda: keras.optimizers.SGD(gradient_accumulation_steps=4),
        ValueError,
        r"got SGD\(gradient_accumulation_steps=4\), expected none.*`tfloop.GradientsAccumulator",
    ),
    "a loss scale": (
        lambda: keras.optimizers.SGD(loss_scale_factor=8.0),
        ValueError,
        r"got SGD\(loss_scale_factor=8.0\), expected none.*`grads.scale\(1 / s\)`",
    ),
    "a scaling optimizer": (
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
        ValueError,
        r"got a LossScaleOptimizer, expected the optimizer inside.*`Adam\(...\)`",
    ),
    "several in one": (
        lambda: keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.SGD())
        ),
        ValueError,
        "got a MultiOptimizer, expected one optimizer.*with_group",
    ),
    "a used one": (used, ValueError, r"already made 1 steps elsewhere, expected a fresh one"),
    "a negative bound": (
        lambda: keras.optimizers.SGD(clipnorm=-1.0),
        ValueError,
        r"GradientClipping.by_norm\(max_norm\)` has a bound out of range: got -1.0",
    ),
    "a config that loses an argument": (
        lambda: Forgetful(strength=2.0),
        ValueError,
        r"can't copy Forgetful: its config loses 'strength'.*`def get_config\(self\)",
    ),
    "a config that can't make it": (
        lambda: Demanding(Words()),
        ValueError,
        "can't copy Demanding: got TypeError.*get_config",
    ),
    "no config": (Broken, ValueError, "can't copy Broken: got NotImplementedError"),
}
if not has(MULTI_OPTIMIZER):
    del BAD_OPTIMIZERS["several in one"]


@pytest.mark.parametrize("name", BAD_OPTIMIZERS)
def test_a_wrong_optimizer_raises_at_once(name):
    make, error, message = BAD_OPTIMIZERS[name]
    given = make()
    with (
        pytest.raises(error, match=r"(?s)`ModuleOptimizer\(optimizer\)`.*" + message)
        if ("by_norm" not in message)
        else pytest.raises(error, match=message)
    ):
        ModuleOptimizer(given)
    if given is not None:
        optim = ModuleOptimizer("sgd")
        with pytest.raises(error, match=message):
            optim.with_group(ParamGroup.all(), given)
        assert len(optim._assembly.groups) == 1


def test_state_that_no_path_leads_to_raises_before_the_first_step():
    model = Words()
    optim = ModuleOptimizer(Dictionary(0.1))
    with pytest.raises(ValueError, match="found state of Dictionary that no path leads to: got 'w"):
        optim.build(model)
    with pytest.raises(RuntimeError, match="isn't built"):
        optim.state(KERNEL)


@pytest.mark.parametrize(
    "given",
    ["adam", {"class_name": "SGD", "config": {"momentum": 0.5}}, keras.optimizers.Adam(1e-3)],
)
def test_names_and_configs_are_accepted_as_in_compile(given):
    optim = ModuleOptimizer(given)
    assert "Adam" in str(optim) or optim._assembly.groups[0].update.given.momentum == 0.5


def test_an_optimizer_bound_to_other_variables_is_copied():
    given = keras.optimizers.Adam(0.1)
    given.build([keras.Variable(tf.ones((2, 2)))])
    model = Words()
    optim = ModuleOptimizer(given).build(model)
    assert optim.state(KERNEL)["momentums"].shape == (4, 3)
    assert len(given._trainable_variables) == 1


def test_a_schedule_counts_the_updates_of_its_group():
    model = Words()
    for variable in model.weights:
        variable.assign(tf.zeros(variable.shape))
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [1.0, 0.5, 0.25])
    optim = ModuleOptimizer(keras.optimizers.SGD(schedule)).with_group(
        ParamGroup.from_name("kernel"), keras.optimizers.SGD(schedule)
    )
    grads = {KERNEL: tf.ones((4, 3)), BIAS: tf.ones(3)}
    for paths in ([BIAS], [BIAS, KERNEL], [KERNEL], [BIAS]):
        optim.step(None, model, GradientsParams({path: grads[path] for path in paths}))
    assert float(model.dense.bias[0]) == -(1.0 + 0.5 + 0.25)
    assert float(model.dense.kernel[0, 0]) == -(1.0 + 0.5)
    assert int(optim.iterations) == 4
