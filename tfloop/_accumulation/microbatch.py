"""`microbatch`: the gradients of a large batch, computed piece by piece inside one call.

The functional sibling of `GradientsAccumulator`: no buffers that outlive the call.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfloop._checks.arguments import whole_number
from tfloop._checks.messages import described
from tfloop._gradients.params import GradientsParams
from tfloop._tensors import annotations, overwritten, sparse
from tfloop._tensors.counts import checked_weight, divided, weighted
from tfloop._tracing import traces

_CALL = "microbatch(fn, batch, num=...)"
_Batch = TypeVar("_Batch")
_Outputs = TypeVar("_Outputs")
_Tensors = dict[str, tf.Tensor]
_WEIGHT = ""  # the key of the weights among the sums, which are keyed by path
_VALUE = "value/"  # before the path of what overwrites a variable, among the rows


@traces.not_converted
def microbatch(
    fn: Callable[[_Batch], tuple[GradientsParams, _Outputs]],
    batch: _Batch,
    *,
    num: int,
    weight: Callable[[_Batch], Any] | None = None,
) -> tuple[GradientsParams, _Outputs]:
    """Computes the mean gradients of a batch at the activation memory of one piece.

        sum over pieces of w_i g_i / sum of w_i,   w_i = rows of piece i, or weight(piece i)

    The leading axis of the batch is cut into pieces of ceil(n / num) rows; the last may be short,
    none is empty, so there may be fewer than `num`. In a trace the pieces run one after the other
    in one graph loop, so that a piece's activations are gone before the next begins.

    What a layer computes over the batch is computed over a piece: see `GradientsAccumulator` for
    BatchNormalization.

    Args:
      fn: piece -> (gradients, outputs): a step without its update. The loss is a mean over what
        the weight counts.
      batch: A tensor or array, or a structure of these with one common leading axis.
      num: At most so many pieces.
      weight: piece -> scalar, such as its number of tokens; by default its rows. A piece of
        weight 0 adds nothing, even where its mean over nothing is NaN.

    Returns:
      The mean gradients by path: dense ones in float32 or float64, sparse ones still sparse, with
      the rows of all pieces side by side. (What overwrites a variable, as in float8 layers, is the
      maximum over the pieces.) And the outputs: scalars stacked, one per piece; others concatenated
      on their leading axis, with their Keras masks.
    Mutates: what `fn` does.
    Graph mode: works, jitted too; `fn` is traced once, for a piece whose leading axis is open
      unless all pieces have one known size. An empty batch, parts of different lengths, a bad
      weight and weights that sum to 0 raise when they run, except under XLA.

    Raises:
      TypeError: `fn` doesn't return (GradientsParams, outputs), `num` isn't an int, or the batch
        holds something else than tensors.
      ValueError: `num` is below 1, the batch is empty or its parts differ in length, or the
        weights are negative, not finite or sum to 0.
    """
    num = whole_number(_CALL, "num", num, least=1, fix="num=4")
    batch, rows = _checked(batch)
    size = -(-rows // num)
    if not isinstance(size, int):
        size = tf.maximum(size, 1)  # TensorFlow may divide by it before it has checked the batch
    pieces = _Pieces(fn, batch, weight, rows, size)
    return pieces.result(pieces.in_turn() if tf.executing_eagerly() else pieces.in_loop())


class _Pieces:
    """Runs `fn` on pieces of a batch and merges what it gives.

    A result is two flat dicts: what is added up (the weight, weighted dense gradients) and what is
    put side by side (rows of sparse gradients and their numbers, outputs and what Keras notes on
    them, values of which the maximum is taken).
    """

    def __init__(
        self, fn: Callable, batch: Any, weight: Callable | None, rows: Any, size: Any
    ) -> None:
        self._fn = fn
        # Masks go through the loop as tensors of their own: a graph forgets what is noted on one.
        self._batch = batch, [*map(annotations.annotations, tf.nest.flatten(batch))]
        self._weight = weight
        self._rows = rows
        self._size = size
        self._shapes: dict[str, Any] = {}  # of the sparse gradients
        self._outputs: Any = None

    def in_turn(self) -> tuple[_Tensors, _Tensors]:
        """All pieces, one after the other."""
        total: tuple[_Tensors, _Tensors] = {}, {}
        for begin in range(0, self._rows, self._size):
            total = _merged(total, self._measured(self._cut(begin, self._size)))
        return total

    def in_loop(self) -> tuple[_Tensors, _Tensors]:
        """The pieces of full size in one graph loop, then the rest."""
        whole, rest = self._rows // self._size, self._rows % self._size
        even = isinstance(rest, int) and rest == 0
        leading = tf.TensorShape([self._size if even else None])
        spec = tf.nest.map_structure(
            lambda t: tf.TensorSpec(leading.concatenate(t.shape[1:]), t.dtype), self._batch
        )
        # A function of its own, so that `fn` is traced once for the loop and for the rest.
        measured = tf.function(self._measured, input_signature=[spec])
        sums, rows = measured.get_concrete_function().structured_outputs
        held = (
            {key: _zeros(key, spec) for key, spec in sums.items()},
            {
                key: tf.TensorArray(s.dtype, whole, infer_shape=False, element_shape=s.shape)
                for key, s in rows.items()
            },
        )

        def body(n: tf.Tensor, held: Any) -> tuple[tf.Tensor, Any]:
            sums, rows = measured(self._cut(n * self._size, self._size))
            return n + 1, (
                {key: total + sums[key] for key, total in held[0].items()},
                {key: array.write(n, rows[key]) for key, array in held[1].items()},
            )

        # Pieces don't depend on each other: left to itself TensorFlow would run ten at a time.
        n, held = tf.while_loop(
            lambda n, _: n < whole, body, (tf.constant(0), held), parallel_iterations=1
        )
        joined = {key: array.concat() for key, array in held[1].items()}
        for key, tensor in joined.items():
            in_each = rows[key].shape[0]
            if isinstance(whole, int) and in_each is not None:
                tensor.set_shape([whole * in_each, *tensor.shape[1:]])
        total = held[0], joined
        if even:
            return total
        # Cut by the loop's own count, so that the rest waits for its end.
        last = lambda: _merged(total, measured(self._cut(n * self._size, rest)))  # noqa: E731
        return last() if isinstance(rest, int) else tf.cond(rest > 0, last, lambda: total)

    def result(self, total: tuple[_Tensors, _Tensors]) -> tuple[GradientsParams, Any]:
        """The mean gradients and the outputs from the merged result."""
        sums, rows = total
        weight = sums.pop(_WEIGHT)
        text = f"`{_CALL}` can't take the mean: the weights of all pieces sum to 0"
        if tf.executing_eagerly() and float(weight) == 0:
            raise ValueError(
                f"{text}, expected more. The batch holds nothing that counts. Skip such a batch: "
                "`if weight(batch) > 0:`."
            )
        grads: dict[str, Any] = {}
        with tf.control_dependencies([tf.raw_ops.Assert(condition=weight > 0, data=[text])]):
            for path, summed in sums.items():
                grads[path] = divided(summed, weight)
            for path, shape in self._shapes.items():
                values = divided(rows[f"values/{path}"], weight)
                shape = None if shape is None else tf.constant(shape)
                looked_up = tf.IndexedSlices(values, rows[f"numbers/{path}"], shape)
                # Both occur where a parameter is looked up in one piece and multiplied in another.
                grads[path] = sparse.add(grads[path], looked_up) if path in grads else looked_up
            for key in (key for key in rows if key.startswith(_VALUE)):
                value = tf.reduce_max(rows[key], 0)
                path = overwritten.ValuePath(key.removeprefix(_VALUE))
                grads[path] = tf.where(weight > 0, value, tf.zeros_like(value))
        found = (_output(rows, key) for key in sorted(rows) if key.startswith("outputs/"))
        outputs = tf.nest.map_structure(lambda there: next(found) if there else None, self._outputs)
        return GradientsParams(grads), outputs

    # Autograph converts this much, so that it reaches the functions of the user.
    def _measured(self, piece: Any) -> tuple[_Tensors, _Tensors]:
        """Runs `fn` on one piece."""
        piece = _annotated(piece)
        returned = self._fn(piece)
        weight = None if self._weight is None else self._weight(piece)
        return self._packed(piece, returned, weight)

    @traces.not_converted
    def _packed(self, piece: Any, returned: Any, weight: Any) -> tuple[_Tensors, _Tensors]:
        """The result of one piece, weighted."""
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        if not is_pair or not isinstance(returned[0], GradientsParams):
            raise TypeError(
                f"`{_CALL}` needs a function that returns (GradientsParams, outputs): got "
                f"{described(returned)}. End it with "
                "`return tfloop.GradientsParams.from_grads(grads, model), loss`."
            )
        grads, outputs = returned[0]._consume(_CALL), returned[1]
        if weight is None:
            weight = tf.shape(tf.nest.flatten(piece)[0])[0]
        weight = checked_weight(_CALL, weight)
        sums, rows = {_WEIGHT: weight}, {}
        grads, values = overwritten.split(grads)
        for path, value in values.items():
            value = sparse.densify(value)
            nothing = tf.constant(value.dtype.min, value.dtype)  # which no maximum shows
            rows[_VALUE + path] = tf.where(weight > 0, value, nothing)[tf.newaxis]
        for path, grad in grads.items():
            grad = weighted(sparse.cast(grad, sparse.accumulation_dtype(grad.dtype)), weight)
            if not sparse.is_sparse(grad):
                sums[path] = grad
                continue
            rows[f"values/{path}"], rows[f"numbers/{path}"] = grad.values, grad.indices
            # Where it isn't known, `step` and `accumulate` take it from the variable.
            shape = grad.dense_shape
            self._shapes[path] = None if shape is None else tf.get_static_value(shape)
        for number, output in enumerate(tf.nest.flatten(outputs)):
            if output is not None:
                output = _as_output(output)
                rows[f"outputs/{number:06}"] = output if output.shape.rank else output[tf.newaxis]
                for name, note in annotations.annotations(output).items():
                    rows[f"{name}/{number:06}"] = note
        self._outputs = tf.nest.map_structure(lambda output: output is not None, outputs)
        return sums, rows

    def _cut(self, begin: Any, rows: Any) -> Any:
        """The rows of the batch from `begin` on."""
        if isinstance(begin, int):
            return tf.nest.map_structure(lambda tensor: tensor[begin : begin + rows], self._batch)

        def cut(tensor: tf.Tensor) -> tf.Tensor:
            shape = tf.shape(tensor)[1:]
            begins = tf.concat([[begin], tf.zeros_like(shape)], 0)
            piece = tf.slice(tensor, begins, tf.concat([[rows], shape], 0))
            known = tf.TensorShape([rows if isinstance(rows, int) else None])
            return tf.ensure_shape(piece, known.concatenate(tensor.shape[1:]))

        return tf.nest.map_structure(cut, self._batch)


def _merged(
    total: tuple[_Tensors, _Tensors], more: tuple[_Tensors, _Tensors]
) -> tuple[_Tensors, _Tensors]:
    """The results of two runs; eager pieces may differ in which parameters they reach."""
    (sums, rows), (sums_, rows_) = total, more
    added = {key: sums[key] + tensor if key in sums else tensor for key, tensor in sums_.items()}
    beside = {
        key: tf.concat([rows[key], tensor], 0) if key in rows else tensor
        for key, tensor in rows_.items()
    }
    return sums | added, rows | beside


@traces.not_converted
def _annotated(piece: tuple[Any, list[dict[str, tf.Tensor]]]) -> Any:
    """A piece of the batch, with what Keras had noted on the batch."""
    batch, notes = piece
    for leaf, note in zip(tf.nest.flatten(batch), notes, strict=True):
        annotations.annotate(leaf, note)
    return batch


def _output(rows: _Tensors, key: str) -> tf.Tensor:
    """An output of all pieces, with what Keras had noted on it in each."""
    output, number = rows[key], key.rpartition("/")[2]
    notes = {name: rows.get(f"{name}/{number}") for name in annotations.NOTES}
    # Eager pieces may differ in whether there is one.
    in_all = {
        name: note
        for name, note in notes.items()
        if note is not None and note.shape[:1].is_compatible_with(output.shape[:1])
    }
    annotations.annotate(output, in_all)
    return output


def _zeros(path: str, spec: tf.TensorSpec) -> tf.Tensor:
    if not spec.shape.is_fully_defined():
        raise ValueError(
            f"`{_CALL}` got a gradient of shape {spec.shape} for {path!r}, expected the variable's "
            "own. A `tf.py_function` in the model hides shapes. Say them there: "
            "`tf.ensure_shape(output, shape)`."
        )
    return tf.zeros(spec.shape, spec.dtype)


def _as_output(output: Any) -> tf.Tensor:
    try:
        return tf.convert_to_tensor(output)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{_CALL}` got {described(output)} among the outputs, expected dense tensors: only "
            "these are put together over the pieces. Leave it out, or convert it: `x.to_tensor()`."
        ) from error


def _checked(batch: Any) -> tuple[Any, Any]:
    """The batch as tensors, and its rows: an int where they are known, else a scalar tensor."""
    batch = tf.nest.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, batch
    )
    leaves = tf.nest.flatten(batch)
    if not leaves or not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        odd = next((leaf for leaf in leaves if not isinstance(leaf, tf.Tensor)), batch)
        raise TypeError(
            f"`{_CALL}` needs a batch of tensors: got {described(odd)} in it. Only tensors are "
            "cut. Convert it, `tf.convert_to_tensor(x)`, or close over it in `fn`."
        )
    lengths = {leaf.shape[0] if leaf.shape.rank else None for leaf in leaves}
    if any(leaf.shape.rank == 0 for leaf in leaves) or len(lengths - {None}) > 1:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        raise ValueError(
            f"`{_CALL}` needs one common leading axis: got the shapes {shapes}. The batch is cut "
            "along it. Close over what isn't per sample: `lambda piece: fn(piece, scalar)`."
        )
    known = next(iter(lengths - {None}), None)
    if known == 0:
        raise ValueError(
            f"`{_CALL}` got an empty batch: 0 rows, expected at least 1. The data ran out. "
            "Skip it: `if len(x):`."
        )
    if None not in lengths:
        return batch, known
    rows = tf.stack([tf.shape(leaf)[0] for leaf in leaves])
    text = f"`{_CALL}` got an empty batch, or parts of different lengths:"
    sound = tf.logical_and(rows[0] > 0, tf.reduce_all(tf.equal(rows, rows[0])))
    with tf.control_dependencies([tf.raw_ops.Assert(condition=sound, data=[text, rows])]):
        batch, rows = tf.nest.map_structure(
            functools.partial(annotations.derived, tf.identity), (batch, rows[0])
        )
    return batch, rows if known is None else known
