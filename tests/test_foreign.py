"""Gradients made elsewhere: a list beside variables, pairs, a dict by path, a tree of dicts."""

from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import ZOO, fill, in_every_mode, message, rows

import tfloop
from tfloop import GradientsParams, ModuleOptimizer, named_parameters

from_grads = GradientsParams.from_grads
MODEL = ZOO["sequential"].build()
PATHS = list(named_parameters(MODEL))


def gradients(model=MODEL, variables=None):
    """What a tape of TensorFlow gives, in the order of Keras."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(rows(4, 3)) ** 2)
    return tape.gradient(loss, model.trainable_variables if variables is None else variables)


def assert_same(got, wanted):
    assert list(got) == list(wanted)
    for path, grad in wanted.items():
        np.testing.assert_array_equal(got[path], grad, err_msg=path)


class Dense(NamedTuple):
    kernel: object
    bias: object


def test_every_form_gives_what_our_own_tape_gives():
    fill(MODEL)
    with tfloop.Tape() as tape:
        loss = tf.reduce_sum(MODEL(rows(4, 3)) ** 2)
    wanted = tape.backward(loss, MODEL)
    grads, variables = gradients(), MODEL.trainable_variables
    by_path = {path: grad.numpy() for path, grad in wanted.items()}  # as other libraries give them
    tree: dict = {}
    for path, grad in by_path.items():
        layer, name = path.split(".")
        tree.setdefault(layer, {})[name] = grad
    forms = {
        "a list": from_grads(grads, MODEL),
        "a view": from_grads(grads, tfloop.train(MODEL)),
        "another order": from_grads(grads[::-1], MODEL, variables=variables[::-1]),
        "pairs": from_grads(list(zip(grads, variables, strict=True)), MODEL),
        "zip": from_grads(zip(grads, variables, strict=True), MODEL),
        "raw variables": from_grads(grads, MODEL, variables=[v.value for v in variables]),
        "a dict": from_grads(by_path, MODEL),
        "a tree": from_grads(tree, MODEL),
        "tuples": from_grads({k: Dense(**v) for k, v in tree.items()}, MODEL),
        "ours": from_grads(wanted, MODEL),
        "ours, as before": from_grads(tape_of_ours(), MODEL),
    }
    for form, got in forms.items():
        assert list(got) == PATHS, form
        assert_same(got, wanted)


def tape_of_ours():
    with tfloop.Tape() as tape:
        loss = tf.reduce_sum(MODEL(rows(4, 3)) ** 2)
    return tape.backward(loss)


def test_none_is_no_gradient_and_what_is_frozen_is_left_out():
    model = ZOO["sequential"].build()
    some = from_grads([None, *gradients(model)[1:]], model)
    assert some.missing(model) == PATHS[:1]
    grads = dict(zip(PATHS, gradients(model), strict=True))
    model.layers[0].trainable = False
    assert list(from_grads(grads, model)) == PATHS[2:]
    assert list(from_grads(grads, model, tfloop.ParamGroup.from_name("head"))) == PATHS[4:]


def test_of_two_models_each_takes_its_own_share():
    one, two = ZOO["sequential"].build(), ZOO["sequential"].build()
    variables = one.trainable_variables + two.trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(one(rows(4, 3))) + 2.0 * tf.reduce_sum(two(rows(4, 3)))
    grads = tape.gradient(loss, variables)
    shares = [from_grads(grads, model, variables=variables) for model in (one, two)]
    assert_same(shares[0], dict(zip(PATHS, grads[:6], strict=True)))
    assert_same(shares[1], dict(zip(PATHS, grads[6:], strict=True)))
    both = from_grads(grads, {"one": one, "two": two}, variables=variables)
    assert list(both) == [f"{name}.{path}" for name in ("one", "two") for path in PATHS]


def test_sparse_rows_stay_sparse_and_16_bits_become_32():
    table = keras.Sequential([keras.Input((2,), dtype="int32"), keras.layers.Embedding(5, 3)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(table(tf.constant([[1, 1]])))
    (grad,) = tape.gradient(loss, table.trainable_variables)
    assert isinstance(from_grads([grad], table)["embedding.embeddings"], tf.IndexedSlices)
    short = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="bfloat16")])
    assert {g.dtype for g in from_grads(gradients(short), short).values()} == {tf.float32}


def test_it_works_in_every_mode():
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(MODEL(x) ** 2)
        return from_grads(tape.gradient(loss, MODEL.trainable_variables), MODEL)

    wanted = from_grads(gradients(), MODEL)
    for mode, run in in_every_mode(step).items():
        got = run(rows(4, 3))
        for path in PATHS:
            np.testing.assert_allclose(got[path], wanted[path], rtol=1e-5, atol=1e-6, err_msg=mode)


def consumed():
    model = ZOO["sequential"].build()
    grads = from_grads(gradients(model), model)
    ModuleOptimizer("sgd").step(model, grads)
    return from_grads(grads, model)


GRADS = gradients()


@pytest.mark.parametrize(
    ("kind", "act", "parts"),
    [
        (
            ValueError,
            lambda: from_grads(GRADS[:-2], MODEL),
            ("got 4 gradients beside 6 variables", "none is left for 'head.kernel', 'head.bias'"),
        ),
        (ValueError, lambda: from_grads([*GRADS, GRADS[0]], MODEL), ("7", "some are nobody's")),
        (
            ValueError,
            lambda: from_grads(GRADS[::-1], MODEL),
            ("for 'dense.kernel': got the shape (2,)", "in two orders", "variables="),
        ),
        (
            ValueError,
            lambda: from_grads({"dense.kernl": GRADS[0]}, MODEL),
            ("unknown path: 'dense.kernl'", "Did you mean 'dense.kernel'"),
        ),
        (
            ValueError,
            lambda: from_grads({"params": {"dense": {"bias": GRADS[1]}}}, MODEL),
            ("unknown path: 'params.dense.bias'", "'dense.bias'", "a level more"),
        ),
        (
            ValueError,
            lambda: from_grads([(GRADS[0], MODEL.layers[0].kernel)] * 2, MODEL),
            ("two gradients for 'dense.kernel'", "tf.add_n"),
        ),
        (ValueError, lambda: from_grads([None] * 6, MODEL), ("found no gradient",)),
        (TypeError, lambda: from_grads(GRADS[0], MODEL), ("takes no such gradients", "One")),
        (TypeError, lambda: from_grads(iter(()), MODEL), ("takes no such gradients",)),
        (TypeError, lambda: from_grads("dense", MODEL), ("got str 'dense'",)),
        (TypeError, lambda: from_grads(GRADS, {"a": MODEL}), ("can't tell whose", "dict(a)")),
        (TypeError, lambda: from_grads(["x"] * 6, MODEL), ("for 'dense.kernel': got str 'x'",)),
        (
            TypeError,
            lambda: from_grads([np.ones(3, int)] * 6, MODEL),
            ("got dtype int64", "tf.cast"),
        ),
        (
            TypeError,
            lambda: from_grads([3.0], MODEL, variables=[3.0]),
            ("got float 3.0 among the variables",),
        ),
        (
            TypeError,
            lambda: from_grads({"dense.bias": GRADS[1]}, MODEL, variables=[]),
            ("variables beside dict(dense.bias)", "Leave the variables out"),
        ),
        (TypeError, lambda: from_grads(tape_of_ours(), MODEL, variables=[]), ("type Gradients",)),
        (RuntimeError, consumed, ("has consumed", "grads.copy()")),
    ],
)
def test_what_isnt_the_models_is_refused_by_name(kind, act, parts):
    call = "`GradientsParams.from_grads(grads, model, group)`"
    with pytest.raises(kind, match=message(call, *parts)):
        act()
