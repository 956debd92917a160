"""Copies of our objects: equal state, and each goes its own way."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizer_helpers import Many, Words, gradient_table, row_of

import tfloop
from tfloop import GradientsAccumulator, GradientsParams, ModuleOptimizer, ParamGroup
from tfloop.schedulers._rates import values_of as rates_in

# Keras copies its models by a file in memory.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

BIAS = "dense.bias"
WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy}
PICKLED = WAYS | {"pickle": lambda thing: pickle.loads(pickle.dumps(thing))}


def an_optimizer(model):
    """Two kinds with state, one of them by identity, a schedule, an exclusion and a clipping."""
    adam = keras.optimizers.AdamW(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), weight_decay=0.1, clipnorm=1.0
    )
    adam.exclude_from_weight_decay(var_list=[model.dense.kernel])
    momentum = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True)
    return (
        ModuleOptimizer(adam, scaler=tfloop.LossScaler(growth_interval=3))
        .with_group(ParamGroup.from_ids([model.dense.bias]), momentum)
        .with_clipping(tfloop.GradientClipping.by_value(0.5))
    )


def train(optim, model, steps, start=0):
    table = gradient_table(model, 8)
    for i in range(start, start + steps):
        optim.step(None, model, GradientsParams(row_of(table, i)))


def values_of(model):
    return [variable.numpy() for variable in model.weights]


def assert_equal(one, other):
    for ours, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def with_the_weights_of(model):
    other = type(model)()
    for ours, theirs in zip(other.weights, model.weights, strict=True):
        ours.assign(theirs)
    return other


@pytest.mark.parametrize("make_model", [Words, Many])
@pytest.mark.parametrize("way", WAYS)
def test_a_copied_optimizer_goes_on_as_the_original_would(way, make_model):
    model = make_model()
    optim = an_optimizer(model)
    train(optim, model, 2)
    other, copied = with_the_weights_of(model), WAYS[way](optim)
    assert int(copied.iterations) == 2
    assert copied.root is model
    for path in tfloop.named_parameters(model):
        ours, theirs = copied.state(path), optim.state(path)
        assert list(ours) == list(theirs)
        assert_equal(ours.values(), theirs.values())
    train(optim, model, 3, 2)
    trained, state = values_of(model), optim.serialize()
    train(copied, other, 3, 2)
    assert_equal(values_of(model), trained)
    assert optim.serialize() == state  # its own way
    assert_equal(values_of(other), trained)
    assert float(copied.scaler.scale) == float(optim.scaler.scale) == 2.0**16
    assert copied.scaler is not optim.scaler


def test_a_copy_may_go_on_with_the_same_model():
    model = Words()
    optim = an_optimizer(model)
    train(optim, model, 2)
    kept = values_of(model)
    copied = copy.deepcopy(optim)
    train(optim, model, 2, 2)
    expected = values_of(model)
    for variable, value in zip(model.weights, kept, strict=True):
        variable.assign(value)
    train(copied, model, 2, 2)
    assert_equal(values_of(model), expected)


@pytest.mark.parametrize("order", [("model", "optim"), ("optim", "model")])
def test_a_model_and_its_optimizer_are_copied_together_in_any_order(order):
    model = keras.Sequential([keras.Input((3,)), *[keras.layers.Dense(3) for _ in range(3)]])
    optim = ModuleOptimizer("adam").with_group(
        ParamGroup.from_layers(model.layers[1]), keras.optimizers.SGD(0.1, momentum=0.9)
    )
    train(optim, model, 2)
    things = {"model": model, "optim": optim}
    copies = dict(zip(order, copy.deepcopy([things[name] for name in order]), strict=True))
    train(copies["optim"], copies["model"], 2, 2)
    train(optim, model, 2, 2)
    for ours, theirs in zip(copies["model"].weights, model.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_copy_keeps_the_state_of_what_was_frozen_and_begins_that_of_what_was_unfrozen():
    model, other = Words(), Words()
    model.embedding.trainable = False
    optim = ModuleOptimizer(keras.optimizers.Adam(0.1))
    train(optim, model, 2)
    for each in (model, other):
        each.embedding.trainable = True
        each.dense.trainable = False
    copied = copy.deepcopy(optim)
    for variable, value in zip(other.weights, values_of(model), strict=True):
        variable.assign(value)
    train(optim, model, 1, 2)
    train(copied, other, 1, 2)
    for each in (model, other):
        each.dense.trainable = True
    train(optim, model, 1, 3)
    train(copied, other, 1, 3)
    assert_equal(values_of(other), values_of(model))


def test_one_optimizer_given_to_two_groups_is_one_in_the_copy_too():
    given = keras.optimizers.SGD(0.5)
    optim = ModuleOptimizer(given).with_group(ParamGroup.from_name("bias"), given)
    copied = copy.deepcopy(optim)
    assert copied._assembly.groups[0].update.given is copied._assembly.groups[1].update.given
    assert copied._assembly.groups[0].update.given is not given


def test_an_unbuilt_optimizer_is_copied_with_what_it_leaves_out_of_decay():
    model = Words()
    optim = an_optimizer(model)
    copied = copy.deepcopy(optim)
    kept = values_of(model)
    train(optim, model, 2)
    expected = values_of(model)
    for variable, value in zip(model.weights, kept, strict=True):
        variable.assign(value)
    train(copied, model, 2)
    assert_equal(values_of(model), expected)


def test_a_group_added_to_a_copy_clears_what_it_takes_and_nothing_of_the_original():
    model = Words()
    optim = ModuleOptimizer("adam")
    train(optim, model, 2)
    state = optim.serialize()
    copied = copy.deepcopy(optim)
    copied.with_group(ParamGroup.from_path(BIAS), keras.optimizers.SGD(momentum=0.9))
    assert list(copied.state(BIAS)) == ["momentums"]
    kernel = "dense.kernel"
    assert_equal(copied.state(kernel).values(), optim.state(kernel).values())
    assert optim.serialize() == state


def test_a_schedule_that_is_copied_along_is_that_of_the_copy():
    plateau = tfloop.schedulers.Plateau(1.0, factor=0.5, patience=0)
    optim = ModuleOptimizer(keras.optimizers.SGD(plateau))
    other, copied = copy.deepcopy((plateau, optim))
    other.update(1.0)
    other.update(1.0)
    assert float(optim._assembly.groups[0].update.own_rate()) == 1.0
    assert float(copied._assembly.groups[0].update.own_rate()) == 0.5


def test_a_copy_that_has_stepped_belongs_to_one_model_alone():
    model = Words()
    optim = ModuleOptimizer("adam")
    train(optim, model, 1)
    copied = copy.deepcopy(optim)
    train(copied, model, 1)
    with pytest.raises(ValueError, match="another model, expected"):
        train(copied, with_the_weights_of(model), 1)


def test_a_copy_goes_on_with_models_of_the_same_paths_and_shapes_alone():
    model = Words()
    optim = ModuleOptimizer("adam")
    train(optim, model, 1)
    with pytest.raises(ValueError, match="another model, expected"):
        train(copy.deepcopy(optim), Many(), 1)


@pytest.mark.parametrize("maker", [tf.function, tfloop.compile])
def test_a_copy_goes_on_with_a_copied_model_in_a_trace(maker):
    model = Words()
    optim = an_optimizer(model)
    train(optim, model, 2)
    other, copied = with_the_weights_of(model), copy.deepcopy(optim)
    table = gradient_table(model, 8)
    row = {path: grad for path, grad in row_of(table, 2).items()}
    maker(lambda: copied.step(None, other, GradientsParams(dict(row))) and None)()
    optim.step(None, model, GradientsParams(dict(row)))
    for ours, theirs in zip(other.weights, model.weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_accumulator_has_a_window_of_its_own(way):
    model, window = Words(), GradientsAccumulator(reduction="mean")
    one = GradientsParams({BIAS: tf.ones(3)})
    window.accumulate(model, one.copy(), weight=3)
    copied = WAYS[way](window)
    assert (int(copied.count), float(copied.weight)) == (1, 3.0)
    copied.accumulate(model, one.scale(5.0), weight=1)
    assert float(copied.grads()[BIAS][0]) == 2.0
    assert float(window.grads()[BIAS][0]) == 1.0


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_scaler_has_a_scale_of_its_own_and_no_owner(way):
    optim = ModuleOptimizer("sgd", scaler=tfloop.LossScaler(8.0, growth_interval=1))
    for scaler in (optim.scaler, tfloop.LossScaler.fixed(8.0)):
        copied = WAYS[way](scaler)
        assert repr(copied) == repr(scaler)
        ModuleOptimizer("sgd", scaler=copied)
        copied.scale.assign(2.0)
        assert float(scaler.scale) == 8.0


@pytest.mark.parametrize("way", PICKLED)
def test_a_copied_scheduler_counts_for_itself(way):
    plateau = tfloop.schedulers.Plateau(1.0, factor=0.5, patience=0)
    scheduler = tfloop.ModuleLrScheduler(plateau)
    scheduler.step()
    copied = PICKLED[way](scheduler)
    assert int(copied.count) == 1
    copied.with_group(ParamGroup.from_name("a"), multiplier=2.0)
    copied.step()
    plateau.update(1.0)
    plateau.update(1.0)
    assert int(scheduler.count) == 1
    assert scheduler.fingerprint() != copied.fingerprint()
    assert float(scheduler.step().base) == 0.5
    assert float(copied.step().base) == 1.0


@pytest.mark.parametrize("way", PICKLED)
def test_groups_added_to_copied_rates_are_the_copys_alone(way):
    rates = tfloop.ModuleLearningRate(1.0).with_group(ParamGroup.from_name("a"), 2.0)
    copied = PICKLED[way](rates)
    copied.with_group(ParamGroup.from_name("b"), 3.0)
    assert rates_in(rates) == [2.0, 1.0]
    assert rates_in(copied) == [2.0, 3.0, 1.0]


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copied_optimizer_of_keras_holds_the_state(way):
    model = Words()
    optim = ModuleOptimizer("adam")
    train(optim, model, 2)
    copied = PICKLED[way](optim.as_keras(model))
    copied.optim.build(model)
    assert int(copied.optim.iterations) == 2
    state = optim.state(BIAS)
    for name, value in copied.optim.state(BIAS).items():
        np.testing.assert_array_equal(value, state[name])


@pytest.mark.parametrize("order", [("model", "window"), ("window", "model")])
def test_a_window_and_its_model_are_copied_together_in_any_order(order):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), keras.layers.Dense(3)])
    window = GradientsAccumulator()
    window.accumulate(model, GradientsParams({BIAS: tf.ones(3)}))
    model.layers[0].trainable = False  # its sum stays
    things = {"model": model, "window": window}
    copies = dict(zip(order, copy.deepcopy([things[name] for name in order]), strict=True))
    copies["window"].accumulate(copies["model"], GradientsParams({"dense_1.bias": tf.ones(3)}))
    assert copies["window"].root is copies["model"]
    assert sorted(copies["window"].grads()) == [BIAS, "dense_1.bias"]
    assert list(window.grads()) == [BIAS]


def test_a_window_that_was_used_belongs_to_one_model_alone():
    model, window = Words(), GradientsAccumulator()
    window.accumulate(model, GradientsParams({BIAS: tf.ones(3)}))
    copied = copy.deepcopy(window)
    copied.accumulate(model, GradientsParams({BIAS: tf.ones(3)}))
    with pytest.raises(ValueError, match="A window belongs to one root"):
        copied.accumulate(Words(), GradientsParams({BIAS: tf.ones(3)}))


@pytest.mark.parametrize("way", WAYS)
def test_a_copied_loader_has_a_place_of_its_own_and_views_share_theirs(way):
    loader = tfloop.DataLoader(np.arange(6), lambda batch: batch + 1, batch_size=2, shuffle=1)
    list(loader)
    copied = WAYS[way](loader)
    epoch = [batch.numpy().tolist() for batch in copied]
    assert loader.serialize() != copied.serialize()
    assert [batch.numpy().tolist() for batch in loader] == epoch
    one, part = copy.deepcopy((loader, loader.take(1)))
    list(part)
    assert one.serialize() == part.serialize() != loader.serialize()


def a_batch():
    return np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)


@pytest.mark.parametrize("loss", ["mse", lambda y, outputs: (y - outputs) ** 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_copied_learner_trains_a_model_of_its_own_as_the_original_would(way, loss):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    learner = tfloop.Learner(
        model,
        ModuleOptimizer("adam"),
        loss,
        lr=0.1,
        accumulate=2,
        metrics=[keras.metrics.MeanSquaredError()],
    )
    for _ in range(3):
        learner.train_step(a_batch())
    copied = WAYS[way](learner)
    before = values_of(model)
    logs = copied.train_step(a_batch())  # fills the window
    assert_equal(values_of(model), before)
    assert not np.array_equal(copied.model.get_weights()[0], before[0])
    for name, value in learner.train_step(a_batch()).items():
        np.testing.assert_array_equal(value, logs[name])
    assert_equal(values_of(model), values_of(copied.model))


@pytest.mark.parametrize("way", WAYS)
def test_what_a_user_set_on_an_object_is_copied_with_it(way):
    model, rates = Words(), [0.5]
    optim = an_optimizer(model)
    train(optim, model, 1)
    window = tfloop.GradientsAccumulator()
    window.build(model)
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    learner = tfloop.Learner(net, ModuleOptimizer("sgd"), "mse")
    for thing in (optim, window, tfloop.LossScaler(), learner):
        twin = WAYS[way](thing)
        assert set(vars(twin)) == set(vars(thing))
        thing.rates = rates
        copied = WAYS[way](thing).rates
        assert copied == rates
        assert copied is not rates


def test_what_only_a_checkpoint_writes_down_says_so_when_it_is_pickled():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    for thing in (
        ModuleOptimizer("adam"),
        GradientsAccumulator(),
        tfloop.LossScaler(),
        tfloop.DataLoader(np.arange(3), batch_size=1),
        tfloop.compile(lambda: 1),
        tfloop.Learner(model, ModuleOptimizer("adam"), "mse"),
    ):
        with pytest.raises(TypeError, match=rf"write a {type(thing).__name__}.*tfloop.Checkpoint"):
            pickle.dumps(thing)
