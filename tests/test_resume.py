"""The MNIST example, killed in the middle of an epoch and started again, ends as if undisturbed."""

import os
import pathlib
import signal
import subprocess
import sys

from native import again_after_native_abort, check_not_aborted

ROOT = pathlib.Path(__file__).parents[1]
COMMAND = [
    *(sys.executable, "-m", "tfloop.examples.mnist", "--dataset", "digits", "--lr", "1e-3"),
    *("--num_epochs", "3", "--model.hidden_size", "8", "--accumulate", "3", "--log_every", "1"),
]


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def last_epoch(process: subprocess.Popen) -> list[str]:
    printed, problems = process.communicate()
    check_not_aborted(process.returncode)
    assert process.returncode == 0, problems
    return [line for line in printed.splitlines() if line.startswith("[Valid - Epoch 3 ")]


def the_error(process: subprocess.Popen) -> str:
    """The one line for the user; TensorFlow's own lines about the machine stand around it."""
    _, printed = process.communicate()
    check_not_aborted(process.returncode)
    assert process.returncode == 2
    assert "Traceback" not in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    return line


@again_after_native_abort
def test_a_killed_run_resumes_and_ends_with_the_same_lines(tmp_path):
    undisturbed = start("--workdir", str(tmp_path / "whole"))
    killed = start("--workdir", str(tmp_path / "killed"))
    for line in killed.stdout:
        if line.startswith("[Train - Epoch 2 - Iteration 7]"):
            killed.send_signal(signal.SIGKILL)
            break
    killed.communicate()
    check_not_aborted(killed.returncode)
    assert killed.returncode == -signal.SIGKILL
    resumed = last_epoch(start("--workdir", str(tmp_path / "killed"), "--resume"))
    assert resumed == last_epoch(undisturbed)
    assert len(resumed) > 1


def test_resume_without_a_workdir_is_one_clear_line():
    assert the_error(start("--resume")) == (
        "error: --resume needs the folder of the run: --workdir=FOLDER."
    )


@again_after_native_abort
def test_resume_of_another_model_is_one_clear_line(tmp_path):
    start("--workdir", str(tmp_path), "--num_epochs", "1").communicate()
    again = ("--workdir", str(tmp_path), "--resume")
    assert the_error(start(*again, "--model.hidden_size", "4")).startswith(
        "error: --resume can't be used: got model.hidden_size=4, expected model.hidden_size=8 "
    )
    (tmp_path / "config.json").unlink()  # The checkpoint knows it, too.
    error = the_error(start(*again, "--model.hidden_size", "4"))
    assert error.startswith("error: --resume can't be used: ")
    assert "linear1.kernel" in error
