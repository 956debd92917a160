"""What is private of Keras, TensorFlow and Sonnet: still there, still with this meaning, or said.

Of each function one test holds it against the library as it is, and one takes the name away.
"""

import os
import re
import tomllib
from pathlib import Path

import keras
import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
from helpers import in_every_mode, message, rows
from processes import run

import tfloop
from tfloop import ModuleOptimizer, named_parameters
from tfloop._backend import (
    keras_layers,
    keras_losses,
    keras_optimizers,
    keras_tensors,
    keras_variables,
    log,
    sonnet,
    tensorflow,
    versions,
)

layers = keras.layers
optimizers = keras.optimizers


@pytest.fixture(autouse=True)
def _asked_anew():
    """What is asked of a library once is asked in each test, and after it."""
    cached = (
        *(keras_layers._private_attributes, keras_layers._records, keras_layers.bookkeeping),
        *(keras_optimizers._check_exclusions, keras_tensors._check_notes),
        keras_variables._name_of_seeds,
    )
    for fn in cached:
        fn.cache_clear()
    yield
    for fn in cached:
        fn.cache_clear()


def refused(name, owner="keras", **context):
    """The message of a private name that isn't there."""
    return pytest.raises(
        RuntimeError, match=message(f"tfloop needs `{name}` of `{owner}", "without it", "install")
    )


def hide(monkeypatch, kind, name):
    """Takes a name away from the class that defines it."""
    owner = next(base for base in kind.__mro__ if name in vars(base))
    monkeypatch.delattr(owner, name)
    if hasattr(kind, name):  # a base had it, too
        hide(monkeypatch, kind, name)


class TestWhatIsSaid:
    def test_it_names_the_version_that_is_there_and_the_one_to_install(self):
        text = str(versions.unsupported("_x", "keras.Variable", "the inner one"))
        assert f"got keras {keras.__version__} without it, expected the inner one." in text
        assert f"`pip install '{versions.TESTED['keras']}'`" in text

    def test_the_versions_are_those_that_the_package_asks_for(self):
        project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
        asked = project["project"]["dependencies"]
        asked += project["project"]["optional-dependencies"]["dev"]
        assert {tested.partition(",")[0] for tested in versions.TESTED.values()} <= set(asked)
        for name, lowest in versions.LOWEST.items():
            assert f"{name}>={'.'.join(map(str, lowest))}" in asked


class TestRange:
    @pytest.mark.parametrize(
        "found",
        [
            {"tensorflow": "2.20.0", "keras": "3.10.0"},
            {"tensorflow": "2.23.0-dev20261026", "keras": "3.16.0.dev2026102704"},
            {"tensorflow": "3.0.0", "keras": "3.15.1"},
        ],
    )
    def test_within_it_nothing_is_said(self, found):
        versions.check(found)  # a warning would be an error

    @pytest.mark.parametrize(
        "found",
        [
            {"tensorflow": "2.20.0", "keras": "3.9.2"},
            {"tensorflow": "2.15.1", "keras": "2.15.0"},
            {"tensorflow": "2.19.1", "keras": "3.15.1"},
        ],
    )
    def test_below_it_one_line_says_what_to_install(self, found):
        got = f"got tensorflow {found['tensorflow']} and keras {found['keras']}, expected at least"
        fix = "`pip install -U 'tensorflow>=2.20' 'keras>=3.10'`"
        with pytest.raises(ImportError, match=message(got, "tensorflow 2.20 and keras 3.10", fix)):
            versions.check(found)

    def test_above_it_a_keras_that_nobody_tested_is_warned_of(self):
        found = {"tensorflow": tf.__version__, "keras": "3.17.0.dev1"}
        with pytest.warns(UserWarning, match=message("got keras 3.17.0.dev1", "at most 3.16")):
            versions.check(found)

    def test_importing_any_part_asks_first_and_says_it_once(self):
        set_version = "import keras, tensorflow; keras.__version__ = "
        below = run("-c", f"{set_version}'3.9.2'; import tfloop.schedulers")
        assert below.stderr.splitlines()[-1].startswith("ImportError: `import tfloop` got")
        above = run("-c", f"{set_version}'9.0.0'; import tfloop.schedulers, tfloop")
        assert above.stderr.count("`import tfloop` got keras 9.0.0") == 1
        assert above.returncode == 0


