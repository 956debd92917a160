"""`GradientsAccumulator`: the gradients of several micro-batches as those of one batch.

Sums in `tf.Variable` buffers that outlive a call; `microbatch` is its sibling without. Never
touches an optimizer: what a window becomes is decided by `ModuleOptimizer.step`.
"""

import copy
import dataclasses
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfloop._accumulation import buffers
from tfloop._accumulation.buffers import Buffers
from tfloop._checks.copying import with_attributes_of
from tfloop._checks.messages import described, not_pickled
from tfloop._gradients.params import GradientsParams
from tfloop._model.paths import AddressBook, address_book, root_key, tf_variable
from tfloop._replicas import contexts, placement, seeds
from tfloop._replicas.reduction import WINDOW_KINDS, reduction_of
from tfloop._tensors import overwritten, sparse
from tfloop._tensors.counts import checked_weight, divided, weighted
from tfloop._tensors.sparse import Gradient
from tfloop._tracing import traces

_NEW = "GradientsAccumulator(reduction=...)"
_ACCUMULATE = "accumulator.accumulate(model, grads)"
_MSG_EMPTY = (
    "`{call}` found an empty window: got 0 micro-batches, expected at least 1. Nothing was "
    "accumulated since the last update. Add some: `accumulator.accumulate(model, grads)`."
)


class Window(NamedTuple):
    """What was accumulated on this replica, as a step takes it.

    Attributes:
      sums: Path -> sum of the weighted gradients.
      weight: What the sums are to be divided by, or `None` for plain sums.
      present: Path -> did it get anything, a scalar bool; or `None` where that is known now, and
        `sums` holds those that did.
    """

    sums: dict[str, Gradient]
    weight: tf.Tensor | None
    present: dict[str, tf.Tensor] | None


