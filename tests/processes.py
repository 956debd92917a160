"""The processes that tests start: given up when they hang, however slow they are; none stays.

What tells a hang from a busy machine is silence. A process is waited for as long as it prints, and
from one line to the next for `SILENCE`; nothing limits the whole of what it does.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

import pytest
from native import again_after_native_abort, check_not_aborted

ROOT = Path(__file__).parents[1]
SILENCE = 1200.0
"""Seconds; ten times what any test needs. It's there so that a suite ends."""


class Child(subprocess.Popen):
    """Python, run in the folder of the checkout, and ended with the `with` block it's used in.

    Both its streams are read all the time: a full pipe would stop it.

    Args:
      command: Python's arguments.
      environment: What to add to ours.
      cwd: Another folder.
      stdin: What it reads; by default what we do.
    """

    def __init__(
        self,
        *command: str,
        environment: dict[str, str] | None = None,
        cwd: Path = ROOT,
        stdin: int | None = None,
    ) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        settings = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": path} | (environment or {})
        super().__init__(
            [sys.executable, *command],
            cwd=cwd,
            env=os.environ | settings,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group that its own children are in, too
        )
        self._said = {"stdout": "", "stderr": ""}
        self._heard: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._open = 2
        for name in self._said:
            threading.Thread(target=self._listen, args=(name,), daemon=True).start()

    def _listen(self, name: str) -> None:
        with getattr(self, name) as stream:
            for line in stream:
                self._heard.put((name, line))
        self._heard.put((name, ""))

    def _lines(self):
        """What it prints, as (stream, line), until both streams are at their end."""
        while self._open:
            try:
                name, line = self._heard.get(timeout=SILENCE)
            except queue.Empty:
                pytest.fail(f"{self.args} hangs, silent for {SILENCE:.0f} s after {self._said}")
            self._said[name] += line
            self._open -= not line
            yield name, line

    def wait_for(self, text: str) -> None:
        """Returns when it has printed a line with this text."""
        for name, line in self._lines():
            if name == "stdout" and text in line:
                return
        pytest.fail(f"{self.args} ended without {text!r}: {self._said}")

    def result(self) -> subprocess.CompletedProcess:
        """Its exit code and all that it has printed, once it has ended.

        Raises:
          NativeAbortError: It died in native code.
        """
        for _ in self._lines():
            pass
        check_not_aborted(self.wait(SILENCE))
        return subprocess.CompletedProcess(self.args, self.returncode, **self._said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        if self.stdin is not None:
            self.stdin.close()


class Forks(Child):
    """Programs that share the imports of one process, each in a fork of it; see `forked.py`."""

    def __init__(self) -> None:
        super().__init__("-W", "error", "tests/forked.py", stdin=subprocess.PIPE)

    def run(self, *command: str) -> subprocess.CompletedProcess:
        """What Python has done with these arguments.

        Raises:
          NativeAbortError: It died in native code.
        """
        self.stdin.write(json.dumps(command) + "\n")
        self.stdin.flush()
        for name, line in self._lines():
            if name == "stdout" and line:
                done = subprocess.CompletedProcess(command, **json.loads(line))
                check_not_aborted(done.returncode)
                return done
        pytest.fail(f"{self.args} ended: {self._said}")


_KILLED = """
import os, runpy, signal, sys
text, write = sys.argv.pop(1), sys.stdout.write
def written(line):
    count = write(line)
    if text in line:
        os.kill(os.getpid(), signal.SIGKILL)
    return count
sys.stdout.write = written
del sys.argv[0]
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def killed_at(text: str, *command: str) -> tuple[str, ...]:
    """Python's arguments for a program that is killed as it prints this text.

    It does so itself: somebody else, on a busy machine, may come when it has long gone on.
    """
    return ("-c", _KILLED, text, *command)


@again_after_native_abort
def run(*command: str, **options: Any) -> subprocess.CompletedProcess:
    """What Python has done with these arguments; for what may be done twice."""
    with Child(*command, **options) as child:
        return child.result()
