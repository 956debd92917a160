"""Two workers, as two processes on this host."""

import ast
import signal

import numpy as np
import pytest
import tensorflow as tf
from native import again_after_native_abort
from processes import ROOT, Child, killed_at
from workers import workers

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
    with workers("-W", "error", str(SCRIPT), str(folder)) as children:
        return [child.result() for child in children]


@pytest.mark.parametrize("claim", CLAIMS)
def test_workers(printed, claim):
    lines = []
    for rank, done in enumerate(printed):
        lines += [line for line in done.stdout.splitlines() if line.startswith(f"ok {claim} ")]
        assert len(lines) == rank + 1, done.stderr[-6000:]
    assert lines[0] == lines[1]  # with the digests of all state


def final_state(folder):
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
    return {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}


@pytest.mark.thorough
@again_after_native_abort
def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint_and_nothing_else(tmp_path):
    whole, killed = str(tmp_path / "whole"), str(tmp_path / "killed")
    with Child(*EXAMPLE, "--local_workers=2", f"--workdir={whole}") as launcher:
        with workers(*killed_at("step 12 ", *EXAMPLE, f"--workdir={killed}")) as children:
            assert children[0].result().returncode == -signal.SIGKILL  # the one that prints
        undisturbed = launcher.result()
    assert undisturbed.returncode == 0, undisturbed.stderr[-6000:]
    lines = undisturbed.stdout.splitlines()
    several, single = (line for line in lines if line.startswith("test loss "))
    assert several == single

    with workers(*EXAMPLE, f"--workdir={killed}") as children:
        resumed = [child.result() for child in children]
    for done in resumed:
        assert done.returncode == 0, done.stderr[-6000:]
    lines = resumed[0].stdout.splitlines()
    assert lines[0] == "resumed at step 10"
    assert lines[-1] == several
    ends = [final_state(folder) for folder in (whole, killed)]
    assert len(ends[0]) > 10
    for key, value in ends[0].items():
        if not key.startswith("_CHECKPOINTABLE"):
            np.testing.assert_array_equal(ends[1][key], value, err_msg=key)
