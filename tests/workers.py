"""Workers for tests of several hosts: processes started together over loopback."""

import contextlib
import json
import socket
from collections.abc import Iterator

from processes import Child

NUMBER = 2


@contextlib.contextmanager
def held_ports(number: int) -> Iterator[list[int]]:
    """Ports that are ours until the end, all different.

    A socket that is bound and doesn't listen keeps everybody from a port but those who bind it by
    number with SO_REUSEADDR, as TensorFlow's servers do.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("localhost", 0))
        yield [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def workers(*command: str) -> Iterator[list[Child]]:
    """One process for each rank, each with its TF_CONFIG."""
    with contextlib.ExitStack() as stack:
        hosts = [f"localhost:{port}" for port in stack.enter_context(held_ports(NUMBER))]
        tasks = [{"type": "worker", "index": rank} for rank in range(NUMBER)]
        configs = [json.dumps({"cluster": {"worker": hosts}, "task": task}) for task in tasks]
        yield [
            stack.enter_context(Child(*command, environment={"TF_CONFIG": config}))
            for config in configs
        ]
