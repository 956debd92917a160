"""`Checkpoint`: everything that a run needs to go on exactly, in one atomic file set.

Knows which objects there are, whose root is whose, and how what was saved is compared with what
is there. What an object's state consists of it says itself; files are `_store`'s.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfloop import _record, _store
from tfloop._accumulate import GradientsAccumulator
from tfloop._arguments import whole_number
from tfloop._messages import described, listed
from tfloop._optimizer import ModuleOptimizer
from tfloop._paths import address_book, is_model, is_variable, root_key, tf_variable, unwrap

_SAVE = "Checkpoint.save(step)"
_RESTORE = "Checkpoint.restore()"
_Values = dict[str, Any]
_Pairs = list[tuple[Any, Any]]


class Checkpoint:
    """Saves and restores the objects of a run, so that it continues bit for bit.

    Saves every variable by its path: models with their statistics and seed states, optimizers with
    all slots and counts, accumulators in the middle of a window, schedulers, metrics, and the
    position of data loaders. A save is atomic: killed at any instant, or on a full disk, the
    directory holds the checkpoints that were complete before, and the next save removes what is
    left of it. Restoring reads and compares everything before it changes anything.

    "Bit for bit" holds on one machine with `tfloop.seed(n, deterministic=True)`, the same number
    of threads and the same flags. What lives in plain Python isn't saved: keep a counter in a
    `tf.Variable`, and give it too. Of random numbers the seed states of models are saved; a
    `keras.random.SeedGenerator` of your own is given as its `state`.

    Variables are written from where they are; a restore holds one copy of the values, in host
    memory.

    Args:
      directory: Made if it isn't there. One run's own: names of its files begin with `tfloop-`.
      max_to_keep: The newest so many are kept; `None` keeps all.
      **objects: Name -> model, `ModuleOptimizer`, `GradientsAccumulator`, scheduler, `DataLoader`,
        `keras.metrics.Metric`, variable, or a dict or list of models and variables.

    Raises:
      TypeError: An object has no state that can be saved, or `max_to_keep` isn't an int.
      ValueError: No object, or `max_to_keep` below 1.

    Example:
      >>> import tempfile, tensorflow as tf, tfloop
      >>> epoch = tf.Variable(1)
      >>> checkpoint = tfloop.Checkpoint(tempfile.mkdtemp(), epoch=epoch)
      >>> _ = checkpoint.save(7)
      >>> _ = epoch.assign(2)
      >>> checkpoint.restore(), int(epoch)
      (7, 1)
    """

    def __init__(
        self, directory: str | os.PathLike, *, max_to_keep: int | None = 3, **objects: Any
    ) -> None:
        call = "Checkpoint(directory, **objects)"
        if not objects:
            raise ValueError(
                f"`{call}` has nothing to save: got no objects, expected some by name. "
                "Write `Checkpoint(directory, model=model, optim=optim)`."
            )
        if max_to_keep is not None:
            max_to_keep = whole_number(call, "max_to_keep", max_to_keep, least=1, fix="None")
        for name, thing in objects.items():
            _check_kind(f"Checkpoint({name}=...)", thing)
        self._directory = os.fspath(directory)
        self._max_to_keep = max_to_keep
        self._objects = {name: unwrap(thing) for name, thing in objects.items()}

    @property
    def latest(self) -> str | None:
        """The path of the newest complete checkpoint, or `None`."""
        return next(reversed(_store.written(self._directory)), None)

    def save(self, step: Any) -> str:
        """Writes a checkpoint, then removes the oldest beyond `max_to_keep`.

        An optimizer that isn't built yet is built first, if one object alone can be its root.

        Args:
          step: What `restore` gives back: a whole number of at least 0, such as the count of
            micro-batches; a number, or a scalar tensor or variable.

        Returns:
          Its path, without suffix. Names are counted on, whatever `step` is.
        Mutates: the directory.
        Graph mode: call it outside.

        Raises:
          TypeError: `step` isn't a whole number.
          ValueError: `step` is negative, a model isn't built, or an optimizer isn't and several
            objects, or none, can be its root.
          RuntimeError: It is called in a trace.
          OSError, tf.errors.OpError: The directory can't be written; older checkpoints are intact.
        """
        _refuse_graph(_SAVE)
        step = step.numpy() if hasattr(step, "numpy") else step
        step = whole_number(_SAVE, "step", step, least=0, fix="optim.iterations")
        entries: dict[str, Any] = {}
        values: _Values = {}
        for name, thing in self._objects.items():
            if isinstance(thing, ModuleOptimizer) and thing.root is None:
                self._build(_SAVE, name, self._candidates(_SAVE))
            part = self._part(_SAVE, name)
            entries[name] = {"kind": part.kind, **part.entry()}
            values |= {f"{name}/{key}": value for key, value in part.values.items()}
        path = _store.write(self._directory, {"step": step, "objects": entries}, values)
        _store.keep(self._directory, self._max_to_keep)
        return path

    def restore(self, path: str | os.PathLike | None = None, *, strict: bool = True) -> int | None:
        """Takes over a checkpoint, wholly or not at all.

        An optimizer or accumulator that isn't built yet is built for the object that the checkpoint
        names as its root.

        Args:
          path: A path that `save` gave; by default the newest.
          strict: `False` leaves alone what the checkpoint lacks and ignores what it has too much:
            objects, and paths in models. What both have must fit, and there must be something.

        Returns:
          The step that was saved, or `None` if there is no checkpoint.
        Mutates: the objects; nothing if it raises, except that optimizers may be built.
        Graph mode: call it outside. Traces made earlier use the restored values.

        Raises:
          FileNotFoundError: There is nothing at `path`.
          ValueError: It is damaged, of a newer format, or doesn't fit: missing, extra or misshapen
            entries, another optimizer, no object or several that can be a root.
          RuntimeError: It is called in a trace.
        """
        _refuse_graph(_RESTORE)
        path = self.latest if path is None else os.fspath(path)
        if path is None:
            return None
        manifest, values = _store.read(path)
        entries = manifest["objects"]
        self._check_names(entries, strict)
        pairs: _Pairs = []
        # Those that may have to be built come last, when all else is known to fit.
        for name in sorted(entries.keys() & self._objects.keys(), key=self._has_root):
            entry = entries[name]
            start = f"{name}/"
            saved = {key[len(start) :]: v for key, v in values.items() if key.startswith(start)}
            # An empty window belongs to any root.
            is_held = any("/" in key for key in saved)
            if is_held and self._has_root(name) and self._objects[name].root is None:
                named = [root for root in entry["roots"] if root in self._objects]
                self._build(_RESTORE, name, named or self._candidates(_RESTORE))
            part = self._part(_RESTORE, name)
            if entry["kind"] != part.kind:
                raise ValueError(
                    f"`{_RESTORE}` can't restore {name!r}: got a {entry['kind']}, expected a "
                    f"{part.kind}. The names were exchanged. Give each object the name that it was "
                    f"saved under: `Checkpoint(directory, {name}=...)`."
                )
            pairs += part.pairs(entry, saved, strict)
        _assign(pairs)
        return manifest["step"]

    def __repr__(self) -> str:
        """What it saves and where."""
        return f"Checkpoint({self._directory!r}: {', '.join(self._objects)})"

    def _check_names(self, entries: Mapping[str, Any], strict: bool) -> None:
        missing = [name for name in self._objects if name not in entries]
        extra = [name for name in entries if name not in self._objects]
        if (missing or extra) if strict else len(missing) == len(self._objects):
            raise ValueError(
                f"`{_RESTORE}` found other objects: got {listed(entries)}, expected "
                f"{listed(self._objects)}; missing there {listed(missing)}, unknown here "
                f"{listed(extra)}. Objects are saved by name. Give the same names, or take what "
                "both have: `checkpoint.restore(strict=False)`."
            )

    def _has_root(self, name: str) -> bool:
        return isinstance(self._objects[name], (ModuleOptimizer, GradientsAccumulator))

    def _candidates(self, call: str) -> list[str]:
        """The objects that could be the root of an optimizer: those with something to train."""
        return [
            name
            for name, thing in self._objects.items()
            if _is_root(thing) and address_book(thing, call).parameters()
        ]

    def _build(self, call: str, name: str, roots: list[str]) -> None:
        """Builds an optimizer or accumulator for the one object that can be its root."""
        distinct = {root_key(self._objects[root]): root for root in reversed(roots)}
        if len(distinct) != 1:
            raise ValueError(
                f"`{call}` can't build {name!r}: got {len(distinct)} objects that can be its root, "
                f"{listed(roots)}, expected one. It hasn't made a step yet, so nothing says whose "
                f"it is. Build it first: `{name}.build(model)`."
            )
        self._objects[name].build(self._objects[roots[0]])

    def _part(self, call: str, name: str) -> "_Variables | _Optimizer | _Window | _State":
        """An object as the words of a checkpoint put it."""
        thing = self._objects[name]
        if self._has_root(name):
            others = self._objects.items()
            key = None if thing.root is None else root_key(thing.root)
            roots = [n for n, other in others if _is_root(other) and root_key(other) == key]
            part = _Optimizer if isinstance(thing, ModuleOptimizer) else _Window
            return part(name, thing, roots)
        if isinstance(thing, tf.train.experimental.PythonState):
            return _State(thing)
        if isinstance(thing, keras.metrics.Metric):
            numbered = {f"{n}.{v.name}": v for n, v in enumerate(thing.variables)}
            return _Variables(name, "metric", numbered)
        if is_variable(thing):
            return _Variables(name, "variable", {"value": thing})
        return _Variables(name, "model", address_book(thing, call).variables)


class _Variables:
    """A model, a metric or a variable: variables by path."""

    def __init__(self, name: str, kind: str, variables: Mapping[str, Any]) -> None:
        self.name = name
        self.kind = kind
        self.values = {path: tf_variable(variable) for path, variable in variables.items()}

    def entry(self) -> dict[str, Any]:
        """What the manifest says besides the kind."""
        return {}

    def pairs(self, entry: Mapping[str, Any], saved: _Values, strict: bool) -> _Pairs:
        """Pairs of live variable and saved value, after all checks."""
        missing = [path for path in self.values if path not in saved]
        extra = [path for path in saved if path not in self.values]
        if (missing or extra) if strict else len(missing) == len(self.values):
            raise ValueError(
                f"`{_RESTORE}` can't restore {self.name!r}: got other variables, missing in the "
                f"checkpoint {listed(missing)}, unknown here {listed(extra)}, expected the same. "
                "It was built otherwise when it was saved. Build it as it was, or take what both "
                "have: `checkpoint.restore(strict=False)`."
            )
        shared = {path: variable for path, variable in self.values.items() if path in saved}
        for path, variable in shared.items():
            found = tuple(saved[path].shape), tf.as_dtype(saved[path].dtype).name
            expected = tuple(variable.shape), variable.dtype.name
            if found != expected:
                raise ValueError(
                    f"`{_RESTORE}` can't restore {self.name!r}: got shape {found[0]} and dtype "
                    f"{found[1]} for {path!r}, expected {expected[0]} and {expected[1]}. The model "
                    "was changed since it was saved. Build it as it was: `build_model(config)`."
                )
        return [(variable, saved[path]) for path, variable in shared.items()]


class _Optimizer:
    """A `ModuleOptimizer`: groups, known by their members."""

    kind = "ModuleOptimizer"

    def __init__(self, name: str, optim: ModuleOptimizer, roots: list[str]) -> None:
        self.name = name
        self.roots = roots
        self.groups = optim.records()
        self.values = {
            f"{number}/{key}": variable
            for number, group in enumerate(self.groups)
            for key, variable in group.variables().items()
        }

    def entry(self) -> dict[str, Any]:
        """The groups in the order of the numbers that begin their keys."""
        groups = [{"optimizer": g.optimizer, "members": list(g.slots)} for g in self.groups]
        return {"roots": self.roots, "groups": groups}

    def pairs(self, entry: Mapping[str, Any], saved: _Values, strict: bool) -> _Pairs:
        """Pairs of live variable and saved value, after all checks."""
        found: list[_record.Saved] = []
        for number, group in enumerate(entry["groups"]):
            start = f"{number}/"
            values = {key[len(start) :]: v for key, v in saved.items() if key.startswith(start)}
            found.append((group["optimizer"], group["members"], values))
        return _fitting(self.name, lambda: _record.assignments(found, self.groups))


class _Window:
    """A `GradientsAccumulator`: what got anything in its window."""

    kind = "GradientsAccumulator"

    def __init__(self, name: str, accumulator: GradientsAccumulator, roots: list[str]) -> None:
        self.name = name
        self.roots = roots
        self.values = accumulator.state()
        self._accumulator = accumulator

    def entry(self) -> dict[str, Any]:
        """Whose gradients they are."""
        return {"roots": self.roots}

    def pairs(self, entry: Mapping[str, Any], saved: _Values, strict: bool) -> _Pairs:
        """Pairs of live variable and saved value, after all checks."""
        return _fitting(self.name, lambda: self._accumulator.assignments(saved))


class _State:
    """A `PythonState`, such as a `DataLoader`: bytes that it alone can judge."""

    def __init__(self, thing: tf.train.experimental.PythonState) -> None:
        self.kind = type(thing).__name__
        self.values = {"state": thing.serialize()}
        self._thing = thing

    def entry(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def pairs(self, entry: Mapping[str, Any], saved: _Values, strict: bool) -> _Pairs:
        """This, which stands for a variable, and its state."""
        return [(self, saved["state"])]

    def assign(self, state: Any) -> None:
        """Takes over a state."""
        self._thing.deserialize(state)


def _assign(pairs: _Pairs) -> None:
    """Takes over all values or none: what may still refuse comes first."""
    states = [(part, value) for part, value in pairs if isinstance(part, _State)]
    done: list[_State] = []
    try:
        for part, value in states:
            part.assign(value)
            done.append(part)
    except Exception:
        for part in done:
            part.assign(part.values["state"])
        raise
    for variable, value in pairs:
        if not isinstance(variable, _State):
            variable.assign(value)


def _fitting(name: str, assignments: Callable[[], _Pairs]) -> _Pairs:
    """What an object says of its saved state, with its name where it refuses."""
    try:
        return assignments()
    except ValueError as error:
        raise ValueError(f"`{_RESTORE}` can't restore {name!r}: {error}") from error


def _is_root(thing: Any) -> bool:
    return is_model(thing) or isinstance(thing, (Mapping, list, tuple))


def _refuse_graph(call: str) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"`{call}` was called in a trace: got a graph, expected eager code. It would run once, "
            "when the step is traced. Call it between the steps: `checkpoint.save(step)`."
        )


def _check_kind(call: str, thing: Any) -> None:
    """Refuses what has no state, when the checkpoint is made."""
    kinds = (tf.train.experimental.PythonState, keras.metrics.Metric)
    if isinstance(thing, kinds) or is_model(thing) or is_variable(thing):
        return
    if isinstance(thing, (Mapping, list, tuple)):
        root_key(thing, call)
        return
    fix = "Keep a number in a variable: `tf.Variable(0)`."
    if isinstance(thing, keras.optimizers.Optimizer):
        fix = "Give what steps with it: `tfloop.ModuleOptimizer(optimizer)`."
    elif isinstance(thing, keras.random.SeedGenerator):
        fix = "Give its variable: `generator.state`."
    raise TypeError(
        f"`{call}` has no state that can be saved: got {described(thing)}, expected a model, "
        "ModuleOptimizer, GradientsAccumulator, scheduler, DataLoader, metric or variable. "
        f"{fix}"
    )
