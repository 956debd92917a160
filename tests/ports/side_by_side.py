"""Runs a published loop twice, written by hand and with tfloop, and compares what comes out.

A port is a file `test_<name>.py` that names its source and holds three functions:

    make() -> World             networks, metrics, random numbers
    by_hand(world) -> step      `tf.GradientTape` and Keras' optimizers, as the source has it
    with_tfloop(world) -> step

and the inputs of its steps. Both loops get worlds that are made alike, and the same inputs.
`README.md` beside this file has the table of their lengths.
"""

import ast
import pathlib
import types
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfloop

STEPS = 20


class World(types.SimpleNamespace):
    """What a loop works on. Models, metrics and variables in it are compared at the end."""


def assert_equal(
    make: Callable[[], World],
    by_hand: Callable[[World], Callable[..., Any]],
    with_tfloop: Callable[[World], Callable[..., Any]],
    inputs: Iterable[tuple],
    tolerance: float = 1e-6,
) -> None:
    """Runs both loops over the inputs: equal losses at each step, equal variables at the end."""
    inputs = list(inputs)
    assert len(inputs) == STEPS
    wanted, before, after = _run(make, by_hand, inputs)
    got, _, trained = _run(make, with_tfloop, inputs)
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    assert trained.keys() == after.keys()
    for path, value in after.items():
        gap = np.linalg.norm((trained[path] - value).ravel())
        norm = np.linalg.norm(value.ravel())
        assert gap <= tolerance * max(norm, 1.0), f"{path}: {gap} of {norm}"
    assert any((before[path] != after[path]).any() for path in after)
    assert np.isfinite(wanted).all()


def _run(make, loop, inputs):
    keras.utils.set_random_seed(0)
    world = make()
    before = _values(world)
    step = loop(world)
    losses = [np.hstack([np.ravel(loss) for loss in tf.nest.flatten(step(*x))]) for x in inputs]
    return np.array(losses, "float64"), before, _values(world)


def _values(world: World) -> dict[str, np.ndarray]:
    found = {}
    for name, thing in vars(world).items():
        if isinstance(thing, tf.Variable | keras.Variable):
            variables = {"": thing}
        elif isinstance(thing, keras.metrics.Metric):
            variables = dict(enumerate(thing.variables))
        elif isinstance(thing, keras.Layer):
            variables = tfloop.named_variables(thing)
        else:
            continue
        for path, variable in variables.items():
            found[f"{name}.{path}"] = tf.convert_to_tensor(variable).numpy().astype("float64")
    return found


def lines(file: pathlib.Path) -> tuple[int, int]:
    """Lines of code in the bodies of `by_hand` and `with_tfloop`."""
    source = file.read_text(encoding="utf-8")
    text = source.splitlines()
    counts = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            body = [line.strip() for line in text[node.lineno : node.end_lineno]]
            counts[node.name] = sum(bool(line) and not line.startswith("#") for line in body)
    return counts["by_hand"], counts["with_tfloop"]