class TestVariables:
    def test_the_inner_variable_is_the_one_that_keras_assigns(self):
        variable = keras.Variable(1.0)
        variable.assign(3.0)
        inner = keras_variables.tf_variable(variable)
        assert isinstance(inner, tf.Variable)
        assert float(inner.numpy()) == 3.0
        assert keras_variables.tf_variable(inner) is inner

    def test_it_is_the_same_in_a_call_that_casts_and_in_a_stateless_scope(self):
        found = []

        class Layer(layers.Layer):
            def build(self, shape):
                self.w = self.add_weight(shape=(), initializer="ones")

            def call(self, x):
                found.append((self.w.value, keras_variables.tf_variable(self.w)))
                return x * self.w

        layer = Layer(dtype="mixed_float16")
        layer(rows(2, 3))
        ((cast, inner),) = found
        assert cast.dtype == tf.float16
        assert inner.dtype == tf.float32
        with keras.StatelessScope([(layer.w, tf.constant(5.0))]):
            assert float(layer.w.value) == 5.0
            assert keras_variables.tf_variable(layer.w) is inner

    def test_under_another_name_it_is_found_by_its_kind(self):
        variable = keras.Variable(1.0)
        inner = vars(variable).pop("_value")
        variable._inner = inner
        assert keras_variables.tf_variable(variable) is inner
        keras_variables.replace_tf_variable(variable, other := tf.Variable(2.0))
        assert keras_variables.tf_variable(variable) is other
        del variable._inner
        with refused("_value"):
            keras_variables.tf_variable(variable)

    def test_another_inner_variable_is_what_keras_reads_and_writes(self):
        variable, other = keras.Variable(1.0), tf.Variable(2.0)
        keras_variables.replace_tf_variable(variable, other)
        variable.assign_add(1.0)
        assert float(variable.numpy()) == float(other.numpy()) == 3.0

    def test_a_keras_variable_around_another_shares_it(self):
        inner = tf.Variable([1.0, 2.0])
        variable = keras_variables.around(inner, "w")
        variable.assign([3.0, 4.0])
        assert inner.numpy().tolist() == [3.0, 4.0]
        assert variable.name == "w"

    def test_also_where_keras_copies(self, monkeypatch):
        initialize = keras.Variable._initialize

        def copying(self, value):
            initialize(self, tf.convert_to_tensor(value))

        monkeypatch.setattr(keras.Variable, "_initialize", copying)
        inner = tf.Variable([1.0, 2.0])
        assert keras_variables.tf_variable(keras.Variable(inner)) is not inner
        assert keras_variables.tf_variable(keras_variables.around(inner, "w")) is inner

    def test_seeds_are_told_from_other_pairs_of_integers(self):
        dropout = layers.Dropout(0.5)
        inner = keras_variables.tf_variable
        assert keras_variables.is_seed(inner(dropout.seed_generator.state))
        assert not keras_variables.is_seed(inner(keras.Variable([1, 2], dtype="int64")))

    def test_also_under_another_name(self, monkeypatch):
        make = keras.Variable.__init__

        def renamed(self, *args, **kwargs):
            if kwargs.get("name") == "seed_generator_state":
                kwargs["name"] = "state_of_another_keras"
            make(self, *args, **kwargs)

        monkeypatch.setattr(keras.Variable, "__init__", renamed)
        state = keras_variables.tf_variable(keras.random.SeedGenerator(1).state)
        assert "state_of_another_keras" in state.name
        assert keras_variables.is_seed(state)

    def test_a_seed_of_another_shape_is_refused(self, monkeypatch):
        make = keras.random.SeedGenerator.__init__

        def longer(self, *args, **kwargs):
            make(self, *args, **kwargs)
            self.state = keras.Variable([1, 2, 3])

        monkeypatch.setattr(keras.random.SeedGenerator, "__init__", longer)
        with refused("state"):
            keras_variables.is_seed(tf.Variable([1, 2]))


class TestTensors:
    def test_keras_notes_the_mask_and_the_logits(self):
        x = tf.constant([[1, 2, 0]])
        embedded = layers.Embedding(3, 2, mask_zero=True)(x)
        assert list(keras_tensors.annotations(embedded)) == ["_keras_mask"]
        assert keras_tensors.annotations(embedded)["_keras_mask"].numpy().tolist() == [[1, 1, 0]]
        logits = rows(2, 3)
        for fn in (keras.activations.softmax, keras.activations.sigmoid):
            assert keras_tensors.annotations(fn(logits))["_keras_logits"] is logits

    def test_layers_and_losses_read_what_is_noted(self):
        x, y = tf.constant([[[1.0], [5.0]]]), tf.constant([[[0.0], [0.0]]])
        keras_tensors.annotate(x, {"_keras_mask": tf.constant([[True, False]])})
        assert float(keras.losses.MeanSquaredError(reduction="sum")(y, x)) < 25.0

    @pytest.mark.parametrize("name", keras_tensors.NOTES)
    def test_a_note_of_another_name_is_refused(self, monkeypatch, name):
        names = [
            f"{note}_of_another_keras" if note == name else note for note in keras_tensors.NOTES
        ]
        monkeypatch.setattr(keras_tensors, "NOTES", tuple(names))
        with refused(f"{name}_of_another_keras"):
            tfloop.valid(layers.Dense(1))(rows(2, 3))

    def test_the_question_leaves_nothing_in_a_trace(self):
        def nodes():
            step = tf.function(lambda x: keras_tensors.annotations(x) or x)
            graph = step.get_concrete_function(tf.TensorSpec((2,))).graph
            return [op.type for op in graph.get_operations()]

        assert nodes() == nodes() == ["Placeholder", "Identity"]


_LOSSES = """
import keras, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from tfloop._backend import keras_losses, tensorflow
from tfloop._tracing import traces

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
inside = [False]

def loss():
    return [float(v) for v in strategy.experimental_local_results(strategy.run(value_of))]

def value_of():
    return keras.losses.MeanSquaredError()(tf.zeros((3, 1)), 2.0 * tf.ones((3, 1)))

assert loss() == [2.0, 2.0], loss()
keras_losses.keep_whole(lambda: inside[0])
keras_losses.keep_whole(lambda: inside[0])
assert loss() == [2.0, 2.0], loss()
inside[0] = True
assert loss() == [4.0, 4.0], loss()

assert not tensorflow.is_default_strategy(strategy)
with strategy.scope():
    assert tensorflow.a_strategy_is_open()
    assert not tensorflow.is_default_strategy(strategy)

found = []
@tf.function
def step():
    def replica():
        found.append(tensorflow.replica_graph() is tf.compat.v1.get_default_graph())
        found.append(tensorflow.a_strategy_is_open())
        inner = tf.function(lambda: found.append(
            tensorflow.replica_graph() is tf.compat.v1.get_default_graph()))
        inner()
    strategy.run(replica)
step()
assert set(found[::3]) == {True} and set(found[1::3]) == {True} and not any(found[2::3]), found
print("all holds")
"""


