"""The check of accelerators passes on a part of the CPU that stands in for one."""

import re

import numpy as np
import pytest
from processes import run

from benchmarks import device_check


@pytest.mark.thorough
def test_every_row_is_ok_and_no_accelerator_is_claimed():
    done = run("-W", "error", "-m", "benchmarks.device_check", "--quick", "--device=cpu")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert "**Nothing was run on an accelerator.**" in done.stdout
    rows = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", done.stdout, re.M)[1:]
    assert len(rows) == 20
    assert {result for _, result, _ in rows} == {"ok"}
    figures = [figure for what, _, figure in rows if what.endswith("`compile`")]
    assert all(re.match(r"\d+\.\d\d times as fast as ", figure) for figure in figures)
    assert len(figures) >= 6


def test_a_device_that_computes_otherwise_is_found_out():
    def pair(first, second):
        values = iter([first, second])
        return lambda: {"a": np.array([3.0, 4.0]), "b": np.array(next(values))}, 1e-4

    checks = {
        "near": pair(1.0, 1.00001),
        "far": pair(1.0, 1.001),
        "lost": pair(float("nan"), 1.0),
        "raises": (lambda: 1 // 0, 1e-4),
    }
    rows = {name: (word, figure) for name, word, figure in device_check.checked(checks, "CPU:0")}
    assert {name: word for name, (word, _) in rows.items()} == {
        "near": "ok",
        "far": "FAILED",
        "lost": "FAILED",
        "raises": "FAILED",
    }
    assert rows["far"][1] == "differs by 1e-03, at most 1e-04"
    assert rows["raises"][1].startswith("ZeroDivisionError")
