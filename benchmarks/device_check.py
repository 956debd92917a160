"""Checks tfloop on this machine's accelerator, and measures it there.

    python -m benchmarks.device_check            the GPU if TensorFlow sees one
    python -m benchmarks.device_check --quick    within a minute, and fewer loops are timed

Everything is computed on the device and on the CPU and compared; then loops are timed on the
device, all in turn, with equal losses. It prints one Markdown table, and the exit code is 1 if a
row isn't ok. Without an accelerator, the CPU is split in two and the second part plays the device:
that shows that this program works, and nothing about accelerators.
"""

import dataclasses
import gc
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfloop
from benchmarks import _loops, _measure, _tasks
from benchmarks._measure import Result
from benchmarks._workloads import Entry
from tfloop import GradientClipping, GradientsParams, ModuleOptimizer, ParamGroup

_EXACT, _MIXED = 1e-4, 5e-2
_HOST = "CPU:0"

Arrays = dict[str, np.ndarray]
Check = tuple[Callable[[], Arrays], float]
layers = keras.layers


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _batch(rows: int = 24) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Words, of which many repeat, numbers, and targets."""
    rng = _rng()
    words = rng.integers(0, 12, size=(rows, 4)).astype("int32")
    numbers, targets = rng.normal(size=(rows, 6)), rng.normal(size=(rows, 3))
    return (
        tf.constant(words),
        tf.constant(numbers.astype("float32")),
        tf.constant(targets.astype("float32")),
    )


def _model(dtype: str = "float32") -> keras.Model:
    """Sparse gradients for the table, dense ones for the rest."""
    keras.utils.set_random_seed(0)
    words, numbers = keras.Input((4,), dtype="int32"), keras.Input((6,))
    table = layers.Flatten()(layers.Embedding(20, 5, dtype=dtype)(words))
    hidden = layers.Dense(16, "tanh", dtype=dtype)(
        layers.Concatenate(dtype=dtype)([table, numbers])
    )
    return keras.Model([words, numbers], layers.Dense(3, dtype=dtype)(hidden))


def _gradients(model, batch, scaler=None) -> tuple[GradientsParams, tf.Tensor]:
    *inputs, targets = batch
    with tfloop.Tape(scaler=scaler) as tape:
        outputs = tf.cast(tfloop.train(model)(inputs), tf.float32)
        loss = tf.reduce_mean((outputs - targets) ** 2)
    return GradientsParams.from_grads(tape.backward(loss), model), loss


def _parameters(model) -> Arrays:
    return {path: variable.numpy() for path, variable in tfloop.named_parameters(model).items()}


def _dense(grads: GradientsParams) -> Arrays:
    return {path: tf.convert_to_tensor(grad).numpy() for path, grad in grads.items()}


def tape() -> Arrays:
    """`Tape`, `backward`, `wrt`, `from_grads` and the algebra, eager."""
    model, (words, numbers, targets) = _model(), _batch()
    with tfloop.Tape(watch=[numbers]) as recorded:
        loss = tf.reduce_mean((model([words, numbers]) - targets) ** 2)
    found = recorded.backward(loss)
    grads = GradientsParams.from_grads(found, model)
    return {
        "inputs": found.wrt(numbers).numpy(),
        "norm": grads.global_norm().numpy(),
        **_dense(grads.scale(2.0)),
    }


def steps(
    optimizer: type[keras.optimizers.Optimizer],
    *,
    compiled: bool = True,
    jit_compile: bool = False,
    dtype: str = "float32",
) -> Arrays:
    """Losses and parameters of some updates: two groups, two clippings, sparse and dense."""
    model, batch = _model(dtype), _batch()
    scaler = None if dtype == "float32" else tfloop.LossScaler(2.0**10)
    optim = ModuleOptimizer(
        optimizer(), clipping=GradientClipping.by_global_norm(0.5), scaler=scaler
    )
    table = ParamGroup.from_name("embedding")
    optim.with_group(table, optimizer(), GradientClipping.by_norm(0.1))

    def step(batch, lr):
        grads, loss = _gradients(model, batch, scaler)
        optim.step(lr, model, grads)
        return loss

    if compiled:
        step = tfloop.compile(step, jit_compile=jit_compile)
    losses = [float(step(batch, 0.02)) for _ in range(5)]
    slots = {
        f"{path}/{name}": np.asarray(value)
        for path in tfloop.named_parameters(model)
        for name, value in optim.state(path).items()
    }
    return {"losses": np.array(losses), **_parameters(model), **slots}


def accumulator() -> Arrays:
    """Three unequal micro-batches, one update."""
    model, batch = _model(), _batch()
    optim, window = ModuleOptimizer("adam"), tfloop.GradientsAccumulator(reduction="mean")

    @tfloop.compile
    def micro(piece):
        grads, _ = _gradients(model, piece)
        window.accumulate(model, grads, weight=tf.shape(piece[0])[0])

    @tfloop.compile
    def update(lr):
        optim.step(lr, model, window)

    for cut in (slice(0, 10), slice(10, 20), slice(20, 24)):
        micro(tuple(part[cut] for part in batch))
    update(0.02)
    return _parameters(model)


def microbatch() -> Arrays:
    """The same inside one call."""
    model, batch = _model(), _batch()

    @tfloop.compile
    def gradients(batch):
        return tfloop.microbatch(partial(_gradients, model), batch, num=5)

    grads, losses = gradients(batch)
    return {"losses": losses.numpy(), **_dense(grads)}


def views() -> Arrays:
    """Dropout and BatchNormalization while training, and neither while validating."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, use_bias=False),
            layers.BatchNormalization(momentum=0.5),
            layers.Dropout(0.5),
            layers.Dense(3),
        ]
    )
    model, optim, (_, numbers, targets) = tfloop.train(net), ModuleOptimizer("sgd"), _batch()

    @tfloop.compile
    def step(inputs, targets, lr):
        with tfloop.Tape() as tape:
            loss = tf.reduce_mean((model(inputs) - targets) ** 2)
        optim.step(lr, model, GradientsParams.from_grads(tape.backward(loss), model))
        return loss

    losses = [float(step(numbers, targets, 0.1)) for _ in range(3)]
    variables = {path: variable.numpy() for path, variable in tfloop.named_variables(net).items()}
    outputs = tfloop.compile(lambda inputs: model.valid()(inputs))(numbers)
    for path, variable in tfloop.named_variables(net).items():
        np.testing.assert_array_equal(variables[path], variable.numpy(), "validation has moved it")
    return {"losses": np.array(losses), "outputs": outputs.numpy(), **variables}