class TestLossesAndReplicas:
    def test_losses_are_divided_but_where_they_are_kept_whole(self):
        done = run("-c", _LOSSES)
        assert "all holds" in done.stdout, done.stderr

    @pytest.mark.parametrize("name", keras_losses._SCALINGS)
    def test_a_division_in_another_place_is_refused(self, monkeypatch, name):
        from keras.src.losses import loss

        monkeypatch.delattr(loss, name)
        with refused(name):
            tfloop.compile(lambda x: x, strategy=tf.distribute.OneDeviceStrategy("CPU:0"))

    def test_another_module_is_refused(self, monkeypatch):
        monkeypatch.setattr(keras_losses, "_MODULE", "keras.src.losses.of_another_keras")
        with refused("keras.src.losses.of_another_keras"):
            keras_losses.keep_whole(lambda: True)


class Penalised(layers.Layer):
    def __init__(self):
        super().__init__(name="penalised")
        self.inner = layers.Dense(1, activity_regularizer="l2")

    def call(self, x):
        self.add_loss(tf.reduce_sum(x))
        return self.inner(x)


class TestLayers:
    def test_what_a_layer_tracks_is_what_it_holds_itself(self):
        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense, self.dropout = layers.Dense(1), layers.Dropout(0.5)
                self.w, self.seed = self.add_weight(shape=(1,)), keras.random.SeedGenerator(1)
                self.count = self.add_weight(shape=(1,), trainable=False)

        net = Net()
        expected = [net.w, net.count, net.seed, net.dense, net.dropout]
        assert [*map(id, keras_layers.tracked(net))] == [*map(id, expected)]

    @pytest.mark.parametrize("flag", [True, False, None])
    def test_the_flag_of_an_inner_call_can_be_kept_from_the_layers_after_it(self, flag):
        class Outer(layers.Layer):
            def call(self, x):
                with keras_layers.training_kept():
                    self.inner(x, training=not flag)
                return self.after(x)

        seen = []

        class Seeing(layers.Layer):
            def call(self, x, training=None):
                seen.append(training)
                return x

        outer = Outer()
        outer.inner, outer.after = Seeing(), Seeing()
        outer(rows(2, 3), training=flag)
        assert seen[-2:] == [not flag, flag]  # Keras builds with a call, too

    def test_without_the_note_of_calls_there_is_nothing_to_keep(self, monkeypatch):
        monkeypatch.setattr(keras_layers, "get_global_attribute", lambda name: None)
        with keras_layers.training_kept():
            assert layers.Dense(2)(rows(2, 3)).shape == (2, 2)

    @pytest.mark.parametrize("name", keras_layers._TRACKED)
    def test_a_record_of_another_name_is_refused(self, monkeypatch, name):
        net = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        vars(net)["_renamed"] = vars(net).pop(name)
        with refused(name):
            keras_layers.tracked(net)

    def test_inner_layers_are_those_at_any_depth_also_in_a_circle(self):
        shared = layers.Dense(1)
        inner = keras.Sequential([shared, layers.ReLU()])
        outer = keras.Sequential([inner, shared])
        found = keras_layers.inner_layers(outer)
        assert {id(layer) for layer in found} == {*map(id, (inner, shared, inner.layers[1]))}
        assert len(found) == 3
        outer._layers.append(outer)
        assert len(keras_layers.inner_layers(outer)) == 4

    def test_without_its_record_that_is_refused(self):
        layer = layers.Dense(1)
        vars(layer)["_renamed"] = vars(layer).pop("_layers")
        with refused("_layers"):
            keras_layers.inner_layers(layer)

    def test_own_losses_are_those_of_the_last_call_of_this_layer_alone(self):
        layer = Penalised()
        for _ in range(2):
            layer(tf.ones((2, 3)))
        assert [float(loss) for loss in keras_layers.own_losses(layer)] == [6.0]
        assert len(keras_layers.own_losses(layer.inner)) == 1
        assert len(layer.losses) == 2

    def test_without_them_a_total_loss_is_refused(self, monkeypatch):
        layer = Penalised()
        layer(tf.ones((2, 3)))
        hide(monkeypatch, Penalised, "_get_own_losses")
        with refused("_get_own_losses"):
            tfloop.total_loss(tf.constant(0.0), layer)

    def test_records_are_keras_own_private_attributes_by_kind_of_layer(self):
        x = keras.Input((1,))
        plain = keras_layers.records(layers.Dense(1))
        assert set(keras_layers._TRACKED) <= plain
        assert not {"_functional", "_operations", "_compile_loss", "kernel", "loss"} & plain
        assert "_functional" in keras_layers.records(keras.Sequential())
        functional = keras_layers.records(keras.Model(x, layers.Dense(1)(x)))
        assert {"_operations", "_operations_by_depth", "_layers"} <= functional

    def test_an_attribute_of_the_users_with_a_name_from_another_kind_of_model_counts(self):
        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self._outputs = [layers.Dense(1)]

            def call(self, x):
                return self._outputs[0](x)

        net = Net()
        net(rows(2, 3))
        assert list(named_parameters(net)) == ["outputs.0.kernel", "outputs.0.bias"]

    def test_a_new_record_of_keras_changes_no_path(self, monkeypatch):
        def build():
            return keras.Sequential([keras.Input((3,)), layers.Dense(1), layers.Dense(2)])

        before = list(named_parameters(build()))
        for kind in (keras.Sequential, type(keras.Model(x := keras.Input((1,)), layers.ReLU()(x)))):
            make = kind.__init__

            def more(self, *args, _make=make, **kwargs):
                _make(self, *args, **kwargs)
                self._another_record = [*self._layers]

            monkeypatch.setattr(kind, "__init__", more)
        model = build()
        assert model._another_record
        assert list(named_parameters(model)) == before

    def test_no_automatic_name_is_used_up(self):
        keras.utils.clear_session()
        keras_layers.records(layers.Layer(name="mine"))
        keras_layers.bookkeeping()
        keras_optimizers._check_exclusions()
        keras_tensors._check_notes()
        keras_variables._name_of_seeds()
        made = (layers.Layer(), keras.Sequential(), keras.Model(), layers.Masking())
        names = ["layer", "sequential", "model", "masking"]
        assert [thing.name for thing in made] == names
        assert keras.Input((1,)).name == "keras_tensor"
        assert keras.random.SeedGenerator(1).name == "seed_generator"
        assert optimizers.SGD().name == "SGD" or optimizers.SGD().name.startswith("sgd")

    def test_compile_fit_and_evaluate_set_nothing_that_counts_as_a_setting(self):
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        before = set(vars(model))
        model.compile("sgd", "mse")
        model.fit(rows(4, 3), tf.zeros((4, 1)), verbose=0)
        model.evaluate(rows(4, 3), tf.zeros((4, 1)), verbose=0)
        model.predict(rows(4, 3), verbose=0)
        assert set(vars(model)) - before - keras_layers.bookkeeping() == set()

    def test_what_tells_how_a_layer_computes_is_no_bookkeeping(self):
        assert keras_layers._TELLING <= vars(layers.Layer(name="bare")).keys()
        assert not keras_layers._TELLING & keras_layers.bookkeeping()

    def test_a_flag_that_keras_moves_is_still_followed(self):
        net = keras.Sequential([keras.Input((3,)), layers.Dropout(0.5)])
        vars(net)["_another_flag"] = vars(net).pop("_remat_mode")
        assert "_another_flag" not in keras_layers.bookkeeping()

    @pytest.mark.parametrize(
        "make",
        [
            *(lambda: layers.Conv2D(1, 1), lambda: layers.ReLU(), lambda: layers.Dense(1)),
            *(lambda: layers.LSTMCell(1), lambda: layers.GlobalAveragePooling1D()),
            *(lambda: type("MyBlock2D", (layers.Layer,), {})(), lambda: keras.Sequential()),
            *(lambda: type("_HTTPNet", (keras.Model,), {})(), lambda: layers.UnitNormalization()),
        ],
    )
    def test_automatic_names_follow_the_rule(self, make):
        thing = make()
        base = keras_layers.snake_case(type(thing).__name__)
        assert re.fullmatch(rf"{base}(_\d+)?", thing.name)


