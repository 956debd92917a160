"""The registry of ways to run a program, and what it is compared with.

To add one, write what is done to a step:

    @way("graph")
    def in_another_thread(program):
        return play(program, TFLOOP, lambda step: in_a_thread(tfloop.compile(step)))

The first argument names the reference, the loop by hand: `eager`; `graph`, one `tf.function`;
`jit`, the same by XLA. `play` makes the world of a program, calls the step and gives a `Record` of
all that could be seen. `check(program, way)` compares the two and raises an AssertionError that
says where they part.
"""

import contextlib
import copy
import dataclasses
import functools
import io
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from kits import PLAIN, TFLOOP, PlainOptimizer
from programs import CALLS, Keywords, Program

import tfloop

HALF = CALLS // 2
TOLERANCE = 1e-6
NARROW = 1e-3


# What is seen.


@dataclasses.dataclass
class Record:
    """What a run left: the outputs of each call (or the error it raised), and the state after."""

    outputs: list[Any]
    state: dict[str, Any]


def flat(thing):
    """Keys and arrays of any structure of tensors, in one order."""
    if isinstance(thing, dict):
        return {f"{k}/{p}": v for k in sorted(thing) for p, v in flat(thing[k]).items()}
    if isinstance(thing, (list, tuple)):
        return {f"{n}/{p}": v for n, part in enumerate(thing) for p, v in flat(part).items()}
    if isinstance(thing, tf.RaggedTensor):
        thing = thing.to_tensor()
    if isinstance(thing, tf.SparseTensor):
        thing = tf.sparse.to_dense(thing)
    return (
        {} if thing is None else {"": np.asarray(thing.numpy() if tf.is_tensor(thing) else thing)}
    )


def one_of(variable):
    """The value of a variable; on replicas the same on all."""
    variable = variable._value if isinstance(variable, keras.Variable) else variable
    held = getattr(variable, "values", None)
    on_read = "ON_READ" in str(getattr(variable, "synchronization", ""))
    tells_replicas_apart = "seed_generator" in getattr(variable, "name", "")
    if isinstance(held, tuple) and not on_read and not tells_replicas_apart:
        first, *others = [part.numpy() for part in held]
        for other in others:
            np.testing.assert_array_equal(first, other, err_msg="replicas differ")
        return first
    return variable.numpy()


def state_of(kit, world):
    """All state that a world holds, as key -> array."""
    found: dict[str, Any] = {}
    for name, thing in world.parts().items():
        if isinstance(thing, (PlainOptimizer, tfloop.ModuleOptimizer)):
            root = world.other if name == "optim_of_other" else world.net
            found[name] = kit.slots(thing, root)
        elif isinstance(thing, (keras.layers.Layer, tf.Module)):
            if getattr(thing, "built", True):
                found[name] = [one_of(v) for v in tfloop.named_variables(thing).values()]
        elif isinstance(thing, tf.Variable):
            found[name] = one_of(thing)
        elif isinstance(thing, (tf.random.Generator, keras.random.SeedGenerator)):
            found[name] = one_of(thing.state)
        elif isinstance(thing, keras.metrics.Metric):
            found[name] = [one_of(v) for v in thing.variables]
        elif isinstance(thing, tf.lookup.experimental.MutableHashTable):
            keys, values = thing.export()
            found[name] = dict(zip(map(str, keys.numpy()), values.numpy(), strict=True))
        elif isinstance(thing, tf.queue.QueueBase):
            found[name] = thing.size().numpy()
        elif hasattr(thing, "text"):
            found[name] = thing.text()
        elif isinstance(thing, list):
            found[name] = list(thing)
    return flat(found)


def assert_same(got, expected, exact, where, tolerance=TOLERANCE):
    """Equal to the last bit, or floats to a part of the norm, or of 1 where that is larger."""
    assert got.keys() == expected.keys(), (where, sorted(got.keys() ^ expected.keys()))
    for key, value in expected.items():
        other, at = got[key], f"{where}: {key}"
        assert other.shape == value.shape, (at, other.shape, value.shape)
        assert other.dtype.kind == value.dtype.kind, (at, other.dtype, value.dtype)
        if exact or value.dtype.kind not in "fcV" or not np.isfinite(value).all():
            np.testing.assert_array_equal(other, value, err_msg=at)
        else:
            kind = "c16" if value.dtype.kind == "c" else "f8"
            apart = np.linalg.norm(other.astype(kind) - value.astype(kind))
            limit = tolerance * max(np.linalg.norm(value.astype(kind)), 1.0)
            assert apart <= limit, f"{at}: got {other}, expected {value}"