def checkpoint() -> Arrays:
    """What is restored is what was saved; the next update too."""
    with tempfile.TemporaryDirectory() as folder:
        model, optim, batch = _model(), ModuleOptimizer("adam"), _batch()

        @tfloop.compile
        def step(batch, lr):
            grads, _ = _gradients(model, batch)
            optim.step(lr, model, grads)

        saved = tfloop.Checkpoint(folder, model=model, optim=optim)
        step(batch, 0.02)
        saved.save(1)
        step(batch, 0.02)
        expected = _parameters(model)
        assert saved.restore() == 1
        step(batch, 0.02)
        found = _parameters(model)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-5, atol=1e-6, err_msg=path)
    return found


def moved(device: str) -> Arrays:
    """A copy on the device; gradients computed there are applied here."""
    with tf.device(_HOST):
        model = _model()
    copied = tfloop.to_device(model, device)
    _check_place([variable.value for variable in copied.variables], device)
    with tf.device(device):
        grads, _ = _gradients(copied, _batch())
    with tf.device(_HOST):
        ModuleOptimizer("sgd").step(0.1, model, grads.to_device(_HOST))
    return _parameters(model)


def loader() -> Arrays:
    """An epoch of shuffled batches, the last one short."""
    model, optim = _model(), ModuleOptimizer("sgd")
    arrays = tuple(part.numpy() for part in _batch(50))

    @tfloop.compile
    def step(batch, lr):
        grads, loss = _gradients(model, batch)
        optim.step(lr, model, grads)
        return loss

    batches = tfloop.DataLoader(arrays, batch_size=16, shuffle=0)
    return {
        "losses": np.array([float(step(batch, 0.1)) for batch in batches]),
        **_parameters(model),
    }