def built(optimizer, *variables):
    optimizer.build([*variables])
    return optimizer


class TestRates:
    def test_the_rate_is_the_object_that_was_given(self):
        schedule = optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
        function = lambda: 0.5  # noqa: E731
        assert keras_optimizers.rate_of(optimizers.SGD(schedule)) is schedule
        assert keras_optimizers.rate_of(optimizers.SGD(function)) is function
        optimizer = optimizers.SGD(0.25)
        keras_optimizers.rate_of(optimizer).assign(0.5)
        assert float(optimizer.learning_rate.numpy()) == 0.5

    def test_without_it_a_group_is_refused_when_it_is_made(self):
        optimizer = optimizers.SGD(0.1)
        vars(optimizer)["_rate"] = vars(optimizer).pop("_learning_rate")
        with refused("_learning_rate"):
            ModuleOptimizer(optimizer)

    @pytest.mark.parametrize("kind", ["SGD", "Adam", "Muon"])
    def test_for_a_while_the_rate_is_a_tensor_that_the_rule_reads(self, kind):
        for make in keras_optimizers.kinds(kind):
            optimizer = make(0.0)
            kept = keras_optimizers.rate_of(optimizer)
            with keras_optimizers.rate_set(optimizer, tf.constant(0.5)) as rate:
                assert float(optimizer.learning_rate) == float(rate) == 0.5
            assert keras_optimizers.rate_of(optimizer) is kept

    def test_a_config_needs_none_of_a_function(self):
        optimizer = optimizers.Adam(lambda: 0.5, beta_1=0.5)
        config = keras_optimizers.config_without_rate(optimizer)
        assert config["beta_1"] == 0.5
        assert isinstance(config["learning_rate"], float)
        assert callable(keras_optimizers.rate_of(optimizer))
        assert keras_optimizers.config_without_rate(optimizers.Adam(0.25))["learning_rate"] == 0.25

    def test_a_count_of_ours_is_what_iterations_gives(self):
        optimizer, count = optimizers.SGD(0.1), tf.Variable(7, dtype=tf.int64)
        keras_optimizers.use_iterations(optimizer, count)
        assert optimizer.iterations is count

    def test_a_count_under_another_name_is_refused(self, monkeypatch):
        optimizer, count = optimizers.SGD(0.1), tf.Variable(7, dtype=tf.int64)
        kept = optimizer.iterations
        monkeypatch.setattr(optimizers.SGD, "iterations", property(lambda self: kept))
        with refused("_iterations"):
            keras_optimizers.use_iterations(optimizer, count)


class TestKinds:
    def test_those_that_this_keras_lacks_are_left_out(self):
        assert keras_optimizers.kinds("SGD", "OfAnotherKeras") == (optimizers.SGD,)

    def test_without_the_newest_all_else_works(self, monkeypatch):
        for name in ("Muon", "MultiOptimizer", "ScheduleFreeAdamW"):
            monkeypatch.delattr(optimizers, name, raising=False)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
        optim = ModuleOptimizer(optimizers.Adam(weight_decay=0.5)).build(model)
        grads = {path: tf.zeros(v.shape) for path, v in named_parameters(model).items()}
        optim.step(1.0, model, tfloop.GradientsParams(grads))
        assert optim._assembly.groups[0].update.state.decay_of("dense.kernel") == 0.5


