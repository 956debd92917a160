"""Reductions as objects: what a replica sends, and what is made of the sum."""

import ast
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tfloop
from tfloop import GradientsAccumulator, ModuleOptimizer
from tfloop._replicas.reduction import KINDS, Contribution, total

WEIGHTS = [tf.constant(weight, tf.float64) for weight in (3.0, 1.0, 0.0)]
GRADS = [tf.constant([4.0, -2.0]), tf.constant([8.0, 6.0]), tf.constant([np.nan, np.inf])]


def together(name, weighed=False):
    """What replicas with these gradients and weights get, by hand in place of the collective."""
    kind = KINDS[name]
    mine = [
        {"w": tf.cast(weight, tf.float32) * grad if weighed else grad}
        for weight, grad in zip(WEIGHTS[:2], GRADS[:2], strict=True)
    ]
    sent = [kind.sent(g, w, weighed) for g, w in zip(mine, WEIGHTS, strict=False)]
    sums = {"w": tf.add_n([grads["w"] for grads in sent])}
    return kind.received(sums, tf.add_n(WEIGHTS[:2]))["w"].numpy()


@pytest.mark.parametrize("weighed", [False, True])
def test_a_mean_is_weighted(weighed):
    np.testing.assert_allclose(together("mean", weighed), [5.0, 0.0])


def test_a_sum_of_windows_is_that_of_their_means():
    np.testing.assert_allclose(together("sum"), [12.0, 4.0])
    np.testing.assert_allclose(together("sum", weighed=True), [12.0, 4.0])


def test_a_weight_of_zero_adds_nothing_not_even_nan():
    sent = KINDS["mean"].sent({"w": GRADS[2]}, WEIGHTS[2], False)
    np.testing.assert_array_equal(sent["w"], [0.0, 0.0])


@pytest.mark.parametrize("name", KINDS)
def test_on_one_device_a_gradient_is_what_it_was(name):
    found = total(Contribution({"w": GRADS[0]}, WEIGHTS[0]), KINDS[name])
    np.testing.assert_array_equal(found.grads["w"], GRADS[0])
    summed = total(Contribution({"w": 3 * GRADS[0]}, WEIGHTS[0], weighed=True), KINDS[name])
    np.testing.assert_array_equal(summed.grads["w"], GRADS[0])


def test_those_who_take_a_name_say_which_there_are():
    with pytest.raises(ValueError, match="got reduction=str 'max', expected 'mean', 'sum' or None"):
        ModuleOptimizer("sgd", reduction="max")
    with pytest.raises(ValueError, match="got reduction=None, expected 'mean' or 'sum'. The mean"):
        GradientsAccumulator(reduction=None)


def test_no_other_room_compares_names_of_reductions():
    names = set(KINDS) - {None}
    asked = []
    for file in Path(tfloop.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare):
                parts = [p.value for p in ast.walk(node) if isinstance(p, ast.Constant)]
                asked += [f"{file}:{node.lineno}" for part in parts if part in names]
    assert asked == []
