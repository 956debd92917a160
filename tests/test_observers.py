"""Looking changes nothing, and what a trace of any public method reads is followed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop
from tfloop import GradientsAccumulator, GradientsParams, ModuleOptimizer


def net():
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="stem"),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="head"),
        ]
    )
    return model


def zeros(model):
    return GradientsParams(
        {path: tf.zeros(v.shape) for path, v in tfloop.named_parameters(model).items()}
    )


def looked_at(optim, model):
    optim.summary(model)
    repr(optim)
    optim._assembly.fingerprint()
    optim.serialize()
    optim._assembly.records()
    int(optim.iterations), int(optim.skipped)
    [optim.state(path) for path in tfloop.named_parameters(model)]
    optim.as_keras(model).get_config()


@pytest.mark.parametrize("names", [["head"], None])
@pytest.mark.parametrize("looks", [False, True])
def test_exclusions_from_decay_are_those_of_keras_whether_somebody_looks_or_not(names, looks):
    def made(model):
        sgd = keras.optimizers.SGD(0.1, weight_decay=0.5)
        variables = None if names else [model.layers[-1].kernel]
        sgd.exclude_from_weight_decay(var_list=variables, var_names=names)
        return sgd

    model, plain = net(), net()
    optim = ModuleOptimizer(made(model))
    if looks:
        looked_at(optim, model)
    optim.step(None, model, zeros(model))
    bare = made(plain)
    bare.apply([tf.zeros((1, 1))] * 2, plain.trainable_variables)
    for ours, theirs in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    assert model.layers[-1].kernel.numpy() == 1.0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_that_is_looked_at_is_the_run_that_is_not(compiled):
    def run(looks):
        model, asked = net(), []

        def rate():
            asked.append(1)
            return 0.1 / len(asked)

        optim = ModuleOptimizer(keras.optimizers.AdamW(rate, weight_decay=0.1))

        def step(x):
            with tfloop.Tape() as tape:
                loss = tf.reduce_sum(model(x) ** 2)
            optim.step(None, model, GradientsParams.from_grads(tape.backward(loss), model))

        step = tfloop.compile(step) if compiled else step
        for _ in range(4):
            if looks:
                (
                    repr(optim),
                    optim._assembly.fingerprint(),
                    optim.serialize(),
                    optim._assembly.records(),
                )
            step(tf.ones((2, 1)))
        return [v.numpy() for v in model.variables], optim.serialize()

    (values, state), (seen, seen_state) = run(False), run(True)
    np.testing.assert_array_equal(values, seen)
    assert state == seen_state


@pytest.mark.parametrize("jit", [False, True])
def test_a_window_is_emptied_by_a_trace_made_before_its_first_gradient(jit):
    model, window = net(), GradientsAccumulator()
    clear = tfloop.compile(window.reset, jit_compile=jit)
    clear()

    def filled():
        for _ in range(2):
            window.accumulate(model, zeros(model).map(tf.ones_like))
        return window.grads()["head.kernel"].numpy().item()

    assert filled() == 2.0
    window.accumulate(model, zeros(model).map(tf.ones_like))
    clear()
    assert int(window.count) == 0
    assert filled() == 2.0


def test_norms_that_overflow_are_skipped_like_infinite_gradients():
    for clipping in (
        tfloop.GradientClipping.by_global_norm(1.0),
        tfloop.GradientClipping.by_norm(1.0),
        tfloop.GradientClipping.by_value(1.0),
    ):
        for value, skipped in ((1e20, clipping.kind != "value"), (np.inf, True), (1.0, False)):
            model = net()
            optim = ModuleOptimizer("sgd", clipping=clipping, skip_nonfinite=True)

            @tfloop.compile
            def step(value, model=model, optim=optim):
                grads = zeros(model).map(lambda grad: grad + value)
                optim.step(0.1, model, grads)

            step(tf.constant(value))
            assert int(optim.skipped) == skipped, (clipping, value)
            assert np.isfinite(model.layers[0].kernel.numpy()).all()
            assert (model.layers[0].kernel.numpy() == 1.0).all() == skipped


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("compiled", [False, True])
def test_every_gradient_is_asked_whether_it_is_finite(number, compiled):
    model = net()
    optim = ModuleOptimizer("sgd", skip_nonfinite=True)
    path = list(tfloop.named_parameters(model))[number]

    def step(value):
        grads = zeros(model)
        grads.register(path, tf.reshape(value, (1, 1)))
        optim.step(0.1, model, grads)

    step = tfloop.compile(step) if compiled else step
    step(tf.constant(np.nan, tf.float32))
    assert int(optim.skipped) == 1
    assert all(variable.numpy() == 1.0 for variable in model.variables)


class Complex(tf.Module):
    def __init__(self):
        self.w = tf.Variable(tf.complex(1.0, 0.0))
        self.v = tf.Variable(1.0)


def test_a_complex_parameter_is_refused_by_name_unless_a_group_freezes_it():
    model = Complex()
    with pytest.raises(ValueError, match=r"found a complex parameter: got 'w' of complex64"):
        ModuleOptimizer("sgd").build(model)
    optim = ModuleOptimizer("sgd", strict=False).with_group(tfloop.ParamGroup.from_name("w"), None)
    with pytest.warns(UserWarning, match="matches nothing"):  # that has a gradient here
        optim.build(model)