def decayed(optimizer, *variables):
    return [
        keras_optimizers.is_decayed(optimizer, keras_variables.tf_variable(v)) for v in variables
    ]


class TestWeightDecay:
    def test_what_is_excluded_is_known_by_variable_and_by_name(self):
        one, two, bias = (keras.Variable(1.0, name=name) for name in ("one", "two", "bias"))
        optimizer = optimizers.AdamW()
        optimizer.exclude_from_weight_decay(var_list=[one], var_names=["bias"])
        assert decayed(optimizer, one, two, bias) == [False, True, False]
        assert decayed(optimizers.AdamW(), one, two, bias) == [True, True, True]

    def test_exclusions_go_over_to_a_copy_and_more_may_be_added(self):
        one, two, bias, last = (keras.Variable(1.0, name=n) for n in ("one", "two", "bias", "end"))
        given, copy = optimizers.AdamW(), optimizers.AdamW()
        given.exclude_from_weight_decay(var_list=[one], var_names=["bias"])
        keras_optimizers.copy_exclusions(given, copy)
        keras_optimizers.exclude(copy, [two])
        assert decayed(copy, one, two, bias, last) == [False, False, False, True]
        assert decayed(given, one, two, bias, last) == [False, True, False, True]

    @pytest.mark.parametrize("number", [0, 1])
    def test_exclusions_under_another_name_are_refused(self, monkeypatch, number):
        exclude = optimizers.Optimizer.exclude_from_weight_decay
        name = keras_optimizers._EXCLUSIONS[number]

        def renamed(self, *args, **kwargs):
            exclude(self, *args, **kwargs)
            vars(self)["_renamed"] = vars(self).pop(name)

        monkeypatch.setattr(optimizers.Optimizer, "exclude_from_weight_decay", renamed)
        with refused(name):
            ModuleOptimizer(optimizers.AdamW())

    def test_an_answer_that_knows_all_variables_goes_first(self, monkeypatch):
        """As in Keras 3.16, whose other one fails for what the optimizer wasn't built on."""
        kind, name = optimizers.Optimizer, "_is_excluded_from_weight_decay"
        uses = kind._use_weight_decay
        if not hasattr(kind, name):
            monkeypatch.setattr(kind, name, lambda self, v: not uses(self, v), raising=False)
        monkeypatch.setattr(kind, "_use_weight_decay", lambda self, v: {}[id(v)])
        one, two = keras.Variable(1.0), keras.Variable(1.0)
        optimizer = optimizers.AdamW()
        optimizer.exclude_from_weight_decay(var_list=[one])
        assert decayed(optimizer, one, two) == [False, True]

    def test_without_any_answer_it_is_refused(self, monkeypatch):
        for name in ("_is_excluded_from_weight_decay", "_use_weight_decay"):
            if hasattr(optimizers.AdamW, name):
                hide(monkeypatch, optimizers.AdamW, name)
        with refused("_use_weight_decay"):
            decayed(optimizers.AdamW(), keras.Variable(1.0))

    @pytest.mark.parametrize("rank", [1, 2])
    def test_the_decay_is_the_one_that_keras_applies(self, rank):
        variable = keras.Variable(np.ones((2,) * rank, np.float32), name="w")
        makes = [
            optimizers.SGD(0.5, weight_decay=0.25),
            *(kind(0.5, weight_decay=0.25) for kind in keras_optimizers.kinds("Muon")),
        ]
        for optimizer in makes:
            variable.assign(np.ones((2,) * rank))
            built(optimizer, variable)._apply_weight_decay([variable])
            decay = keras_optimizers.decay_of(optimizer, variable) or 0.0
            np.testing.assert_allclose(variable.numpy(), 1.0 - 0.5 * decay, rtol=1e-6)

    def test_without_muons_rules_it_is_refused(self, monkeypatch):
        for kind in keras_optimizers.kinds("Muon"):
            monkeypatch.delattr(kind, "_should_use_adamw")
            optimizer = kind(0.1, weight_decay=0.5)
            if keras_optimizers.own_decay(optimizer) is None:  # that of Keras 3.10 has one decay
                assert keras_optimizers.decay_of(optimizer, keras.Variable(1.0)) == 0.5
                continue
            with refused("_should_use_adamw"):
                keras_optimizers.decay_of(optimizer, keras.Variable(1.0))

    def test_a_decay_of_its_own_is_told_from_keras(self):
        class Own(optimizers.SGD):
            def _apply_weight_decay(self, variables):
                variables[0].assign(7.0)

        variable = keras.Variable(1.0)
        assert keras_optimizers.own_decay(optimizers.SGD(weight_decay=0.1)) is None
        keras_optimizers.own_decay(Own())([variable])
        assert float(variable.numpy()) == 7.0


