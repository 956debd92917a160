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
    """The modules of the package that a module imports, in its functions and for its types too."""
    found = set()
    for node in ast.walk(ast.parse(Path(importlib.import_module(name).__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tfloop"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("tfloop.")}
    return found - {name}


def folder_of(name: str) -> str:
    return name.split(".")[1]


def above(graph: dict[str, set[str]]) -> set[str]:
    """What is left when everything is taken away that needs only what was taken away before."""
    done: set[str] = set()
    while ready := [n for n in graph if n not in done and graph[n] & set(graph) <= done]:
        done |= set(ready)
    return set(graph) - done


def test_the_front_door_exports_exactly_the_public_names():
    assert set(tfloop.__all__) == PUBLIC
    assert all(hasattr(tfloop, name) for name in PUBLIC)


def test_every_public_name_has_a_docstring():
    assert [name for name in PUBLIC if not getattr(tfloop, name).__doc__] == []


# A method that gives its own object as something else; made when it is called.
UPWARD = {"tfloop._optimizer.optimizer": {"tfloop._optimizer.as_keras"}}


def test_imports_make_no_cycle():
    assert above({name: imports_of(name) - UPWARD.get(name, set()) for name in MODULES}) == set()


def test_folders_make_no_cycle():
    graph: dict[str, set[str]] = {}
    for name in MODULES:
        needs = {folder_of(other) for other in imports_of(name) if other != "tfloop"}
        graph.setdefault(folder_of(name), set()).update(needs - {folder_of(name)})
    assert above(graph) == set()


def test_no_room_imports_the_front_door():
    assert [
        name for name in MODULES if "tfloop" in imports_of(name) and ".examples" not in name
    ] == []


@pytest.mark.parametrize("name", MODULES)
def test_doctests_of(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