def shapes(record):
    outputs = [{k: np.asarray(v.shape) for k, v in found.items()} for found in record.outputs]
    return Record(outputs, {k: np.asarray(v.shape) for k, v in record.state.items()})


# How a program is played.


def arguments(program, number):
    inputs = program.inputs(number)
    if inputs and isinstance(inputs[-1], Keywords):
        return inputs[:-1], dict(inputs[-1])
    return inputs, {}


def made(program, kit):
    """The world of a program, the same each time."""
    keras.utils.set_random_seed(0)
    return program.make(kit)


def outcome(program, called, number):
    """What a call gives; where the program is to raise, that is an outcome, too."""
    args, kwargs = arguments(program, number)
    try:
        return flat(called(*args, **kwargs))
    except tf.errors.InvalidArgumentError as error:
        if not program.raises:
            raise
        return {"raised": np.asarray(type(error).__name__)}


def play(program, kit, wrap, *, world=None, numbers=range(CALLS), anew=False, between=None):
    """Calls the step of a program and says what was seen.

    Args:
      program: It.
      kit: With which it is written.
      wrap: step -> what is called.
      world: One that was in use; by default a new one.
      numbers: Of the calls.
      anew: Wrap again after the change, as one must with a `tf.function`.
      between: Is given the world and what is called before each call.
    """
    world = made(program, kit) if world is None else world
    called = wrap(world.function())
    outputs = []
    for number in numbers:
        if number == HALF and program.changes:
            world.change()
            called = wrap(world.function()) if anew else called
        if between is not None:
            between(world, called)
        outputs.append(outcome(program, called, number))
    return Record(outputs, state_of(kit, world))


def hand(step):
    return tf.function(step)


def hand_jit(step):
    return tf.function(step, jit_compile=True)


@functools.lru_cache(maxsize=16)
def reference(program, kind):
    """The loop by hand. `halves` is `graph` in two processes, so with two traces."""
    wrap = {"eager": lambda step: step, "jit": hand_jit}.get(kind, hand)
    if kind != "halves":
        return play(program, PLAIN, wrap, anew=True)
    world = made(program, PLAIN)
    first = play(program, PLAIN, wrap, world=world, numbers=range(HALF))
    second = play(program, PLAIN, wrap, world=world, numbers=range(HALF, CALLS), anew=True)
    return Record(first.outputs + second.outputs, second.state)


# The ways.


@dataclasses.dataclass(frozen=True)
class Way:
    """One entry of the registry.

    Attributes:
      play: program -> Record.
      reference: program -> Record.
      takes: Can this program be run this way at all? What merely fails is a row of `CANT`.
      process: `replicas`: it needs a process with two devices. `restored`: one that goes on.
    """

    name: str
    play: Callable[[Program], Record]
    reference: Callable[[Program], Record]
    takes: Callable[[Program], bool]
    process: str | None = None


WAYS: dict[str, Way] = {}


def way(kind, takes=lambda program: True, process=None):
    """Registers a way under its name."""

    def register(run):
        given = kind if callable(kind) else functools.partial(reference, kind=kind)
        WAYS[run.__name__] = Way(run.__name__, run, given, takes, process)
        return run

    return register


def check(program, way, by_chance=False):
    """Raises an AssertionError where the two records differ; `by_chance`, in their shapes."""
    got, expected = way.play(program), way.reference(program)
    assert len(got.outputs) == len(expected.outputs)
    if by_chance:
        got, expected = shapes(got), shapes(expected)
    tolerance = NARROW if program.narrow and way.process == "replicas" else TOLERANCE
    exact = not program.trains and "jit" not in way.name and way.process != "replicas"
    for number, pair in enumerate(zip(got.outputs, expected.outputs, strict=True)):
        assert_same(*pair, exact, f"call {number}", tolerance)
    assert_same(got.state, expected.state, exact, "state", tolerance)


