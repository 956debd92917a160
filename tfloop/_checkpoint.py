"""`Checkpoint`: everything that a run needs to go on exactly, in one atomic file set.

A flat table of variables by path on `tf.train.CheckpointManager`, with a manifest beside it. It
knows how objects are named and compared; what their state consists of, they say themselves.
"""

import base64
import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfloop import _record
from tfloop._accumulate import GradientsAccumulator
from tfloop._messages import described, did_you_mean, listed
from tfloop._optimizer import ModuleOptimizer
from tfloop._paths import address_book, is_model, is_variable, root_key, tf_variable, unwrap

_FORMAT = 1
_RESTORE = "Checkpoint.restore()"
_PREFIX = "ckpt"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


class Checkpoint:
    """Saves and restores the objects of a run, so that it continues bit for bit.

    Saves every variable by its path: models with their statistics and seed states, optimizers with
    all slots and counts, accumulators in the middle of a window, schedulers, metrics, and the
    position of data loaders. A save is atomic: killed at any instant, the directory holds the
    checkpoints that were complete before. Restoring reads and compares everything first.

    "Bit for bit" holds on one machine with `tfloop.seed(n, deterministic=True)`, the same number
    of threads and the same flags.

    Args:
      directory: Made if it isn't there.
      max_to_keep: The newest so many are kept; `None` keeps all.
      **objects: Name -> model, `ModuleOptimizer`, `GradientsAccumulator`, scheduler, `DataLoader`,
        `keras.metrics.Metric`, variable, or a dict or list of models and variables.

    Raises:
      TypeError: An object has no state that can be saved.
      ValueError: No object, or `max_to_keep` below 1.

    Example:
      >>> import tempfile, tensorflow as tf, tfloop
      >>> step = tf.Variable(1)
      >>> checkpoint = tfloop.Checkpoint(tempfile.mkdtemp(), step=step)
      >>> _ = checkpoint.save(7)
      >>> step.assign(2)
      >>> checkpoint.restore(), int(step)
      (7, 1)
    """

    def __init__(
        self, directory: str | os.PathLike, *, max_to_keep: int | None = 3, **objects: Any
    ) -> None:
        if not objects:
            raise ValueError(
                "`Checkpoint(directory, **objects)` got nothing to save, expected objects by name. "
                "Write `Checkpoint(directory, model=model, optim=optim)`."
            )
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(
                f"`Checkpoint(max_to_keep=...)` got {max_to_keep!r}, expected at least 1, or None "
                "to keep all. Write `max_to_keep=3`."
            )
        for name, thing in objects.items():
            _check_kind(name, thing)
        self._directory = Path(directory)
        self._max_to_keep = max_to_keep
        self._objects = {name: unwrap(thing) for name, thing in objects.items()}

    @property
    def latest(self) -> str | None:
        """The path of the newest complete checkpoint, or `None`."""
        return tf.train.latest_checkpoint(str(self._directory))

    def save(self, step: Any) -> str:
        """Writes a checkpoint, then drops the oldest beyond `max_to_keep`.

        Args:
          step: What `restore` gives back: a whole number of at least 0, such as the count of
            updates.

        Returns:
          Its path, without suffix.
        Mutates: the directory.
        Graph mode: call it outside.

        Raises:
          ValueError: `step` is negative, or an object isn't built.
          OSError, tf.errors.OpError: The directory can't be written; older checkpoints are intact.
        """
        step = _checked_step(step)
        parts = {name: _part(name, thing, self._objects) for name, thing in self._objects.items()}
        variables: list[Any] = []
        entries = {name: part.manifest(variables) for name, part in parts.items()}
        manifest = json.dumps({"format": _FORMAT, "step": step, "objects": entries})
        values = {str(n): _saveable(variable) for n, variable in enumerate(variables)}
        checkpoint = tf.train.Checkpoint(manifest=tf.Variable(manifest), values=values)
        self._directory.mkdir(parents=True, exist_ok=True)
        manager = tf.train.CheckpointManager(
            checkpoint, str(self._directory), self._max_to_keep, checkpoint_name=_PREFIX
        )
        # Never the name of files that are there: overwriting a complete one isn't atomic.
        return manager.save(checkpoint_number=self._next_number())

    def restore(self, path: str | os.PathLike | None = None, *, strict: bool = True) -> int | None:
        """Takes over a checkpoint, wholly or not at all.

        An optimizer or accumulator that isn't built yet is built for the object that the checkpoint
        names as its root.

        Args:
          path: A path that `save` gave; by default the newest.
          strict: `False` leaves alone what the checkpoint lacks, and ignores what it has too much,
            by object and, in models, by path. Shapes must agree all the same.

        Returns:
          The step that was saved, or `None` if there is no checkpoint.
        Mutates: the objects; nothing if it raises.
        Graph mode: call it outside.

        Raises:
          FileNotFoundError: There is nothing at `path`.
          ValueError: It is damaged, of a newer format, or doesn't fit: missing, extra or misshapen
            entries, another optimizer.
        """
        path = self.latest if path is None else os.fspath(path)
        if path is None:
            return None
        manifest, values = _read(path)
        entries = manifest["objects"]
        self._check_names(entries, strict)
        found: list[tuple[Any, np.ndarray]] = []
        states: list[tuple[Any, str]] = []
        for name, thing in self._objects.items():
            if name not in entries:
                continue
            self._build(name, thing, entries[name])
            part = _part(name, thing, self._objects)
            part.check_kind(entries[name])
            if part.state is not None:
                states.append((thing, base64.b64decode(entries[name]["state"]).decode()))
            found += part.assignments(entries[name], values, strict)
        _take_over(states)
        for variable, value in found:
            variable.assign(value)
        return manifest["step"]

    def __repr__(self) -> str:
        """What it saves and where."""
        return f"Checkpoint({str(self._directory)!r}: {', '.join(self._objects)})"

    def _next_number(self) -> int:
        pattern = re.compile(rf"{_PREFIX}-(\d+)")
        found = (pattern.match(name) for name in os.listdir(self._directory))
        return max((int(match[1]) for match in found if match), default=0) + 1

    def _check_names(self, entries: Mapping[str, Any], strict: bool) -> None:
        missing = [name for name in self._objects if name not in entries]
        extra = [name for name in entries if name not in self._objects]
        if strict and (missing or extra):
            raise ValueError(
                f"`{_RESTORE}` found other objects: missing in the checkpoint {listed(missing)}, "
                f"unknown here {listed(extra)}. Objects are saved by name. Give the same names, or "
                "take what fits: `restore(strict=False)`."
            )

    def _build(self, name: str, thing: Any, entry: Mapping[str, Any]) -> None:
        """Builds an optimizer or accumulator for the root that the checkpoint names."""
        if not isinstance(thing, (ModuleOptimizer, GradientsAccumulator)) or thing.root is not None:
            return
        root = entry.get("root")
        if root not in self._objects:
            raise ValueError(
                f"`{_RESTORE}` can't build {name!r}: got no root for it among "
                f"{listed(self._objects)}. It was saved with a root that isn't one object here. "
                f"Build it first: `{name}.build(model)`."
            )
        thing.build(self._objects[root])


