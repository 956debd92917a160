"""`Checkpoint`: everything that a run needs to go on exactly, in one atomic file set.

Knows which objects there are and whose root is whose. What the state of each consists of and how
it is compared is `_parts`'s business, files are `files`'s.
"""

import os
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfloop._accumulation.accumulator import GradientsAccumulator
from tfloop._checkpoint import files
from tfloop._checkpoint.kinds import Pairs, Part, check_kind, is_root, mean_of, part_of, take_over
from tfloop._checks.arguments import whole_number
from tfloop._checks.messages import listed
from tfloop._model.paths import address_book, is_variable, root_key, unwrap
from tfloop._optimizer.optimizer import ModuleOptimizer
from tfloop._replicas import collectives, per_replica, placement
from tfloop._tracing import traces

_SAVE = "Checkpoint.save(step)"
_RESTORE = "Checkpoint.restore()"


class Checkpoint:
    """Saves and restores the objects of a run, so that it continues bit for bit.

    Saves every variable by its path: models with their statistics and seed states, optimizers with
    all slots and counts, accumulators in the middle of a window, schedulers, metrics, and the
    position of data loaders. A save is atomic: killed at any instant, or on a full disk, the
    directory holds the checkpoints that were complete before, and the next save removes what is
    left of it. Restoring reads and compares everything before it changes anything.

    "Bit for bit" holds on one machine with `tfloop.seed(n, deterministic=True)`, the same number
    of threads, the same flags and batches of one shape: a compiled step that meets a short batch
    first is compiled otherwise, and may differ by rounding. What lives in plain Python isn't saved:
    keep a counter in a `tf.Variable`, and give it too. Of random numbers the seed states of models
    are saved; a `keras.random.SeedGenerator` of your own is given as its `state`.

    Variables are written from where they are; a restore holds one copy of the values, in host
    memory.

    Over several workers every one of them calls `save` and `restore`, at the same steps: the first
    writes, and what each has a part of is put together by all. `directory` is one folder that all
    of them see.

    Args:
      directory: Made if it isn't there. One run's own: names of its files begin with `tfloop-`.
      max_to_keep: The newest so many are kept; `None` keeps all.
      **objects: Name -> model, `ModuleOptimizer`, `GradientsAccumulator`, scheduler, `DataLoader`,
        `keras.metrics.Metric`, variable, a Keras optimizer that is built (its variables in their
        order), or a dict or list of models and variables.

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
                "Write `tfloop.Checkpoint(directory, model=model, optim=optim)`."
            )
        if max_to_keep is not None:
            max_to_keep = whole_number(
                call, "max_to_keep", max_to_keep, least=1, fix="max_to_keep=3"
            )
        for name, thing in objects.items():
            check_kind(thing, f"Checkpoint({name}=...)")
        self._directory = os.fspath(directory)
        self._max_to_keep = max_to_keep
        self._objects = {name: unwrap(thing) for name, thing in objects.items()}

    @property
    def latest(self) -> str | None:
        """The path of the newest complete checkpoint, or `None`."""
        return next(reversed(files.written(self._directory)), None)

    def save(self, step: Any) -> str:
        """Writes a checkpoint, then removes the oldest beyond `max_to_keep`.

        Of an optimizer that isn't built yet it saves the state that it would begin with, if one
        object alone can be its root.

        Args:
          step: What `restore` gives back: a whole number of at least 0, such as the count of
            micro-batches; a number, or a scalar tensor or variable.

        Returns:
          Its path, without suffix. Names are counted on, whatever `step` is. Over several workers
          it is there for all of them on return.
        Mutates: the directory, nothing else.
        Graph mode: call it outside.

        Raises:
          TypeError: `step` isn't a whole number.
          ValueError: `step` is negative, a model isn't built, or an optimizer isn't and several
            objects, or none, can be its root.
          RuntimeError: It is called in a trace.
          OSError, tf.errors.OpError: The directory can't be written; older checkpoints are intact.
            On the other workers a FileNotFoundError.
        """
        _refuse_graph(_SAVE)
        step = step.numpy() if hasattr(step, "numpy") else step
        step = whole_number(_SAVE, "step", step, least=0, fix="optim.iterations")
        entries: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for name, thing in self._objects.items():
            root = None
            if isinstance(thing, ModuleOptimizer) and thing.root is None:
                root = self._only(_SAVE, name, self._candidates(_SAVE))
            part = part_of(thing, _SAVE, root)
            roots = self._roots_of(thing.root if root is None and self._has_root(name) else root)
            entries[name] = {"kind": part.kind, "roots": roots, **part.said}
            values[name] = dict(part.values)
            own = {key: part.own[key] for key in part.own if key in part.values}
            for key, each in per_replica.differing(own).items():
                if key in part.statistics:
                    values[name][key] = mean_of(each)
                for place, value in enumerate(each):
                    values.setdefault(_of_replica(name, place), {})[key] = value
                entries[name]["replicas"] = len(each)
        manifest = {"step": step, "objects": entries}
        strategy = self._strategy(_SAVE)
        if placement.spans_processes(strategy):
            return self._write_once(strategy, manifest, values)
        return self._write(manifest, values)

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
        strategy = self._strategy(_RESTORE)
        if placement.spans_processes(strategy):
            self._check_alike(strategy, path)
        if path is None:
            return None
        manifest, values = files.read(path)
        entries = manifest["objects"]
        self._check_names(entries, strict)
        pairs: Pairs = []
        apart: list[tuple[Any, list[Any]]] = []
        parts: list[Part] = []
        # Those that may have to be built come last, when all else is known to fit.
        # In one order in all processes: workers make variables together.
        for name in sorted(filter(entries.__contains__, self._objects), key=self._has_root):
            thing, entry, saved = self._objects[name], entries[name], values[name]
            # An empty window belongs to any root.
            if self._has_root(name) and thing.root is None and any("/" in key for key in saved):
                named = [root for root in entry["roots"] if root in self._objects]
                thing.build(self._only(_RESTORE, name, named or self._candidates(_RESTORE)))
            part = part_of(thing, _RESTORE)
            if entry["kind"] != part.kind:
                raise ValueError(
                    f"`{_RESTORE}` can't restore {name!r}: got a {entry['kind']}, expected a "
                    f"{part.kind}. The names were exchanged. Give each object the name that it was "
                    f"saved under: `tfloop.Checkpoint(directory, {name}=...)`."
                )
            try:
                pairs += part.pairs(entry, saved, strict)
            except ValueError as error:
                raise ValueError(f"`{_RESTORE}` can't restore {name!r}: {error}") from error
            of_replicas = [values[_of_replica(name, n)] for n in range(entry.get("replicas", 0))]
            for key in of_replicas[0] if of_replicas else ():
                if key in part.own:
                    apart.append((part.own[key], [each[key] for each in of_replicas]))
            parts.append(part)
        take_over(pairs, apart)
        for part in parts:
            part.finish()
        return manifest["step"]

    def __repr__(self) -> str:
        """What it saves and where."""
        return f"Checkpoint({self._directory!r}: {', '.join(self._objects)})"

    def _write(self, manifest: Mapping[str, Any], values: Mapping[str, Any]) -> str:
        path = files.write(self._directory, manifest, values)
        files.keep(self._directory, self._max_to_keep)
        return path

    def _write_once(self, strategy: Any, manifest: Mapping[str, Any], values: Any) -> str:
        """The first worker writes; the others help it to read, and wait for it."""
        values = {name: per_replica.read_together(part) for name, part in values.items()}
        path = None
        try:
            if 0 in placement.replica_ids(strategy):
                # In a strategy's scope the first one alone would make variables.
                path = traces.eagerly(lambda: self._write(manifest, values))
        finally:  # where it raises, the others must not wait for ever
            written, *_ = collectives.gather_number(strategy, _number(path))
        latest = self.latest
        if latest is None or not written or _number(latest) != written:
            raise FileNotFoundError(
                f"`{_SAVE}` got no checkpoint from the first worker: got {latest!r} here, "
                f"expected number {written}. It failed there, or {self._directory!r} is another "
                "folder here. Give all workers one that they share: "
                "`tfloop.Checkpoint('/shared/run')`."
            )
        return latest

    def _check_alike(self, strategy: Any, path: str | None) -> None:
        """Workers that restored different checkpoints would train on without a word."""
        numbers = collectives.gather_number(strategy, _number(path))
        if len(set(numbers)) > 1:
            raise FileNotFoundError(
                f"`{_RESTORE}` found other checkpoints on other workers: got the numbers "
                f"{listed(numbers)}, expected one (0 is none). {self._directory!r} isn't the same "
                "folder on all. Give them one that they share: `tfloop.Checkpoint('/shared/run')`."
            )

    def _strategy(self, call: str) -> tf.distribute.Strategy | None:
        """That of the objects, if they were made in one."""
        found: list[Any] = []
        for name, thing in self._objects.items():
            root = thing.root if self._has_root(name) else thing
            if root is not None and is_root(root):
                found += address_book(root, call).variables.values()
            elif isinstance(root, (keras.metrics.Metric, keras.optimizers.Optimizer)):
                found += root.variables
            elif is_variable(root):
                found.append(root)
        return placement.strategy_of(found)

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

    def _roots_of(self, root: Any) -> list[str]:
        """The objects that are this root, under all their names."""
        if root is None:
            return []
        key = root_key(root)
        return [
            n for n, other in self._objects.items() if is_root(other) and root_key(other) == key
        ]

    def _candidates(self, call: str) -> list[str]:
        """The objects that could be the root of an optimizer: those with something to train."""
        return [
            name
            for name, thing in self._objects.items()
            if is_root(thing) and address_book(thing, call).parameters()
        ]

    def _only(self, call: str, name: str, roots: list[str]) -> Any:
        """The one object that can be the root of an optimizer or accumulator."""
        distinct = {root_key(self._objects[root]): root for root in reversed(roots)}
        if len(distinct) != 1:
            raise ValueError(
                f"`{call}` can't build {name!r}: got {len(distinct)} objects that can be its root, "
                f"{listed(roots)}, expected one. It hasn't made a step yet, so nothing says whose "
                f"it is. Build it first: `{name}.build(model)`."
            )
        return self._objects[roots[0]]


def _of_replica(name: str, place: int) -> str:
    """What the values of one replica are saved under, beside those of the object."""
    return f"{name}@{place}"


def _number(path: str | None) -> int:
    """What a checkpoint is told by among those of its directory; 0 for none."""
    return 0 if path is None else files.number_of(path)


def _refuse_graph(call: str) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"`{call}` was called in a trace: got a graph, expected eager code. It would run once, "
            "when the step is traced. Call it between the steps: `checkpoint.save(step)`."
        )
