"""Two workers, as two processes on this host."""

import ast
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from native import again_after_native_abort, check_not_aborted
from workers import ROOT, outputs, workers

SCRIPT = ROOT / "tests" / "worker_claims.py"
CLAIMS = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("claim_")
]
EXAMPLE = (str(ROOT / "examples" / "multi_worker.py"), "--quick", "--save_every=5", "--log_every=1")


@pytest.fixture(scope="module")
@again_after_native_abort
def printed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    with workers("-W", "error", str(SCRIPT), str(folder), timeout=200.0) as processes:
        found = outputs(processes)
    for process in processes:
        check_not_aborted(process.returncode)
    return found


@pytest.mark.parametrize("claim", CLAIMS)
def test_workers(printed, claim):
    lines = []
    for rank, (out, errors) in enumerate(printed):
        lines += [line for line in out.splitlines() if line.startswith(f"ok {claim} ")]
        assert len(lines) == rank + 1, errors[-6000:]
    assert lines[0] == lines[1]  # with the digests of all state


def final_state(folder):
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
    return {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}


@again_after_native_abort
def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint_and_nothing_else(
    tmp_path, request
):
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    launcher = subprocess.Popen(
        [sys.executable, *EXAMPLE, "--local_workers=2", f"--workdir={whole}"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    request.addfinalizer(lambda: launcher.send_signal(signal.SIGINT))  # it ends its workers too
    with workers(*EXAMPLE, f"--workdir={killed}") as processes:
        for line in processes[0].stdout:
            if line.startswith("step 12 "):
                processes[1].send_signal(signal.SIGKILL)
                break
    assert processes[1].returncode == -signal.SIGKILL
    undisturbed, errors = launcher.communicate(timeout=150)
    assert launcher.returncode == 0, errors[-6000:]
    several, single = (line for line in undisturbed.splitlines() if line.startswith("test loss "))
    assert several == single

    with workers(*EXAMPLE, f"--workdir={killed}") as processes:
        found = outputs(processes)
    for process, (_, errors) in zip(processes, found, strict=True):
        check_not_aborted(process.returncode)
        assert process.returncode == 0, errors[-6000:]
    lines = found[0][0].splitlines()
    assert lines[0] == "resumed at step 10"
    assert lines[-1] == several
    ends = [final_state(folder) for folder in (whole, killed)]
    assert len(ends[0]) > 10
    for key, value in ends[0].items():
        if not key.startswith("_CHECKPOINTABLE"):
            np.testing.assert_array_equal(ends[1][key], value, err_msg=key)