@dataclasses.dataclass
class _Part:
    """The state of one object, in the words of the manifest.

    Attributes:
      name: The name that the user gave it.
      kind: What it is.
      groups: Its variables.
      root: The name of the object it belongs to.
      state: What isn't in variables, or `None`.
    """

    name: str
    kind: str
    groups: list[_record.GroupRecord]
    root: str | None = None
    state: bytes | None = None

    def manifest(self, variables: list[Any]) -> dict[str, Any]:
        """What is saved, with each variable's number in the table, which grows."""
        groups = []
        for group in self.groups:
            numbers = {}
            for key, variable in group.variables().items():
                numbers[key] = len(variables)
                variables.append(variable)
            entry = {"optimizer": group.optimizer, "members": list(group.slots), "keys": numbers}
            groups.append(entry)
        state = base64.b64encode(self.state).decode() if self.state is not None else None
        return {"kind": self.kind, "root": self.root, "groups": groups, "state": state}

    def check_kind(self, entry: Mapping[str, Any]) -> None:
        """Refuses the state of something else."""
        if entry["kind"] != self.kind:
            raise ValueError(
                f"`{_RESTORE}` found a {entry['kind']} under the name {self.name!r}, expected a "
                f"{self.kind}. The names were exchanged. Give each object the name it was saved "
                "under."
            )

    def assignments(
        self, entry: Mapping[str, Any], values: Mapping[int, np.ndarray], strict: bool
    ) -> list[tuple[Any, np.ndarray]]:
        """Pairs of live variable and saved value, after all checks."""
        saved = [
            (g["optimizer"], g["members"], {key: values[n] for key, n in g["keys"].items()})
            for g in entry["groups"]
        ]
        live = self.groups
        if not strict and self.kind == "model" and saved:
            saved, live = _intersection(saved[0], live[0])
        try:
            return _record.assignments(saved, live)
        except ValueError as error:
            raise ValueError(f"`{_RESTORE}` can't restore {self.name!r}: {error}") from error


def _intersection(
    saved: _record.Saved, live: _record.GroupRecord
) -> tuple[list[_record.Saved], list[_record.GroupRecord]]:
    """What a checkpoint and a model have in common."""
    kind, members, values = saved
    shared = [path for path in members if path in live.slots]
    kept = {key: value for key, value in values.items() if key.rpartition("/")[0] in shared}
    slots = {path: live.slots[path] for path in shared}
    record = dataclasses.replace(live, slots=slots)
    return ([(kind, shared, kept)], [record]) if shared else ([], [])


