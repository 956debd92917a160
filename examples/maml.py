"""MAML: learn weights from which one gradient step on ten points fits a new task.

A task is a sine with an amplitude and a phase of its own. The inner step runs the network with
tensors in place of its variables (`view.with_values`), so the adapted weights are a function of
the variables, and the outer tape differentiates through the step: second order.

It prints the error on new sines after 0, 1 and 5 steps on their ten points, of the meta-trained
network and of one that learned to predict all the sines at once, without the inner step.

    python examples/maml.py --quick
"""

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfloop

_UPDATES = flags.DEFINE_integer("updates", 5000, "Updates of the weights.", lower_bound=1)
_TASKS = flags.DEFINE_integer("tasks", 8, "Sines behind an update.", lower_bound=1)
_POINTS = flags.DEFINE_integer("points", 10, "Points to adapt to a sine.", lower_bound=1)
_INNER_LR = flags.DEFINE_float("inner_lr", 0.01, "Rate of the inner step.", lower_bound=0.0)
_LR = flags.DEFINE_float("lr", 1e-3, "Rate of the updates.", lower_bound=0.0)
_QUICK = flags.DEFINE_bool("quick", False, "A few updates, to see that everything works.")


def draw(random: np.random.Generator, tasks: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of some sines, to adapt and to test: x and y, `[tasks, 2, points, 1]`."""
    amplitude = random.uniform(0.1, 5.0, (tasks, 1, 1, 1))
    phase = random.uniform(0.0, np.pi, (tasks, 1, 1, 1))
    x = random.uniform(-5.0, 5.0, (tasks, 2, _POINTS.value, 1))
    return x.astype("float32"), (amplitude * np.sin(x - phase)).astype("float32")


def build_model() -> keras.Model:
    """One number in, one out."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((1,)),
            layers.Dense(40, "relu"),
            layers.Dense(40, "relu"),
            layers.Dense(1),
        ]
    )


def error(model, x, y) -> tf.Tensor:
    """The mean squared error."""
    return tf.reduce_mean((model(x) - y) ** 2)


def adapted(model, x, y, steps: int):
    """A view of the model after some inner steps on a task; the model itself is unchanged."""
    parameters = tfloop.named_parameters(model)
    values = {path: tf.convert_to_tensor(value) for path, value in parameters.items()}
    for _ in range(steps):
        with tfloop.Tape(watch=values.values()) as tape:
            loss = error(model.with_values(values), x, y)
        grads = tape.backward(loss, wrt=values.values())
        values = {
            path: value - _INNER_LR.value * grads.wrt(value) for path, value in values.items()
        }
    return model.with_values(values)


def make_step(net: keras.Model, inner_steps: int):
    """An update by the errors of the adapted networks on the points they didn't adapt to."""
    model = tfloop.train(net)
    optim = tfloop.ModuleOptimizer(
        keras.optimizers.Adam(), clipping=tfloop.GradientClipping.by_global_norm(10.0)
    )

    @tfloop.compile
    def step(x, y, lr):
        with tfloop.Tape() as tape:
            errors = [
                error(adapted(model, x[task, 0], y[task, 0], inner_steps), x[task, 1], y[task, 1])
                for task in range(_TASKS.value)
            ]
            loss = tf.add_n(errors) / len(errors)
        optim.step(lr, model, tape.backward(loss, model))
        return loss

    return step


def make_test(net: keras.Model, steps: int):
    """The error on a task after some steps."""
    model = tfloop.train(net)

    @tfloop.compile
    def test(x, y):
        return error(adapted(model, x[0], y[0], steps), x[1], y[1])

    return test


def main(_: list[str]) -> None:
    """Trains with and without the inner step, and adapts both to new sines."""
    updates = 1000 if _QUICK.value else _UPDATES.value
    new = draw(np.random.default_rng(1), tasks=200)

    print(f"Mean squared error on new sines from {_POINTS.value} points, {updates} updates:")
    print("                  0 steps  1 step  5 steps")
    for name, inner_steps in ("all at once", 0), ("meta-trained", 1):
        tfloop.seed(0)
        net = build_model()
        step = make_step(net, inner_steps)
        random = np.random.default_rng(0)
        for _ in range(updates):
            step(*draw(random, _TASKS.value), _LR.value)
        tests = [make_test(net, steps) for steps in (0, 1, 5)]
        after = [np.mean([test(x, y) for x, y in zip(*new, strict=True)]) for test in tests]
        print(f"  {name:<12}  " + "  ".join(f"{value:7.3f}" for value in after))


if __name__ == "__main__":
    app.run(main)
