"""The tests' own ways with processes: a hang ends, nothing is left behind, a port is kept."""

import signal
import socket

import processes
import pytest
from processes import Child, killed_at, run
from workers import held_ports


def test_a_silent_process_is_given_up_and_one_that_ends_is_not(monkeypatch):
    assert run("-c", "print('done')").stdout == "done\n"
    monkeypatch.setattr(processes, "SILENCE", 0.1)
    program = "import sys, time; print('begun', flush=True); time.sleep(10**6)"
    with Child("-c", program) as child, pytest.raises(pytest.fail.Exception, match="hangs, silent"):
        child.result()
    assert child.returncode == -signal.SIGKILL


def test_a_process_ends_with_its_block_and_so_do_those_that_it_started():
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(10**6)'])\n"
        "print('started', flush=True)\n"
        "child.wait()\n"
    )
    with Child("-c", program) as child:
        child.wait_for("started")
    assert child.result().returncode == -signal.SIGKILL  # nobody holds its streams any more


def test_what_is_to_be_killed_at_a_text_comes_no_further(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfor n in range(9):\n    print(f'{n} {sys.argv[1:]}', flush=True)\n"
    )
    done = run(*killed_at("3 ['a", str(script), "a"))
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.splitlines()[:3] == ["0 ['a']", "1 ['a']", "2 ['a']"]
    assert "4 [" not in done.stdout


def test_a_held_port_is_for_a_server_that_names_it_alone():
    with held_ports(2) as (port, other):
        assert port != other
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("", port))
        with socket.create_server(("", port)):  # as TensorFlow's do, it sets SO_REUSEADDR
            socket.create_connection(("localhost", port)).close()
