"""Laws that hold for every model in the registry: paths, the plain loop, views, traces."""

import doctest
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    ZOO,
    assert_close,
    fill,
    floating,
    loss_of,
    values,
)

import tfloop
from tfloop._model.paths import is_variable, tf_variable, variable_id

STEPS = 3
RATE = 0.0625

every_model = pytest.mark.parametrize("name", ZOO)
every_light_model = pytest.mark.parametrize("name", [n for n, c in ZOO.items() if not c.heavy])


@every_model
def test_every_variable_has_exactly_one_path(name):
    case = ZOO[name]
    model = case.build()
    named = tfloop.named_variables(model)
    assert len({variable_id(v) for v in named.values()}) == len(named)
    assert {variable_id(v) for v in tfloop.named_parameters(model).values()} == {
        variable_id(v) for v in case.parameters(model)
    }
    if isinstance(model, keras.Model):
        assert {id(v) for v in model.variables} <= {id(v) for v in named.values()}
    if isinstance(model, tf.Module):
        assert {id(v) for v in model.variables} <= {variable_id(v) for v in named.values()}


def test_paths_dont_depend_on_what_was_built_before():
    light = [name for name, case in ZOO.items() if not case.heavy]
    forward = {name: ZOO[name].build() for name in light}
    forward |= {f"{name}, again": ZOO[name].build() for name in light}
    keras.backend.clear_session()
    backward = {name: ZOO[name].build() for name in reversed(light)}
    for name in light:
        paths = list(tfloop.named_variables(backward[name]))
        assert list(tfloop.named_variables(forward[name])) == paths
        assert list(tfloop.named_variables(forward[f"{name}, again"])) == paths


@pytest.mark.parametrize("name", [n for n, c in ZOO.items() if c.clones])
def test_a_keras_clone_has_the_paths_of_its_original(name):
    model = ZOO[name].build()
    clone = keras.models.clone_model(model)
    assert list(tfloop.named_variables(clone)) == list(tfloop.named_variables(model))


@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
@every_light_model
def test_the_loop_equals_the_plain_one(name, mode):
    """In float64: every variable, statistic and seed after three steps to 1e-12.

    With Adam; under XLA with SGD, which compiles in half the time (for the others see case 20).
    """
    kind = "SGD" if mode == "jit" else "Adam"
    with floating("float64"):
        reference_mode = mode if ZOO[name].is_random else "eager"
        wanted = plain_loop(name, reference_mode, kind, "float64")
        got, traces = our_loop(name, mode, getattr(keras.optimizers, kind)())
    assert_close(got, wanted, 1e-12)
    assert traces == (0 if mode == "eager" else 1)


@pytest.mark.parametrize("name", ["application", "embedding", "attention"])
def test_the_loop_equals_the_plain_one_in_float32(name):
    # Rounding differs between the modes, and batch norms over a few values enlarge it.
    wanted = plain_loop(name, "graph", "SGD", "float32")
    got, traces = our_loop(name, "graph", keras.optimizers.SGD())
    assert_close(got, wanted, 1e-6)
    assert traces == 1


@pytest.mark.parametrize("thing", [tfloop.named_parameters, tfloop.Tape, tfloop.total_loss])
def test_the_example_of_a_docstring_is_true(thing):
    example = doctest.DocTestParser().get_doctest(thing.__doc__, {}, thing.__name__, None, 0)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


@every_model
def test_a_valid_view_changes_nothing_and_gives_no_gradient(name):
    case = ZOO[name]
    model, x = case.build(), case.x()
    fill(model)
    before = values(model)
    watched = [x] if x.dtype.is_floating else []
    inside = tf.constant(2.0)
    with tfloop.Tape(watch=[*watched, inside], persistent=True) as tape:
        outputs = [case.call(tfloop.valid(model), x) for _ in range(2)]
        loss = inside * sum(loss_of(output) for output in outputs)
    assert values(model).keys() == before.keys()
    for path, value in values(model).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)
    grads = tape.backward(loss, wrt=[inside, *watched])
    assert grads.wrt(inside) is not None
    assert all(grads.wrt(tensor) is None for tensor in watched)
    loose = {id(v) for v in tf.nest.flatten(model) if is_variable(v)}
    touched = [v for v in tfloop.named_parameters(model).values() if id(v) not in loose]
    grads = tape.backward(loss, wrt=[inside, *touched])
    assert all(grads.wrt(variable) is None for variable in touched)


def plain_step(case, model, optimizer, trainable):
    with tf.GradientTape() as tape:
        flag = {} if isinstance(model, tf.Module) else {"training": True}
        loss = loss_of(case.call(model, case.x(), **flag))
    grads = tape.gradient(loss, [tf_variable(v) for v in trainable])
    # Dense: most of Keras' optimizers are wrong for repeated rows.
    pairs = [(tf.convert_to_tensor(g), v) for g, v in zip(grads, trainable, strict=True)]
    optimizer.apply_gradients(pairs)


@functools.cache
def plain_loop(name, mode, kind, dtype):
    """The hand-written loop on a twin: `tf.GradientTape` and Keras' optimizer, nothing of ours."""
    case = ZOO[name]
    model = case.build()
    fill(model)
    optimizer = getattr(keras.optimizers, kind)(RATE)
    trainable = case.parameters(model)
    optimizer.build(trainable)
    step = functools.partial(plain_step, case, model, optimizer, trainable)
    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "jit")
    for _ in range(STEPS):
        step()
    return values(model)


def our_loop(name, mode, optimizer):
    case = ZOO[name]
    root = case.build()
    fill(root)
    model = tfloop.train(root)
    optim = tfloop.ModuleOptimizer(optimizer)
    traces = []

    def step(lr):
        if mode != "eager":
            traces.append(1)
        with tfloop.Tape() as tape:
            loss = loss_of(case.call(model, case.x()))
        grads = tfloop.GradientsParams.from_grads(tape.backward(loss), root)
        optim.step(lr, root, grads)

    if mode == "graph":
        step = tf.function(step)
    if mode == "jit":
        step = tfloop.compile(step, jit_compile=True)
    for _ in range(STEPS):
        step(tf.constant(RATE))
    return values(root), len(traces)
