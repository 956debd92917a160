"""Runs the benchmarks and prints the tables.

    python -m benchmarks --quick
    python -m benchmarks --rounds 15 --output benchmarks/runs/mine.md

Figures need an idle machine. The exit code is 1 if two loops didn't do the same work; a missed
target is only reported.
"""

import pathlib
import sys

from absl import app, flags

from benchmarks import _measure, _report, _tasks
from benchmarks._workloads import workloads

_MEMORY = "Memory"

_QUICK = flags.DEFINE_bool("quick", False, "Three rounds, and nothing that takes long to trace.")
_WORKLOADS = flags.DEFINE_list(
    "workloads", [], f"Some of {', '.join([*workloads(quick=True), _MEMORY])}; all by default."
)
_ROUNDS = flags.DEFINE_integer(
    "rounds", None, "Rounds of a table; 15 by default, 3 with --quick.", lower_bound=1
)
_STEPS = flags.DEFINE_integer(
    "steps", None, "Updates of each loop in a round, instead of its own number.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string("output", None, "A Markdown file to write, besides printing.")
_PEERS_PYTHON = flags.DEFINE_string(
    "peers_python", sys.executable, "A Python that has PyTorch, or JAX and optax, for W2."
)


def main(arguments: list[str]) -> None:
    """Measures, prints, writes."""
    if len(arguments) > 1:
        raise app.UsageError(f"Got {arguments[1]!r}, expected flags alone: --workloads=W1,W2.")
    tables = workloads(quick=_QUICK.value, peers_python=_PEERS_PYTHON.value)
    chosen = _WORKLOADS.value or [*tables, _MEMORY]
    if unknown := set(chosen) - {*tables, _MEMORY}:
        known = ", ".join([*tables, _MEMORY])
        raise app.UsageError(
            f"--workloads got {', '.join(sorted(unknown))}, expected some of {known}."
        )
    rounds = _ROUNDS.value or (3 if _QUICK.value else 15)

    parts = [_report.head(rounds)]
    print(parts[0], flush=True)
    deviating = []
    for name in chosen:
        if name == _MEMORY:
            networks = {"W1": _tasks.MNIST, "W3": _tasks.TRANSFORMER, "W5": _tasks.EMBEDDING}
            shares = {n: _measure.accumulation_memory(task) for n, task in networks.items()}
            parts.append(_report.memory(shares))
        else:
            results = _measure.measure(tables[name].entries, rounds=rounds, updates=_STEPS.value)
            parts.append(_report.table(name, tables[name], results))
            measured = (r for r in results.values() if isinstance(r, _measure.Result))
            deviating += [f"{name} {r.entry.label}" for r in measured if not r.is_same_work]
        print(parts[-1], flush=True)
    if _OUTPUT.value:
        pathlib.Path(_OUTPUT.value).write_text("\n".join(parts))
    if deviating:
        sys.exit(f"Other work than the base, by the losses: {', '.join(deviating)}.")


if __name__ == "__main__":
    app.run(main)
