"""The loops that are compared.

Each is a function of a task, a new model and data. It returns a function that trains on the data
once, and gives the losses of all batches, or their mean where `fit` keeps only that. No loop that
is written here reads a loss before its end.
"""

import atexit
import itertools
import json
import math
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfloop
from benchmarks import _peers
from benchmarks._tasks import NO_DECAY, RATE, Data, Task

Run = Callable[[], list[Any]]

cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Unavailable(Exception):  # noqa: N818
    """A loop can't run here; the text says why."""


def _hand_gradients(model, variables, x, y):
    with tf.GradientTape() as tape:
        loss = cross_entropy(y, model(x, training=True))
    return tape.gradient(loss, variables), loss


def _hand_step(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Callable:
    variables = model.trainable_variables

    def step(x, y):
        grads, loss = _hand_gradients(model, variables, x, y)
        optimizer.apply(grads, variables)
        return loss

    return step


def by_hand(task: Task, model: keras.Model, data: Data) -> Run:
    """One `tf.function` with `GradientTape` and Keras' optimizer, called for each step."""
    step = tf.function(_hand_step(model, task.keras_optimizer()))
    return lambda: [step(x, y) for x, y in data.batches]


def by_hand_fed(task: Task, model: keras.Model, data: Data) -> Run:
    """The same, and the batches come from `tf.data`."""
    step, dataset = tf.function(_hand_step(model, task.keras_optimizer())), data.dataset()
    return lambda: [step(x, y) for x, y in dataset]


def by_hand_eager(task: Task, model: keras.Model, data: Data) -> Run:
    """The same, without `tf.function`."""
    step = _hand_step(model, task.keras_optimizer())
    return lambda: [step(x, y) for x, y in data.batches]


def by_hand_in_groups(task: Task, model: keras.Model, data: Data) -> Run:
    """The same, with one optimizer for what decays and one for the rest."""
    variables = model.trainable_variables
    spared = [variable.name in NO_DECAY for variable in variables]
    decays = [not is_spared for is_spared in spared]
    groups = [list(itertools.compress(variables, chosen)) for chosen in (decays, spared)]
    optimizers = [keras.optimizers.AdamW(RATE, weight_decay=d) for d in (task.weight_decay, 0.0)]

    @tf.function
    def step(x, y):
        grads, loss = _hand_gradients(model, groups, x, y)
        for optimizer, grads_of_group, group in zip(optimizers, grads, groups, strict=True):
            optimizer.apply(grads_of_group, group)
        return loss

    return lambda: [step(x, y) for x, y in data.batches]


def fit(task: Task, model: keras.Model, data: Data, *, steps_per_execution: int = 1) -> Run:
    """One epoch of Keras' `fit`."""
    model.compile(task.keras_optimizer(), cross_entropy, steps_per_execution=steps_per_execution)
    dataset = data.dataset()
    return lambda: model.fit(dataset, shuffle=False, verbose=0).history["loss"]


def train_on_batch(task: Task, model: keras.Model, data: Data) -> Run:
    """Keras' `train_on_batch`, which reads each loss."""
    model.compile(task.keras_optimizer(), cross_entropy)
    return lambda: [model.train_on_batch(x, y) for x, y in data.batches]


def _gradients(model, x, y):
    with tfloop.Tape() as tape:
        loss = cross_entropy(y, model(x))
    return tfloop.GradientsParams.from_grads(tape.backward(loss), model), loss


def _step(model: keras.Model, optim: tfloop.ModuleOptimizer) -> Callable:
    model = tfloop.train(model)

    def step(batch, lr):
        grads, loss = _gradients(model, *batch)
        optim.step(lr, model, grads)
        return loss

    return step


def compiled(task: Task, model: keras.Model, data: Data) -> Run:
    """A compiled step of tfloop, called for each step."""
    step = tfloop.compile(_step(model, task.tfloop_optimizer()))
    return lambda: [step(batch, RATE) for batch in data.batches]


def compiled_fed(task: Task, model: keras.Model, data: Data) -> Run:
    """The same, and the batches come from a `DataLoader`."""
    step, loader = tfloop.compile(_step(model, task.tfloop_optimizer())), data.loader()
    return lambda: [step(batch, RATE) for batch in loader]


def eager(task: Task, model: keras.Model, data: Data) -> Run:
    """The same, not compiled."""
    step = _step(model, task.tfloop_optimizer())
    return lambda: [step(batch, RATE) for batch in data.batches]


def many_steps_a_call(
    task: Task,
    model: keras.Model,
    data: Data,
    *,
    steps: int = 50,
    jit_compile: bool = False,
    fed: bool = False,
) -> Run:
    """The same by `fn.run`, on the batches in memory or fed by a `DataLoader`."""
    step = tfloop.compile(_step(model, task.tfloop_optimizer()), jit_compile=jit_compile)
    loader = data.loader() if fed else data.batches

    def run():
        batches, calls = iter(loader), math.ceil(len(loader) / steps)
        return [step.run(batches, RATE, steps=steps) for _ in range(calls)]

    return run


def peer(task: Task, model: keras.Model, data: Data, *, name: str, python: str) -> Run:
    """A loop of `_peers.py`, in a child process that waits while others run."""
    weights = model.get_weights()
    layers = {f"{'wb'[n % 2]}{n // 2}": array for n, array in enumerate(weights)}
    x, y = (a.reshape(-1, data.batch_size, *a.shape[1:]) for a in (data.x, data.y))
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/given.npz", x=x, y=y, **layers)
        command = [python, _peers.__file__, name, f"{folder}/given.npz"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        greeting = child.stdout.readline().strip()
    atexit.register(child.communicate)  # It ends with its input.
    if greeting != "ready":
        raise Unavailable(greeting or "failed")

    def run():
        print("run", file=child.stdin, flush=True)
        return [json.loads(child.stdout.readline())]

    return run


def hand_accumulation(task: Task, model: keras.Model, data: Data, *, scatter: bool = False) -> Run:
    """Micro-steps add to variables, an update takes the mean; `scatter` keeps rows sparse."""
    optimizer, variables = task.keras_optimizer(), model.trainable_variables
    buffers = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in variables]

    @tf.function
    def micro_step(x, y):
        grads, loss = _hand_gradients(model, variables, x, y)
        for buffer, grad in zip(buffers, grads, strict=True):
            if scatter and isinstance(grad, tf.IndexedSlices):
                buffer.scatter_add(grad)
            else:
                buffer.assign_add(tf.convert_to_tensor(grad))
        return loss

    @tf.function
    def update():
        optimizer.apply([buffer / task.micro_batches for buffer in buffers], variables)
        for buffer in buffers:
            buffer.assign(tf.zeros_like(buffer))

    def run():
        losses = []
        for window in _windows(task, data):
            losses += [micro_step(x, y) for x, y in window]
            update()
        return losses

    return run


def keras_accumulation(task: Task, model: keras.Model, data: Data) -> Run:
    """The hand loop with the accumulation of Keras' optimizer."""
    optimizer = task.keras_optimizer(gradient_accumulation_steps=task.micro_batches)
    step = tf.function(_hand_step(model, optimizer))
    return lambda: [step(x, y) for x, y in data.batches]


def accumulator(task: Task, net: keras.Model, data: Data) -> Run:
    """Micro-steps with a `GradientsAccumulator`, and an update."""
    model, optim = tfloop.train(net), task.tfloop_optimizer()
    window = tfloop.GradientsAccumulator(reduction="mean")

    @tfloop.compile
    def micro_step(batch):
        grads, loss = _gradients(model, *batch)
        window.accumulate(model, grads)
        return loss

    @tfloop.compile
    def update(lr):
        optim.step(lr, model, window)

    def run():
        losses = []
        for batches in _windows(task, data):
            losses += [micro_step(batch) for batch in batches]
            update(RATE)
        return losses

    return run


def microbatch(task: Task, net: keras.Model, data: Data, *, jit_compile: bool = False) -> Run:
    """The large batch in one call, cut by `tfloop.microbatch`."""
    model, optim = tfloop.train(net), task.tfloop_optimizer()

    @tfloop.compile(jit_compile=jit_compile)
    def step(batch, lr):
        grads, losses = tfloop.microbatch(
            lambda piece: _gradients(model, *piece), batch, num=task.micro_batches
        )
        optim.step(lr, model, grads)
        return losses

    large = [
        tuple(tf.concat(parts, axis=0) for parts in zip(*batches, strict=True))
        for batches in _windows(task, data)
    ]
    return lambda: [step(batch, RATE) for batch in large]


def _nothing() -> Callable:
    variable = tf.Variable(1.0)
    return lambda x, y, lr: variable + lr


def empty_function(task: Task, model: keras.Model, data: Data) -> Run:
    """A `tf.function` that does nothing, called on all batches."""
    step, lr = tf.function(_nothing()), tf.constant(RATE)
    return lambda: [step(x, y, lr) for x, y in data.batches]


def empty_raw_call(task: Task, model: keras.Model, data: Data) -> Run:
    """The same by the op below every `tf.function`: nothing from Python can be faster."""
    lr = tf.constant(RATE)
    function = tf.function(_nothing()).get_concrete_function(*data.batches[0], lr)
    call, captured = tf.raw_ops.StatefulPartitionedCall, function.captured_inputs
    return lambda: [
        call(args=[x, y, lr, *captured], Tout=[tf.float32], f=function)[0] for x, y in data.batches
    ]


def empty_compiled(task: Task, model: keras.Model, data: Data) -> Run:
    """The same by `tfloop.compile`, with the rate as a number."""
    step = tfloop.compile(_nothing())
    return lambda: [step(x, y, RATE) for x, y in data.batches]


def tf_data_epoch(task: Task, model: None, data: Data) -> Run:
    """`tf.data` as in its guide: shuffle, then batch. Counts the samples."""
    dataset = tf.data.Dataset.from_tensor_slices((data.x, data.y))
    dataset = dataset.shuffle(len(data.x), seed=0).batch(data.batch_size)
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    return lambda: [sum(len(y) for _, y in dataset)]


def loader_epoch(task: Task, model: None, data: Data) -> Run:
    """The same with a `DataLoader`."""
    loader = tfloop.DataLoader((data.x, data.y), batch_size=data.batch_size, shuffle=0)
    return lambda: [sum(len(y) for _, y in loader)]


def _windows(task: Task, data: Data) -> list[list]:
    """The batches of each update."""
    size = task.micro_batches
    return [data.batches[n : n + size] for n in range(0, len(data.batches), size)]
