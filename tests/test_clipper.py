"""A clipping of somebody's own that remembers: its state moves and is kept as the optimizer's."""

import copy
import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop
from tfloop import GradientClipping, GradientsAccumulator, GradientsParams, ModuleOptimizer

NORMS = [3.0, 1.0, 2.0, 8.0, 5.0, 1.5, 40.0, 2.0]
MODES = ("eager", "compile", "jit")


@keras.saving.register_keras_serializable("tests")
@dataclasses.dataclass(frozen=True)
class ByMedian(GradientClipping):
    """Bounds the global norm by the median of the last three; by nothing before there are any."""

    factor: float = 1.0

    def initial_state(self):
        return {"norms": np.zeros(3, "float32"), "seen": 0}

    def clip(self, grads, parameters=(), state=None):
        norm = tf.linalg.global_norm(grads)
        median = tf.sort(state["norms"])[1]
        bound = tf.where(state["seen"] >= 3, self.factor * median, norm)
        state["norms"] = tf.concat([state["norms"][1:], norm[tf.newaxis]], 0)
        state["seen"] += 1
        return [grad * tf.minimum(1.0, bound / norm) for grad in grads]


def by_hand(norms, factor=1.0):
    """What is taken off a weight by SGD of rate 1 whose gradients have these norms."""
    seen, moves = [], []
    for norm in norms:
        bound = factor * np.median(seen[-3:]) if len(seen) >= 3 else norm
        moves.append(min(norm, bound))
        seen.append(norm)
    return -np.cumsum(moves)


def net():
    return {path: tf.Variable(0.0, name=path) for path in ("w", "other", "more")}


def optimizer(**options):
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0), clipping=ByMedian(), **options)
    return optim.with_group(tfloop.ParamGroup.from_path("other"), "sgd")


def stepper(model, optim, mode="eager"):
    def step(norm):
        optim.step(None, model, GradientsParams({"w": norm}))
        return tf.identity(model["w"])

    if mode != "eager":
        step = tfloop.compile(step, jit_compile=mode == "jit")
    return lambda norm: float(step(tf.constant(norm)))


def trained(model, optim, norms, mode="eager"):
    step = stepper(model, optim, mode)
    return [step(norm) for norm in norms]