def around(wrap, context):
    """Each call in a context of its own."""

    def wrapped(step):
        called = wrap(step)

        def call(*args, **kwargs):
            with context():
                return called(*args, **kwargs)

        return call

    return wrapped


@way("eager")
def eager(program):
    return play(program, TFLOOP, lambda step: step)


@way("graph")
def function_by_the_user(program):
    return play(program, TFLOOP, hand, anew=True)


@way("graph")
def compiled(program):
    return play(program, TFLOOP, tfloop.compile)


@way("jit")
def jit(program):
    return play(program, TFLOOP, tfloop.compile(jit_compile=True))


def many(jit_compile=False):
    """`run`, four steps a call where the arguments behind the batch allow that."""

    def outputs_of(program, world, step):
        has_batch = len(arguments(program, 0)[0]) > 0
        with_batch = step if has_batch else lambda _, *args, **kwargs: step(*args, **kwargs)
        compiled = tfloop.compile(with_batch, jit_compile=jit_compile)
        outputs, number = [], 0
        while number < CALLS:
            if number == HALF:
                world.change()
            batches, (args, kwargs) = _alike(program, number, has_batch)
            stack = compiled.run(iter(batches), *args, steps=len(batches), **kwargs)
            for row in range(len(batches)):
                outputs.append(flat(tf.nest.map_structure(lambda t, row=row: t[row], stack)))
            number += len(batches)
        return outputs

    def run(program):
        world = made(program, TFLOOP)
        outputs = outputs_of(program, world, world.function())
        return Record(outputs, state_of(TFLOOP, world))

    return run


def _alike(program, number, has_batch):
    """Batches from a call on that go with one rest, up to half of the calls."""
    found, shared = [], None
    for following in range(number, HALF if number < HALF else CALLS):
        args, kwargs = arguments(program, following)
        batch, *rest = args if has_batch else (tf.constant(0.0), *args)
        same = shared is None or str(shared) == str((rest, kwargs))
        if not same:
            break
        shared = rest, kwargs
        found.append(batch)
    return found, shared


@way("graph")
def several_steps_a_call(program):
    return many()(program)


@way("jit")
def several_steps_a_call_by_jit(program):
    return many(jit_compile=True)(program)


@functools.cache
def one_device():
    # Not made on import: it fixes the devices.
    return tf.distribute.OneDeviceStrategy("/CPU:0")


def in_scope(program, kit, strategy, wrap, anew=False):
    with strategy.scope():
        world = made(program, kit)
    world._scope = strategy.scope  # What is made by a change is made there, too.
    return play(program, kit, wrap, world=world, anew=anew)


def on_one_replica_by_hand(program):
    strategy = one_device()
    wrap = lambda step: tf.function(lambda *a, **k: strategy.run(step, a, k))  # noqa: E731
    return in_scope(program, PLAIN, strategy, wrap, anew=True)


@way(on_one_replica_by_hand)
def one_replica(program):
    strategy = one_device()
    wrap = lambda step: tfloop.compile(step, strategy=strategy)  # noqa: E731
    return in_scope(program, TFLOOP, strategy, wrap)


@way("graph")
def under_a_device(program):
    return play(program, TFLOOP, around(tfloop.compile, lambda: tf.device("CPU:0")))


@way("graph")
def under_an_open_tape(program):
    return play(program, TFLOOP, around(tfloop.compile, tf.GradientTape))


@contextlib.contextmanager
def functions_run_eagerly():
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


@way(lambda program: play(program, PLAIN, around(hand, functions_run_eagerly), anew=True))
def functions_run_as_python(program):
    return play(program, TFLOOP, around(tfloop.compile, functions_run_eagerly))


@contextlib.contextmanager
def numerics_checked():
    tf.debugging.enable_check_numerics()
    try:
        yield
    finally:
        tf.debugging.disable_check_numerics()


def by_hand_with_numerics_checked(program):
    with numerics_checked():
        return play(program, PLAIN, hand, anew=True)


@way(by_hand_with_numerics_checked)
def with_numerics_checked(program):
    with numerics_checked():
        return play(program, TFLOOP, tfloop.compile)


