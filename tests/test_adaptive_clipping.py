"""Adaptive gradient clipping: the paper's formula by hand, unit by unit, in every kind of call."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop
from tfloop import AdaptiveGradientClipping, GradientsAccumulator, GradientsParams, ModuleOptimizer

MODES = ("eager", "graph", "jit")
RNG = np.random.default_rng(0)


def by_hand(grad, weights, axes, clipping=0.5, eps=0.1):
    """g * clipping * max(||w||, eps) / ||g|| where that is smaller, in float64."""
    grad, weights = np.asarray(grad, np.float64), np.asarray(weights, np.float64)
    norm = np.sqrt(np.sum(grad**2, axes, keepdims=True))
    bound = clipping * np.maximum(np.sqrt(np.sum(weights**2, axes, keepdims=True)), eps)
    return np.where(norm > bound, grad * bound / np.where(norm > 0, norm, 1.0), grad)


def clip(clipping, grads, weights, mode="eager"):
    variables = [tf.Variable(w) for w in weights]
    fn = lambda grads: clipping.clip(grads, variables)  # noqa: E731
    if mode != "eager":
        fn = tf.function(fn, jit_compile=mode == "jit")
    return fn(grads)


def dense(grad):
    return np.array(tf.convert_to_tensor(grad))


# A shape, and the axes along which a unit lies.
UNITS = {
    "scalar": ((), ()),
    "vector": ((6,), (0,)),
    "vector written as a row": ((1, 6), (0, 1)),
    "vector written as a column": ((6, 1), (0, 1)),
    "bias of a convolution": ((1, 1, 1, 6), (0, 1, 2, 3)),
    "dense kernel": ((4, 6), (0,)),
    "kernel of several heads": ((4, 3, 2), (0,)),
    "convolution kernel": ((3, 3, 2, 5), (0, 1, 2)),
    "kernel over three dimensions": ((2, 2, 2, 3, 4), (0, 1, 2, 3)),
}


@pytest.mark.parametrize("mode", MODES)
def test_each_unit_has_a_bound_of_its_own(mode):
    weights = [RNG.normal(size=shape).astype("float32") for shape, _ in UNITS.values()]
    # Of different sizes, so that some units are clipped and others aren't.
    grads = [(w * 0 + RNG.normal(size=w.shape) * RNG.choice([0.1, 1.0, 9.0])) for w in weights]
    grads = [tf.constant(grad, tf.float32) for grad in grads]
    found = clip(AdaptiveGradientClipping(0.5, 0.1), grads, weights, mode)
    for name, one, grad, w in zip(UNITS, found, grads, weights, strict=True):
        wanted = by_hand(grad, w, UNITS[name][1])
        np.testing.assert_allclose(one, wanted, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_only_the_units_above_their_bound_are_touched(mode):
    weights = np.array([[3.0, 0.0], [4.0, 2.0]], "float32")  # columns of norm 5 and 2
    grad = tf.constant([[0.3, 3.0], [0.1, 4.0]])  # of norm 0.32 and 5
    (found,) = clip(AdaptiveGradientClipping(0.5), [grad], [weights], mode)
    np.testing.assert_array_equal(found[:, 0], grad[:, 0])
    np.testing.assert_allclose(found[:, 1], [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(), (1,), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_sparse_gradients_are_clipped_as_the_dense_ones(size, mode):
    # Row 2 comes twice; neither part alone says how large it is.
    weights = RNG.normal(size=(4, *size)).astype("float32")
    values = RNG.normal(size=(3, *size)).astype("float32") * 5
    rows = tf.IndexedSlices(tf.constant(values), tf.constant([2, 0, 2]), tf.constant([4, *size]))
    agc = AdaptiveGradientClipping(0.3, 0.1)
    (found,) = clip(agc, [rows], [weights], mode)
    (wanted,) = clip(agc, [tf.convert_to_tensor(rows)], [weights], mode)
    assert isinstance(found, tf.IndexedSlices)
    np.testing.assert_allclose(dense(found), wanted, rtol=1e-6)
    assert not np.allclose(wanted, tf.convert_to_tensor(rows))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_norms_are_sums_in_a_wide_dtype(dtype, mode):
    # 300 ** 2 is no float16, and 4096 ones summed in 16 bits stop growing.
    weights = tf.ones((4096, 1), dtype)
    grad = tf.fill((4096, 1), tf.constant(300.0, dtype))
    (found,) = clip(AdaptiveGradientClipping(0.5), [grad], [weights], mode)
    assert found.dtype.name == dtype
    np.testing.assert_array_equal(tf.cast(found, tf.float64), np.full((4096, 1), 0.5))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_below_the_bound_a_gradient_is_bit_equal(dtype, mode):
    grad = tf.cast(RNG.normal(size=(7, 5)), dtype)
    (found,) = clip(AdaptiveGradientClipping(100.0), [grad], [tf.ones((7, 5), dtype)], mode)
    assert found.numpy().tobytes() == grad.numpy().tobytes()


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_zero_count_as_eps(mode):
    (found,) = clip(AdaptiveGradientClipping(0.5, 0.01), [tf.constant([3.0, 4.0])], [[0.0] * 2])
    np.testing.assert_allclose(found, [0.003, 0.004], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_norm_that_isnt_finite_makes_its_unit_nan_and_nothing_zero(bad, mode):
    grad = tf.constant([[bad, 3.0], [1.0, 4.0]])
    (found,) = clip(AdaptiveGradientClipping(1.0), [grad], [np.full((2, 2), 0.5, "f")], mode)
    assert np.isnan(found[:, 0]).all()
    np.testing.assert_allclose(found[:, 1], np.array([0.6, 0.8]) * 0.5**0.5, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_weights_that_arent_finite_bound_nothing(bad, mode):
    (found,) = clip(AdaptiveGradientClipping(), [tf.constant([3.0, 4.0])], [[bad, 1.0]], mode)
    np.testing.assert_array_equal(found, [3.0, 4.0])


def words_and_images():
    """Small enough to be fused: an embedding, a convolution, kernels and biases."""
    keras.utils.set_random_seed(3)
    ids, image = keras.Input((3,), dtype="int32"), keras.Input((6, 6, 2))
    words = keras.layers.Flatten()(keras.layers.Embedding(20, 4, name="words")(ids))
    seen = keras.layers.Flatten()(keras.layers.Conv2D(3, 3, 2, "same", name="conv")(image))
    joined = keras.layers.Concatenate()([words, seen])
    return keras.Model([ids, image], keras.layers.Dense(1, name="head")(joined))


IDS = RNG.integers(0, 20, size=(10, 8, 3)).astype("int32")
IMAGES = RNG.normal(size=(10, 8, 6, 6, 2)).astype("float32")
TARGETS = RNG.normal(size=(10, 8, 1)).astype("float32") * 5
AXES = {
    "words.embeddings": (0,),
    "conv.kernel": (0, 1, 2),
    "conv.bias": (0,),
    "head.kernel": (0, 1),
    "head.bias": (0,),
}


def hand_loop():
    """Ten steps of SGD with momentum, each gradient clipped by the formula, all of it dense."""
    model, moments, clipped = words_and_images(), {}, 0
    named = tfloop.named_parameters(model)
    for ids, image, target in zip(IDS, IMAGES, TARGETS, strict=True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model([ids, image], training=True) - target) ** 2)
        grads = tape.gradient(loss, {path: v.value for path, v in named.items()})
        for path, variable in named.items():
            grad = dense(grads[path])
            wanted = by_hand(grad, variable.numpy(), AXES[path], 0.02, 1e-3)
            clipped += not np.allclose(grad, wanted)
            moments[path] = 0.9 * moments.get(path, 0.0) - 0.1 * wanted
            variable.assign(variable.numpy() + moments[path])
    assert clipped > 20
    return {path: variable.numpy() for path, variable in named.items()}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("way", ["eager", "compile", "jit", "run", "window"])
def test_training_equals_the_loop_by_hand(way, fused):
    model = words_and_images()
    agc = AdaptiveGradientClipping(0.02)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    optim = ModuleOptimizer(sgd, clipping=agc, fused=fused)
    window = GradientsAccumulator(reduction="mean")

    def backward(ids, image, target):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean((tfloop.train(model)([ids, image]) - target) ** 2)
        return GradientsParams.from_grads(tape.backward(loss), model)

    def step(batch):
        optim.step(None, model, backward(*batch))

    def two_halves(batch):
        for half in (slice(4), slice(4, None)):
            window.accumulate(model, backward(*(part[half] for part in batch)), weight=4)
        optim.step(None, model, window)

    steps = {
        "eager": step,
        "compile": tfloop.compile(step),
        "jit": tfloop.compile(step, jit_compile=True),
        "window": tfloop.compile(two_halves),
    }
    batches = list(zip(IDS, IMAGES, TARGETS, strict=True))
    if way == "run":
        steps["compile"].run(iter(batches), steps=10)
    else:
        for batch in batches:
            steps[way](tuple(map(tf.constant, batch)))
    for path, wanted in hand_loop().items():
        found = tfloop.named_parameters(model)[path].numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6, err_msg=path)


def test_what_overwrites_a_variable_isnt_clipped():
    model = {"w": keras.Variable([3.0, 4.0]), "amax": keras.Variable([1.0])}
    model["amax"].overwrite_with_gradient = True
    optim = ModuleOptimizer("sgd", clipping=AdaptiveGradientClipping(0.1))
    grads = {"w": tf.constant([30.0, 40.0]), "amax": tf.constant([8.0])}
    named = tfloop.named_variables(model)
    found = GradientsParams({path: grads[path] for path in named})
    optim.step(1.0, model, found)
    np.testing.assert_allclose(model["w"].numpy(), [2.7, 3.6], rtol=1e-6)
    np.testing.assert_array_equal(model["amax"].numpy(), [8.0])


def test_a_group_may_do_without():
    model = words_and_images()
    optim = ModuleOptimizer("sgd", clipping=AdaptiveGradientClipping(0.02))
    optim.with_group(tfloop.ParamGroup.from_name("head"), keras.optimizers.SGD())
    table = optim.summary(model)
    assert table.count("adaptive 0.02") == 3
    before = model.get_layer("head").bias.numpy()
    grads = {"head.bias": tf.constant([100.0])}
    optim.step(1.0, model, GradientsParams(grads))
    np.testing.assert_array_equal(model.get_layer("head").bias.numpy(), before - 100.0)


# Keras 3.15 copies variables in a way that NumPy 2 will drop.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_file_of_keras_keeps_it(tmp_path):
    model = words_and_images()
    optim = ModuleOptimizer("sgd", clipping=AdaptiveGradientClipping(0.02, 0.01))
    model.compile(optimizer=optim.as_keras(model), loss="mse")
    model.fit([IDS[0], IMAGES[0]], TARGETS[0], epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.optim._assembly.groups[0].clipping == AdaptiveGradientClipping(
        0.02, 0.01
    )
    for one in (model, loaded):
        one.fit([IDS[1], IMAGES[1]], TARGETS[1], epochs=1, verbose=0)
    np.testing.assert_array_equal(
        loaded.get_layer("conv").kernel.numpy(), model.get_layer("conv").kernel.numpy()
    )


def test_it_compares_hashes_and_reads_as_what_makes_it():
    one = AdaptiveGradientClipping(1, eps=np.float64(0.5))
    assert one == AdaptiveGradientClipping(1.0, 0.5) == copy.deepcopy(one) != one.by_norm(1.0)
    assert len({one, AdaptiveGradientClipping(1.0, 0.5), AdaptiveGradientClipping()}) == 2
    assert repr(one) == "AdaptiveGradientClipping(clipping=1.0, eps=0.5)"
    assert AdaptiveGradientClipping.from_config(one.get_config()) == one


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0.0,), ValueError, r"g\(clipping, eps\)` has a clipping out of range: got 0.0"),
        ((0.01, -1), ValueError, "a eps out of range: got -1, expected a finite number > 0"),
        ((np.inf,), ValueError, "a clipping out of range: got inf"),
        (
            ("0.01",),
            TypeError,
            "needs a number: got clipping=str '0.01'.*The clipping is fixed when",
        ),
        ((0.01, None), TypeError, r"got eps=None.*Write `tfloop.AdaptiveGradientClipping\(0.01\)`"),
    ],
)
def test_a_wrong_argument_raises(arguments, error, message):
    with pytest.raises(error, match=message):
        AdaptiveGradientClipping(*arguments)
