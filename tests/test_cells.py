"""Small variables laid end to end: each keeps its place, whatever the shapes beside it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfloop._update.fused import Fused, Single, cells_of

# Those of one trailing shape are joined along their first axis.
SHAPES = {
    "a": (3, 4),
    "scalar": (),
    "b": (2, 4),
    "bias": (5,),
    "c": (2, 3, 4),
    "one": (1,),
    "d": (7, 3, 4),
    "no_rows": (0, 4),
    "no_columns": (3, 0),
    "none_either": (2, 0),
    "e": (4, 3),
}


def variables():
    rng = np.random.default_rng(0)
    return {
        name: keras.Variable(np.asarray(rng.normal(size=shape), "float32"))
        for name, shape in SHAPES.items()
    }


def wrapped(mode, fn):
    return fn if mode == "eager" else tf.function(fn, jit_compile=mode == "jit")


@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
def test_what_is_done_to_the_vector_is_done_to_each_variable(mode):
    made = variables()
    (cell,) = cells_of(made, fuse=True)
    assert isinstance(cell, Fused)
    before = {name: variable.numpy() for name, variable in made.items()}
    vector = cell.target.value

    def double():
        vector.assign(2.0 * cell.values())
        cell.write_back(vector)

    wrapped(mode, double)()
    for name, variable in made.items():
        assert variable.shape == SHAPES[name]
        np.testing.assert_array_equal(variable.numpy(), 2 * before[name])
        np.testing.assert_array_equal(cell.slot(name, vector).numpy(), 2 * before[name])


@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
def test_gradients_rates_and_masks_are_in_the_order_of_the_vector(mode):
    made = variables()
    (cell,) = cells_of(made, fuse=True)
    left_out = {"b", "bias", "no_rows"}
    grads = {name: 2.0 * v.value for name, v in made.items() if name not in left_out}
    rates = {name: tf.constant(float(n)) for n, name in enumerate(grads)}
    grad, rate, mask = wrapped(
        mode, lambda: (cell.grad(grads), cell.rate(rates), *cell.mask(grads, None))
    )()
    for name, variable in made.items():
        if name in left_out:
            assert not cell.slot(name, mask).numpy().any()
            assert not cell.slot(name, grad).numpy().any()
        else:
            assert cell.slot(name, mask).numpy().all()
            np.testing.assert_array_equal(cell.slot(name, grad).numpy(), 2 * variable.numpy())
            assert np.all(cell.slot(name, rate).numpy() == rates[name].numpy())


def test_few_large_and_special_variables_stay_alone():
    made = variables()
    made["large"] = keras.Variable(np.zeros((129, 128), "float32"))
    made["bounded"] = keras.Variable(np.zeros(3, "float32"))
    made["bounded"].constraint = keras.constraints.NonNeg()
    made["short"] = keras.Variable(np.zeros(3, "float16"))
    vector, *alone = cells_of(made, fuse=True)
    assert sorted(vector.paths) == sorted(SHAPES)
    assert [cell.paths for cell in alone] == [["large"], ["bounded"], ["short"]]
    assert all(isinstance(cell, Single) for cell in cells_of(made, fuse=False))