def backwards(wrap):
    """`x -> (y, dy/dx)` of the sum, by a tape around the call."""

    def wrapped(step):
        called = wrap(step)

        def call(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = called(x)
            return y, tape.gradient(y, x)

        return call

    return wrapped


def forwards(wrap):
    """`x -> (y, its tangent)`, by an accumulator around the call."""

    def wrapped(step):
        called = wrap(step)

        def call(x):
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
                y = called(x)
            return y, accumulator.jvp(y)

        return call

    return wrapped


def is_pure(program):
    return program.pure


@way(lambda program: play(program, PLAIN, backwards(hand)), takes=is_pure)
def differentiated_from_outside(program):
    return play(program, TFLOOP, backwards(tfloop.compile))


@way(lambda program: play(program, PLAIN, forwards(hand)), takes=is_pure)
def differentiated_forwards_from_outside(program):
    return play(program, TFLOOP, forwards(tfloop.compile))


@way("graph", takes=lambda program: not program.bare)
def inside_another_compiled_step(program):
    return play(program, TFLOOP, lambda step: nested(tfloop.compile, step))


@way("graph", takes=lambda program: not program.changes)
def inside_a_function_of_the_user(program):
    return play(program, TFLOOP, lambda step: nested(hand, step))


def nested(outer, step):
    inner = tfloop.compile(step)
    return outer(lambda *args, **kwargs: inner(*args, **kwargs))


@way("graph")
def each_call_in_another_thread(program):
    def wrap(step):
        called = tfloop.compile(step)

        def call(*args, **kwargs):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(called, *args, **kwargs).result()

        return call

    return play(program, TFLOOP, wrap)


def in_any_order(program):
    found = reference(program, "graph")
    return Record(sorted(found.outputs, key=str), found.state)


@way(in_any_order, takes=lambda program: program.order_free)
def all_calls_at_once(program):
    world = made(program, TFLOOP)
    called, start = tfloop.compile(world.function()), threading.Barrier(CALLS)

    def call(number):
        start.wait()
        return outcome(program, called, number)

    with ThreadPoolExecutor(CALLS) as pool:
        outputs = [*pool.map(call, range(CALLS))]
    return Record(sorted(outputs, key=str), state_of(TFLOOP, world))


def deep_copy(thing):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Keras' own, of NumPy 2
        return copy.deepcopy(thing)


class Trainer:
    """A step as a method that is compiled, as most people write it."""

    def __init__(self, world):
        self.world = world

    @tfloop.compile
    def step(self, *args, **kwargs):
        return self.world._step(self.world, *args, **kwargs)


def method(program, trainer, numbers):
    return play(
        program,
        TFLOOP,
        lambda _: lambda *a, **k: trainer.step(*a, **k),
        world=trainer.world,
        numbers=numbers,
    )


@way("graph", takes=lambda program: not program.bare)
def method_of_a_shallow_copy(program):
    """The copy is given a world of its own, and goes by that."""
    first = Trainer(made(program, TFLOOP))
    method(program, first, range(3))
    before = state_of(TFLOOP, first.world)
    second = copy.copy(first)
    second.world = made(program, TFLOOP)
    found = method(program, second, range(CALLS))
    assert_same(state_of(TFLOOP, first.world), before, True, "the original")
    return found


@way("halves", takes=lambda program: program.saved and program.copies)
def method_of_a_deep_copy(program):
    """The copy goes on where the original stood, and leaves it alone."""
    first = Trainer(made(program, TFLOOP))
    start = method(program, first, range(HALF))
    second = deep_copy(first)
    found = method(program, second, range(HALF, CALLS))
    assert_same(state_of(TFLOOP, first.world), start.state, True, "the original")
    return Record(start.outputs + found.outputs, found.state)


def look(world, called, folder):
    """Calls everything that only looks."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Keras' own, of NumPy 2
        repr(called), getattr(called, "trace_count", None)
        for name, thing in world.parts().items():
            repr(thing), hash(id(thing)), dir(thing)
            if isinstance(thing, (keras.layers.Layer, tf.Module)) and getattr(thing, "built", True):
                tfloop.named_parameters(thing), tfloop.named_variables(thing)
                repr(tfloop.train(thing)), hash(tfloop.valid(thing))
                tfloop.ParamGroup.all().select(thing)
                if isinstance(thing, keras.Sequential):
                    thing.summary(print_fn=lambda *_, **__: None)
                    thing.get_config(), thing.count_params()
                    thing.save(f"{folder}/{name}.keras")
            if isinstance(thing, tfloop.ModuleOptimizer):
                root = world.other if name == "optim_of_other" else world.net
                if getattr(root, "built", True):
                    thing.summary(root), thing.as_keras(root)
                    thing._assembly.fingerprint()
                    thing.as_keras(root).get_config(), thing.serialize(), repr(thing)
                    for path in tfloop.named_parameters(root):
                        thing.state(path)
                thing.iterations.numpy(), thing.skipped.numpy(), thing.root, thing.scaler
            if isinstance(thing, tfloop.GradientsAccumulator):
                repr(thing.count), repr(thing.weight)


def saveable(world):
    """What a checkpoint can hold of a world."""
    kinds = (keras.layers.Layer, tf.Module, keras.metrics.Metric, tf.Variable)
    ours = (tfloop.ModuleOptimizer, tfloop.GradientsAccumulator)
    found = {}
    for name, thing in world.parts().items():
        if isinstance(thing, (tf.random.Generator, keras.random.SeedGenerator)):
            found[name] = thing.state
        elif isinstance(thing, (*kinds, *ours)) and getattr(thing, "built", True):
            found[name] = thing
    return found


def watched(wrap):
    def run(program):
        with tempfile.TemporaryDirectory() as folder:

            def between(world, called):
                look(world, called, folder)
                parts = saveable(world)
                if all(getattr(thing, "built", True) for thing in world.parts().values()) and parts:
                    tfloop.Checkpoint(f"{folder}/checkpoints", **parts).save(1)

            return play(program, TFLOOP, wrap, between=between)

    return run


@way("graph")
def observed_between_the_calls(program):
    return watched(tfloop.compile)(program)


@way("eager")
def observed_between_eager_calls(program):
    return watched(lambda step: step)(program)


# In processes of their own; see `elsewhere.py`.


def two_replicas_strategy():
    return tfloop.strategy("cpu:2")


def on_two(program, wrap):
    strategy = two_replicas_strategy()
    return in_scope(program, TFLOOP, strategy, functools.partial(wrap, strategy))


@way("graph", takes=lambda program: program.rowwise, process="replicas")
def two_replicas(program):
    """Each with its rows."""
    return on_two(program, lambda strategy, step: tfloop.compile(step, strategy=strategy))


# What has rows comes from each replica, so twice.
@way("graph", takes=lambda program: program.rowwise and program.trains, process="replicas")
def two_replicas_without_a_batch(program):
    """Each with all rows, which are found by a number."""

    def wrap(strategy, step):
        columns = zip(*[arguments(program, number)[0] for number in range(CALLS)], strict=True)
        stacks = [tf.nest.map_structure(lambda *rows: tf.stack(rows), *c) for c in columns]

        def numbered(number):
            return step(*tf.nest.map_structure(lambda stack: stack[number], stacks))

        compiled, number = tfloop.compile(numbered, strategy=strategy), iter(range(CALLS))
        return lambda *args, **kwargs: compiled(tf.constant(next(number)))

    return on_two(program, wrap)


FOLDER = {"restored": ""}  # Where the first halves of runs are, in the process that goes on.


def play_first_half(program, folder):
    """In the process that ends: half of the calls, then a checkpoint."""
    world = made(program, TFLOOP)
    found = play(program, TFLOOP, tfloop.compile, world=world, numbers=range(HALF))
    parts = saveable(world)
    if parts:
        tfloop.Checkpoint(f"{folder}/{program.name}", **parts).save(HALF)
    return found.outputs


@way(
    lambda program: dataclasses.replace(
        (whole := reference(program, "halves")), outputs=whole.outputs[HALF:]
    ),
    takes=lambda program: program.saved,
    process="restored",
)
def restored_in_a_new_process(program):
    world = made(program, TFLOOP)
    parts = saveable(world)
    if parts:
        step = tfloop.Checkpoint(f"{FOLDER['restored']}/{program.name}", **parts).restore()
        assert step == HALF
    return play(program, TFLOOP, tfloop.compile, world=world, numbers=range(HALF, CALLS))
