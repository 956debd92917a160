"""Several replicas, on logical CPU devices in processes of their own."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from native import again_after_native_abort, check_not_aborted

SCRIPT = Path(__file__).with_name("replica_claims.py")
CLAIMS = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("claim_")
]


@again_after_native_abort
def run(number, folder):
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "error", SCRIPT, str(number), folder],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    check_not_aborted(done.returncode)
    return done


@pytest.fixture(scope="module", params=[2, 4])
def printed(request, tmp_path_factory):
    return run(request.param, tmp_path_factory.mktemp("replicas"))


@pytest.mark.xdist_group("replicas")
@pytest.mark.parametrize("claim", CLAIMS)
def test_replicas(printed, claim):
    assert f"ok {claim}\n" in printed.stdout, printed.stderr[-6000:]
