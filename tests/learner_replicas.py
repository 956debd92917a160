"""Run by `test_learner.py` in a process of its own: Keras' `fit` and the Learner on two devices.

Prints a word for each claim that holds.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import contextlib
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfloop

strategy = tfloop.strategy("cpu:2")
rng = np.random.default_rng(0)
x = rng.normal(size=(21, 3)).astype("float32")
y = x.sum(1, keepdims=True) + 1.0
head = tfloop.ParamGroup.from_name("head")


def build(scope):
    with scope:
        tfloop.seed(1)
        layers = [keras.layers.Dense(4, "tanh", kernel_regularizer="l2")]
        layers += [keras.layers.Dense(1, name="head")]
        model = keras.Sequential([keras.Input((3,)), *layers])
        metric = keras.metrics.MeanAbsoluteError("error")
    return model, metric


def optimizer():
    clipping = tfloop.GradientClipping.by_global_norm(0.5)
    optim = tfloop.ModuleOptimizer(keras.optimizers.Adam(0.05), clipping=clipping)
    return optim.with_group(head, keras.optimizers.SGD(0.1, momentum=0.9))


def assert_close(got, wanted):
    for ours, theirs in zip(got.weights, wanted.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)


def mean_of_squares(y, outputs):
    return tf.reduce_mean(tf.reduce_sum((outputs - y) ** 2, -1))


def learn(strategy, rates, loss, accumulate, rows, steps=1):
    model, metric = build(contextlib.nullcontext() if strategy is None else strategy.scope())
    optim = optimizer()
    learner = tfloop.Learner(
        model,
        optim,
        loss,
        lr=rates(),
        metrics=[metric],
        accumulate=accumulate,
        strategy=strategy,
    )
    data = tfloop.DataLoader((x[:rows], y[:rows]), batch_size=5)
    return model, optim, learner.fit(data, data, epochs=3, steps_per_execution=steps).history


cases = {
    "given": (lambda: None, "mse"),
    "groups": (lambda: tfloop.ModuleLearningRate(0.05).with_group(head, 0.1), mean_of_squares),
    "schedule": (
        lambda: tfloop.ModuleLrScheduler(0.05).with_group(head, multiplier=2.0),
        keras.losses.MeanSquaredError(),
    ),
}
# The last batch of 21 rows has one, for one replica alone; of 20 it is whole.
for name, accumulate, rows in (
    ("given", 1, 21),
    ("groups", 2, 21),
    ("schedule", 1, 20),
    ("schedule", 2, 20),
):
    rates, loss = cases[name]
    # Several steps a call where there are several replicas: the result is the same.
    model, optim, history = learn(strategy, rates, loss, accumulate, rows, steps=accumulate)
    single, other, wanted = learn(None, rates, loss, accumulate, rows)
    assert_close(model, single)
    assert history.keys() == wanted.keys()
    for key, numbers in wanted.items():
        np.testing.assert_allclose(history[key], numbers, rtol=1e-5)
    assert int(optim.iterations.numpy()) == int(other.iterations.numpy())
    print(f"{name}-{accumulate}")


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 2


found = []  # left in the middle of a window, and of an epoch
for stops in ([], [Stop()]):
    with tempfile.TemporaryDirectory() as folder:
        for callbacks in (stops, []) if stops else ([],):
            model, metric = build(strategy.scope())
            options = {"metrics": [metric], "accumulate": 2, "strategy": strategy}
            learner = tfloop.Learner(model, optimizer(), "mse", lr=0.05, **options)
            data = tfloop.DataLoader((x[:20], y[:20]), batch_size=5, shuffle=1)
            history = learner.fit(data, epochs=2, callbacks=callbacks, checkpoint=folder)
    found.append((model, history.history))
(single, wanted), (model, history) = found
assert_close(model, single)
for key, numbers in wanted.items():
    np.testing.assert_allclose(history[key], numbers, rtol=1e-6)
print("stopped-2")

halves = [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)]
for reduction in ("mean", "sum"):
    model, _ = build(strategy.scope())
    single, _ = build(contextlib.nullcontext())
    for net, options in ((model, {"reduction": reduction}), (single, {})):
        optim = tfloop.ModuleOptimizer(keras.optimizers.Adam(0.05), **options)
        optim.with_group(head, keras.optimizers.SGD(0.1))
        net.compile(optim.as_keras(net), "mse")
        net.fit(x[:20], y[:20], batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=halves)
    assert_close(model, single)
    assert int(model.optimizer.iterations.numpy()) == 10
    print(f"fit-{reduction}")

model, _ = build(strategy.scope())
optim = tfloop.ModuleOptimizer(keras.optimizers.SGD(), reduction=None)
model.compile(optim.as_keras(model), "mse")
with pytest.raises(ValueError, match="got reduction=None with 2 replicas"):
    model.fit(x[:20], y[:20], verbose=0)
print("fit-None")