class TestHooks:
    @pytest.mark.parametrize(
        "name", ["apply", "apply_gradients", "_backend_apply_gradients", "_clip_gradients"]
    )
    def test_keras_calls_the_method_and_a_class_with_its_own_is_known(self, name):
        calls = []

        def own(self, *args, **kwargs):
            calls.append(name)
            return getattr(super(Own, self), name)(*args, **kwargs)

        Own = type("Own", (optimizers.SGD,), {name: own})
        assert keras_optimizers.applies_by_itself(Own())
        assert not keras_optimizers.applies_by_itself(optimizers.SGD())
        variable = keras.Variable(1.0)
        Own(0.5).apply_gradients([(tf.constant(1.0), variable)])
        assert calls == [name]
        assert float(variable.numpy()) == 0.5

    def test_an_update_of_its_own_is_known_but_for_that_of_nadam(self):
        calls = []

        class Own(optimizers.SGD):
            def _backend_update_step(self, *args):
                calls.append(args)
                super()._backend_update_step(*args)

        assert keras_optimizers.updates_by_itself(Own())
        assert not any(
            map(keras_optimizers.updates_by_itself, (optimizers.SGD(), optimizers.Nadam()))
        )
        Own().apply([tf.constant(1.0)], [keras.Variable(1.0)])
        assert len(calls) == 1

    @pytest.mark.parametrize(
        ("ask", "name"),
        [
            (keras_optimizers.applies_by_itself, "_backend_apply_gradients"),
            (keras_optimizers.applies_by_itself, "_clip_gradients"),
            (keras_optimizers.updates_by_itself, "_backend_update_step"),
            (keras_optimizers.own_decay, "_apply_weight_decay"),
        ],
    )
    def test_a_method_under_another_name_is_refused(self, monkeypatch, ask, name):
        optimizer = optimizers.SGD()
        hide(monkeypatch, optimizers.Optimizer, name)
        with refused(name):
            ask(optimizer)

    def test_missing_gradients_are_left_out_with_keras_warning(self):
        one, two = keras.Variable(1.0, name="one"), keras.Variable(1.0, name="two")
        with pytest.warns(UserWarning, match=message("Gradients do not exist", "two")):
            found = keras_optimizers.without_missing(optimizers.SGD(), [1.0, None], [one, two])
        assert [*map(list, found)] == [[1.0], [one]]

    def test_without_keras_way_that_is_refused(self, monkeypatch):
        hide(monkeypatch, optimizers.SGD, "_filter_empty_gradients")
        with refused("_filter_empty_gradients"):
            keras_optimizers.without_missing(optimizers.SGD(), [None], [keras.Variable(1.0)])


class TestState:
    def test_slots_are_the_lists_parallel_to_the_variables(self):
        for count in range(1, 8):  # whatever other list has as many entries
            targets = [keras.Variable(np.ones(n + 1, np.float32)) for n in range(count)]
            optimizer = built(optimizers.Adam(amsgrad=True, use_ema=True), *targets)
            names = {"momentums", "velocities", "velocity_hats", keras_optimizers.AVERAGE}
            for n, target in enumerate(targets):
                found = keras_optimizers.slots_of(optimizer, target, n, count)
                assert found.keys() == names
                assert {tuple(slot.shape) for slot in found.values()} == {(n + 1,)}

    def test_also_where_keras_keeps_its_records_under_other_names(self):
        targets = [keras.Variable([1.0]), keras.Variable([2.0])]
        optimizer = built(optimizers.SGD(momentum=0.5), *targets)
        for name in ("_variables", "_trainable_variables"):
            vars(optimizer)[f"{name}_of_another_keras"] = vars(optimizer).pop(name)
        vars(optimizer)["_all"] = [optimizer.iterations, optimizer.momentums[1]]
        found = keras_optimizers.slots_of(optimizer, targets[1], 1, 2)
        assert found.keys() == {"momentums"}
        assert found["momentums"] is keras_variables.tf_variable(optimizer.momentums[1])

    def test_counters_are_all_state_that_stands_alone_but_the_rate(self):
        found = keras_optimizers.counters_of(built(optimizers.Nadam(), keras.Variable(1.0)))
        assert found.keys() == {"iterations", "u_product"}
        assert keras_optimizers.counters_of(optimizers.SGD()).keys() == {"iterations"}

    def test_the_product_of_nadam_is_moved_by_each_update(self):
        variable, optimizer = keras.Variable(1.0), optimizers.Nadam(0.1)
        optimizer.apply([tf.constant(1.0)], [variable])
        half = 0.9 * (1.0 - 0.5 * 0.96)
        assert np.isclose(float(keras_optimizers.nadam_product(optimizer).numpy()), half)
        assert keras_optimizers.nadam_product(optimizers.SGD()) is None

    def test_without_it_that_is_refused(self):
        optimizer = built(optimizers.Nadam(), keras.Variable(1.0))
        vars(optimizer)["_product"] = vars(optimizer).pop("_u_product")
        with refused("_u_product"):
            keras_optimizers.nadam_product(optimizer)

    def test_averages_are_those_that_keras_moves(self):
        one, two = keras.Variable(1.0), keras.Variable(2.0)
        optimizer = built(optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5), one, two)
        for _ in range(2):
            optimizer.apply([tf.constant(1.0), tf.constant(0.0)], [one, two])
        inner = keras_variables.tf_variable(one)
        assert float(keras_optimizers.moving_average_of(optimizer, inner).numpy()) == -0.5
        assert [float(v.numpy()) for v in keras_optimizers.moving_averages(optimizer)] == [
            -0.5,
            2.0,
        ]
        assert [keras_optimizers.index_of(optimizer, v) for v in (one, two)] == [0, 1]

    def test_averages_under_another_name_are_refused(self, monkeypatch):
        variable = keras.Variable(1.0)
        optimizer = built(optimizers.SGD(use_ema=True), variable)
        hide(monkeypatch, optimizers.SGD, "_get_variable_index")
        with refused("_get_variable_index"):
            keras_optimizers.moving_average_of(optimizer, variable)
        vars(optimizer)["_averages"] = vars(optimizer).pop("_model_variables_moving_average")
        with refused("_model_variables_moving_average"):
            keras_optimizers.moving_averages(optimizer)

    def test_slots_are_found_anew_after_the_inner_variables_were_replaced(self):
        targets = [keras.Variable(1.0), keras.Variable(2.0)]
        optimizer = built(optimizers.SGD(1.0, momentum=0.5), *targets)
        for target in targets:
            keras_variables.replace_tf_variable(target, tf.Variable(5.0))
        keras_optimizers.index_anew(optimizer, targets)
        optimizer.apply([tf.constant(1.0), tf.constant(2.0)], targets)
        assert [float(slot.numpy()) for slot in optimizer.momentums] == [-1.0, -2.0]
        assert [float(target.numpy()) for target in targets] == [4.0, 3.0]

    @pytest.mark.parametrize("name", ["_trainable_variables_indices", "_var_key"])
    def test_without_keras_places_that_is_refused(self, monkeypatch, name):
        target = keras.Variable(1.0)
        optimizer = built(optimizers.SGD(), target)
        if name in vars(optimizer):
            vars(optimizer)["_renamed"] = vars(optimizer).pop(name)
        else:
            hide(monkeypatch, optimizers.SGD, name)
        with refused(name):
            keras_optimizers.index_anew(optimizer, [target])


