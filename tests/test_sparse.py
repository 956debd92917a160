"""Sparse gradients give the dense result: repeated rows, every dtype, eager, graph and jit."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import in_every_mode, message

from tfloop._tensors import sparse

# Rows and numbers: repeated, none, one, all.
ROWS = {
    "repeated": [1, 3, 1, 1, 0],
    "none": [],
    "one": [2],
    "all": [3, 2, 1, 0],
    "unsorted": [3, 0, 3],
}
SHAPE = (4, 2)


def sliced(name, dtype="float32", index=tf.int32, sign=1.0):
    numbers = ROWS[name]
    count = len(numbers)
    values = sign * (np.arange(count * 2).reshape(count, 2) - 2.5)
    return tf.IndexedSlices(
        tf.constant(values, dtype), tf.constant(numbers, index), tf.constant(SHAPE, index)
    )


def dense(grad):
    """By NumPy: each row is added where it belongs."""
    total = np.zeros(SHAPE, np.float64)
    np.add.at(total, grad.indices.numpy(), grad.values.numpy().astype(np.float64))
    return total


every_kind = pytest.mark.parametrize("rows", ROWS)
every_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])


@every_kind
@every_dtype
@pytest.mark.parametrize("index", [tf.int32, tf.int64])
def test_every_function_gives_the_dense_result(rows, dtype, index):
    grad = sliced(rows, dtype, index)
    full = dense(grad)
    tolerance = {"float64": 1e-15, "float32": 1e-6}.get(dtype, 1e-2)
    once = sparse.deduplicate(grad)
    assert once.indices.dtype == index
    assert sorted(set(ROWS[rows])) == sorted(once.indices.numpy())
    np.testing.assert_allclose(dense(once), full)
    np.testing.assert_allclose(sparse.densify(grad).numpy().astype(float), full)
    assert sparse.densify(grad).dtype == sparse.deduplicate(grad).dtype == dtype
    wide = tf.float64 if dtype == "float64" else tf.float32
    for scalar, wanted in [
        (sparse.squared_norm(grad), np.sum(full**2)),
        (sparse.dot(grad, grad), np.sum(full**2)),
        (sparse.dot(grad, tf.constant(full, dtype)), np.sum(full**2)),
        (sparse.dot(tf.constant(full, dtype), grad), np.sum(full**2)),
    ]:
        assert scalar.dtype == wide
        np.testing.assert_allclose(scalar.numpy(), wanted, rtol=tolerance)
    scaled = sparse.scale(grad, 0.5)
    assert sparse.is_sparse(scaled)
    np.testing.assert_allclose(dense(scaled), 0.5 * full, rtol=tolerance)


@every_kind
def test_a_sum_is_the_dense_sum_and_sparse_where_both_are(rows):
    other = sliced("repeated", sign=-0.5)
    grad = sliced(rows)
    wanted = dense(grad) + dense(other)
    both = sparse.add(grad, other)
    assert sparse.is_sparse(both)
    np.testing.assert_allclose(dense(both), wanted)
    full = tf.constant(dense(other), tf.float32)
    for total in (sparse.add(grad, full), sparse.add(full, grad)):
        assert not sparse.is_sparse(total)
        np.testing.assert_allclose(total, wanted)


def test_a_sum_of_two_dtypes_has_the_wider_one():
    short, wide = sliced("one", "float16"), sliced("one", "float64")
    for total in (sparse.add(short, wide), sparse.add(wide, short)):
        assert total.dtype == tf.float64
    assert sparse.add(tf.constant(1.0), tf.constant(2.0, tf.float64)).dtype == tf.float64
    mixed = sparse.add(sliced("one", index=tf.int32), sliced("one", index=tf.int64))
    assert mixed.indices.dtype == tf.int64
    assert sparse.add(sliced("one"), sliced("one")).indices.dtype == tf.int32


@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
def test_the_result_is_the_same_in_every_mode(mode):
    def everything(one, other):
        total = sparse.add(one, other)
        parts = [
            sparse.deduplicate(total),
            sparse.scale(total, 2.0),
            sparse.cast(one, tf.float64),
        ]
        return (
            [sparse.densify(part) for part in parts],
            [sparse.squared_norm(total), sparse.dot(one, other), sparse.all_finite(total)],
        )

    one, other = sliced("repeated"), sliced("unsorted")
    got = in_every_mode(everything)[mode](one, other)
    tf.nest.map_structure(np.testing.assert_allclose, got, everything(one, other))
    np.testing.assert_allclose(got[0][0], dense(one) + dense(other))


def test_sums_of_short_floats_are_kept_in_float32():
    many = tf.IndexedSlices(
        tf.ones((4096, 1), tf.float16), tf.zeros(4096, tf.int32), tf.constant([2, 1])
    )
    assert float(sparse.squared_norm(many)) == 4096.0**2
    assert float(sparse.dot(many, many)) == 4096.0**2


def test_dense_gradients_pass_through_the_same_functions():
    grad = tf.constant([[1.0, -2.0]])
    assert sparse.deduplicate(grad) is grad
    assert sparse.densify(grad) is grad
    assert sparse.cast(grad, tf.float32) is grad
    assert sparse.cast(grad, tf.float64).dtype == tf.float64
    assert float(sparse.squared_norm(grad)) == 5.0
    np.testing.assert_allclose(sparse.map_values(tf.negative, grad), [[-1.0, 2.0]])
    assert not sparse.is_sparse(grad)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_isnt_finite_is_seen(bad):
    grad = tf.IndexedSlices(tf.constant([[1.0, bad]]), tf.constant([0]), tf.constant(SHAPE))
    assert not sparse.all_finite(grad)
    assert not sparse.all_finite(grad.values)
    assert not np.isfinite(sparse.squared_norm(grad))
    assert sparse.all_finite(sliced("repeated"))
    assert sparse.all_finite(sliced("none"))


def test_numbers_arent_rounded_on_their_way_to_float64():
    assert float(sparse.scalar(0.1, tf.float64)) == 0.1
    assert float(sparse.scalar(np.float64(0.1), tf.float64)) == 0.1
    assert float(sparse.scalar(3, tf.float64)) == 3.0
    assert float(sparse.scale(tf.constant(1.0, tf.float64), 0.1)) == 0.1
    for given in (tf.constant(0.5), tf.Variable(0.5), np.float32(0.5), np.array(0.5)):
        assert sparse.scalar(given, tf.float64).dtype == tf.float64


def test_rows_take_their_dense_shape_from_the_variable():
    bare = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([3], tf.int64))
    full = sparse.with_dense_shape(bare, tf.TensorShape(SHAPE))
    assert full.dense_shape.dtype == tf.int64
    np.testing.assert_allclose(sparse.densify(full), dense(full))
    complete = sliced("one")
    assert sparse.with_dense_shape(complete, tf.TensorShape(SHAPE)) is complete
    one, other = sparse.add(bare, complete), sparse.add(complete, bare)
    np.testing.assert_allclose(sparse.densify(one), sparse.densify(other))


def test_shapes_are_known_as_far_as_they_can_be():
    assert sparse.shape_of(tf.ones((2, 3))) == (2, 3)
    assert sparse.shape_of(sliced("one")) == SHAPE
    assert sparse.shape_of(tf.IndexedSlices(tf.ones((1, 2)), [0])).rank is None
    seen = []

    @tf.function
    def traced(grad):
        seen.append(sparse.shape_of(grad))
        return sparse.densify(grad)

    traced(sliced("one"))
    assert seen[0].rank is None


def test_sums_are_kept_in_float32_or_wider():
    assert sparse.accumulation_dtype(tf.float16, tf.bfloat16) == tf.float32
    assert sparse.accumulation_dtype("float16", "float64") == tf.float64


def test_rows_without_a_dense_shape_cant_be_made_dense():
    bare = tf.IndexedSlices(tf.ones((3, 2)), [0, 1, 0])
    parts = ("can't be made dense", "got rows of shape (3, 2)", "tf.constant(variable.shape)")
    with pytest.raises(ValueError, match=message(*parts)):
        sparse.densify(bare)
