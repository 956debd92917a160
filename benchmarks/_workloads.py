"""What is compared with what, and how fast we want to be."""

import dataclasses
import sys
from collections.abc import Callable
from functools import partial

from benchmarks import _loops as loops
from benchmarks import _tasks as tasks
from benchmarks._tasks import Task

P1 = "P1: hand loop, one `tf.function`"
FED = "P1, fed by `tf.data`"
GROUPS = "P1, two optimizers"
FIT = "`fit`"
FIT_10 = "`fit`, 10 steps a call"
ON_BATCH = "`train_on_batch`"
EAGER = "hand loop, eager"
KERAS = "P1, Keras' optimizer accumulates"
SCATTER = "P1, sparse rows scattered"
TORCH = "PyTorch eager, fused Adam"
JAX = "JAX, one jitted step a call"
JAX_50 = "JAX, a scan of 50 steps a call"
NOTHING = "an empty `tf.function`"
RAW = "its op, called directly"
TF_DATA = "`tf.data`: shuffle, batch, prefetch"
OURS = "**`tfloop.compile`**"
OURS_FED = "**`tfloop.compile`, fed by `DataLoader`**"
OURS_EAGER = "**tfloop, eager**"
RUN_50 = "**`step.run`, 50 steps a call**"
RUN_50_FED = "**`step.run`, 50 steps a call, fed by `DataLoader`**"
JIT_50 = "**`step.run`, 50 steps a call, XLA**"
ACCUMULATOR = "**`tfloop.GradientsAccumulator`**"
MICROBATCH = "**`tfloop.microbatch`**"
JIT_MICROBATCH = "**`tfloop.microbatch`, XLA**"
OUR_NOTHING = "**an empty `tfloop.compile`**"
LOADER = "**`tfloop.DataLoader`**"

