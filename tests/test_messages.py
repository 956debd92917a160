"""Words of error messages: short lists, near misses, names of things."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfloop._checks import messages


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "none"),
        (["a"], "'a'"),
        (["a", "b"], "'a', 'b'"),
        (list("abcde"), "'a', 'b', 'c', 'd', 'e'"),
        (list("abcdefg"), "'a', 'b', 'c', 'd', 'e' and 2 more"),
        ((n for n in "ab"), "'a', 'b'"),
        ([1, None], "1, None"),
    ],
)
def test_lists_show_five_names_and_count_the_rest(names, text):
    assert messages.listed(names) == text


KNOWN = ["encoder.layernorm.gamma", "encoder.dense.kernel", "head.kernel", "head.bias"]


@pytest.mark.parametrize(
    ("wanted", "near"),
    [
        ("layer_norm", ["encoder.layernorm.gamma"]),
        ("LayerNorm", ["encoder.layernorm.gamma"]),
        ("head.kernal", ["head.kernel"]),
        ("encoder.dens.kernel", ["encoder.dense.kernel"]),
        ("kernel", ["encoder.dense.kernel", "head.kernel"]),
        ("xyzzy", []),
        ("", []),
    ],
)
def test_near_misses_ignore_case_and_punctuation(wanted, near):
    assert messages.near_misses(wanted, KNOWN)[: len(near)] == near
    assert bool(messages.near_misses(wanted, KNOWN)) == bool(near)


def test_near_misses_are_few_and_the_best_comes_first():
    many = [f"block_{i}.kernel" for i in range(20)]
    assert len(messages.near_misses("block.kernel", many)) == 3
    assert messages.near_misses("block_7.kernel", many)[0] == "block_7.kernel"
    assert messages.near_misses("x", []) == []


def test_a_question_is_asked_only_where_something_is_near():
    assert messages.did_you_mean("head.bia", KNOWN).startswith(" Did you mean 'head.bias'")
    assert messages.did_you_mean("xyzzy", KNOWN) == ""


class Named:
    name = "x"


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (None, "None"),
        (True, "bool True"),
        (3, "int 3"),
        (0.5, "float 0.5"),
        ("net", "str 'net'"),
        ("x" * 500, "str '" + "x" * 29 + "..." + "x" * 29 + "'"),
        ({"g": 1, 2: 3}, "dict(g, 2)"),
        ({i: i for i in range(9)}, "dict(0, 1, 2, 3, 4, ...)"),
        ({}, "dict()"),
        ([1], "an object of type list"),
        (np.ones(2), "an object of type ndarray"),
        (keras.layers.Dense, "the class Dense"),
        (Named(), "'x' (Named)"),
    ],
)
def test_things_are_named_as_their_owner_would(thing, text):
    assert messages.described(thing) == text


def test_models_variables_and_tensors_are_named_by_kind():
    assert messages.described(keras.layers.Dense(2, name="d")) == "'d' (Dense)"
    assert messages.described(tf.Variable(1.0, name="w")) == "'w:0' (ResourceVariable)"
    assert "EagerTensor" in messages.described(tf.constant(1.0))