class TestTensorFlow:
    def test_an_eager_tensor_is_what_eager_code_computes(self):
        assert type(tf.constant(1.0)) is tensorflow.EagerTensor
        found = []
        tf.function(lambda x: found.append(type(x)))(tf.constant(1.0))
        assert tensorflow.EagerTensor not in found

    def test_dtypes_and_shapes_of_eager_tensors_are_told_apart(self):
        tensors = [tf.ones((2, 3)), tf.ones((3, 2)), tf.ones((2, 3), tf.float16)]
        keys = {(tensorflow.dtype_of(t), tensorflow.shape_of(t)) for t in tensors}
        assert len(keys) == 3
        assert tensorflow.shape_of(tensors[0]) == tensorflow.shape_of(tf.zeros((2, 3), tf.int32))
        assert tensorflow.dtype_of(tensors[0]) == tensorflow.dtype_of(tf.zeros(()))

    def test_an_open_tape_is_seen(self):
        assert not tensorflow.a_tape_is_open()
        with tf.GradientTape():
            assert tensorflow.a_tape_is_open()
        with tf.autodiff.ForwardAccumulator(x := tf.constant(1.0), x):
            assert tensorflow.a_tape_is_open()
        assert not tensorflow.a_tape_is_open()

    def test_an_open_strategy_is_seen(self):
        assert not tensorflow.a_strategy_is_open()
        with tf.distribute.OneDeviceStrategy("CPU:0").scope():
            assert tensorflow.a_strategy_is_open()
        assert not tensorflow.a_strategy_is_open()

    def test_also_without_the_list_of_scopes(self, monkeypatch):
        monkeypatch.setattr(tensorflow, "_default_graph", object)
        assert not tensorflow.a_strategy_is_open()
        with tf.distribute.OneDeviceStrategy("CPU:0").scope():
            assert tensorflow.a_strategy_is_open()

    def test_the_default_strategy_is_told_from_others(self):
        default, one = tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy("CPU:0")
        assert tensorflow.is_default_strategy(default)
        assert not tensorflow.is_default_strategy(one)
        with one.scope():
            assert tensorflow.is_default_strategy(default)
            assert not tensorflow.is_default_strategy(one)

    def test_operations_with_state_are_known(self, monkeypatch):
        assert not any(map(tensorflow.has_state, ("AddV2", "MatMul", "StatelessRandomUniform")))
        assert all(map(tensorflow.has_state, ("RandomUniform", "MutableHashTableV2", "NotThere")))
        monkeypatch.setattr(tensorflow, "_definition", lambda name: None)
        assert tensorflow.has_state("AddV2")

    def test_captures_that_are_looked_up_anew_are_seen(self, monkeypatch):
        plain = tf.function(lambda: tf.constant(1.0)).get_concrete_function()
        assert not tensorflow.looks_up_anew(plain)

        @tf.function
        def deferred():
            graph = tf.compat.v1.get_default_graph()
            spec = tf.TensorSpec((), tf.float32)
            return graph.capture_call_time_value(lambda: tf.constant(1.0), spec, key="k")

        assert tensorflow.looks_up_anew(deferred.get_concrete_function())
        hide(monkeypatch, type(plain.graph), "deferred_external_captures")
        assert tensorflow.looks_up_anew(plain)

    def test_an_error_gets_the_lines_of_the_users_code(self):
        @tf.function
        def divide(x):
            return tf.debugging.check_numerics(x / 0.0, "not finite")

        concrete = divide.get_concrete_function(tf.TensorSpec(()))
        lines, tag = tensorflow.located(concrete)
        text = f"{tag} {{{{node CheckNumerics}}}} not finite"
        with (
            pytest.raises(
                tf.errors.InvalidArgumentError,
                match=message("Graph execution error", "test_backend.py"),
            ),
            lines,
        ):
            raise tf.errors.InvalidArgumentError(None, None, text)

    def test_without_that_the_error_is_raised_as_it_is(self, monkeypatch):
        @tfloop.compile
        def divide(x):
            return tf.debugging.check_numerics(1.0 / x, "not finite")

        for _ in range(3):
            divide(tf.constant(1.0))
        concrete = tf.function(lambda: tf.constant(1.0)).get_concrete_function()
        hide(monkeypatch, type(concrete), "inference_fn")
        assert tensorflow.located(concrete) is None
        with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
            divide(tf.constant(0.0))

    def test_a_function_is_traced_in_its_outer_graph(self, monkeypatch):
        graphs = []

        @tf.function
        def inner():
            graphs.append(tf.compat.v1.get_default_graph())
            return tf.constant(1.0)

        @tf.function
        def outer():
            graphs.append(tf.compat.v1.get_default_graph())
            return inner()

        outer()
        around, within = graphs
        assert tensorflow.outer_graph(within) is around
        assert tensorflow.outer_graph(tf.Graph()) is None
        hide(monkeypatch, type(within), "outer_graph")
        with refused("outer_graph", "tensorflow"):
            tensorflow.outer_graph(within)

    def test_outside_of_replicas_no_thread_has_a_graph(self):
        assert tensorflow.replica_graph() is None

    def test_what_tensorflow_adds_to_a_module_is_its_own(self):
        module = tf.Module()
        before = set(vars(module))
        module.part, module.parts = tf.Module(), [tf.Module()]
        tf.train.Checkpoint(m=module).save  # noqa: B018 - tracking is all
        added = set(vars(module)) - before - {"part", "parts"}
        assert added
        assert all(map(tensorflow.is_tracking, added))
        assert not tensorflow.is_tracking("part")

    def test_what_a_module_ignores_is_tensorflows_own_or_said(self):
        class Hidden(tf.Module):
            _TF_MODULE_IGNORED_PROPERTIES = frozenset(
                {"secret", *tf.Module._TF_MODULE_IGNORED_PROPERTIES}
            )

        assert all(map(tensorflow.is_tracking, tensorflow.ignored_attributes(tf.Module())))
        module = Hidden()
        module.secret, module.shown = tf.Variable(1.0), tf.Variable(1.0)
        assert "secret" in tensorflow.ignored_attributes(module)
        assert list(named_parameters(module)) == ["shown"]
        assert len(module.variables) == 1

    def test_without_it_all_attributes_are_looked_into(self, monkeypatch):
        monkeypatch.delattr(tf.Module, "_TF_MODULE_IGNORED_PROPERTIES")
        module = tf.Module()
        vars(module)["w"] = tf.Variable(1.0)
        assert tensorflow.ignored_attributes(module) == frozenset()
        assert list(named_parameters(module)) == ["w"]


