"""The shape of the package: its public names, its doctests, and imports that only go down."""

import ast
import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import tfloop

ROOT = Path(tfloop.__file__).parent
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(ROOT)], "tfloop."))
PUBLIC = {
    *("named_parameters", "named_variables"),
    *("Tape", "Gradients", "GradientsParams", "total_loss"),
    *("ParamGroup", "GradientClipping", "ModuleOptimizer"),
    *("ModuleLearningRate", "ModuleLrScheduler", "schedulers"),
    *("GradientsAccumulator", "microbatch"),
    *("train", "valid", "blend", "to_device"),
    *("LossScaler", "compile", "seed", "strategy", "DataLoader", "Checkpoint", "Learner"),
    *("Config", "OptimizerConfig", "AdamConfig", "flags"),
}


def imports_of(name: str) -> set[str]:
    """The modules of the package that a module imports when it is itself imported."""
    module = importlib.import_module(name)
    found = set()
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfloop"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("tfloop.")}
    return found - {name}


def test_the_front_door_exports_exactly_the_public_names():
    assert set(tfloop.__all__) == PUBLIC
    assert all(hasattr(tfloop, name) for name in PUBLIC)


def test_every_public_name_has_a_docstring():
    assert [name for name in PUBLIC if not getattr(tfloop, name).__doc__] == []


def test_imports_make_no_cycle():
    graph = {name: imports_of(name) for name in MODULES}
    done: set[str] = set()
    while ready := [
        n for n, needs in graph.items() if n not in done and needs & set(graph) <= done
    ]:
        done |= set(ready)
    assert set(graph) - done == set()


def test_no_room_imports_the_front_door():
    assert [
        name for name in MODULES if "tfloop" in imports_of(name) and ".examples" not in name
    ] == []


@pytest.mark.parametrize("name", MODULES)
def test_doctests_of(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
