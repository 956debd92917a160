"""The MNIST example, killed in the middle of an epoch and started again, ends as if undisturbed."""

import signal
import subprocess

import pytest
from native import again_after_native_abort
from processes import Forks, killed_at

COMMAND = [
    *("-m", "tfloop.examples.mnist", "--dataset", "digits", "--lr", "1e-3"),
    *("--num_epochs", "3", "--model.hidden_size", "8", "--accumulate", "3", "--log_every", "1"),
]


@pytest.fixture(scope="module")
def ended():
    """Gives what Python has done with a command."""
    with Forks() as forks:
        yield forks.run


def last_epoch(done: subprocess.CompletedProcess) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("[Valid - Epoch 3 ")]


def the_error(done: subprocess.CompletedProcess) -> str:
    """The one line for the user; TensorFlow's own lines about the machine stand around it."""
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.thorough
@again_after_native_abort
def test_a_killed_run_resumes_and_ends_with_the_same_lines(ended, tmp_path):
    whole = last_epoch(ended(*COMMAND, "--workdir", str(tmp_path / "whole")))
    command = [*COMMAND, "--workdir", str(tmp_path / "killed")]
    killed = ended(*killed_at("[Train - Epoch 2 - Iteration 7]", *command))
    assert killed.returncode == -signal.SIGKILL
    assert last_epoch(ended(*command, "--resume")) == whole
    assert len(whole) > 1


def test_resume_without_a_workdir_is_one_clear_line(ended):
    assert the_error(ended(*COMMAND, "--resume")) == (
        "error: --resume needs the folder of the run: --workdir=FOLDER."
    )


@again_after_native_abort
def test_resume_of_another_model_is_one_clear_line(ended, tmp_path):
    command = [*COMMAND, "--workdir", str(tmp_path)]
    ended(*command, "--num_epochs", "1")
    again = (*command, "--resume", "--model.hidden_size", "4")
    assert the_error(ended(*again)).startswith(
        "error: --resume can't be used: got model.hidden_size=4, expected model.hidden_size=8 "
    )
    (tmp_path / "config.json").unlink()  # The checkpoint knows it, too.
    error = the_error(ended(*again))
    assert error.startswith("error: --resume can't be used: ")
    assert "linear1.kernel" in error
