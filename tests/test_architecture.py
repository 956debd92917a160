"""The shape of the package: its public names, its doctests, and imports that only go down."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import tfloop

ROOT = Path(tfloop.__file__).parent
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(ROOT)], "tfloop."))
PUBLIC = {
    *("named_parameters", "named_variables"),
    *("Tape", "Gradients", "GradientsParams", "total_loss"),
    *("ParamGroup", "GradientClipping", "AdaptiveGradientClipping", "ModuleOptimizer"),
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


# What is private of other libraries is `_backend`'s alone.

BACKEND = "tfloop._backend"
PUBLIC_BY_CONVENTION = {"_asdict", "_fields", "_make", "_replace"}  # of named tuples
# Names of ours that these libraries use too: the objects that have them there are ours.
OURS_TOO = {
    "tfloop._compile.step": {"_jit_compile", "_lock"},
    "tfloop._gradients.scaling": {"_start"},
    "tfloop._optimizer.contribution": {"_lock"},
    "tfloop.examples._digits": {"_generate_examples"},  # by which a data set is written
}
ASKING = {"getattr", "hasattr", "setattr", "delattr", "attrgetter"}


def is_private(name: object) -> bool:
    """One leading underscore or two, but none of Python's own names."""
    return isinstance(name, str) and re.fullmatch(r"_(?!_\w*__$)\w+", name) is not None


def tree_of(name: str) -> ast.Module:
    return ast.parse(Path(importlib.import_module(name).__file__).read_text())


def names_of_ours() -> set[str]:
    """All private names that the package defines: modules, functions, classes, attributes."""
    found = {part for name in MODULES for part in name.split(".")}
    for node in (node for name in MODULES for node in ast.walk(tree_of(name))):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Attribute(value=ast.Name("self" | "cls"), ctx=ast.Store()):
                found.add(node.attr)
            case ast.Name(ctx=ast.Store()):  # of a module or a class, fields of dataclasses too
                found.add(node.id)
            case ast.Assign(targets=[ast.Name("__slots__")], value=value):
                found |= set(ast.literal_eval(value))
    return {name for name in found if is_private(name)}


def names_of_others() -> set[str]:
    """Private names of objects of Keras and TensorFlow, among which ours would go unnoticed."""
    x = keras.Input((1,), name="bare")
    things: list[Any] = [
        *(keras.layers.Layer(name="bare"), keras.Sequential(name="bare")),
        keras.Model(x, keras.layers.ReLU()(x)),
        *(keras.optimizers.Nadam(), keras.optimizers.Lamb(), keras.Variable(0.0)),
        *(keras.losses.MeanSquaredError(), keras.metrics.Mean(), keras.random.SeedGenerator(1)),
        *(tf.constant(0.0), tf.Variable(0.0), tf.Module(), tf.Graph(), tf.GradientTape()),
        *(tf.function(lambda: None), tf.distribute.get_strategy(), tf.data.Dataset.range(1)),
    ]
    return {name for thing in things for name in dir(thing) if is_private(name)}


def private_uses(name: str) -> Iterator[tuple[int, str, bool]]:
    """Line and name of what a module asks of objects, and whether that is its own `self`."""
    for node in ast.walk(tree_of(name)):
        match node:
            case ast.Attribute(value=of, attr=attr) if is_private(attr):
                yield node.lineno, attr, isinstance(of, ast.Name) and of.id in ("self", "cls")
            case ast.Call(func=ast.Name(called) | ast.Attribute(attr=called), args=args):
                for text in (a.value for a in args if isinstance(a, ast.Constant)):
                    if called in ASKING and is_private(text):
                        yield node.lineno, text, False
            case ast.Subscript(value=ast.Call(func=ast.Name("vars")), slice=ast.Constant(text)):
                if is_private(text):
                    yield node.lineno, text, False
            case ast.MatchClass(kwd_attrs=attrs):
                yield from ((node.lineno, attr, False) for attr in attrs if is_private(attr))


def inner_modules(name: str) -> Iterator[tuple[int, str]]:
    """Line and name of the inner modules of other libraries that a module names in any way."""
    inner = re.compile(r"(keras|sonnet)\.src\b|tensorflow\.python\b|tf\.__internal__")
    docs = set()
    for node in ast.walk(tree_of(name)):
        match node:
            case ast.Expr(value=ast.Constant(str())):
                docs.add(node.value)
            case ast.Import() | ast.ImportFrom() | ast.Attribute():
                if found := inner.search(ast.unparse(node)):
                    yield node.lineno, found.group()
            case ast.Constant(value=str(text)) if node not in docs:
                if found := inner.search(text):
                    yield node.lineno, found.group()


def inherited(name: str) -> set[str]:
    """Private names that classes of a module have from a class of another library."""
    module = importlib.import_module(name)
    found = set()
    for kind in vars(module).values():
        if inspect.isclass(kind) and kind.__module__ == name:
            bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] != "tfloop"]
            found |= {attr for base in bases for attr in dir(base) if is_private(attr)}
            if issubclass(kind, keras.optimizers.Optimizer):  # what its objects are born with
                found |= {attr for attr in vars(keras.optimizers.SGD()) if is_private(attr)}
    return found


def foreign_uses(name: str, ours: set[str], others: set[str]) -> list[str]:
    """What a module uses of other libraries though it is private, with its line."""
    allowed = PUBLIC_BY_CONVENTION | OURS_TOO.get(name, set())
    from_bases = inherited(name)
    found = [
        (line, attr)
        for line, attr, own in private_uses(name)
        if attr not in allowed
        and (attr not in ours or (attr in from_bases if own else attr in others))
    ]
    file = importlib.import_module(name).__file__
    return [f"{file}:{line}: {what}" for line, what in sorted({*found, *inner_modules(name)})]


@pytest.fixture(scope="module")
def names() -> tuple[set[str], set[str]]:
    return names_of_ours(), names_of_others()


@pytest.mark.parametrize("name", [n for n in MODULES if not n.startswith(BACKEND)])
def test_nothing_private_of_other_libraries_is_used_in(name, names):
    assert foreign_uses(name, *names) == []


@pytest.mark.parametrize(
    "line",
    [
        *("optimizer._learning_rate", "optimizer._trainable_variables_indices = {}"),
        *("variable._value", "layer._layers", "optimizer._iterations", "self.given._learning_rate"),
        *("getattr(x, '_keras_mask', None)", "hasattr(x, '_keras_mask')", "vars(x)['_value']"),
        *("setattr(x, '_value', 1)", "operator.attrgetter('_value')", "type(x)._use_weight_decay"),
        *("import keras.src.losses", "from tensorflow.python.eager import record"),
        *("from sonnet.src import base", "importlib.import_module('keras.src.losses.loss')"),
        *("tf.__internal__.EagerTensor", "cls.__module__ == 'sonnet.src.nets.mlp'"),
        *("class A(keras.optimizers.SGD):\n  def f(self): return self._iterations",),
    ],
)
def test_such_uses_are_found(line, names, tmp_path, monkeypatch):
    (tmp_path / "probe.py").write_text(
        f"if 0:\n {line}" if "class" not in line else f"import keras\n{line}"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(importlib.import_module("sys").modules, "probe", raising=False)
    assert foreign_uses("probe", *names) != []


@pytest.mark.parametrize("name", MODULES)
def test_doctests_of(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