_WITHOUT = """
import sys, types
import keras, tensorflow as tf

names = ["tensorflow.python.eager.record", "tensorflow.python.framework.op_def_registry"]
kept, internal = {name: sys.modules[name] for name in names}, tf.__internal__
sys.modules.update({name: types.ModuleType(name) for name in names})
without = {n: getattr(internal, n) for n in dir(internal) if n != "EagerTensor"}
tf.__internal__ = types.SimpleNamespace(**without)
from tfloop._backend import tensorflow
tf.__internal__ = internal
sys.modules.update(kept)
import tfloop

assert tensorflow.a_tape_is_open() and tensorflow.has_state("AddV2")
traces = []

@tfloop.compile
def step(x):
    traces.append(x)
    return 2.0 * x

assert [float(step(float(n))) for n in range(4)] == [0.0, 2.0, 4.0, 6.0]
assert float(step(tf.constant(4.0))) == 8.0
assert len(traces) == 1, traces
print("all holds")
"""


def test_without_the_questions_of_the_short_way_steps_go_the_ordinary_one():
    done = run("-c", _WITHOUT)
    assert "all holds" in done.stdout, done.stderr


class TestSonnet:
    @pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
    @pytest.mark.parametrize("rate", [None, 0.5])
    def test_an_mlp_without_dropout_refuses_the_flag_that_it_names(self, rate, mode):
        mlp = snt.nets.MLP([2, 1], dropout_rate=rate)
        assert sonnet.refuses_flag(mlp) == (rate is None)
        assert not sonnet.refuses_flag(snt.Linear(1))
        assert not sonnet.refuses_flag(layers.Dense(1))
        mlp(rows(2, 3), is_training=None if rate is None else False)
        assert in_every_mode(lambda x: tfloop.valid(mlp)(x))[mode](rows(2, 3)).shape == (2, 1)
        with pytest.raises(ValueError, match="is_training"):
            mlp(rows(2, 3), is_training=False if rate is None else None)

    def test_without_its_rate_that_is_refused(self):
        mlp = snt.nets.MLP([1])
        vars(mlp)["_rate"] = vars(mlp).pop("_dropout_rate")
        with refused("_dropout_rate", "sonnet"):
            sonnet.refuses_flag(mlp)

    def test_a_method_is_found_behind_sonnets_wrappers(self):
        class Net(snt.Module):
            @snt.once
            def __call__(self, x, is_training):
                return x

        class Plain(tf.Module):
            def __call__(self, x, training):
                return x

        assert sonnet.undecorated(Net.__call__).__code__.co_varnames == ("self", "x", "is_training")
        assert sonnet.undecorated(Plain.__call__) is Plain.__call__

    def test_a_wrapper_of_another_form_is_refused(self):
        class Net(snt.Module):
            def __call__(self, x):
                return x

        def wrapper(self, *args, **kwargs):
            return Net

        wrapper.__module__ = "sonnet.src.of_another_sonnet"
        with refused("f", "sonnet"):
            sonnet.undecorated(wrapper)


@pytest.mark.parametrize(
    ("command", "silent"),
    [
        (["python", "-m", "tfloop.examples.mnist", "--lr=1"], True),
        (["python", "-W", "error", "-m", "tfloop.examples.mnist"], True),
        (["python", "-m", "tfloop.examples.mnist", "--tf_log"], False),
        (["python", "-m", "pytest", "tfloop.examples.mnist"], False),
        (["python", "train.py"], False),
        (["python", "-m"], False),
    ],
)
def test_only_our_own_commands_silence_tensorflow(command, silent, monkeypatch):
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    assert log.is_silent(command) == silent
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    assert not log.is_silent(command)  # the user's own


def test_what_is_raised_in_silence_is_heard_again(capfd):
    def fail():
        with log._without_stderr():
            os.write(2, b"unheard")
            raise ValueError("heard")

    with pytest.raises(ValueError, match="heard"):
        fail()
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"
