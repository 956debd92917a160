"""Checks of plain arguments: what is a number, and what is one."""

import fractions

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfloop._checks.arguments import is_number, number, wrong_scalar


@pytest.mark.parametrize("value", [1, 0.5, np.float32(2), np.int64(3), fractions.Fraction(1, 2)])
def test_numbers_of_python_and_numpy_are_numbers(value):
    assert is_number(value)
    assert wrong_scalar(value) is None
    assert number("f(x)", "x", value, lambda x: x > 0, "more", "Fix.") == float(value)


@pytest.mark.parametrize("value", [True, np.True_, "1", None, 1j, [1.0], tf.constant(1.0)])
def test_what_is_no_number_is_none(value):
    assert not is_number(value)
    with pytest.raises(TypeError, match=r"`f\(x\)` needs a number: got x=.*, expected more. Fix."):
        number("f(x)", "x", value, lambda x: x > 0, "more", "Fix.")


@pytest.mark.parametrize("make", [tf.constant, tf.Variable, keras.Variable, np.array])
def test_a_tensor_is_a_scalar_by_dtype_and_shape(make):
    assert wrong_scalar(make(1.0)) is None
    assert wrong_scalar(make(2)) is None
    assert wrong_scalar(make([1.0])) == ("shape (1,)", True)
    assert wrong_scalar(make(True)) == ("dtype bool", False)


def test_a_shape_that_a_trace_does_not_know_may_be_a_scalar():
    seen = []

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32)])
    def traced(value):
        seen.append(wrong_scalar(value))

    traced(1.0)
    assert seen == [None]
