"""Measures loops side by side: round after round, each loop once a round.

A machine that is slower for a while is so for all loops of a round, so a ratio of two times of one
round means more than a ratio of two times from two runs.
"""

import dataclasses
import gc
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

import tfloop
from benchmarks._loops import Run, Unavailable
from benchmarks._tasks import Task
from benchmarks._workloads import Entry


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of one loop.

    Attributes:
      entry: The loop.
      seconds: For each round, the time of one update.
      first: Seconds that the first round took beyond the fastest later one: tracing, and building
        state.
      variables: Trainable variables of its model.
      difference: The largest relative difference of a loss of the first round to the reference's.
    """

    entry: Entry
    seconds: np.ndarray
    first: float
    variables: int
    difference: float

    @property
    def is_same_work(self) -> bool:
        """Are the losses those of its base, within its tolerance?"""
        return self.difference < self.entry.tolerance


def measure(
    entries: Sequence[Entry], *, rounds: int, updates: int | None = None
) -> dict[str, Result | str]:
    """Runs all loops in turn.

    Args:
      entries: The loops; the losses of each are compared with those of its `base`.
      updates: In a round, instead of each entry's own number.
      rounds: After two that warm up; in the first everything is traced.

    Returns:
      Label -> result, or the reason why that loop can't run here.
    """
    found: dict[str, Result | str] = {}
    runs, first, variables = {}, {}, {}
    if updates is not None:
        entries = [dataclasses.replace(entry, updates=updates) for entry in entries]
    for entry in entries:
        model, data = entry.task.model(), entry.task.data(entry.updates)
        variables[entry.label] = len(model.trainable_variables) if model else 0
        try:
            runs[entry.label] = entry.loop(entry.task, model, data)
            first[entry.label] = _timed(runs[entry.label])
        except Unavailable as reason:
            found[entry.label] = str(reason)
    # After a new trace TensorFlow prepares older functions once more, at their next call.
    for run in runs.values():
        run()
    # Collections then look at new objects alone, not at those of all these models and traces.
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(rounds):
        for label, run in runs.items():
            seconds[label].append(_timed(run)[0])
    gc.unfreeze()
    for entry in entries:
        if entry.label in runs:
            (took, losses), times = first[entry.label], np.array(seconds[entry.label])
            found[entry.label] = Result(
                entry,
                seconds=times / entry.updates,
                first=max(took - float(np.min(times)), 1e-3),
                variables=variables[entry.label],
                difference=_difference(losses, first[entry.base][1]),
            )
    return found


def accumulation_memory(task: Task) -> float:
    """Bytes of the variables that a `GradientsAccumulator` makes / one float32 copy of the model.

    Read off the process, not the accumulator, so that nothing is left out.
    """
    model, before = task.model(), live_variables()
    window = tfloop.GradientsAccumulator(reduction="mean")
    window.build(model)
    old = {id(variable) for variable in before}
    made = [variable for variable in live_variables() if id(variable) not in old]
    held = sum(v.dtype.size * v.shape.num_elements() for v in made)
    return held / sum(4 * v.shape.num_elements() for v in model.trainable_variables)


def live_variables() -> list[tf.Variable]:
    """All variables of this process."""
    return [thing for thing in gc.get_objects() if isinstance(thing, tf.Variable)]


def _timed(run: Run) -> tuple[float, np.ndarray]:
    began = time.perf_counter()
    losses = run()
    last = np.asarray(losses[-1])  # Waits for the end.
    seconds = time.perf_counter() - began
    return seconds, np.concatenate([np.ravel(piece) for piece in (*losses[:-1], last)])


def _difference(losses: np.ndarray, base: np.ndarray) -> float:
    if len(losses) == 1:
        base = base.mean(keepdims=True)
    base = base[: len(losses)]  # An eager loop makes fewer steps a round.
    return float(np.max(np.abs(losses - base) / np.abs(base)))