def _check_kind(name: str, thing: Any) -> None:
    """Refuses what has no state, when the checkpoint is made."""
    kinds = (tf.train.experimental.PythonState, keras.metrics.Metric)
    if isinstance(thing, kinds) or is_model(thing) or is_variable(thing):
        return
    if isinstance(thing, (Mapping, list, tuple)):
        root_key(thing, f"Checkpoint({name}=...)")
        return
    hint = "Give a ModuleOptimizer" if isinstance(thing, keras.optimizers.Optimizer) else "Leave it"
    raise TypeError(
        f"`Checkpoint({name}=...)` got {described(thing)}, expected a model, ModuleOptimizer, "
        "GradientsAccumulator, scheduler, DataLoader, metric or variable. "
        f"{hint}{' in its place' if hint != 'Leave it' else ' out'}, or keep a number in a "
        "variable: `tf.Variable(0)`."
    )


def _part(name: str, thing: Any, objects: Mapping[str, Any]) -> _Part:
    """The state of an object as it is now."""
    if isinstance(thing, (ModuleOptimizer, GradientsAccumulator)):
        key = None if thing.root is None else root_key(thing.root)
        roots = [n for n, other in objects.items() if _is_root(other) and root_key(other) == key]
        kind = type(thing).__name__
        records = thing.records() if key is not None else []
        return _Part(name, kind, records, root=roots[0] if roots else None)
    if isinstance(thing, tf.train.experimental.PythonState):
        state = thing.serialize()
        state = state.encode() if isinstance(state, str) else state
        return _Part(name, type(thing).__name__, [], state=state)
    if isinstance(thing, keras.metrics.Metric):
        variables = {str(n): variable for n, variable in enumerate(thing.variables)}
        return _Part(name, "metric", [_flat(variables)])
    if is_variable(thing):
        return _Part(name, "variable", [_flat({name: thing})])
    return _Part(name, "model", [_flat(address_book(thing, f"Checkpoint({name}=...)").variables)])


def _flat(variables: Mapping[str, Any]) -> _record.GroupRecord:
    slots = {path: {"value": tf_variable(variable)} for path, variable in variables.items()}
    return _record.GroupRecord("variables", slots, {})


def _is_root(thing: Any) -> bool:
    return is_model(thing) or isinstance(thing, (Mapping, list, tuple))


def _saveable(variable: Any) -> tf.Variable:
    """Stand-ins for elements of a vector are written as their value."""
    return variable if isinstance(variable, tf.Variable) else tf.Variable(variable.numpy())


def _checked_step(step: Any) -> int:
    number = int(step)
    if number < 0 or number != step:
        raise ValueError(
            f"`Checkpoint.save(step)` got {step!r}, expected a whole number of at least 0. It is "
            "given back by `restore`. Count updates: `checkpoint.save(optim.iterations)`."
        )
    return number


def _read(path: str) -> tuple[dict[str, Any], dict[int, np.ndarray]]:
    """The manifest and every value, read to the end before anything is used."""
    if not tf.io.gfile.glob(f"{path}.index"):
        directory = os.path.dirname(path)
        known = {os.path.splitext(p)[0] for p in tf.io.gfile.glob(f"{directory}/*.index")}
        hint = did_you_mean(path, known)
        raise FileNotFoundError(
            f"`Checkpoint.restore(path)` found nothing at {path!r}: expected the path that `save` "
            f"returned, without a suffix.{hint} The newest is `checkpoint.latest`."
        )
    try:
        reader = tf.train.load_checkpoint(path)
        tensors = {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"`{_RESTORE}` can't read {path!r}: the files are damaged ({error}). A copy was cut "
            "short, or the disk failed. Restore an older one: `checkpoint.restore(path)`."
        ) from error
    text = tensors.get(f"manifest{_VALUE}")
    manifest = json.loads(text) if text is not None else {}
    if manifest.get("format") != _FORMAT:
        raise ValueError(
            f"`{_RESTORE}` got format {manifest.get('format')} at {path!r}, expected {_FORMAT}. "
            "A newer tfloop, or not tfloop, wrote it. Upgrade tfloop, or save again with this "
            "version."
        )
    values = {}
    for key, value in tensors.items():
        if key.startswith("values/"):
            values[int(key.split("/")[1])] = value
    return manifest, values


def _take_over(states: list[tuple[Any, str]]) -> None:
    """Restores what isn't in variables; all of it or nothing."""
    before = [(thing, thing.serialize()) for thing, _ in states]
    try:
        for thing, state in states:
            thing.deserialize(state)
    except Exception:
        for thing, state in before:
            thing.deserialize(state)
        raise
