"""Where batches come from: arrays in memory, or a `tf.data.Dataset`.

A source knows its rows and their order: epoch `e` under seed `s` is one fixed order, whatever
the threads do. Positions, workers and the user's batcher are `data`'s.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfloop._checks.messages import listed

_SHUFFLE_BYTES = 256 * 2**20
_LIGHT_BYTES = 2**19
# What NumPy has, too, without a copy.
_PLAIN = {tf.bool, tf.uint8, tf.int8, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64}
_MOST_SKIPPED = 2**31 - 1  # `skip` takes more for nothing.
_UNKNOWN_ITEM_BYTES = 16 * 2**10
# What a buffered item costs beside its values, as measured: a place, and a tensor a component.
_SLOT_BYTES, _TENSOR_BYTES = 160, 48

_MSG_NO_SOURCE = (
    "`DataLoader(dataset)` can't draw batches from this: got {kind}{where}, expected a "
    "`tf.data.Dataset` of single items, a NumPy array or tensor, or a dict or tuple of these. "
    "{cause} {fix}"
)


class ArraySource:
    """Arrays of equal length: row numbers are shuffled, then whole batches are gathered.

    Shuffling numbers costs nothing beside shuffling rows, and one gather a batch replaces the
    per-item work of `tf.data`. The arrays are copied once, into host memory.
    """

    def __init__(self, arrays: Any, *, batch_size: int, drop_last: bool, shuffle: int | None):
        """Checks the lengths and takes the copy."""
        with tf.device("CPU:0"):
            self._arrays = _tensors(arrays, "")
        self.num_items: int = _common_length(self._arrays)
        self._batch_size, self._drop_last, self._shuffle = batch_size, drop_last, shuffle
        size = batch_size
        self._num_batches = self.num_items // size if drop_last else -(-self.num_items // size)
        self._makers: dict[int, Any] = {}

    def is_light(self, count: int) -> bool:
        """Do so many batches take less time to gather than to get from a thread of `tf.data`?"""
        arrays = tf.nest.flatten(self._arrays)
        row = sum(math.prod(array.shape[1:]) * array.dtype.size for array in arrays)
        plain = all(array.dtype in _PLAIN for array in arrays)
        return plain and count * row * self._batch_size <= _LIGHT_BYTES

    def gathered(self, epoch: int, start: int, stop: float, count: int = 0) -> Iterator[Any]:
        """As `batches`, or `stacks` of `count`, each gathered when it is asked for."""
        size, order = self._batch_size, self._order(epoch)
        last = int(min(stop, self._num_batches))
        arrays = [np.asarray(array) for array in tf.nest.flatten(self._arrays)]  # no copies
        is_flat = type(self._arrays) is tuple and len(self._arrays) == len(arrays)
        together = max(count, 1)
        for first in range(start, last - together + 1, together):
            window = slice(first * size, (first + together) * size)
            found = [a[window] if order is None else a.take(order[window], axis=0) for a in arrays]
            if count:
                found = [part.reshape(count, size, *part.shape[1:]) for part in found]
            with tf.device("CPU:0"):  # as `tf.data` gives them
                leaves = tuple(map(tf.constant, found))
            yield leaves if is_flat else tf.nest.pack_sequence_as(self._arrays, leaves)

    def batches(self, epoch: int, start: int, stop: float, workers: dict[str, Any]) -> Any:
        """The batches `start` to `stop` of an epoch, as a `tf.data.Dataset`."""
        return self._dataset(0, epoch, start, int(min(stop, self._num_batches)), workers)

    def stacks(
        self, epoch: int, start: int, stop: int, count: int, workers: dict[str, Any]
    ) -> tf.data.Dataset:
        """The full batches `start` to `stop`, `count` at a time along a new leading axis.

        All rows of a stack are gathered at once.
        """
        return self._dataset(count, epoch, start, stop, workers)

    def _dataset(self, count: int, epoch: int, start: int, stop: int, workers: Any) -> Any:
        if count not in self._makers:
            # A function, so that its map is traced once and not in every epoch.
            make = functools.partial(self._mapped, count, workers)
            self._makers[count] = tf.function(make, autograph=False)
        bounds = [tf.constant(number, tf.int64) for number in (start, stop)]
        order = self._order(epoch)
        with tf.device("CPU:0"):
            rows = None if order is None else tf.constant(order)
        return self._makers[count](rows, *bounds)

    def _mapped(self, count: int, workers: Any, order: Any, start: Any, stop: Any) -> Any:
        """Batches, or stacks of `count` of them."""
        size, together = self._batch_size, max(count, 1)

        def rows(number: tf.Tensor) -> Any:
            window = slice(number * size, (number + together) * size)
            picked = None if order is None else order[window]

            def taken(array: tf.Tensor) -> tf.Tensor:
                found = array[window] if picked is None else tf.gather(array, picked)
                if count:
                    return tf.reshape(found, [count, size, *array.shape[1:]])
                if self._drop_last:
                    found.set_shape([size, *array.shape[1:]])
                return found

            return tf.nest.map_structure(taken, self._arrays)

        numbers = tf.data.Dataset.range(start, stop - (together - 1), together)
        return numbers.map(rows, **workers)

    def _order(self, epoch: int) -> np.ndarray | None:
        if self._shuffle is None:
            return None
        generator = np.random.Generator(np.random.PCG64([self._shuffle, epoch]))
        return generator.permutation(self.num_items)


class DatasetSource:
    """The items of a `tf.data.Dataset`, shuffled through a buffer that is as large as is sane."""

    def __init__(
        self, dataset: Any, *, batch_size: int, drop_last: bool, shuffle: int | None
    ) -> None:
        """Keeps the data set; nothing is read before the first batch."""
        self._dataset, self._shuffle = dataset, shuffle
        self._batch_size, self._drop_last = batch_size, drop_last
        cardinality = int(dataset.cardinality())
        if cardinality == tf.data.UNKNOWN_CARDINALITY:
            self.num_items: int | float | None = None
        else:
            self.num_items = (
                math.inf if cardinality == tf.data.INFINITE_CARDINALITY else cardinality
            )
        self._shuffled = tf.function(self._shuffle_by, autograph=False)

    def batches(self, epoch: int, start: int, stop: float, workers: dict[str, Any]) -> Any:
        """The batches `start` to `stop` of an epoch, as a `tf.data.Dataset`."""
        dataset = self._dataset
        if self._shuffle is not None:
            # One int64 for (seed, epoch): `shuffle` takes no more.
            entropy = np.random.SeedSequence([self._shuffle, epoch]).generate_state(1, np.uint64)
            dataset = self._shuffled(tf.constant(int(entropy[0]) >> 1, tf.int64))
        batches = dataset.batch(self._batch_size, drop_remainder=self._drop_last)
        batches = batches.skip(min(start, _MOST_SKIPPED))
        return batches if stop == math.inf else batches.take(min(stop - start, 2**63 - 1))

    def stacks(
        self, epoch: int, start: int, stop: int, count: int, workers: dict[str, Any]
    ) -> tf.data.Dataset:
        """The full batches `start` to `stop`, `count` at a time along a new leading axis."""
        return self.batches(epoch, start, stop, workers).batch(count, drop_remainder=True)

    def _shuffle_by(self, seed: tf.Tensor) -> Any:
        # `shuffle` mixes its seed with the global one. In a traced function the global seed is
        # the function's own, so pinning it here leaves the order to `seed` alone.
        tf.random.set_seed(1)
        known = self.num_items if self.num_items is not None else math.inf
        buffer = max(1, min(known, _SHUFFLE_BYTES // _item_bytes(self._dataset.element_spec)))
        return self._dataset.shuffle(buffer, seed=seed, reshuffle_each_iteration=False)


def source_of(data: Any, **options: Any) -> ArraySource | DatasetSource:
    """The source for what the user handed over.

    Raises:
      TypeError: `data` is neither a data set nor arrays; the message knows the common mistakes.
    """
    if isinstance(data, tf.data.Dataset):
        return DatasetSource(data, **options)
    if isinstance(data, tf.distribute.DistributedDataset):
        raise _no_source(
            data,
            cause="It is batched and spread over replicas already.",
            fix="Load first, distribute after: `tfloop.compile(step, strategy=strategy)`.",
        )
    if isinstance(data, Iterator) or callable(data):
        raise _no_source(
            data,
            cause="A generator can't be rewound, counted or resumed.",
            fix="Collect it, or wrap it: `tf.data.Dataset.from_generator(make, "
            "output_signature=spec)`.",
        )
    return ArraySource(data, **options)


def _tensors(data: Any, where: str) -> Any:
    """The same structure with a host tensor per array; lists become tuples, as in `tf.data`."""
    if isinstance(data, Mapping):
        parts = {key: _tensors(data[key], f"{where}[{key!r}]") for key in data}
        return type(data)(parts)  # type: ignore[call-arg]
    if isinstance(data, (tuple, list)):
        items = [_tensors(item, f"{where}[{index}]") for index, item in enumerate(data)]
        return type(data)(*items) if hasattr(data, "_fields") else tuple(items)
    if isinstance(data, tf.RaggedTensor | tf.SparseTensor):
        raise _no_source(
            data,
            where,
            cause="Its rows have no common shape to gather.",
            fix="Use `tf.data.Dataset.from_tensor_slices(data)`.",
        )
    if isinstance(data, str) or not (tf.is_tensor(data) or hasattr(data, "__array__")):
        raise _no_source(
            data,
            where,
            cause="Only arrays have rows; a list stands for several of them.",
            fix="Wrap it: `numpy.asarray(data)`.",
        )
    tensor = tf.identity(data) if tf.is_tensor(data) else tf.constant(np.asarray(data))
    if tensor.shape.rank == 0:
        raise ValueError(
            f"`DataLoader(dataset)` can't batch a scalar: got shape (){_at(where)}, expected a "
            "leading axis of items. Repeat it per item: `numpy.full(num_items, value)`."
        )
    return tensor


def _common_length(arrays: Any) -> int:
    named = list(_named(arrays, ""))
    if not named:
        raise ValueError(
            "`DataLoader(dataset)` holds no arrays: got an empty structure, expected at least "
            "one array. Pass `tfloop.DataLoader((images, labels), batch_size=64)`."
        )
    lengths = {int(tensor.shape[0]) for _, tensor in named}
    if len(lengths) > 1:
        table = listed(f"{name or 'array'}: {tensor.shape[0]}" for name, tensor in named)
        raise ValueError(
            f"`DataLoader(dataset)` needs arrays of one length: got {table}, expected the same "
            "number of items in each. Cut them alike before: `array[:num_items]`."
        )
    return lengths.pop()


def _named(arrays: Any, where: str) -> Iterator[tuple[str, tf.Tensor]]:
    if isinstance(arrays, Mapping):
        for key in arrays:
            yield from _named(arrays[key], f"{where}[{key!r}]")
    elif isinstance(arrays, tuple):
        for index, part in enumerate(arrays):
            yield from _named(part, f"{where}[{index}]")
    else:
        yield where, arrays


def _item_bytes(spec: Any) -> int:
    """Bytes of one item in a buffer, guessed where a shape or a string's length is unknown."""
    sizes = [_SLOT_BYTES]
    for part in tf.nest.flatten(spec):
        known = isinstance(part, tf.TensorSpec) and part.shape.is_fully_defined()
        fixed = known and part.dtype != tf.string
        values = part.shape.num_elements() * part.dtype.size if fixed else _UNKNOWN_ITEM_BYTES
        sizes.append(_TENSOR_BYTES + values)
    return sum(sizes)


def _at(where: str) -> str:
    return f" at `dataset{where}`" if where else ""


def _no_source(data: object, where: str = "", *, cause: str, fix: str) -> TypeError:
    kind = f"an object of type {type(data).__name__}"
    return TypeError(_MSG_NO_SOURCE.format(kind=kind, where=_at(where), cause=cause, fix=fix))
