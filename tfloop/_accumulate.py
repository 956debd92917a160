"""`GradientsAccumulator` and `microbatch`: large batches in small memory.

Sums gradients over micro-batches in `tf.Variable` buffers, or inside one graph loop. Never
touches an optimizer: what a window of micro-batches becomes is decided by `ModuleOptimizer.step`.
"""

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfloop import _record, _sparse, _traces
from tfloop._gradients import GradientsParams
from tfloop._messages import described
from tfloop._paths import AddressBook, address_book, root_key
from tfloop._sparse import Gradient

_ACCUMULATE = "accumulator.accumulate(model, grads)"


class GradientsAccumulator(tf.train.experimental.PythonState):
    """Accumulates the gradients of several micro-batches into one update.

        "sum":   sum of g_i
        "mean":  sum of w_i g_i / sum of w_i

    With `"mean"` and sample (or token) counts as weights, micro-batches of unequal sizes give the
    gradient of the one large batch. The window ends when the accumulator is handed to
    `optim.step(lr, model, accumulator)`, which takes what was added, few or many, and resets it.
    A parameter that got nothing in the window stays untouched there, with its state. Micro-steps
    touch no optimizer, so schedules, bias correction and decay count updates.

    One copy of the trainable parameters in memory: float32 buffers, float64 for float64 parameters,
    made by `build`, which the first `accumulate` calls. A `tf.train.Checkpoint` saves them by path,
    so a run resumes exactly in the middle of a window.

    Args:
      reduction: `"sum"`, as Burn does, or `"mean"`.

    Raises:
      ValueError: Another reduction.

    Example:
      >>> import keras, tensorflow as tf, tfloop
      >>> net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
      >>> window = tfloop.GradientsAccumulator(reduction="mean")
      >>> for value, samples in ((1.0, 3), (5.0, 1)):
      ...     grads = tfloop.GradientsParams({"dense.kernel": tf.constant([[value]])})
      ...     window.accumulate(net, grads, weight=samples)
      >>> float(window.grads()["dense.kernel"][0, 0])
      2.0
    """

    def __init__(self, *, reduction: str = "sum") -> None:
        if reduction not in ("sum", "mean"):
            raise ValueError(
                f"`GradientsAccumulator(reduction=...)` got {described(reduction)}, expected 'sum' "
                "or 'mean'. The mean over samples makes one large batch: "
                "`GradientsAccumulator(reduction='mean')`."
            )
        self.reduction = reduction
        self._book: AddressBook | None = None
        self._model: Any = None
        self._buffers: dict[str, tf.Variable] = {}
        self._pending: bytes | None = None
        self._version = 0

        def counters() -> list[tf.Variable]:
            kinds = (("count", tf.int64), ("weight", tf.float64))
            return [tf.Variable(0, dtype=d, trainable=False, name=n) for n, d in kinds]

        self._count, self._weight = _traces.eagerly(counters)
        self._present: tf.Variable | None = None

    @property
    def count(self) -> tf.Variable:
        """The micro-batches in the window so far: an int64 scalar variable."""
        return self._count

    @property
    def weight(self) -> tf.Variable:
        """The sum of their weights: a float64 scalar variable; the count for `"sum"`."""
        return self._weight

    @_traces.not_converted
    def build(self, model: Any) -> "GradientsAccumulator":
        """Makes the buffers for a root; a parameter thawed later gets its buffer then.

        Args:
          model: The root that this accumulator belongs to from now on, as in `named_parameters`.

        Returns:
          self.
        Mutates: self.
        Graph mode: works in any trace; buffers are made outside of it.

        Raises:
          ValueError: It belongs to another root, the model isn't built, or a restored window
            doesn't fit.
        """
        self._prepare(model, "GradientsAccumulator.build(model)")
        return self

    @_traces.not_converted
    def accumulate(self, model: Any, grads: GradientsParams, weight: Any = None) -> None:
        """Adds the gradients of one micro-batch to the window.

        Args:
          model: The root, or a view of it.
          grads: Gradients by path; consumed. Those of frozen parameters are dropped. Sparse ones
            are scattered into the buffer and never made dense.
          weight: For `"mean"`, how much this micro-batch counts: its samples or tokens when the
            loss is a mean over them; 1 by default. `"sum"` takes none.

        Mutates: self; nothing if it raises.
        Graph mode: works, jitted too. A tensor weight that is negative or not finite raises when
          it runs, except under XLA.

        Raises:
          ValueError: `grads` is empty, has an unknown path or another shape; a weight with
            `"sum"`, or one that is negative or not finite.
          TypeError: A wrong kind of argument.
          RuntimeError: `grads` was consumed before.
        """
        if not isinstance(grads, GradientsParams):
            raise TypeError(
                f"`{_ACCUMULATE}` needs a GradientsParams: got {described(grads)}. Gradients are "
                "added by path. Key them: "
                "`GradientsParams.from_grads(tape.backward(loss), model)`."
            )
        weight = self._checked_weight(weight)
        book = self._prepare(model, _ACCUMULATE)
        checked = grads.checked(book, _ACCUMULATE)
        grads._consume(_ACCUMULATE)
        trainable = book.parameters()
        received = [path in checked and path in trainable for path in self._buffers]
        for path, buffer in self._buffers.items():
            if path in checked and path in trainable:
                _add(buffer, checked[path], weight if self.reduction == "mean" else None)
        self._present.assign(tf.logical_or(self._present, tf.constant(received)))
        self._weight.assign_add(weight)
        self._count.assign_add(1)

    @_traces.not_converted
    def grads(self) -> GradientsParams:
        """Takes the accumulated gradients and resets the window.

        For reading or changing them before the step. In a trace the presence of a parameter is not
        known: every one is there then, an absent one as zeros, and the step would move it by
        its momentum. Hand the accumulator itself to the step to avoid that.

        Returns:
          Path -> gradient, of the buffers' dtype; in eager mode those that got anything.
        Mutates: self: the window is empty afterwards.
        Graph mode: works; an empty window raises when it runs, except under XLA.

        Raises:
          RuntimeError: The window is empty.
          ValueError: The weights sum to 0.
        """
        grads, _ = self._window("accumulator.grads()")
        self.reset()
        return GradientsParams(grads)

    @_traces.not_converted
    def reset(self) -> None:
        """Empties the window without using it."""
        self._count.assign(0)
        self._weight.assign(0.0)
        if self._present is not None:
            self._present.assign(tf.zeros_like(self._present))
        for buffer in self._buffers.values():
            buffer.assign(tf.zeros_like(buffer))

    def fingerprint(self) -> object:
        """What of this accumulator a trace bakes in; see `_traces`."""
        return self._version

    def serialize(self) -> bytes:
        """The window as bytes, for `tf.train.Checkpoint`."""
        if self._pending is not None:
            return self._pending
        return _record.dump(self.records()) if self._book is not None else b""

    def deserialize(self, state: bytes) -> None:
        """Takes over a window from `tf.train.Checkpoint`, or nothing if it doesn't fit.

        Raises:
          ValueError: Missing, extra or misshapen entries.
        """
        if self._book is None:
            self._pending = state or None
        elif state:
            _record.load(state, self.records())
        else:
            self.reset()

    def records(self) -> list[_record.GroupRecord]:
        """The live window, as `_record` writes and restores it."""
        slots = {
            path: {"sum": buffer, "present": _Element(self._present, index)}
            for index, (path, buffer) in enumerate(self._buffers.items())
        }
        counters = {"count": self._count, "weight": self._weight}
        return [_record.GroupRecord(f"GradientsAccumulator({self.reduction})", slots, counters)]

    def __repr__(self) -> str:
        """What it does and what is in it."""
        root = self._book.description if self._book else "not built"
        held = f", {int(self._count)} micro-batches" if tf.executing_eagerly() else ""
        return f"GradientsAccumulator({root}, reduction={self.reduction!r}{held})"

    def _prepare(self, model: Any, call: str) -> AddressBook:
        """Builds for the root, or checks that it is ours and follows what has changed in it."""
        if self._book is not None and root_key(model, call) != self._book.key:
            theirs = address_book(model, call)
            raise ValueError(
                f"`{call}` got {theirs.description}, expected {self._book.description}, which this "
                "accumulator was built with. A window belongs to one root. Use an accumulator for "
                "each: `tfloop.GradientsAccumulator()`."
            )
        book = address_book(model, call)
        if book is not self._book or any(path not in self._buffers for path in book.parameters()):
            _traces.eagerly(lambda: self._build(model, book))
        _traces.depends_on(book)
        _traces.depends_on(self)
        return book

    def _build(self, model: Any, book: AddressBook) -> None:
        """Makes the buffers that are missing and keeps the others, with their sums."""
        wanted = [p for p in book.floating() if p in self._buffers or p in book.parameters()]
        present = dict.fromkeys(wanted, False)
        if self._present is not None:
            present |= dict(zip(self._buffers, self._present.numpy(), strict=True))
        buffers = {}
        for path in wanted:
            variable = book.variables[path]
            dtype = _sparse.accumulation_dtype(variable.dtype)
            buffers[path] = self._buffers.get(path)
            if buffers[path] is None:
                zeros = tf.zeros(variable.shape, dtype)
                buffers[path] = tf.Variable(zeros, trainable=False, name=f"sum/{path}")
        flags = [bool(present[path]) for path in wanted]
        self._present = tf.Variable(flags, trainable=False, name="present")
        self._model, self._book, self._buffers = model, book, buffers
        self._version += 1
        if self._pending is not None:
            pending, self._pending = self._pending, None
            _record.load(pending, self.records())

    @property
    def root(self) -> Any:
        """The model that the accumulator was built with, or `None`."""
        return self._model

    def window(
        self, model: Any, call: str
    ) -> tuple[dict[str, Gradient], dict[str, tf.Tensor] | None]:
        """What the step takes; `reset` empties the window afterwards.

        Returns:
          Path -> gradient, and path -> did it get anything, a scalar bool; or, where that is known
          now, only the gradients that did, and `None`.
        """
        if self._book is not None:
            self._prepare(model, call)
        return self._window(call)

    def _window(self, call: str) -> tuple[dict[str, Gradient], dict[str, tf.Tensor] | None]:
        eager = tf.executing_eagerly()
        if self._book is None or (eager and int(self._count) == 0):
            raise RuntimeError(
                f"`{call}` found an empty window: got 0 micro-batches, expected at least 1. "
                "Nothing was accumulated since the last update. "
                "Add some: `accumulator.accumulate(model, grads)`."
            )
        if eager and self.reduction == "mean" and float(self._weight) == 0:
            raise ValueError(
                f"`{call}` can't take the mean: got weights that sum to 0, expected more. All "
                "micro-batches were empty. Drop them: `accumulator.reset()`."
            )
        with tf.control_dependencies(self._checks(call)):
            grads = {path: self._reduced(buffer) for path, buffer in self._buffers.items()}
            flags = tf.unstack(tf.identity(self._present), len(self._buffers))
        present = dict(zip(grads, flags, strict=True))
        if eager:
            return {path: grad for path, grad in grads.items() if bool(present[path])}, None
        return grads, present

    def _reduced(self, buffer: tf.Variable) -> tf.Tensor:
        """The sum, or the mean over the weights."""
        if self.reduction == "sum":
            return tf.identity(buffer)
        return buffer / tf.cast(self._weight, buffer.dtype)

    def _checks(self, call: str) -> list[tf.Operation]:
        """The conditions of `_window` where only a run can tell."""
        if tf.executing_eagerly():
            return []
        empty = [f"`{call}` found an empty window: nothing was accumulated since the last update"]
        checks = [tf.debugging.Assert(self._count > 0, empty)]
        if self.reduction == "mean":
            zero = [f"`{call}` can't take the mean: the weights sum to 0"]
            checks.append(tf.debugging.Assert(self._weight > 0, zero))
        return [check for check in checks if check is not None]

    def _checked_weight(self, weight: Any) -> tf.Tensor:
        """The weight as a float64 scalar."""
        if weight is None:
            return tf.constant(1.0, tf.float64)
        if self.reduction == "sum":
            raise ValueError(
                f"`{_ACCUMULATE}` got weight={weight!r} with reduction='sum', expected none: a sum "
                "has no weights. For the mean over samples make it with "
                "`GradientsAccumulator(reduction='mean')`."
            )
        if isinstance(weight, (int, float, np.number)) and not isinstance(weight, bool):
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(
                    f"`{_ACCUMULATE}` got the weight {weight!r}, expected a finite number of at "
                    "least 0. It is the number of samples or tokens behind the gradients: "
                    "`weight=len(batch)`."
                )
            return tf.constant(float(weight), tf.float64)
        numeric = isinstance(weight, (tf.Tensor, tf.Variable, np.ndarray))
        if not numeric or tf.TensorShape(weight.shape).rank not in (0, None):
            got = f"shape {tuple(weight.shape)}" if numeric else described(weight)
            raise TypeError(
                f"`{_ACCUMULATE}` got {got} as weight, expected a number or a scalar tensor. It "
                "is the number of samples or tokens: `weight=tf.shape(x)[0]`."
            )
        weight = tf.cast(weight, tf.float64)
        sound = tf.logical_and(tf.math.is_finite(weight), weight >= 0)
        text = f"`{_ACCUMULATE}` got a weight that is negative or not finite:"
        check = tf.debugging.Assert(sound, [text, weight])
        with tf.control_dependencies([check] if check is not None else []):
            return tf.identity(weight)


class _Element:
    """One element of a vector variable, read and written as a scalar variable."""

    shape = tf.TensorShape(())

    def __init__(self, vector: tf.Variable, index: int) -> None:
        self._vector = vector
        self._index = index
        self.dtype = vector.dtype

    def numpy(self) -> np.ndarray:
        return self._vector[self._index].numpy()

    def assign(self, value: Any) -> None:
        self._vector.assign(tf.tensor_scatter_nd_update(self._vector, [[self._index]], [value]))


def _add(buffer: tf.Variable, grad: Gradient, weight: tf.Tensor | None) -> None:
    """buffer += weight * grad; rows are scattered, repeated ones add up."""
    grad = _sparse.cast(grad, buffer.dtype)
    if weight is not None:
        grad = _sparse.map_values(lambda t: t * tf.cast(weight, t.dtype), grad)
    if _sparse.is_sparse(grad):
        buffer.scatter_add(grad)
    else:
        buffer.assign_add(grad)