def places(device: str) -> Arrays:
    """Parameters, slots, buffers and counters are all on the device, also if a trace makes them."""
    before = {id(variable) for variable in _measure.live_variables()}
    with tf.device(device):
        model, batch, adam = _model(), _batch(), keras.optimizers.Adam()
    with tf.device(_HOST):  # which follow the model
        window = tfloop.GradientsAccumulator()
        optim = ModuleOptimizer(adam, skip_nonfinite=True)

    @tfloop.compile
    def step(batch, lr):
        grads, _ = _gradients(model, batch)
        window.accumulate(model, grads)
        optim.step(lr, model, window)

    step(batch, 0.02)
    gc.collect()  # counters that have followed
    made = [v for v in _measure.live_variables() if id(v) not in before]
    assert len(made) > 3 * len(model.variables)
    _check_place(made, device)
    return {}


def _check_place(variables: list[tf.Variable], device: str) -> None:
    for variable in variables:
        where = variable.device
        assert where.endswith(device), f"{variable.name} is on {where!r}, expected {device}"


def checks(device: str) -> dict[str, Check]:
    """Name -> what is computed, and how far the device may be from the CPU."""
    optimizers = keras.optimizers
    return {
        "`Tape`, `wrt`, algebra, eager": (tape, _EXACT),
        "`step`, SGD, two groups, clipping, sparse and dense": (
            partial(steps, optimizers.SGD),
            _EXACT,
        ),
        "the same, Adam": (partial(steps, optimizers.Adam), _EXACT),
        "the same, AdamW": (partial(steps, optimizers.AdamW), _EXACT),
        "the same, AdamW, eager": (partial(steps, optimizers.AdamW, compiled=False), _EXACT),
        "the same, AdamW, XLA": (partial(steps, optimizers.AdamW, jit_compile=True), _EXACT),
        "the same, SGD, mixed_float16, `LossScaler`": (
            partial(steps, optimizers.SGD, dtype="mixed_float16"),
            _MIXED,
        ),
        "`GradientsAccumulator`": (accumulator, _EXACT),
        "`microbatch`": (microbatch, _EXACT),
        "`train` and `valid`, Dropout, BatchNormalization": (views, _EXACT),
        "`Checkpoint`, there and back": (checkpoint, _EXACT),
        "`to_device`": (partial(moved, device), _EXACT),
        "`DataLoader`": (loader, _EXACT),
        "state lives with the parameters": (partial(places, device), _EXACT),
    }


def _difference(found: Arrays, expected: Arrays) -> float:
    """The largest distance of two arrays, relative to the norm of the second."""
    assert found.keys() == expected.keys(), f"{set(found) ^ set(expected)} on one side alone"
    distances = [0.0]
    for key, value in expected.items():
        scale = max(float(np.linalg.norm(value)), 1e-6)
        distances.append(float(np.linalg.norm(found[key] - value)) / scale)
    return max(distances) if np.all(np.isfinite(distances)) else np.inf


def checked(checks: dict[str, Check], device: str) -> Iterator[tuple[str, str, str]]:
    """The rows of some checks."""
    # It keeps 10 bits of a float32, which is no matter of ours.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    for name, (compute, tolerance) in checks.items():
        try:
            results = []
            for place in (device, _HOST):
                with tf.device(place):
                    results.append(compute())
            difference = _difference(*results)
        except Exception as error:  # the other rows are worth having
            yield name, "FAILED", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        word = "ok" if difference <= tolerance else "FAILED"
        yield name, word, f"differs by {difference:.0e}, at most {tolerance:.0e}"
    tf.config.experimental.enable_tensor_float_32_execution(True)


def _by_hand(task, model, data, *, jit_compile: bool, mixed: bool = False) -> _loops.Run:
    optimizer = task.keras_optimizer()
    if mixed:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    variables = model.trainable_variables

    @tf.function(jit_compile=jit_compile)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = _loops.cross_entropy(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss) if mixed else loss
        optimizer.apply(tape.gradient(scaled, variables), variables)
        return loss

    return lambda: [step(x, y) for x, y in data.batches]


def _compiled(task, model, data, *, jit_compile: bool, mixed: bool = False) -> _loops.Run:
    view, scaler = tfloop.train(model), tfloop.LossScaler() if mixed else None
    optim = task.tfloop_optimizer(scaler=scaler)

    def step(batch, lr):
        x, y = batch
        with tfloop.Tape(scaler=scaler) as tape:
            loss = _loops.cross_entropy(y, view(x))
        optim.step(lr, view, GradientsParams.from_grads(tape.backward(loss), view))
        return loss

    step = tfloop.compile(step, jit_compile=jit_compile)
    return lambda: [step(batch, _tasks.RATE) for batch in data.batches]


