"""`DataLoader`: batches in an order that can be told again.

Where rows come from is `sources`'s; this room keeps the place in the epoch, runs the user's
batcher and hands out batches. Nothing here knows models or gradients.
"""

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfloop._checks.arguments import whole_number
from tfloop._checks.messages import described, not_pickled
from tfloop.data._sources import ArraySource, source_of

_INT64 = 2**63 - 1
_MOST_WORKERS = 1024  # TensorFlow holds as many batches, and aborts where it can't.

_MSG_TRACED = (
    "`iter(loader)` was called inside a `tf.function`: got a graph being traced, expected eager "
    "code. Batches drawn there would be baked into the graph. Draw them outside, or pass "
    "`loader.as_dataset()` to the function as an argument."
)
_NOTE_BATCHER = (
    "The `batcher` of a DataLoader is traced as a TensorFlow function of a whole batch, as in "
    "`tf.data.Dataset.map`. Python code that needs values goes into `tf.numpy_function`."
)


class DataLoader(tf.train.experimental.PythonState):
    """Batches of arrays or of a `tf.data.Dataset`, epoch by epoch, with exact resume.

    Each `iter()` is the next epoch. The order of an epoch depends on `(shuffle, epoch)` alone:
    neither `num_workers`, nor the global seed, nor earlier epochs have a say.

    Arrays are copied once into host memory; row numbers are shuffled, and a batch is gathered
    whole: when it is asked for, if it is small and has no batcher, else ahead of the loop. A
    `tf.data.Dataset` of single items is shuffled through a buffer: as large as the data where the
    length is known and 256 MiB hold it, else as many items as these hold, and then the shuffle is
    only local. Beside its values an item takes some 200 bytes; a text, or a part of unknown shape,
    counts as 16 KiB.

    A loader is trackable: in a `tf.train.Checkpoint` it saves its epoch and how many of the
    epoch's batches were handed out, and after a restore the next `iter()` gives the batches
    that were left, in order. An epoch that a loop leaves early on purpose is `take(n)`, which
    ends it; one left by `break` or an exception is resumed. Random numbers drawn inside the
    batcher aren't part of the order: `tf.data` restarts them with every epoch once a global
    seed is set.

    Args:
      dataset: A `tf.data.Dataset` of single items, or a NumPy array, a tensor, or a mapping,
        tuple or namedtuple of these with one common length. A list comes back as a tuple.
      batcher: `batcher(batch) -> batch`, run on whole batches in a graph, ahead of the loop.
      batch_size: Items per batch; the last batch holds what is left.
      shuffle: The seed, an int of at least 0. None keeps the order of the data.
      num_workers: Batches prepared at the same time, at most 1024; 0 prepares them one by one,
        None leaves the number to `tf.data`. The order stays.
      drop_last: Leave out a last batch that is short.
      prefetch: Prepare batches while the loop works on another.

    Graph mode: iterate eagerly; inside a `tf.function` use `as_dataset()` as an argument.

    Raises:
      TypeError: `shuffle` is a bool, a number isn't an int, or `dataset` is a generator, a
        distributed data set or something else that can't be indexed.
      ValueError: A number is out of range, the arrays differ in length, or there are none.

    Example:
      >>> import numpy as np
      >>> import tfloop
      >>> loader = tfloop.DataLoader(np.arange(5), lambda batch: 10 * batch, batch_size=2)
      >>> [batch.numpy().tolist() for batch in loader]
      [[0, 10], [20, 30], [40]]
    """

    def __init__(
        self,
        dataset: Any,
        batcher: Callable[[Any], Any] | None = None,
        *,
        batch_size: int,
        shuffle: int | None = None,
        num_workers: int | None = None,
        drop_last: bool = False,
        prefetch: bool = True,
    ) -> None:
        """See the class."""
        call = "DataLoader(...)"
        self._batch_size = _at_most(
            _INT64,
            "batch_size",
            whole_number(call, "batch_size", batch_size, least=1, fix="batch_size=64"),
        )
        self._seed = shuffle
        if shuffle is not None:
            self._seed = whole_number(call, "shuffle", shuffle, least=0, fix="shuffle=42")
        self._workers: dict[str, Any] = {
            "num_parallel_calls": tf.data.AUTOTUNE,
            "deterministic": True,
        }
        if num_workers is not None:
            workers = whole_number(call, "num_workers", num_workers, least=0, fix="num_workers=4")
            _at_most(_MOST_WORKERS, "num_workers", workers)
            self._workers["num_parallel_calls"] = workers
            if workers == 0:
                self._workers = {}
        if batcher is not None and not callable(batcher):
            raise TypeError(
                f"`DataLoader(dataset, batcher)` can't call its batcher: got "
                f"{described(batcher)}, expected a function of one batch. A batch size is given "
                "by name. Pass `batch_size=64`."
            )
        self._batcher = None if batcher is None else tf.function(batcher)
        self._drop_last, self._prefetch = bool(drop_last), bool(prefetch)
        self._source = source_of(
            dataset, batch_size=self._batch_size, drop_last=self._drop_last, shuffle=self._seed
        )
        self._first: int = 0
        self._last: float = math.inf
        self._place = _Place()

    @property
    def num_items(self) -> int | None:
        """Items that one epoch yields; None where the data set can't tell or never ends."""
        total = self._source.num_items
        if total is None:
            return None
        if self._drop_last and total != math.inf:
            total = total // self._batch_size * self._batch_size
        first, last = (min(n * self._batch_size, total) for n in (self._first, self._last))
        return None if last == math.inf else int(last - first)

    def __len__(self) -> int:
        """Batches in one epoch.

        Raises:
          TypeError: The data set doesn't know its length, or has no end.
        """
        if self.num_items is None:
            raise TypeError(
                "`len(loader)` isn't known: got a `tf.data.Dataset` of unknown or infinite "
                "cardinality, expected a finite one. Filters and generators lose the count. "
                "Say it: `dataset.apply(tf.data.experimental.assert_cardinality(num_items))`."
            )
        return -(-self.num_items // self._batch_size)

    def __bool__(self) -> bool:
        """True, also when empty: truth doesn't ask for a length that may be unknown."""
        return True

    def __repr__(self) -> str:
        """How much it holds, in which order."""
        items = "unknown" if self.num_items is None else self.num_items
        return f"DataLoader({items} items, batch_size={self._batch_size}, shuffle={self._seed})"

    def take(self, count: int) -> "DataLoader":
        """The first `count` batches of every epoch, as a loader that shares this one's place.

        The end of the view is the end of the epoch. A shuffled epoch begins with other items
        each time, so `take` and `skip` don't make a training and a validation part of it:
        split the data itself.

        Args:
          count: At least 0; more than there are is all of them.
        """
        count = whole_number("loader.take(count)", "count", count, least=0, fix="take(10)")
        return self._view(self._first, min(self._last, self._first + count))

    def skip(self, count: int) -> "DataLoader":
        """All but the first `count` batches of every epoch; see `take`.

        Args:
          count: At least 0; more than there are leaves none.
        """
        count = whole_number("loader.skip(count)", "count", count, least=0, fix="skip(10)")
        return self._view(self._first + count, max(self._last, self._first + count))

    def _view(self, first: int, last: float) -> "DataLoader":
        view = self._with_place(self._place)
        view._first, view._last = first, last
        return view

    def _with_place(self, place: "_Place") -> "DataLoader":
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _place=place)
        return other

    def __copy__(self) -> "DataLoader":
        """A loader over the same data with a place of its own, which begins where this one is."""
        return self._with_place(copy.copy(self._place))

    def __deepcopy__(self, memo: dict) -> "DataLoader":
        """As `copy.copy`: data isn't state. Copied together, views share a place as before."""
        return self._with_place(copy.deepcopy(self._place, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled."""
        raise not_pickled(self)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the next epoch, or after a restore those that were left of it.

        Raises:
          RuntimeError: Inside a `tf.function`, where the batches would become constants.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(_MSG_TRACED)
        last = None if self.num_items is None else self._first + len(self)
        return _Epoch(self._place, self._first, self._singles, self._stacks, last)

    def as_dataset(self) -> tf.data.Dataset:
        """The next epoch as a `tf.data.Dataset` of batches, for `fit`, a strategy or a graph.

        It takes the epoch as `iter()` does; the place inside it isn't followed. Iterating the
        data set twice gives the same order twice.
        """
        self._place.begin()
        return self._batches(self._place.epoch, max(self._first, self._place.batch))

    def _singles(self, epoch: int, first: int) -> Iterable[Any]:
        """The same as `_batches`, by the shortest way."""
        light = self._light_source(1)
        if light is not None:
            return light.gathered(epoch, first, max(first, self._last))
        return self._batches(epoch, first)

    def _light_source(self, count: int) -> ArraySource | None:
        """The source, if so many of its batches are best gathered in the loop's own thread."""
        source = self._source
        if self._batcher is None and isinstance(source, ArraySource) and source.is_light(count):
            return source
        return None

    def _batches(self, epoch: int, first: int) -> tf.data.Dataset:
        """The batches of an epoch from `first` on, counted from the epoch's start."""
        batches = self._source.batches(epoch, first, max(first, self._last), self._workers)
        if self._batcher is not None:
            batches = self._finished(batches, self._batcher)
        return batches.prefetch(tf.data.AUTOTUNE) if self._prefetch else batches

    def _stacks(self, epoch: int, first: int, count: int) -> tuple[Iterable[Any], int]:
        """Stacks of `count` full batches from `first` on, and how many there are."""
        total = self._source.num_items
        full = 0 if total is None else int(min(total // self._batch_size, self._last))
        full = max(first, full)
        if full - first < count:
            return (), 0
        light = self._light_source(count)
        if light is not None:
            return light.gathered(epoch, first, full, count), (full - first) // count
        if self._batcher is None:
            stacks = self._source.stacks(epoch, first, full, count, self._workers)
        else:
            batches = self._batches(epoch, first).take(full - first)
            stacks = batches.batch(count, drop_remainder=True)
        shapes = [spec.shape for spec in tf.nest.flatten(stacks.element_spec)]
        # Rows of different lengths can't be stacked.
        alike = all((s.rank or 0) > 1 and s[2:].is_fully_defined() for s in shapes)
        number = (full - first) // count if alike else 0
        return (stacks.prefetch(tf.data.AUTOTUNE) if self._prefetch else stacks), number

    def _finished(self, batches: tf.data.Dataset, batcher: Callable[[Any], Any]) -> tf.data.Dataset:
        # `map` spreads a plain tuple over the arguments, and nothing else.
        is_spread = type(batches.element_spec) is tuple

        @tf.autograph.experimental.do_not_convert
        def finish(*parts: Any) -> Any:
            finished = batcher(parts if is_spread else parts[0])
            if finished is None:
                raise TypeError(
                    "`DataLoader(dataset, batcher)` got no batch from its batcher: got None, "
                    "expected tensors. Its `return` may be missing. End it with `return batch`."
                )
            return finished

        try:
            return batches.map(finish, **self._workers)
        except Exception as error:
            error.add_note(_NOTE_BATCHER)
            raise

    def serialize(self) -> str:
        """The place in the data as JSON; `tf.train.Checkpoint` calls it."""
        return json.dumps({"epoch": self._place.epoch, "batch": self._place.batch, **self._order()})

    def deserialize(self, string_value: str) -> None:
        """Goes to a recorded place: the next `iter()` gives what was left of that epoch.

        Args:
          string_value: What `serialize` gave, from a loader over the same data.

        Raises:
          ValueError: The record lies in the middle of an epoch, and this loader's seed, batch
            size or data would give other batches than the ones that were left. Nothing is
            changed then.
        """
        record = json.loads(string_value)
        mine = self._order()
        changed = {name: record[name] for name in mine if record[name] != mine[name]}
        if changed and record["batch"] > 0:
            raise ValueError(
                f"`DataLoader` can't resume in the middle of an epoch: got a record of {changed}, "
                f"expected { ({name: mine[name] for name in changed}) }. The loader was changed "
                "since. Build it as it was: `tfloop.DataLoader(data, batch_size=..., shuffle=...)`."
            )
        self._place.go(record["epoch"], record["batch"])

    def _order(self) -> dict[str, Any]:
        """What the order of an epoch follows from, besides the epoch."""
        return {
            "shuffle": self._seed,
            "batch_size": self._batch_size,
            "drop_last": self._drop_last,
            "num_items": None if self._source.num_items == math.inf else self._source.num_items,
        }


class _Place:
    """The epoch, and how many of its batches were handed out; shared by a loader's views.

    Only the newest iterator moves the place: each holds the number it got from `begin`.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0
        self._is_ahead = True  # The next iterator starts here, not in the epoch after.
        self._readers = 0

    def begin(self) -> int:
        """Goes where the next iterator starts, and gives that iterator's number."""
        if not self._is_ahead:
            self.epoch, self.batch = self.epoch + 1, 0
        self._is_ahead = False
        self._readers += 1
        return self._readers

    def go(self, epoch: int, batch: int) -> None:
        """Goes to a recorded place; iterators that are still around lose their say."""
        self.epoch, self.batch, self._is_ahead = epoch, batch, True
        self._readers += 1

    def moved(self, reader: int, batch: int) -> None:
        """A reader has handed out the batches before `batch`."""
        if reader == self._readers:
            self.batch = batch

    def ended(self, reader: int) -> None:
        """A reader came to the end of its epoch."""
        if reader == self._readers:
            self.go(self.epoch + 1, 0)


class _Epoch:
    """The iterator of one epoch: hands out batches and keeps the loader's place.

    Batches come one by one or stacked. Each way has a source of its own, made when it is first
    used; a change from one to the other makes it anew from the present place.
    """

    def __init__(
        self,
        place: _Place,
        first: int,
        batches: Callable[[int, int], Iterable[Any]],
        stacks: Callable[[int, int, int], tuple[Iterable[Any], int]],
        last: int | None,
    ) -> None:
        self._place, self._last = place, last
        self._reader = place.begin()
        self._epoch, self._next = place.epoch, max(first, place.batch)
        self._make_batches, self._make_stacks = batches, stacks
        # Made here, so that a mistake in the batcher shows at once.
        self._left = batches(self._epoch, self._next)
        self._batches: Iterator[Any] | None = None
        self._stacks: Iterator[Any] | None = None
        self._stack_size = self._stacks_left = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __length_hint__(self) -> int:
        """How many batches are left, where that is known; `operator.length_hint` asks."""
        return NotImplemented if self._last is None else max(0, self._last - self._next)

    def __next__(self) -> Any:
        if self._batches is None:
            if self._stack_size:
                self._left = self._make_batches(self._epoch, self._next)
                self._stack_size = 0
            self._batches = iter(self._left)
        try:
            batch = self._drawn(self._batches)
        except StopIteration:
            self._place.ended(self._reader)
            raise
        self._went(1)
        return batch

    def stack(self, count: int) -> Any:
        """The next `count` batches along a new leading axis; `None` if fewer full ones are left."""
        if self._stack_size != count:
            stacks, self._stacks_left = self._make_stacks(self._epoch, self._next, count)
            self._stack_size, self._stacks, self._batches = count, iter(stacks), None
        if self._stacks_left == 0 or self._stacks is None:
            return None
        stack = self._drawn(self._stacks)
        self._stacks_left -= 1
        self._went(count)
        return stack

    def _drawn(self, source: Iterator[Any]) -> Any:
        try:
            return next(source)
        except tf.errors.OpError as error:
            error.add_note(f"While a DataLoader prepared batch {self._next}, counted from 0.")
            raise

    def _went(self, count: int) -> None:
        self._next += count
        self._place.moved(self._reader, self._next)


def _at_most(most: int, name: str, number: int) -> int:
    """The number, or the error for one that TensorFlow doesn't survive."""
    if number > most:
        raise ValueError(
            f"`DataLoader(...)` takes no such `{name}`: got {number}, expected at most {most}. So "
            "many don't fit into any machine. Pass `batch_size=64, num_workers=4`."
        )
    return number