class GradientsAccumulator(tf.train.experimental.PythonState):
    """Accumulates the gradients of several micro-batches into one update.

        "sum":   sum of g_i
        "mean":  sum of w_i g_i / sum of w_i

    With `"mean"` and sample (or token) counts as weights, micro-batches of unequal sizes give the
    gradient of the one large batch. The window ends when the accumulator is handed to
    `optim.step(lr, model, accumulator)`, which takes what was added, few or many, and empties it.
    A parameter that got nothing in the window stays untouched there, with its state. Micro-steps
    touch no optimizer, so schedules, moving averages, bias correction and decay count updates.
    Of what overwrites a variable (the scales of Keras' float8 layers) the largest is kept, as Keras
    does in its own accumulation.

    What still differs from the large batch is what a layer computes over the batch itself.
    BatchNormalization normalises each micro-batch by its own mean and variance, so activations and
    gradients are those of the small batches, and its statistics move once per micro-batch:
    `m**k * old` is left of them after k, not `m * old`. Use GroupNormalization or
    LayerNormalization, freeze the BatchNormalization, or raise its momentum to `m ** (1 / k)`.
    Dropout draws a mask per micro-batch.

    An empty window raises, and so does one whose weights sum to 0. XLA drops asserts: there the
    step leaves everything as it is.

    One copy of the trainable parameters in memory: float32 buffers, float64 for float64 parameters,
    made by `build`, which the first `accumulate` calls. Under a strategy each replica has its own,
    and nothing is sent between them before the step. `tfloop.Checkpoint` and
    `tf.train.Checkpoint` save the window by path, so a run resumes exactly in the middle of one.

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
        fix = (
            "The mean over samples makes one large batch: "
            "`tfloop.GradientsAccumulator(reduction='mean')`."
        )
        self.reduction = reduction
        self._weighs = reduction_of(_NEW, reduction, WINDOW_KINDS, fix).weighs
        self._model: Any = None
        self._book: AddressBook | None = None
        self._restored: dict[str, Any] = {}  # a window that waits for `build`
        self._version = 0
        self._lock = threading.RLock()
        self._is_new_copy = False  # which may still go on with a copy of the model
        variables = traces.eagerly(
            lambda: [
                tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)
                for name, shape, dtype in (
                    ("count", [], tf.int64),
                    ("weight", [], tf.float64),
                    ("layout", [], tf.int64),
                    ("present", [0], tf.float32),
                )
            ]
        )
        count, weight, self._layout, present = variables
        self._buffers = Buffers(reduction, count, weight, present, {})

    @property
    def count(self) -> tf.Variable:
        """The micro-batches in the window so far: an int64 scalar variable.

        Under a strategy `build` puts another in its place.
        """
        traces.depends_on(self)
        return self._buffers.count

    @property
    def weight(self) -> tf.Variable:
        """The sum of their weights: a float64 scalar variable; the count for `"sum"`.

        On a replica it is that of the replica, outside the sum of all. Under a strategy `build`
        puts another in its place.
        """
        traces.depends_on(self)
        return self._buffers.weight

    @property
    def root(self) -> Any:
        """The model that the accumulator was built with, or `None`."""
        return self._model

    @traces.not_converted
    def build(self, model: Any) -> "GradientsAccumulator":
        """Makes the buffers for a root; a parameter unfrozen later gets its buffer then.

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

    @traces.not_converted
    def accumulate(self, model: Any, grads: GradientsParams, weight: Any = None) -> None:
        """Adds the gradients of one micro-batch to the window.

        Args:
          model: The root, or a view of it.
          grads: Gradients by path; consumed. Those of frozen parameters are dropped. Sparse ones
            are scattered into the buffer and never made dense.
          weight: For `"mean"`, how much this micro-batch counts: its samples or tokens when the
            loss is a mean over them; 1 by default. At a weight of 0 nothing is added, even where a
            mean over nothing made the gradients NaN. `"sum"` takes none. In
            `tfloop.compile(strategy=...)` a replica counts by its share of the batch.

        Mutates: self; nothing if a check raises.
        Graph mode: works, jitted too. A tensor weight that is negative or not finite raises when
          it runs, and so does a foreign trace older than the buffers, except under XLA.

        Raises:
          ValueError: `grads` is empty, has an unknown path or another shape; a weight with
            `"sum"`, or one that is negative, not finite or no scalar.
          TypeError: A wrong kind of argument.
          RuntimeError: `grads` was consumed before, or it is called outside of the replicas.
        """
        if not isinstance(grads, GradientsParams):
            raise TypeError(
                f"`{_ACCUMULATE}` needs a GradientsParams: got {described(grads)}. Gradients are "
                "added by path. Key them: "
                "`tfloop.GradientsParams.from_grads(tape.backward(loss), model)`."
            )
        if weight is not None and not self._weighs:
            raise ValueError(
                f"`{_ACCUMULATE}` got weight={described(weight)} with "
                f"reduction={self.reduction!r}, expected none: a sum has no weights. For "
                "the mean over samples make it with "
                "`tfloop.GradientsAccumulator(reduction='mean')`."
            )
        with contexts.one_at_a_time(self._lock):
            self._accumulate(model, grads, weight)

    def _accumulate(self, model: Any, grads: GradientsParams, weight: Any) -> None:
        weight, factor = self._weights(weight)
        book = self._prepare(model, _ACCUMULATE)
        contexts.check_context(_ACCUMULATE, book.variables)
        trainable = book.parameters()
        checked = grads.checked(book, _ACCUMULATE)
        grads._consume(_ACCUMULATE)
        received = {path: grad for path, grad in checked.items() if path in trainable}
        held = self._buffers
        with tf.control_dependencies([weight, *self._freshness(_ACCUMULATE)]):
            for path, grad in received.items():
                buffer = held.sums[path]
                grad = sparse.cast(grad, buffer.dtype)
                if overwritten.is_value(path):
                    self._keep_larger(path, grad, weight)
                    continue
                if factor is not None:
                    grad = weighted(grad, factor)
                if sparse.is_sparse(grad):
                    # Variables of a strategy have no `scatter_add`; each replica's handle has.
                    tf.raw_ops.ResourceScatterAdd(
                        resource=buffer.handle, indices=grad.indices, updates=grad.values
                    )
                else:
                    buffer.assign_add(grad, read_value=False)  # reading it back slows the trace
            flags = tf.constant([float(path in received) for path in held.sums], tf.float32)
            if any(map(overwritten.is_value, received)):
                # A value that didn't count isn't there: 0 in its place would be a value, too.
                values = [*map(overwritten.is_value, held.sums)]
                flags = tf.where(values, flags * tf.cast(weight > 0, flags.dtype), flags)
            held.present.assign(tf.maximum(held.present, flags))
            held.weight.assign_add(weight)
            held.count.assign_add(1)

    @traces.not_converted
    def grads(self) -> GradientsParams:
        """Takes the accumulated gradients and empties the window.

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
        traces.depends_on(self)
        with contexts.one_at_a_time(self._lock):
            return self._taken()

    def _taken(self) -> GradientsParams:
        window = self._window("accumulator.grads()")
        with tf.control_dependencies(self.checks("accumulator.grads()", window.weight)):
            grads = means(window)
            if self._book is not None and window.present is not None:
                for path in filter(overwritten.is_value, grads):
                    kept = tf.cast(tf_variable(self._book.variables[path]), grads[path].dtype)
                    grads[path] = tf.where(window.present[path], grads[path], kept)
            self.reset()
        return GradientsParams(grads)

    @traces.not_converted
    def reset(self) -> None:
        """Empties the window without using it."""
        traces.depends_on(self)
        with contexts.one_at_a_time(self._lock):
            self._restored = {}
            self._buffers.clear()

    def window(self, model: Any, call: str) -> Window:
        """What the step takes; `reset` empties the window afterwards."""
        self._prepare(model, call)
        return self._window(call)

    def fingerprint(self) -> object:
        """What of this accumulator a trace bakes in; see `traces`."""
        return self._version

    def state(self) -> dict[str, Any]:
        """The window by path, as `Buffers.state`; a restored one that still waits for `build`."""
        return self._restored or self._buffers.state()

    def serialize(self) -> bytes:
        """The window as bytes, for `tf.train.Checkpoint`."""
        return buffers.dump(self.state())

    def deserialize(self, state: bytes) -> None:
        """Takes over a window from `tf.train.Checkpoint`, or nothing if it doesn't fit.

        Before the first `accumulate` the sums are kept until `build` knows the model.

        Raises:
          ValueError: Damaged bytes, another reduction, an unknown path, another shape or dtype.
        """
        window = buffers.load(state)
        if self._book is None:
            self._restored = window if any("/" in key for key in window) else {}
            window = {key: window[key] for key in ("count", "weight")}
        self._assign(window)

    def __copy__(self) -> "GradientsAccumulator":
        """As `copy.deepcopy`: two accumulators can't share a window."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict) -> "GradientsAccumulator":
        """An accumulator of its own with an equal window.

        It goes on with the same model, or with a copy of that: the first micro-batch decides.
        """
        twin = type(self)(reduction=self.reduction)
        if self._book is None:
            twin.deserialize(self.serialize())
        else:
            twin._take_over(self, self._model, self._book)
            twin._is_new_copy = True
            if id(self._model) in memo:
                twin.build(memo[id(self._model)])
        return with_attributes_of(self, twin, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled."""
        raise not_pickled(self)

    def __repr__(self) -> str:
        """What it does and what is in it."""
        root = self._book.description if self._book else "not built"
        held = f", {self._buffers.count.numpy()} micro-batches" if tf.executing_eagerly() else ""
        return f"GradientsAccumulator({root}, reduction={self.reduction!r}{held})"

    def _prepare(self, model: Any, call: str) -> AddressBook:
        """Builds for the root, or checks that it is ours and follows what has changed in it."""
        book = address_book(model, call)
        with self._lock:  # no replica waits for another in here
            if self._book is not None and root_key(model, call) != self._book.key:
                if not (self._is_new_copy and self._book.is_like(book)):
                    raise ValueError(
                        f"`{call}` got {book.description}, expected {self._book.description}, "
                        "which this accumulator was built with. A window belongs to one root. Use "
                        "an accumulator for each: `tfloop.GradientsAccumulator()`."
                    )
                traces.eagerly(lambda: self._take_over(self, model, book))
            self._is_new_copy = False
            if book is not self._book or book.parameters().keys() - self._buffers.sums.keys():
                traces.eagerly(lambda: self._build(model, book))
        traces.depends_on(book)
        traces.depends_on(self)
        return book

    def _take_over(self, other: "GradientsAccumulator", model: Any, book: AddressBook) -> None:
        """Gets the window of another, or of this one, for a root of the same paths."""
        window = {key: np.asarray(value) for key, value in other.state().items()}
        kept = other._buffers.sums
        self._book, self._buffers = None, dataclasses.replace(self._buffers, sums={})
        self._build(model, book, kept)
        self._assign(window)

    def _assign(self, window: dict[str, Any]) -> None:
        for variable, value in self._buffers.assignments(window):
            variable.assign(value)

    def _build(self, model: Any, book: AddressBook, kept: Iterable[str] = ()) -> None:
        """Makes the buffers that are missing; a variable that has one keeps it, with its sum."""
        old = self._buffers
        before = dict(zip(old.sums, old.present.numpy(), strict=bool(old.sums)))
        sums, present, trainable = {}, [], book.parameters()
        for path, variable in book.floating().items():
            # Sought by the variable: a layer put in before others renumbers their paths.
            earlier = (self._book and self._book.path_of(variable)) or ""
            buffer = old.sums.get(earlier)
            if buffer is None and (path in trainable or path in kept):
                zeros = tf.zeros(variable.shape, sparse.accumulation_dtype(variable.dtype))
                with placement.scope_of([variable]):
                    buffer = tf.Variable(zeros, name=f"sum/{path}", **placement.SUMMED)
            if buffer is not None:
                sums[overwritten.path_for(path, variable)] = buffer
                present.append(before.get(earlier, 0.0))
        variables = list(book.variables.values())
        count = placement.placed_with(old.count, variables, placement.OF_THE_FIRST)
        weight = placement.placed_with(old.weight, variables, placement.SUMMED)
        with placement.scope_of(variables):
            flags = tf.Variable(present, dtype=tf.float32, name="present", **placement.SUMMED)
        new = Buffers(self.reduction, count, weight, flags, sums)
        new.check(self._restored)  # raises before anything is changed
        self._model, self._book, self._buffers = model, book, new
        seeds.make_distinct(variables)
        self._layout = placement.placed_with(self._layout, variables, placement.MIRRORED)
        self._version += 1
        self._layout.assign(self._version)
        if self._restored:
            self._assign(self._restored)
            self._restored = {}

    def _keep_larger(self, path: str, value: Gradient, weight: tf.Tensor) -> None:
        """Keeps the maximum of what a window gets for a variable that is overwritten."""
        held = self._buffers
        buffer, there = held.sums[path], held.present[list(held.sums).index(path)] > 0
        largest = tf.where(there, overwritten.larger(buffer, value), sparse.densify(value))
        buffer.assign(tf.where(weight > 0, largest, buffer))

    def _weights(self, weight: Any) -> tuple[tf.Tensor, tf.Tensor | None]:
        """How much a micro-batch counts, and by what its gradients are multiplied, if at all."""
        share = contexts.share()
        if share is None or weight is not None:
            weight = checked_weight(_ACCUMULATE, 1 if weight is None else weight)
            return weight, weight if self._weighs else None
        # The parts of a batch count as much together as the batch would on one device.
        part = tf.cast(share.rows, tf.float64) / tf.cast(tf.maximum(share.of, 1), tf.float64)
        if self._weighs:
            return part, part
        return tf.constant(1.0, tf.float64), part * share.replicas

    def _window(self, call: str) -> Window:
        # What differs between replicas must not decide what they do: they reduce together.
        known = tf.executing_eagerly() and not contexts.is_replica()
        held = self._buffers
        if self._restored:
            raise RuntimeError(
                f"`{call}` can't tell yet what a restored window belongs to: got no model so far, "
                "expected one. Build it first: `accumulator.build(model)`."
            )
        if self._book is None or (known and held.count.numpy() == 0):
            raise RuntimeError(_MSG_EMPTY.format(call=call))
        weight = tf.identity(held.weight) if self._weighs else None
        there = held.present > 0
        flags = there.numpy() if known else tf.unstack(there, len(held.sums))
        present = dict(zip(held.sums, flags, strict=True))
        sums = {
            p: tf.identity(buffer) for p, buffer in held.sums.items() if not known or present[p]
        }
        return Window(sums, weight, None if known else present)

    def checks(
        self, call: str, weight: tf.Tensor | None, filled: tf.Tensor | None = None
    ) -> list[tf.Operation]:
        """Refuses an empty window, and in a trace says so when it runs.

        Args:
          call: The public call, for messages.
          weight: What all sums together are to be divided by.
          filled: Was anything added on any replica? By default, on this one.

        Raises:
          ValueError: The weights sum to 0.
          RuntimeError: The window is empty.
        """
        filled = self._buffers.count > 0 if filled is None else filled
        if tf.executing_eagerly():
            if not filled:
                raise RuntimeError(_MSG_EMPTY.format(call=call))
            if weight is not None and weight.numpy() == 0:
                raise ValueError(
                    f"`{call}` can't take the mean: got weights that sum to 0, expected more. All "
                    "micro-batches were empty. Drop them: `accumulator.reset()`."
                )
            return []
        empty = f"`{call}` found an empty window: nothing was accumulated since the last update"
        checks = [tf.raw_ops.Assert(condition=filled, data=[empty])]
        if weight is not None:
            zero = f"`{call}` can't take the mean: the weights sum to 0"
            checks.append(tf.raw_ops.Assert(condition=weight > 0, data=[zero]))
        return [*checks, *self._freshness(call)]

    def _freshness(self, call: str) -> list[tf.Operation]:
        """In a trace: are the buffers still those that it was made with?"""
        message = (
            f"`{call}` ran in a tf.function that was traced before a parameter was unfrozen. A "
            "trace keeps what it was made with. Call `accumulator.build(model)` before tracing, or "
            "compile the step with `tfloop.compile`, which traces again."
        )
        return traces.assert_fresh(self._version, self._layout, message)


def means(window: Window) -> dict[str, Gradient]:
    """Path -> gradient: the sums, or the means over the weights."""
    if window.weight is None:
        return window.sums
    sums, values = overwritten.split(window.sums)
    return {path: divided(total, window.weight) for path, total in sums.items()} | values
