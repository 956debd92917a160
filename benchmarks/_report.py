"""Writes what was measured as Markdown."""

import datetime
import os
import platform
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf

import tfloop
from benchmarks._measure import Result
from benchmarks._workloads import Target, Workload

_HEAD = """\
# Benchmarks

Made by `python -m benchmarks` on {date}: {versions}; {cores} cores, {machine}; {rounds} rounds.

All loops of a table take turns, round after round, in one process. A figure with a spread is the
median over the rounds and, in brackets, the quartiles.

- **speed**: P1's time / the loop's time in the same round; above 1 is faster than P1. A difference
  of less than 15 % isn't established by one run, so a target below 1.1 reads "no loss seen".
- **ms**: one update, micro-batches included, median. `fit` starts anew in each round, which costs
  it 2 to 5 % here that a long epoch wouldn't show.
- **first step**: seconds that the first round took beyond the fastest later one, i.e. tracing.
- **losses**: the largest relative difference to P1's losses in the first round, from the same
  weights, on the same batches. Far above rounding it would be other work, and fails the run.
- **targets**: what the loop is to reach: a floor to hold, and an aim.

## What isn't promised

A step whose time goes into large operations (W1, W3) runs at the speed of TensorFlow's kernels,
whoever wrote the loop: there we can only lose, and the targets say how little. JAX has better
kernels and cheaper calls on such models, and PyTorch on transformers; no loop closes that gap.
XLA for a whole step is an option, never the default: on this kind of CPU it makes convolutions many
times slower. Only the update of large variables on a CPU goes through it by itself.
Nothing was measured on a GPU or TPU.
"""


def head(rounds: int) -> str:
    """The title, what was measured on what, and how to read it."""
    modules = {"tfloop": tfloop, "TensorFlow": tf, "Keras": keras, "NumPy": np}
    versions = [f"{name} {module.__version__}" for name, module in modules.items()]
    return _HEAD.format(
        date=datetime.date.today(),
        versions=", ".join([f"Python {platform.python_version()}", *versions]),
        cores=os.cpu_count(),
        machine=platform.machine(),
        rounds=rounds,
    )


def table(name: str, workload: Workload, results: Mapping[str, Result | str]) -> str:
    """One workload."""
    lines = [
        f"## {name}: {workload.title}\n",
        "| loop | speed | ms | first step | losses | targets |",
        "|---|---|---|---|---|---|",
    ]
    for entry in workload.entries:
        result = results[entry.label]
        if isinstance(result, str):
            lines.append(f"| {entry.label} | {result} | | | | |")
            continue
        wanted = [_verdict(t, results) for t in workload.targets if t.label == entry.label]
        cells = (
            entry.label,
            _spread(results[entry.base].seconds / result.seconds),
            f"{1e3 * np.median(result.seconds):.3g}",
            f"{result.first:.2f}",
            f"{result.difference:.0e}" if result.difference else "equal",
            "; ".join(wanted),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def memory(shares: Mapping[str, float]) -> str:
    """What accumulators take, as copies of the parameters."""
    lines = [
        "## Memory: variables of a `GradientsAccumulator`\n",
        "| network | copies of the parameters in float32 | target |",
        "|---|---|---|",
    ]
    for name, share in shares.items():
        word = "held" if share < 1.01 else "**missed**"  # Counters come on top.
        lines.append(f"| {name} | {share:.3f} | at most 1: {word} |")
    return "\n".join(lines) + "\n"


def _spread(ratios: np.ndarray) -> str:
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _verdict(target: Target, results: Mapping[str, Result | str]) -> str:
    result, versus = results[target.label], results[target.versus]
    name = target.versus.split(":")[0].strip("*")
    if isinstance(result, str) or isinstance(versus, str):
        return f"vs {name}: not measured"
    times = result.seconds / versus.seconds
    if target.quantity == "speed":
        value, bound, sign = np.median(1 / times), "at least", 1
        text = f"{value:.2f} vs {name}"
    else:
        bound, sign = "at most", -1
        if target.quantity == "first step":
            value = result.first / versus.first
            text = f"first step {value:.2f} of {name}"
        elif target.quantity == "time a variable":
            value = np.median(times) * versus.variables / result.variables
            text = f"time a variable {value:.2f} of {name}"
        else:
            value = 1e6 * np.median(result.seconds - versus.seconds)
            text = f"{value:.0f} us more than {name}"
    reached = [sign * value >= sign * limit for limit in (target.aim, target.floor)]
    word = "aim reached" if reached[0] else "held" if reached[1] else "**missed**"
    return f"{text} ({bound} {target.floor:g}, aim {target.aim:g}): {word}"