def _half(task: _tasks.Task) -> _tasks.Task:
    def build() -> keras.Model:
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return task.build()
        finally:
            keras.config.set_dtype_policy("float32")

    return dataclasses.replace(task, build=build)


def timed(device: str, *, quick: bool) -> Iterator[tuple[str, str, str]]:
    """The rows of all loops: how fast ours is, in the same rounds as the loop by hand."""
    networks = {"W2, MLP": (_tasks.MLP, 100), "W1, CNN": (_tasks.MNIST, 20)}
    if not quick:
        networks["W3, transformer"] = (_tasks.TRANSFORMER, 20)
    for name, (task, updates) in networks.items():
        updates = updates // 5 if quick else updates
        variants = {"": (task, {"jit_compile": False}, 1e-3)}
        if not quick or task is _tasks.MLP:
            variants[", XLA"] = (task, {"jit_compile": True}, 1e-3)
            variants[", mixed_float16"] = (
                _half(task),
                {"jit_compile": False, "mixed": True},
                _MIXED,
            )
        entries = []
        for variant, (of, options, tolerance) in variants.items():
            for label, loop in (("hand", _by_hand), ("ours", _compiled)):
                loop = partial(loop, **options)
                entries.append(Entry(f"{label}{variant}", "hand", loop, of, updates, tolerance))
        entries.append(Entry("fit", "hand", _loops.fit, task, updates))
        try:
            with tf.device(device):
                found = _measure.measure(entries, rounds=3 if quick else 15)
        except Exception as error:
            yield name, "FAILED", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        for variant in variants:
            others = [f"hand{variant}", *(["fit"] if not variant else [])]
            for other in others:
                yield _compared(name, variant, found[f"ours{variant}"], found[other], other)


def _compared(name: str, variant: str, ours: Result, other: Result, label: str) -> tuple:
    ratio = np.median(other.seconds / ours.seconds)
    same = ours.is_same_work and other.is_same_work
    label = "`fit`" if label == "fit" else "the loop by hand"
    figure = (
        f"{ratio:.2f} times as fast as {label}: {1e3 * np.median(ours.seconds):.3g} ms against "
        f"{1e3 * np.median(other.seconds):.3g} ms; losses differ by {ours.difference:.0e}"
    )
    return f"{name}{variant}: `compile`", "ok" if same else "FAILED", figure


def choose(name: str) -> tuple[str, str]:
    """The device, and a line that says what it is."""
    gpus = tf.config.list_physical_devices("GPU")
    if name == "gpu" and not gpus:
        raise app.UsageError(
            "--device=gpu finds no GPU. See what TensorFlow lists: "
            "`tf.config.list_physical_devices()`."
        )
    if gpus and name != "cpu":
        details = tf.config.experimental.get_device_details(gpus[0])
        return "GPU:0", f"On {details.get('device_name', 'a GPU')}."
    (cpu,) = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, parts)
    return "CPU:1", (
        "**Nothing was run on an accelerator.** One half of the CPU stood in for it: the rows show "
        "that this program works, and nothing more."
    )


def main(arguments: list[str]) -> None:
    """Checks, measures, prints."""
    if len(arguments) > 1:
        raise app.UsageError(f"Got {arguments[1]!r}, expected flags alone: --device=gpu.")
    device, text = choose(flags.FLAGS.device)
    print(f"{text} TensorFlow {tf.__version__}, Keras {keras.__version__}, {platform.machine()}.\n")
    print("| what | result | figures |\n|---|---|---|", flush=True)
    failed = 0
    for rows in (checked(checks(device), device), timed(device, quick=flags.FLAGS.quick)):
        for row in rows:
            print(f"| {' | '.join(row)} |", flush=True)
            failed += row[1] != "ok"
    if failed:
        sys.exit(f"{failed} rows aren't ok.")


if __name__ == "__main__":
    # Not at import: flags belong to the process, and tests import this.
    flags.DEFINE_enum("device", "auto", ["auto", "cpu", "gpu"], "What to check.")
    flags.DEFINE_bool("quick", False, "Three rounds of the smallest network.")
    app.run(main)