LOOPS = {
    P1: loops.by_hand,
    FED: loops.by_hand_fed,
    GROUPS: loops.by_hand_in_groups,
    FIT: loops.fit,
    FIT_10: partial(loops.fit, steps_per_execution=10),
    ON_BATCH: loops.train_on_batch,
    EAGER: loops.by_hand_eager,
    KERAS: loops.keras_accumulation,
    SCATTER: partial(loops.hand_accumulation, scatter=True),
    NOTHING: loops.empty_function,
    RAW: loops.empty_raw_call,
    TF_DATA: loops.tf_data_epoch,
    OURS: loops.compiled,
    OURS_FED: loops.compiled_fed,
    OURS_EAGER: loops.eager,
    RUN_50: loops.many_steps_a_call,
    RUN_50_FED: partial(loops.many_steps_a_call, fed=True),
    JIT_50: partial(loops.many_steps_a_call, jit_compile=True),
    ACCUMULATOR: loops.accumulator,
    MICROBATCH: loops.microbatch,
    JIT_MICROBATCH: partial(loops.microbatch, jit_compile=True),
    OUR_NOTHING: loops.empty_compiled,
    LOADER: loops.loader_epoch,
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row: a loop on a task, so many updates a round, compared with the row `base`.

    Its losses differ from those of `base` by less than `tolerance`, or it does other work.
    """

    label: str
    base: str
    loop: Callable
    task: Task
    updates: int
    tolerance: float = 1e-3


@dataclasses.dataclass(frozen=True)
class Target:
    """What one row is to reach against another: a floor to hold, and an aim.

    `quantity` is "speed": the other's time / this one's, at least. Or one of these, at most: "first
    step", this one's first step / the other's; "time a variable", the same of an update, each time
    divided by the variables; "us more", the difference of the times of an update.
    """

    label: str
    versus: str
    floor: float
    aim: float
    quantity: str = "speed"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A table: its rows, the first of which is the base of most, and what is wanted of them."""

    title: str
    entries: list[Entry]
    targets: list[Target]


def _entries(task: Task, updates: int, *labels: str, base: str = P1) -> list[Entry]:
    return [Entry(label, base, LOOPS[label], task, updates) for label in labels]


def _peers(python: str) -> list[Entry]:
    loop = partial(loops.peer, python=python)
    # In the Adam of others the epsilon stands elsewhere: hence the tolerance.
    return [
        Entry(label, P1, partial(loop, name=name), tasks.MLP, 500, tolerance=1e-2)
        for label, name in ((TORCH, "torch"), (JAX, "jax"), (JAX_50, "jax_scan"))
    ]


def _accumulation(title: str, task: Task, updates: int, floor: float, aim: float) -> Workload:
    base = Entry(P1, P1, loops.hand_accumulation, task, updates)
    more = [SCATTER, JIT_MICROBATCH] if task is tasks.EMBEDDING else []
    others = _entries(task, updates, KERAS, ACCUMULATOR, MICROBATCH, *more)
    targets = [Target(MICROBATCH, versus, floor, aim) for versus in (P1, KERAS)]
    return Workload(
        f"{title}; {task.micro_batches} micro-batches an update", [base, *others], targets
    )


def _with_number(label: str, n: int) -> str:
    return f"{label.rstrip('*')}, N = {n}{'**' if label.endswith('**') else ''}"


def _small_variables(*numbers: int) -> Workload:
    entries = []
    for n in numbers:
        base, ours = (_with_number(label, n) for label in (P1, OURS))
        rows = ((base, loops.by_hand), (ours, loops.compiled))
        entries += [Entry(label, base, loop, tasks.narrow(n), 20) for label, loop in rows]
    hundred = [_with_number(label, 100) for label in (OURS, P1)]
    targets = [Target(*hundred, 2.5, 4.0), Target(*hundred, 0.5, 0.25, "first step")]
    if 500 in numbers:
        targets.append(Target(_with_number(OURS, 500), hundred[0], 1.2, 1.0, "time a variable"))
    return Workload("N small variables: a chain of dense layers of 16 units", entries, targets)


def workloads(*, quick: bool, peers_python: str = sys.executable) -> dict[str, Workload]:
    """All tables by name; `quick` leaves out what takes long to trace.

    PyTorch and JAX are looked for in the environment of `peers_python`.
    """
    tables = {
        "W1": Workload(
            "convolutional network of the MNIST example, 512 hidden units, batch 64, Adam",
            _entries(tasks.MNIST, 30, P1, FED, FIT, OURS, OURS_FED)
            + _entries(tasks.MNIST, 4, EAGER, OURS_EAGER),
            [
                Target(OURS, P1, 0.95, 1.05),
                Target(OURS, FIT, 1.0, 1.15),
                Target(OURS, EAGER, 3.5, 5.0),
                Target(OURS_EAGER, EAGER, 0.9, 1.2),
            ],
        ),
        "W2": Workload(
            "dense network 64-32-10, batch 32, Adam: what a call costs",
            _entries(tasks.MLP, 500, P1, FED, FIT, FIT_10, ON_BATCH)
            + _entries(tasks.MLP, 500, OURS, OURS_FED, RUN_50, RUN_50_FED, JIT_50)
            + _entries(tasks.MLP, 10, EAGER, OURS_EAGER)
            + _peers(peers_python),
            [
                Target(OURS, P1, 2.5, 5.0),
                Target(OURS, FIT, 4.0, 7.0),
                Target(OURS, TORCH, 2.0, 3.0),
                Target(OURS, JAX, 0.7, 1.0),
                Target(JIT_50, P1, 10.0, 18.0),
                Target(JIT_50, JAX_50, 0.5, 1.0),
                Target(OURS_EAGER, EAGER, 0.9, 1.2),
            ],
        ),
        "W3": Workload(
            "transformer encoder, 6 layers of width 64, 100 variables, batch 16 x 32, AdamW that "
            "spares biases and norms",
            _entries(tasks.TRANSFORMER, 10, P1, *([] if quick else [GROUPS, FIT]), OURS),
            [Target(OURS, P1, 0.95, 1.1), Target(OURS, P1, 0.75, 0.5, "first step")],
        ),
        "W4-CNN": _accumulation("the network of W1", tasks.MNIST_8, 3, 0.95, 1.15),
        "W4-transformer": _accumulation("the network of W3", tasks.TRANSFORMER_8, 2, 1.0, 1.4),
        "W5": _accumulation(
            "embedding of 50,000 x 64 with repeated ids", tasks.EMBEDDING, 10, 2.5, 5.0
        ),
        "W6": _small_variables(10, 100, *([] if quick else [500])),
        "Calls": Workload(
            "what a call costs that does nothing: two tensors, a rate and a variable",
            _entries(tasks.MLP, 500, NOTHING, RAW, OUR_NOTHING, base=NOTHING),
            [Target(OUR_NOTHING, RAW, 60, 25, "us more")],
        ),
        "DataLoader": Workload(
            "an epoch of shuffled arrays as large as MNIST; ms of a batch of 64",
            _entries(tasks.IMAGES, 937, TF_DATA, LOADER, base=TF_DATA),
            [Target(LOADER, TF_DATA, 1.0, 5.0)],
        ),
    }
    if quick:
        del tables["W4-transformer"]
    return tables
