"""Processes for tests of several workers: started together over loopback, never left behind."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUMBER = 2


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def workers(*command: str, timeout: float = 100.0) -> Iterator[list[subprocess.Popen]]:
    """One process for each rank, each with its TF_CONFIG; killed at the end, or when time is up."""
    hosts = [f"localhost:{port}" for port in free_ports(NUMBER)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    processes: list[subprocess.Popen] = []
    clock = threading.Timer(timeout, lambda: [process.kill() for process in processes])
    try:
        for rank in range(NUMBER):
            task = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}}
            environment = {"TF_CONFIG": json.dumps(task), "PYTHONPATH": path}
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=ROOT,
                    env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"} | environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        clock.start()
        yield processes
    finally:
        clock.cancel()
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()


def outputs(processes: list[subprocess.Popen]) -> list[tuple[str, str]]:
    """What each rank has printed, and its error stream, once all have ended."""
    found: dict[int, tuple[str, str]] = {}

    def read(rank: int) -> None:
        found[rank] = processes[rank].communicate()

    readers = [threading.Thread(target=read, args=(rank,)) for rank in range(len(processes))]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return [found[rank] for rank in range(len(processes))]
