"""Several steps in one call: batches drawn and stacked first, then one loop in the graph.

Drawing from an iterator and looping over a stack; what a step is, and when its traces are stale,
is `step`'s.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from tfloop._backend.tensorflow import EagerTensor
from tfloop._checks.messages import described
from tfloop._tracing import traces

_CALL = "compiled_step.run(iterator, *args, steps=K)"


@runtime_checkable
class Stacking(Protocol):
    """An iterator that can give many batches as one."""

    def stack(self, count: int) -> Any:
        """The next `count` batches along a new leading axis; `None` where they can't be had so."""


def drawn(iterator: Iterator[Any], count: int) -> tuple[Any, list[Any]]:
    """Draws up to `count` batches.

    Returns:
      `count` batches as one stack and nothing else; or `None`, and those that are left, fewer than
      `count` or of different shapes.

    Raises:
      TypeError: It isn't an iterator.
    """
    if not isinstance(iterator, Iterator):
        raise TypeError(
            f"`{_CALL}` needs an iterator: got {described(iterator)}, expected one that knows its "
            "place. Each call goes on where the last one stopped. "
            "Make one per epoch: `batches = iter(loader)`."
        )
    if isinstance(iterator, Stacking):
        stack = iterator.stack(count)
        if stack is not None:
            return stack, []
    batches = list(itertools.islice(iterator, count))
    rows = _rows(batches)
    if len(batches) == count and _are_all(EagerTensor, *rows):
        try:
            if rows is not batches:
                for batch in batches:
                    tf.nest.assert_same_structure(batch, batches[0])
            stacks = [tf.raw_ops.Pack(values=column) for column in zip(*rows, strict=True)]
            return tf.nest.pack_sequence_as(batches[0], stacks), []
        except (TypeError, ValueError, tf.errors.InvalidArgumentError):
            pass  # other structures, lengths or dtypes
    made = zip(batches, rows, strict=True)
    return None, [tf.nest.pack_sequence_as(batch, row) for batch, row in made]


def _rows(batches: list[Any]) -> list[Any]:
    """The leaves of each batch, arrays as tensors; what else isn't one is left to single calls."""
    if _are_all(tuple, batches) and _are_all(EagerTensor, *batches):
        return batches  # as most are, and to take 50 of them apart takes as long as a step
    return [[*map(_as_tensor, tf.nest.flatten(batch))] for batch in batches]


def _as_tensor(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf


def _are_all(kind: type, *rows: Any) -> bool:
    return {*map(type, itertools.chain(*rows))} == {kind}


# Autograph must go through the inner function to the user's.
def looped(step: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs `step` on each batch of a stack and stacks what it returns.

    Args:
      step: `step(batch, *args, **kwargs)`, to be traced.
    """

    @traces.not_converted
    def many(stack: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = tf.nest.flatten(stack)
        # Open once several numbers of steps have been asked for.
        count = leaves[0].shape[0] or tf.shape(leaves[0])[0]
        one = tf.function(step)
        first = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), stack)
        one = one.get_concrete_function(first, *args, **kwargs)
        results = one.structured_outputs
        specs = tf.nest.flatten(results)
        kept = [
            tf.TensorArray(spec.dtype, count, element_shape=spec.shape)
            for spec in specs
            if spec is not None
        ]

        def body(number: tf.Tensor, kept: Any) -> tuple[tf.Tensor, Any]:
            batch = tf.nest.map_structure(lambda t: t[number], stack)
            found = one(batch, *args, **kwargs)
            outputs = [output for output in tf.nest.flatten(found) if output is not None]
            return number + 1, [
                array.write(number, output) for array, output in zip(kept, outputs, strict=True)
            ]

        _, kept = tf.while_loop(
            lambda number, _: number < count,
            body,
            (tf.constant(0), kept),
            parallel_iterations=1,  # steps change variables, one after the other
            maximum_iterations=count,
        )
        stacks = iter([array.stack() for array in kept])
        found = [None if spec is None else next(stacks) for spec in specs]
        return tf.nest.pack_sequence_as(results, found)

    return many


def joined(results: list[Any]) -> Any:
    """The results of single steps, along a new leading axis."""
    return tf.nest.map_structure(
        lambda *leaves: None if leaves[0] is None else tf.stack(leaves), *results
    )


def nothing_like(results: Any) -> Any:
    """Results of no step at all, of the same kinds."""
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[:0], results)


def check_not_empty(results: Any) -> None:
    """Refuses an iterator that was empty from the start: nobody knows what the step returns.

    Raises:
      ValueError: There are no earlier results.
    """
    if results is None:
        raise ValueError(
            f"`{_CALL}` found no batch: got an iterator at its end, expected at least one batch in "
            "the first call. The data is empty, or another loop has used it up. "
            "Make a new one: `batches = iter(loader)`."
        )
