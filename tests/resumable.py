"""A run with everything that has state, and its loop: what the tests of resuming share."""

import keras
import numpy as np
import tensorflow as tf

import tfloop
from tfloop import DataLoader, GradientsAccumulator, GradientsParams, ModuleOptimizer, ParamGroup


def build_run():
    """A run with dropout, two groups, a scheduler and shuffled data, and its compiled steps."""
    keras.utils.set_random_seed(5)
    net = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
        ]
    )
    model = tfloop.train(net)
    head = ParamGroup.from_name("dense_1")
    optim = ModuleOptimizer(keras.optimizers.Adam()).with_group(
        head, keras.optimizers.SGD(momentum=0.9), tfloop.GradientClipping.by_global_norm(0.5)
    )
    rates = tfloop.ModuleLrScheduler(
        keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    ).with_group(head, tfloop.schedulers.Noam(1.0, 4))
    window = GradientsAccumulator(reduction="mean")
    rng = np.random.default_rng(1)
    # All batches have one shape: a run that is taken up at another one traces in another order.
    data = rng.normal(size=(20, 3)).astype("float32"), rng.normal(size=(20, 2)).astype("float32")
    loader = DataLoader(data, batch_size=4, shuffle=7)
    loss_mean = keras.metrics.Mean()

    @tfloop.compile
    def micro(x, y):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        grads = GradientsParams.from_grads(tape.backward(loss), model)
        window.accumulate(model, grads, weight=tf.shape(x)[0])
        loss_mean.update_state(loss)

    @tfloop.compile
    def update():
        optim.step(rates.step(), model, window)

    objects = {
        "model": model,
        "optim": optim,
        "window": window,
        "rates": rates,
        "loader": loader,
        "loss": loss_mean,
        "epoch": tf.Variable(0, dtype=tf.int64),
    }
    return objects, micro, update


def run_on(objects, micro, update, step, epochs=3, each=None):
    """The loop of a run that can be taken up anywhere; a window may span two epochs."""
    epoch, window = objects["epoch"], objects["window"]
    while int(epoch) < epochs:
        for x, y in objects["loader"]:
            micro(x, y)
            step += 1
            if each is not None:
                each(step, x)
            if int(window.count) == 3:
                update()
        epoch.assign_add(1)
    if int(window.count):
        update()


def everything(objects):
    """Every variable of a run, as bytes."""
    values = {}
    for name in ("model", "rates"):
        values |= {f"{name}.{p}": v for p, v in tfloop.named_variables(objects[name]).items()}
    for number, group in enumerate(objects["optim"]._assembly.records()):
        values |= {f"optim.{number}.{p}": v for p, v in group.variables().items()}
    values |= {f"window.{key}": v for key, v in objects["window"].state().items()}
    values |= {f"loss.{n}": v for n, v in enumerate(objects["loss"].variables)}
    return {key: value.numpy().tobytes() for key, value in values.items()}
