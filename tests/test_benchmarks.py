"""The benchmarks run, and compare loops that do the same work. No time is asserted."""

import re

import pytest
from processes import run

from benchmarks import _loops, _measure, _tasks
from benchmarks._workloads import Entry

MODULE = ("-W", "error", "-m", "benchmarks")


def rows(printed: str) -> dict[str, list[str]]:
    """Label -> the other cells."""
    lines = re.findall(r"^\| (.*) \|$", printed, re.M)
    return {cells[0]: cells[1:] for cells in (line.split(" | ") for line in lines)}


@pytest.mark.thorough
def test_all_loops_of_a_table_do_the_same_work(tmp_path):
    report = tmp_path / "benchmarks.md"
    names = "--workloads=W2,Memory"
    done = run(*MODULE, names, "--rounds=2", "--steps=5", f"--output={report}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert report.read_text() in done.stdout + "\n"
    found = rows(report.read_text())
    for label in ("P1: hand loop, one `tf.function`", "`fit`", "**`tfloop.compile`**"):
        speed, milliseconds, first, losses, _ = found[label]
        assert re.fullmatch(r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)", speed)
        assert float(milliseconds) > 0
        assert float(first) >= 0
        assert losses == "equal" or float(losses) < 1e-3
    assert re.search(r"\d+\.\d\d vs P1 \(at least 2\.5, aim 5\)", found["**`tfloop.compile`**"][-1])
    assert float(found["W5"][0]) == 1.0


def test_a_loop_that_does_other_work_is_found_out():
    def idle(task, model, data):
        return lambda: [_loops.cross_entropy(y, model(x, training=True)) for x, y in data.batches]

    loops = {"base": _loops.by_hand, "equal": _loops.eager, "idle": idle}
    entries = [Entry(label, "base", loop, _tasks.MLP, 5) for label, loop in loops.items()]
    results = _measure.measure(entries, rounds=1)
    assert {label: result.is_same_work for label, result in results.items()} == {
        "base": True,
        "equal": True,
        "idle": False,
    }


def test_an_unknown_workload_is_named_with_those_there_are():
    done = run(*MODULE, "--workloads=W9")
    assert done.returncode == 1
    assert "--workloads got W9, expected some of W1, W2, W3, W4-CNN, W4-transformer" in done.stderr