@pytest.mark.parametrize("mode", MODES)
def test_it_remembers_from_update_to_update(mode):
    np.testing.assert_allclose(trained(net(), optimizer(), NORMS, mode), by_hand(NORMS), rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_skipped_update_leaves_what_it_remembers(mode):
    model, optim = net(), optimizer(skip_nonfinite=True)
    found = trained(model, optim, [*NORMS[:4], np.nan, np.inf, *NORMS[4:]], mode)
    assert int(optim.skipped) == 2
    np.testing.assert_allclose([*found[:4], *found[6:]], by_hand(NORMS), rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_group_that_takes_no_part_remembers_nothing(mode):
    model, optim, window = net(), optimizer(), GradientsAccumulator()

    def accumulate_and_step(norm, path):
        window.accumulate(model, GradientsParams({path: norm}))
        optim.step(None, model, window)

    steps = {path: lambda norm, path=path: accumulate_and_step(norm, path) for path in model}
    if mode != "eager":
        steps = {p: tfloop.compile(fn, jit_compile=mode == "jit") for p, fn in steps.items()}
    found = []
    for norm in NORMS:
        steps["other"](tf.constant(7.0))
        steps["w"](tf.constant(norm))
        found.append(float(model["w"]))
    np.testing.assert_allclose(found, by_hand(NORMS), rtol=1e-6)


def ways_to_save(folder):
    """Each: (model, optimizer) before the save -> those that go on."""

    def by_tensorflow(model, optim):
        path = tf.train.Checkpoint(optim=optim, **model).write(str(folder / "tf"))
        other, fresh = net(), optimizer()
        tf.train.Checkpoint(optim=fresh, **other).read(path)
        return other, fresh

    def by_tfloop(model, optim):
        tfloop.Checkpoint(folder / "ours", model=model, optim=optim).save(4)
        other, fresh = net(), optimizer()
        assert tfloop.Checkpoint(folder / "ours", model=other, optim=fresh).restore() == 4
        return other, fresh

    def by_copy(model, optim):
        memo: dict = {}
        return copy.deepcopy(model, memo), copy.deepcopy(optim, memo)

    def with_a_group_more(model, optim):
        # The fallback loses a parameter that has no part in this.
        return model, optim.with_group(tfloop.ParamGroup.from_path("more"), "adam")

    return by_tensorflow, by_tfloop, by_copy, with_a_group_more


@pytest.mark.parametrize("way", range(4))
@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_with_what_it_remembered(way, mode, tmp_path):
    model, optim = net(), optimizer()
    found = trained(model, optim, NORMS[:4], mode)
    model, optim = ways_to_save(tmp_path)[way](model, optim)
    found += trained(model, optim, NORMS[4:], mode)
    np.testing.assert_allclose(found, by_hand(NORMS), rtol=1e-6)


def test_a_copy_remembers_for_itself():
    model, optim = net(), optimizer()
    trained(model, optim, NORMS[:4])
    trained(*ways_to_save(None)[2](model, optim), [100.0, 100.0])
    found = trained(model, optim, NORMS[4:])
    np.testing.assert_allclose(found, by_hand(NORMS)[4:], rtol=1e-6)


def test_groups_with_one_clipping_remember_apart():
    clipping, model = ByMedian(), net()
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0), clipping=clipping)
    group = tfloop.ParamGroup.from_path("other")
    optim.with_group(group, keras.optimizers.SGD(1.0), clipping)
    for norm in NORMS:
        grads = {"w": tf.constant(norm), "other": tf.constant(10 * norm)}
        optim.step(None, model, GradientsParams(grads))
    np.testing.assert_allclose(float(model["w"]), by_hand(NORMS)[-1], rtol=1e-6)
    np.testing.assert_allclose(float(model["other"]), 10 * by_hand(NORMS)[-1], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_another_clipping_begins_anew(mode):
    model, optim = net(), optimizer()
    step = stepper(model, optim, mode)
    before = [step(norm) for norm in NORMS][-1]
    optim.with_clipping(ByMedian(0.5))
    found = [step(norm) - before for norm in NORMS]
    np.testing.assert_allclose(found, by_hand(NORMS, 0.5), rtol=1e-5)


def product(y, out):
    return y * out


# Keras 3.15 copies variables in a way that NumPy 2 will drop.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_file_of_keras_keeps_what_it_remembered(tmp_path):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].kernel.assign([[0.0]])
    optim = ModuleOptimizer(keras.optimizers.SGD(1.0), clipping=ByMedian())
    model.compile(optimizer=optim.as_keras(model), loss=product)
    for number, norm in enumerate(NORMS):
        if number == 4:
            model.save(tmp_path / "model.keras")
            model = keras.models.load_model(tmp_path / "model.keras", {"product": product})
        model.fit(np.ones((1, 1)), np.full((1, 1), norm), verbose=0)
    np.testing.assert_allclose(model.layers[0].kernel[0, 0], by_hand(NORMS)[-1], rtol=1e-6)


def test_the_summary_names_its_class_and_looking_changes_nothing():
    model, optim = net(), optimizer()
    trained(model, optim, NORMS[:4])
    for look in (optim.summary, repr, optim.build):
        assert "ByMedian" in str(look(optim if look is repr else model))
    np.testing.assert_allclose(trained(model, optim, NORMS[4:]), by_hand(NORMS)[4:], rtol=1e-6)


class Forgetful(ByMedian):
    def clip(self, grads, parameters=(), state=None):
        state["more"] = tf.constant(0.0)
        return grads


class Short(ByMedian):
    def clip(self, grads, parameters=(), state=None):
        return []


@pytest.mark.parametrize(
    ("clipping", "message"),
    [
        (Forgetful(), r"`Forgetful.clip\(grads.*got 1 gradients and the state 'norms', 'seen', "),
        (Short(), "something else than it got: got 0 gradients .*, expected 1 and 'norms', 'seen'"),
    ],
)
def test_a_clipping_that_gives_something_else_raises(clipping, message):
    model, optim = net(), ModuleOptimizer("sgd", clipping=clipping)
    with pytest.raises(ValueError, match=message):
        optim.step(1.0, model, GradientsParams({"w": tf.constant(1.0)}))
    assert float(model["w"]) == 0.0


def test_the_base_alone_is_no_clipping():
    with pytest.raises(TypeError, match="abstract"):
        GradientClipping()
    with pytest.raises(TypeError, match="got the class ByMedian as clipping, expected a Gradient"):
        ModuleOptimizer("sgd", clipping=ByMedian)
