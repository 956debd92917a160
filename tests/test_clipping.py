"""Clipping: closed forms of the three kinds, on dense and sparse gradients, in every mode."""

import math

import numpy as np
import pytest
import tensorflow as tf

from tfloop import GradientClipping
from tfloop._clipping.clipping import deserialize, serialize

NAN, INF = math.nan, math.inf
MODES = ("eager", "graph", "jit")
by_value, by_norm = GradientClipping.by_value, GradientClipping.by_norm
by_global_norm = GradientClipping.by_global_norm


def clip(clipping, grads, mode="eager"):
    fn = clipping.clip
    if mode != "eager":
        fn = tf.function(fn, jit_compile=mode == "jit")
    return fn([tf.constant(g) if isinstance(g, (list, np.ndarray)) else g for g in grads])


def rows(values, ids, size=4):
    """Rows with repeated numbers."""
    return tf.IndexedSlices(tf.constant(values), tf.constant(ids), tf.constant([size, 2]))


def dense(grad):
    return np.array(tf.convert_to_tensor(grad))


@pytest.mark.parametrize("mode", MODES)
def test_by_value_clamps_every_element(mode):
    (found,) = clip(by_value(0.5), [[-2.0, -0.5, 0.25, 3.0]], mode)
    np.testing.assert_array_equal(found, [-0.5, -0.5, 0.25, 0.5])


@pytest.mark.parametrize("mode", MODES)
def test_by_norm_bounds_each_gradient_alone(mode):
    found = clip(by_norm(1.0), [[3.0, 4.0], [0.3, 0.4], [[0.0, -5.0]]], mode)
    for one, expected in zip(found, ([0.6, 0.8], [0.3, 0.4], [[0.0, -1.0]]), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-6)


