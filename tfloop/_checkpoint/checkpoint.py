"""`Checkpoint`: everything that a run needs to go on exactly, in one atomic file set.

Knows which objects there are, whose root is whose, and when a save is due. What the state of each
consists of and how it is compared is `kinds`'s business, files are `files`'s, threads `writers`'s.
"""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfloop._accumulation.accumulator import GradientsAccumulator
from tfloop._checkpoint import files, writers
from tfloop._checkpoint.kinds import (
    Model,
    Pairs,
    Part,
    check_kind,
    is_root,
    mean_of,
    part_of,
    take_over,
)
from tfloop._checks.arguments import whole_number
from tfloop._checks.messages import described, listed
from tfloop._compile.turns import STEPS
from tfloop._groups.group import ParamGroup, as_group
from tfloop._model.paths import address_book, is_variable, root_key, unwrap
from tfloop._optimizer.optimizer import ModuleOptimizer
from tfloop._replicas import collectives, per_replica, placement

_SAVE = "Checkpoint.save(step)"
_RESTORE = "Checkpoint.restore()"
_WAIT = "Checkpoint.wait()"
_DUE = "Checkpoint.due()"


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

    Memory: a blocking save needs none of the host's for variables that are there; those of a GPU
    are fetched. Behind the loop it holds what it saves: TensorFlow copies each variable that is
    updated meanwhile, at most one copy of the state, until it is written. A restore holds one copy.

    Use it in the thread that runs the loop, between two steps: there alone a save is whole. It
    belongs to the thread that made it, and waits for steps that `tfloop.compile` runs in others.

    Over several workers every one of them calls `save`, `wait` and `restore`, at the same steps:
    the first writes, and what each has a part of is put together by all. `directory` is one folder
    that all of them see.

    Args:
      directory: Made if it isn't there. One run's own: names of its files begin with `tfloop-`.
        Another process that saves there at the same time is refused, on file systems that can lock
        a folder.
      max_to_keep: The newest so many are kept; `None` keeps all.
      keep_every: Beside these, the first one at or after each multiple of so many steps stays.
      every_seconds: How long after a save, a restore or its making `due` says that it is time.
      **objects: Name -> model, `ModuleOptimizer`, `GradientsAccumulator`, scheduler, `DataLoader`,
        `keras.metrics.Metric`, variable, a Keras optimizer that is built (its variables in their
        order), or a dict or list of models and variables.

    Raises:
      TypeError: An object has no state that can be saved, or an argument isn't a number.
      ValueError: No object, or a number is too small.

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
        self,
        directory: str | os.PathLike,
        *,
        max_to_keep: int | None = 3,
        keep_every: int | None = None,
        every_seconds: float | None = None,
        **objects: Any,
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
        if keep_every is not None:
            keep_every = whole_number(
                call, "keep_every", keep_every, least=1, fix="keep_every=10_000"
            )
        if every_seconds is not None:
            every_seconds = _seconds(call, every_seconds)
        for name, thing in objects.items():
            check_kind(thing, f"Checkpoint({name}=...)")
        self._directory = os.fspath(directory)
        self._max_to_keep = max_to_keep
        self._keep_every = keep_every
        self._every_seconds = every_seconds
        self._objects = {name: unwrap(thing) for name, thing in objects.items()}
        self._thread = threading.current_thread()
        self._busy = False
        self._behind = writers.Behind()
        self._folder: writers.Folder | None = None  # once it has written there
        self._promised: int | None = None  # what the first worker writes behind the loop
        self._last = time.monotonic()

    @property
    def latest(self) -> str | None:
        """The path of the newest complete checkpoint, or `None`."""
        return next(reversed(files.written(self._directory)), None)

    def save(self, step: Any, *, blocking: bool = True) -> str:
        """Writes a checkpoint, then removes the oldest beyond `max_to_keep`.

        The state is what it is when `save` is called, whatever the loop does next. Of an optimizer
        that isn't built yet it saves the state that it would begin with, if one object alone can be
        its root.

        On return the checkpoint is complete, whatever happens to the process, and is brought to the
        disk behind the loop; no older one goes before another has outlasted a power cut. With
        `blocking=False` it is written behind the loop as a whole, and is there once the disk has
        it: at most one at a time, so the next `save`, `wait` or `restore` waits for it, and raises
        what went wrong. A process that ends waits too.

        Args:
          step: What `restore` gives back: a whole number of at least 0, such as the count of
            micro-batches; a number, or a scalar tensor or variable.
          blocking: `False` to go on while it is written.

        Returns:
          Its path, without suffix. Names are counted on, whatever `step` is. Over several workers
          it is there for all of them on return, or after `wait()`.
        Mutates: the directory, nothing else.
        Graph mode: call it outside.

        Raises:
          TypeError: `step` isn't a whole number.
          ValueError: `step` is negative, a model isn't built, or an optimizer isn't and several
            objects, or none, can be its root.
          RuntimeError: It is called in a trace, in another thread, or in the middle of a step;
            another process writes in the directory.
          OSError, tf.errors.OpError: The directory can't be written; older checkpoints are intact.
            On the other workers a FileNotFoundError.
        """
        with self._turn(_SAVE):
            step = step.numpy() if hasattr(step, "numpy") else step
            step = whole_number(_SAVE, "step", step, least=0, fix="optim.iterations")
            strategy = self._strategy(_SAVE)
            self._finish()
            with STEPS.alone(_SAVE):
                content = self._snapshot(step, strategy)
            self._last = time.monotonic()
            if placement.spans_processes(strategy):
                return self._write_once(strategy, content, blocking)
            assert content is not None  # or others would write
            return self._write(content, blocking)

    def wait(self) -> None:
        """Waits until the last save is complete and on the disk.

        Raises:
          OSError, tf.errors.OpError: It couldn't be written; older checkpoints are intact. On the
            other workers a FileNotFoundError.
          RuntimeError: It is called in another thread.
        """
        with self._turn(_WAIT):
            self._finish()

    def due(self) -> bool:
        """Have `every_seconds` passed since the last save or restore?

        Over several workers all have to call it; the first whose time has come decides for all,
        at the price of a message each time.

        Raises:
          RuntimeError: `every_seconds` wasn't given.
        """
        if self._every_seconds is None:
            raise RuntimeError(
                f"`{_DUE}` has no clock: got every_seconds=None, expected seconds. Give them: "
                "`tfloop.Checkpoint(directory, every_seconds=600, ...)`."
            )
        over = time.monotonic() - self._last >= self._every_seconds
        strategy = self._strategy(_DUE)
        return (
            any(collectives.gather_number(strategy, over))
            if placement.spans_processes(strategy)
            else over
        )

    def restore(
        self,
        path: str | os.PathLike | None = None,
        *,
        strict: bool = True,
        group: ParamGroup | None = None,
    ) -> int | None:
        """Takes over a checkpoint, wholly or not at all.

        An optimizer or accumulator that isn't built yet is built for the object that the checkpoint
        names as its root.

        Args:
          path: A path that `save` gave; by default the newest.
          strict: `False` leaves alone what the checkpoint lacks and ignores what it has too much:
            objects, and paths in models. What both have must fit, and there must be something.
          group: Takes over these variables of the models alone, and leaves the rest and all other
            objects as they are; nothing else is read.

        Returns:
          The step that was saved, or `None` if there is no checkpoint.
        Mutates: the objects; nothing if it raises, except that optimizers may be built.
        Graph mode: call it outside. Traces made earlier use the restored values.

        Raises:
          FileNotFoundError: There is nothing at `path`.
          ValueError: It is damaged, of a newer format, or doesn't fit: missing, extra or misshapen
            entries, another optimizer, no object or several that can be a root; the group has no
            member.
          RuntimeError: It is called in a trace, in another thread, or in the middle of a step.
          OSError, tf.errors.OpError: The save before couldn't be written.
        """
        with self._turn(_RESTORE):
            self._finish()
            path = self.latest if path is None else os.fspath(path)
            strategy = self._strategy(_RESTORE)
            if placement.spans_processes(strategy):
                self._check_alike(strategy, path)
            if path is None:
                return None
            with STEPS.alone(_RESTORE):
                step = self._restore(path, strict, self._members(group))
            self._last = time.monotonic()
            return step

    def _restore(self, path: str, strict: bool, members: dict[str, Model] | None) -> int:
        """All of a restore; `members` are the parts of models that are asked for, or `None`."""

        def is_wanted(name: str, key: str) -> bool:
            name, _, _ = name.partition("@")
            if members is not None:
                return name in members and key in members[name].values
            return name in self._objects

        manifest, values = files.read(path, is_wanted)
        entries = manifest["objects"]
        if members is not None:
            entries = {name: entries[name] for name in members if name in entries}
        self._check_names(entries, list(members or self._objects), strict)
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
            part = part_of(thing, _RESTORE) if members is None else members[name]
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

    def _members(self, group: ParamGroup | None) -> dict[str, Model] | None:
        """What of each model a group names; `None` without a group."""
        if group is None:
            return None
        group = as_group("Checkpoint.restore(group=...)", group).bind()
        models = {
            name: Model(address_book(thing, _RESTORE))
            for name, thing in self._objects.items()
            if is_root(thing)
        }
        members = {name: model.only(group) for name, model in models.items()}
        found = {name: part for name, part in members.items() if part.values}
        if not found:
            paths = [path for model in models.values() for path in model.values]
            raise ValueError(
                f"`Checkpoint.restore(group=...)` found nothing to take over: got {group}, "
                f"expected a group with a member among {listed(paths)}. Words are matched whole. "
                "List the paths: `tfloop.named_variables(model)`."
            )
        return found

    def __repr__(self) -> str:
        """What it saves and where."""
        return f"Checkpoint({self._directory!r}: {', '.join(self._objects)})"

    @contextlib.contextmanager
    def _turn(self, call: str) -> Iterator[None]:
        """Refuses every place but the pause between two steps, as far as it can be told."""
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"`{call}` was called in a trace: got a graph, expected eager code. It would run "
                "once, when the step is traced. Call it between the steps: "
                "`checkpoint.save(step)`."
            )
        me = threading.current_thread()
        steps = [
            t._assembly.stepped_in for t in self._objects.values() if isinstance(t, ModuleOptimizer)
        ]
        for owner in [self._thread, *filter(None, steps)]:
            if owner is not me and owner.is_alive():
                raise RuntimeError(
                    f"`{call}` was called in the thread {me.name!r}: got the checkpoint, or an "
                    f"optimizer, of {owner.name!r}, expected one thread for all. Beside a step it "
                    "would find half a state. Make it and call it where the loop runs: "
                    "`if checkpoint.due(): checkpoint.save(step)`."
                )
        if self._busy:
            raise RuntimeError(
                f"`{call}` was called inside another call of this checkpoint: got a signal "
                "handler, most likely, expected the loop. Let the handler set a flag: "
                "`signal.signal(signal.SIGTERM, lambda *_: stop.set())`."
            )
        self._thread, self._busy = me, True
        try:
            yield
        finally:
            self._busy = False

    def _snapshot(self, step: int, strategy: Any) -> files.Snapshot | None:
        """The state of all objects now; `None` where another worker writes it."""
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
        if placement.spans_processes(strategy):
            values = {name: per_replica.read_together(part) for name, part in values.items()}
            if 0 not in placement.replica_ids(strategy):
                return None
        return files.snapshot({"step": step, "objects": entries}, values)

    def _write(self, content: files.Snapshot, blocking: bool) -> str:
        if self._folder is None:
            self._folder = writers.folder(self._directory, _SAVE)
        folder = self._folder
        path = folder.next_path()
        if not blocking:
            self._behind.run(functools.partial(self._write_now, folder, path, content, True))
            return path
        # Where it alone is left, it has to be on the disk before the one before goes.
        alone = self._max_to_keep == 1
        self._write_now(folder, path, content, alone)
        if not alone:
            self._behind.run(functools.partial(files.settle, path))
        return path

    def _write_now(
        self, folder: writers.Folder, path: str, content: files.Snapshot, settled: bool
    ) -> None:
        with folder.writing():
            files.write(path, content, settled=settled)
            files.keep(folder.directory, self._max_to_keep, self._keep_every)

    def _finish(self) -> None:
        """Waits for what is written behind the loop, and raises what went wrong."""
        promised, self._promised = self._promised, None
        try:
            self._behind.wait()
        finally:  # where it raises, the others must not wait for ever
            if promised is not None:
                collectives.gather_number(self._strategy(_WAIT), promised)
        if promised is not None:
            self._check_written(promised)

    def _write_once(self, strategy: Any, content: files.Snapshot | None, blocking: bool) -> str:
        """The first worker writes; the others have helped it to read, and wait for it."""
        path = None
        try:
            if content is not None:
                path = self._write(content, blocking)
        finally:  # where it raises, the others must not wait for ever
            written, *_ = collectives.gather_number(strategy, _number(path))
        if not written or blocking:
            self._check_written(written)
        else:
            self._promised = written
        return os.path.join(self._directory, f"tfloop-{written}")

    def _check_written(self, written: int) -> None:
        """Is what the first worker has written here, too? 0 is nothing."""
        latest = self.latest
        if latest is None or not written or _number(latest) != written:
            raise FileNotFoundError(
                f"`{_SAVE}` got no checkpoint from the first worker: got {latest!r} here, "
                f"expected number {written}. It failed there, or {self._directory!r} is another "
                "folder here. Give all workers one that they share: "
                "`tfloop.Checkpoint('/shared/run')`."
            )

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

    def _check_names(self, entries: Mapping[str, Any], names: list[str], strict: bool) -> None:
        missing = [name for name in names if name not in entries]
        extra = [name for name in entries if name not in self._objects]
        if (missing or extra) if strict else len(missing) == len(names):
            raise ValueError(
                f"`{_RESTORE}` found other objects: got {listed(entries)}, expected "
                f"{listed(names)}; missing there {listed(missing)}, unknown here "
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


def _seconds(call: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"`{call}` takes no such `every_seconds`: got {described(value)}, expected seconds. "
            "Pass `every_seconds=600`."
        )
    if not value > 0:
        raise ValueError(
            f"`{call}` takes no such `every_seconds`: got {value}, expected more than 0. It is "
            "the time between saves. Pass `every_seconds=600`."
        )
    return float(value)
