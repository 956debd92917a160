"""Low precision: the scale that never shows, updates that are skipped, float32 where sums grow."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import tfloop
from tfloop import GradientsAccumulator, GradientsParams, LossScaler, ModuleOptimizer

MODES = ("eager", "graph", "jit")


def compiled(mode):
    if mode == "eager":
        return lambda fn: fn
    return tfloop.compile(jit_compile=mode == "jit")


def network(dtype="float32"):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, "tanh", dtype=dtype), keras.layers.Dense(1, dtype=dtype)]
    return keras.Sequential([keras.Input((3,)), *layers])


X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")


def stepper(model, optim, mode):
    @compiled(mode)
    def step(x, factor):
        with tfloop.Tape(scaler=optim.scaler) as tape:
            loss = factor * tf.reduce_mean(tf.cast(model(x), tf.float32) ** 2)
        optim.step(0.1, model, GradientsParams.from_grads(tape.backward(loss), model))
        return loss

    return lambda x, factor=1.0: step(tf.constant(x), tf.constant(factor))


def state(model, optim):
    found = {path: v.numpy() for path, v in tfloop.named_variables(model).items()}
    for group in optim._assembly.records()[:-1]:
        found |= {f"{group.optimizer}/{key}": v.numpy() for key, v in group.variables().items()}
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_scale_never_shows_in_float32(mode):
    ends = []
    for scaler in (None, LossScaler(2.0**12), LossScaler.fixed(2.0**9)):
        model = network()
        optim = ModuleOptimizer(keras.optimizers.Adam(), scaler=scaler)
        step = stepper(model, optim, mode)
        for _ in range(5):
            step(X)
        ends.append(state(model, optim))
    for other in ends[1:]:  # powers of 2 scale without rounding
        for key, value in ends[0].items():
            np.testing.assert_array_equal(value, other[key], err_msg=key)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["scaler", "skip_nonfinite"])
def test_what_is_not_finite_skips_the_update_of_all_groups(mode, how):
    model = network()
    options = {"scaler": LossScaler(2.0**8)} if how == "scaler" else {"skip_nonfinite": True}
    optim = ModuleOptimizer(keras.optimizers.Adam(), **options)
    optim.with_group(
        tfloop.ParamGroup.from_path("dense_1.bias"), keras.optimizers.SGD(momentum=0.9)
    )
    step = stepper(model, optim, mode)
    step(X)
    before = state(model, optim)
    for bad in (np.nan, np.inf):
        step(X, bad)
        after = state(model, optim)
        for key, value in before.items():
            np.testing.assert_array_equal(value, after[key], err_msg=key)
    assert int(optim.skipped) == 2
    assert int(optim.iterations) == 1
    if how == "scaler":
        assert float(optim.scaler.scale) == 2.0**6
    step(X)
    assert int(optim.iterations) == 2
    assert all((v != before[k]).any() for k, v in state(model, optim).items() if "rate" not in k)


def test_without_a_guard_what_is_not_finite_goes_through():
    model = network()
    optim = ModuleOptimizer("sgd")
    stepper(model, optim, "graph")(X, np.nan)
    assert np.isnan(model.layers[0].kernel.numpy()).all()
    assert int(optim.skipped) == 0


def test_the_scale_halves_and_doubles():
    model = network()
    optim = ModuleOptimizer("sgd", scaler=LossScaler(8.0, growth_interval=3))
    step = stepper(model, optim, "graph")
    scales = []
    for factor in (1.0, 1.0, 1.0, 1.0, 1.0, np.inf, 1.0, 1.0, 1.0):
        step(X, factor)
        scales.append(float(optim.scaler.scale))
    assert scales == [8.0, 8.0, 16.0, 16.0, 16.0, 8.0, 8.0, 8.0, 16.0]
    fixed = ModuleOptimizer("sgd", scaler=LossScaler.fixed(4.0))
    step = stepper(network(), fixed, "graph")
    step(X, np.inf)
    assert (float(fixed.scaler.scale), int(fixed.skipped)) == (4.0, 1)


def test_a_scale_saves_gradients_that_float16_would_lose():
    # Case 22: 1e-8 is 0 in float16. The backward pass is scaled and unscaled in one.
    x = tf.constant([1.0])
    for scaler, expected in ((None, 0.0), (LossScaler(2.0**15), 1e-8)):
        optim = ModuleOptimizer("sgd", scaler=scaler)
        weight = tf.Variable([1.0])
        with tfloop.Tape(scaler=optim.scaler) as tape:
            half = tf.cast(weight * x, tf.float16)
            loss = tf.reduce_sum(tf.cast(half, tf.float32)) * 1e-8
        grad = tape.backward(loss).wrt(weight)
        assert grad.dtype == tf.float32
        np.testing.assert_allclose(grad, [expected], rtol=1e-3)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_policies_give_float32_gradients_and_buffers(policy, scope):
    before = keras.config.dtype_policy()
    if scope == "global":
        keras.config.set_dtype_policy(policy)
    try:
        model = network(None if scope == "global" else policy)
    finally:
        keras.config.set_dtype_policy(before)
    assert model.layers[0].compute_dtype == policy.removeprefix("mixed_")
    # Keras' Adam doesn't move bfloat16 parameters: 0.999 is 1 there. So SGD.
    optim = ModuleOptimizer(keras.optimizers.SGD(momentum=0.5), scaler=LossScaler(2.0**10))
    window = GradientsAccumulator(reduction="mean")

    @tfloop.compile
    def step(x):
        with tfloop.Tape(scaler=optim.scaler) as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        grads = GradientsParams.from_grads(tape.backward(loss), model)
        kinds.extend(grad.dtype for grad in grads.values())
        window.accumulate(model, grads)
        return loss

    kinds: list[tf.DType] = []
    first = float(step(tf.constant(X)))
    assert set(kinds) == {tf.float32}
    assert {buffer.dtype.name for buffer in window._buffers.sums.values()} == {"float32"}
    for _ in range(10):
        optim.step(0.05, model, window)
        last = float(step(tf.constant(X)))
    assert last < first
    assert int(optim.skipped) == 0


def test_the_state_of_a_scaler_is_saved_with_the_optimizer(tmp_path):
    def parts():
        model = network()
        optim = ModuleOptimizer("sgd", scaler=LossScaler(8.0, growth_interval=4))
        return model, optim, stepper(model, optim, "graph")

    model, optim, step = parts()
    for factor in (1.0, 1.0, np.inf, 1.0, 1.0):
        step(X, factor)
    tfloop.Checkpoint(tmp_path / "ours", model=model, optim=optim).save(1)
    tfloop.Checkpoint(tmp_path / "alone", scaler=optim.scaler).save(1)
    tf.train.Checkpoint(scaler=optim.scaler).write(str(tmp_path / "tf"))
    twin, other, again = parts()
    assert tfloop.Checkpoint(tmp_path / "ours", model=twin, optim=other).restore() == 1
    for factor in (1.0, 1.0):
        step(X, factor)
        again(X, factor)
    assert float(optim.scaler.scale) == float(other.scaler.scale) == 8.0  # 4, and doubled again
    assert int(other.skipped) == 1
    for how in ("alone", "tf"):
        fresh = LossScaler(8.0)
        if how == "tf":
            tf.train.Checkpoint(scaler=fresh).read(str(tmp_path / "tf"))
        else:
            tfloop.Checkpoint(tmp_path / "alone", scaler=fresh).restore()
        assert float(fresh.scale) == 4.0


def test_training_in_mixed_float16_is_as_good_as_in_float32():
    digits = load_digits()
    x, y = (digits.data / 16).astype("float32"), digits.target
    accuracies = []
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(0)
        dense = [keras.layers.Dense(64, "relu", dtype=policy), keras.layers.Dense(10, dtype=policy)]
        net = keras.Sequential([keras.Input((64,)), *dense])
        optim = ModuleOptimizer(keras.optimizers.Adam(), scaler=LossScaler())

        @tfloop.compile
        def step(batch, net=net, optim=optim):
            with tfloop.Tape(scaler=optim.scaler) as tape:
                logits = tf.cast(net(batch[0]), tf.float32)
                loss = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits)
                )
            optim.step(3e-3, net, GradientsParams.from_grads(tape.backward(loss), net))

        loader = tfloop.DataLoader((x[:1400], y[:1400]), batch_size=64, shuffle=0)
        for _ in range(20):
            for batch in loader:
                step(batch)
        accuracies.append(float(np.mean(np.argmax(net(x[1400:]), -1) == y[1400:])))
    assert accuracies[0] > 0.9
    assert abs(accuracies[0] - accuracies[1]) <= 0.02


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: LossScaler(0.0), ValueError, r"got 0.0, expected a finite number > 0.*2.0\*\*15"),
        (lambda: LossScaler(np.inf), ValueError, "a scale out of range: got inf"),
        (lambda: LossScaler("2"), TypeError, "needs a number: got scale=str '2'"),
        (lambda: LossScaler(growth_interval=0), ValueError, "`growth_interval`: got 0, expected"),
        (lambda: LossScaler.fixed(-1), ValueError, r"LossScaler.fixed\(scale\)` has a scale out"),
        (lambda: tfloop.Tape(scaler=LossScaler()), ValueError, "no optimizer owns"),
        (lambda: tfloop.Tape(scaler=8.0), TypeError, "got float 8.0, expected a LossScaler"),
        (lambda: ModuleOptimizer("sgd", scaler=8.0), TypeError, "got float 8.0 as scaler"),
        (lambda: ModuleOptimizer("sgd", reduction="avg"), ValueError, "reduction=str 'avg'"),
    ],
)
def test_wrong_arguments_are_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_scaler_belongs_to_one_optimizer():
    scaler = LossScaler()
    ModuleOptimizer("sgd", scaler=scaler)
    with pytest.raises(ValueError, match="a scaler that another optimizer owns"):
        ModuleOptimizer("sgd", scaler=scaler)
    assert "2000" in repr(scaler)
    assert repr(LossScaler.fixed(2)) == "LossScaler.fixed(scale=2.0)"


class TestWeight:
    def test_a_weight_changes_nothing_on_one_device(self):
        model = network()
        optim = ModuleOptimizer("sgd")
        ones = {path: tf.ones(v.shape) for path, v in tfloop.named_parameters(model).items()}
        bias = model.layers[1].bias
        optim.step(0.5, model, GradientsParams(ones), weight=7)
        assert float(bias[0]) == -0.5

    def test_weights_that_have_nothing_to_weigh_are_refused(self):
        model = network()
        ones = {path: tf.ones(v.shape) for path, v in tfloop.named_parameters(model).items()}
        window = GradientsAccumulator(reduction="mean")
        window.accumulate(model, GradientsParams(ones), weight=2)
        with pytest.raises(ValueError, match="an accumulator that has weights of its own"):
            ModuleOptimizer("sgd").step(0.1, model, window, weight=2)
        for reduction in ("sum", None):
            with pytest.raises(ValueError, match="with no mean, expected none"):
                ModuleOptimizer("sgd", reduction=reduction).step(
                    0.1, model, GradientsParams(ones), weight=2
                )
        with pytest.raises(ValueError, match="weights that sum to 0"):
            ModuleOptimizer("sgd").step(0.1, model, GradientsParams(ones), weight=0)
        assert int(window.count) == 1

    def test_reduce_on_one_device_is_a_copy(self):
        grads = GradientsParams({"w": tf.constant(2.0)})
        reduced = grads.reduce(weight=3)
        assert float(reduced["w"]) == 2.0
        assert reduced is not grads
        assert type(reduced) is GradientsParams