@pytest.mark.parametrize("clipping", [by_norm(1.0), by_global_norm(1.0)], ids=str)
def test_numerics_may_be_checked_around_a_sound_clipping(clipping):
    tf.debugging.enable_check_numerics()
    try:
        (found,) = clip(clipping, [[3.0, 4.0]], "graph")
    finally:
        tf.debugging.disable_check_numerics()
    np.testing.assert_allclose(found, [0.6, 0.8], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_by_global_norm_bounds_all_gradients_together(mode):
    found = clip(by_global_norm(6.5), [[3.0, 4.0], [[12.0]]], mode)  # the norm is 13
    np.testing.assert_allclose(found[0], [1.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(found[1], [[6.0]], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clipping", [by_value(1.0), by_norm(4.0), by_global_norm(4.0)], ids=str)
def test_sparse_gradients_are_clipped_as_the_dense_ones(clipping, mode):
    # Row 2 is (3, 4) + (-3, 0.5) = (0, 4.5): neither part alone says how large it is.
    sparse = rows([[3.0, 4.0], [0.5, 0.5], [-3.0, 0.5]], [2, 0, 2])
    other = tf.constant([0.5, 2.0])
    found = clip(clipping, [sparse, other], mode)
    expected = clip(clipping, [tf.convert_to_tensor(sparse), other], mode)
    assert isinstance(found[0], tf.IndexedSlices)
    np.testing.assert_allclose(dense(found[0]), expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clipping", [by_value(10.0), by_norm(10.0), by_global_norm(10.0)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, tf.bfloat16.as_numpy_dtype])
def test_below_the_bound_a_gradient_is_bit_equal(clipping, dtype, mode):
    values = np.random.default_rng(0).normal(size=(7, 5)).astype(dtype)
    values[0, 0] = -0.0
    (found,) = clip(clipping, [values], mode)
    assert found.dtype == tf.as_dtype(dtype)
    assert found.numpy().tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_norms_are_sums_in_a_wide_dtype(dtype):
    # 300 ** 2 is no float16; 2 ** 11 ones summed in 16 bits stop growing.
    grads = [tf.fill((1024,), tf.constant(300.0, dtype)), tf.ones((2048,), dtype)]
    found = clip(by_norm(1.0), grads)
    tolerance = {"float64": 1e-14, "float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(tf.cast(found[0], "float64"), np.full(1024, 1 / 32), tolerance)
    np.testing.assert_allclose(tf.cast(found[1], "float64"), np.full(2048, 2048**-0.5), tolerance)
    assert {g.dtype.name for g in found} == {dtype}


def test_one_wide_gradient_widens_the_norm_of_the_group():
    grads = [tf.constant([3.0], tf.float64), tf.constant([4.0])]
    found = clip(by_global_norm(1.0), grads)
    assert [g.dtype for g in found] == [tf.float64, tf.float32]
    np.testing.assert_allclose(found[0], [0.6], rtol=1e-15)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_norm_that_isnt_finite_makes_everything_nan_and_nothing_zero(bad, mode):
    found = clip(by_norm(1.0), [[bad, 1.0], [3.0, 4.0]], mode)
    assert np.all(np.isnan(found[0]))
    np.testing.assert_allclose(found[1], [0.6, 0.8], rtol=1e-6)
    found = clip(by_global_norm(1.0), [[bad, 1.0], rows([[1.0, 1.0]], [3])], mode)
    assert np.all(np.isnan(found[0]))
    assert np.all(np.isnan(found[1].values))


@pytest.mark.parametrize("mode", MODES)
def test_by_value_keeps_nan_and_bounds_infinities(mode):
    found = clip(by_value(1.0), [[NAN, INF, -INF, 0.5] * 9, rows([[NAN, INF]], [1])], mode)
    np.testing.assert_array_equal(found[0], [NAN, 1.0, -1.0, 0.5] * 9)
    np.testing.assert_array_equal(found[1].values, [[NAN, 1.0]])


def test_a_zero_gradient_stays_zero_and_no_gradients_are_no_gradients():
    for clipping in (by_value(1.0), by_norm(1.0), by_global_norm(1.0)):
        np.testing.assert_array_equal(clip(clipping, [[0.0, 0.0]])[0], [0.0, 0.0])
        assert clip(clipping, []) == []


def test_a_clipping_compares_hashes_and_reads_as_what_makes_it():
    assert by_norm(1) == by_norm(1.0) != by_global_norm(1.0)
    assert len({by_norm(1.0), by_norm(np.float32(1.0)), by_value(1.0)}) == 2
    assert repr(by_global_norm(1)) == "GradientClipping.by_global_norm(1.0)"
    assert eval(repr(by_value(0.5)), {"GradientClipping": GradientClipping}) == by_value(0.5)
    with pytest.raises(AttributeError):
        by_norm(1.0).limit = 2.0


def test_a_bound_is_written_as_its_kind_and_limit():
    for clipping in (by_value(0.5), by_norm(1.0), by_global_norm(2.0)):
        written = serialize(clipping)
        assert written == [clipping.kind, clipping.limit]
        assert deserialize(written) == clipping
    assert serialize(None) is deserialize(None) is None


BAD = {
    "zero": (
        lambda: by_norm(0.0),
        ValueError,
        r"by_norm\(max_norm\)` has a bound out of range: got 0",
    ),
    "negative": (
        lambda: by_value(-1),
        ValueError,
        r"by_value\(limit\)` has a bound out of range: got -1",
    ),
    "nan": (
        lambda: by_global_norm(NAN),
        ValueError,
        r"by_global_norm\(max_norm\)`.*got nan, expected",
    ),
    "infinite": (lambda: by_norm(INF), ValueError, "got inf, expected a finite number > 0"),
    "none": (
        lambda: by_norm(None),
        TypeError,
        "needs a number: got bound=None, expected a finite number > 0",
    ),
    "text": (lambda: by_value("1.0"), TypeError, "needs a number: got bound=str '1.0'"),
    "bool": (lambda: by_norm(True), TypeError, "needs a number: got bound=bool True"),
    "tensor": (
        lambda: by_norm(tf.constant(1.0)),
        TypeError,
        "needs a number: got .*The bound is fixed when a step is traced",
    ),
    "list": (
        lambda: by_global_norm([1.0]),
        TypeError,
        "needs a number: got bound=an object of type list",
    ),
    "complex": (lambda: by_norm(1j), TypeError, "needs a number"),
    "a kind that no file has": (
        lambda: deserialize(["max", 1.0]),
        ValueError,
        r"`GradientClipping` can't be read: got the kind 'max', expected one of 'value', 'norm'",
    ),
    "a limit that no file has": (
        lambda: deserialize(["value", -1.0]),
        ValueError,
        r"by_value\(limit\)` has a bound out of range: got -1.0.*`clipping=None`",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_bound_raises(name):
    make, error, message = BAD[name]
    with pytest.raises(error, match=message):
        make()
