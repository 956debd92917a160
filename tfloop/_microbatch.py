"""`microbatch`: the gradients of a large batch, computed piece by piece inside one call.

The functional sibling of `GradientsAccumulator`: no buffers that outlive the call.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfloop import _sparse, _traces
from tfloop._gradients import GradientsParams
from tfloop._messages import described

_CALL = "microbatch(fn, batch, num=...)"
_SUM, _CONCAT, _STACK = "sum", "concat", "stack"


@_traces.not_converted
def microbatch(
    fn: Callable[[Any], tuple[GradientsParams, Any]],
    batch: Any,
    *,
    num: int,
    weight: Callable[[Any], Any] | None = None,
) -> tuple[GradientsParams, Any]:
    """Computes the mean gradients of a batch at the activation memory of one piece.

        sum over pieces of w_i g_i / sum of w_i,   w_i = rows of piece i, or weight(piece i)

    The leading axis of the batch is cut into pieces of ceil(n / num) rows; the last may be short,
    none is empty, so there may be fewer than `num`. In a trace the pieces run in one graph loop.

    Args:
      fn: piece -> (gradients, outputs): a step without its update. The loss is a mean over what
        the weight counts.
      batch: A tensor or a structure of tensors with one common leading axis.
      num: At most so many pieces.
      weight: piece -> scalar, such as its number of tokens; by default its rows.

    Returns:
      The mean gradients by path: dense ones in float32 or float64, sparse ones still sparse, with
      the rows of all pieces side by side. And the outputs: scalars stacked, one per piece; others
      concatenated on their leading axis.
    Mutates: what `fn` does.
    Graph mode: works, jitted too; `fn` is traced once. An empty batch or weights that sum to 0
      raise when they run, except under XLA.

    Raises:
      TypeError: `fn` doesn't return (GradientsParams, outputs), or `num` isn't an int.
      ValueError: `num` is below 1, the batch is empty or its parts differ in length, or the
        weights sum to 0.
    """
    rows = _checked_rows(batch, num)
    size = -(-rows // num)
    whole = rows // size  # pieces of full size; the rest makes one more
    rest = rows - whole * size
    pieces = _Pieces(fn, batch, weight)
    if tf.executing_eagerly():
        total = pieces.in_turn([min(size, rows - at) for at in range(0, rows, size)], size)
    else:
        total = pieces.in_loop(whole, size)
        if not isinstance(rest, int):
            tail = lambda: pieces.joined(total, pieces.measured(whole * size, rest))  # noqa: E731
            total = tf.cond(rest > 0, tail, lambda: total)
        elif rest:
            total = pieces.joined(total, pieces.measured(whole * size, rest))
    return pieces.result(total)


class _Pieces:
    """Runs `fn` on pieces of a batch, and merges what it gives as one flat list of tensors.

    The list is: weight, then per path the weighted gradient (values and row numbers for a sparse
    one), then the outputs. How it is packed is known after the first piece.
    """

    def __init__(self, fn: Callable, batch: Any, weight: Callable | None) -> None:
        self._fn = fn
        self._batch = batch
        self._weight = weight
        self._rules: list[str] = []
        self._dense: list[str] = []
        self._sparse: dict[str, Any] = {}
        self._outputs: Any = None
        self._measure: Callable = self._measured
        if not tf.executing_eagerly():
            spec = tf.nest.map_structure(
                lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), batch
            )
            self._measure = tf.function(self._measured, input_signature=[spec])
            self._measure.get_concrete_function()

    def measured(self, begin: Any, rows: Any) -> list[tf.Tensor]:
        """The flat list of one piece."""

        def cut(tensor: tf.Tensor) -> tf.Tensor:
            piece = tensor[begin : begin + rows]
            if isinstance(rows, int):
                piece.set_shape([rows, *tensor.shape[1:]])
            return piece

        return self._measure(tf.nest.map_structure(cut, self._batch))

    def in_turn(self, sizes: list[int], size: int) -> list[tf.Tensor]:
        """All pieces, one after the other."""
        found = [self.measured(n * size, rows) for n, rows in enumerate(sizes)]
        merge = {_SUM: tf.add_n, _CONCAT: lambda parts: tf.concat(parts, 0), _STACK: tf.stack}
        return [merge[r](list(p)) for r, p in zip(self._rules, zip(*found, strict=True), strict=True)]

    def in_loop(self, whole: Any, size: Any) -> list[tf.Tensor]:
        """The pieces of full size, in one graph loop."""
        specs = self._measure.get_concrete_function().structured_outputs

        def start(rule: str, spec: Any) -> Any:
            if rule == _SUM:
                return tf.zeros(spec.shape, spec.dtype)
            return tf.TensorArray(
                spec.dtype, size=whole, infer_shape=False, element_shape=spec.shape
            )

        def body(n: tf.Tensor, held: list[Any]) -> tuple[tf.Tensor, list[Any]]:
            found = self.measured(n * size, size)
            pairs = zip(self._rules, held, found, strict=True)
            held = [h + f if rule == _SUM else h.write(n, f) for rule, h, f in pairs]
            return n + 1, held

        held = [start(rule, spec) for rule, spec in zip(self._rules, specs, strict=True)]
        _, held = tf.while_loop(lambda n, _: n < whole, body, (tf.constant(0), held))
        finish = {_SUM: lambda h: h, _CONCAT: lambda h: h.concat(), _STACK: lambda h: h.stack()}
        return [finish[rule](h) for rule, h in zip(self._rules, held, strict=True)]

    def joined(self, total: list[tf.Tensor], last: list[tf.Tensor]) -> list[tf.Tensor]:
        """The merged list with one more piece."""
        join = {
            _SUM: lambda a, b: a + b,
            _CONCAT: lambda a, b: tf.concat([a, b], 0),
            _STACK: lambda a, b: tf.concat([a, b[tf.newaxis]], 0),
        }
        return [join[r](a, b) for r, a, b in zip(self._rules, total, last, strict=True)]

    def result(self, total: list[tf.Tensor]) -> tuple[GradientsParams, Any]:
        """The mean gradients and the outputs from the merged list."""
        weight, *parts = total
        text = f"`{_CALL}` can't take the mean: the weights of all pieces sum to 0"
        if tf.executing_eagerly() and float(weight) == 0:
            raise ValueError(
                f"{text}, expected more. The batch holds nothing that counts. Skip such a batch: "
                "`if weight(batch) > 0:`."
            )
        check = tf.debugging.Assert(weight > 0, [text])
        with tf.control_dependencies([check] if check is not None else []):
            weight = tf.identity(weight)
        grads: dict[str, Any] = {}
        for path in self._dense:
            grads[path] = _divided(parts.pop(0), weight)
        for path, dense_shape in self._sparse.items():
            values, numbers = _divided(parts.pop(0), weight), parts.pop(0)
            shape = tf.constant(dense_shape, numbers.dtype)
            grads[path] = tf.IndexedSlices(values, numbers, shape)
        outputs = tf.nest.pack_sequence_as(self._outputs, parts, expand_composites=True)
        return GradientsParams(grads), outputs

    def _measured(self, piece: Any) -> list[tf.Tensor]:
        """Runs `fn` on one piece and notes how its result is packed."""
        returned = self._fn(piece)
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        if not is_pair or not isinstance(returned[0], GradientsParams):
            raise TypeError(
                f"`{_CALL}` needs a function that returns (GradientsParams, outputs): got "
                f"{described(returned)}. End it with "
                "`return GradientsParams.from_grads(grads, model), loss`."
            )
        grads, outputs = returned[0]._consume(_CALL), returned[1]
        weight = self._weight_of(piece)
        sparse = {p: g for p, g in grads.items() if _sparse_rows(g) is not None}
        self._dense = [path for path in grads if path not in sparse]
        self._sparse = {path: _sparse_rows(grad) for path, grad in sparse.items()}
        flat = [weight, *(_weighted(_sparse.densify(grads[p]), weight) for p in self._dense)]
        for grad in sparse.values():
            flat += [_weighted(grad.values, weight), grad.indices]
        found = tf.nest.flatten(outputs, expand_composites=True)
        found = [tf.convert_to_tensor(output) for output in found]
        self._rules = [_SUM] * (1 + len(self._dense)) + [_CONCAT] * (2 * len(sparse))
        self._rules += [_STACK if output.shape.rank == 0 else _CONCAT for output in found]
        self._outputs = tf.nest.map_structure(lambda _: 0, outputs, expand_composites=True)
        return [*flat, *found]

    def _weight_of(self, piece: Any) -> tf.Tensor:
        if self._weight is None:
            return tf.cast(tf.shape(tf.nest.flatten(piece)[0])[0], tf.float64)
        weight = tf.convert_to_tensor(self._weight(piece))
        if weight.shape.rank not in (0, None):
            raise ValueError(
                f"`{_CALL}` got a weight of shape {tuple(weight.shape)}, expected a scalar for "
                "each piece. Sum it: `weight=lambda piece: tf.reduce_sum(piece.mask)`."
            )
        return tf.cast(weight, tf.float64)


def _weighted(tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    dtype = _sparse.accumulation_dtype(tensor.dtype)
    return tf.cast(tensor, dtype) * tf.cast(weight, dtype)


def _divided(tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    return tensor / tf.cast(weight, tensor.dtype)


def _sparse_rows(grad: Any) -> Any:
    """The dense shape of a sparse gradient if it is known when tracing, else `None`."""
    if not _sparse.is_sparse(grad) or grad.dense_shape is None:
        return None
    return tf.get_static_value(grad.dense_shape)


def _checked_rows(batch: Any, num: Any) -> Any:
    """The rows of a batch: an int where it is known, else a scalar tensor."""
    if isinstance(num, bool) or not isinstance(num, int):
        raise TypeError(
            f"`{_CALL}` got {described(num)} as num, expected an int: the number of pieces is "
            "fixed when a step is traced. Write `num=4`."
        )
    if num < 1:
        raise ValueError(f"`{_CALL}` got num={num}, expected at least 1. One piece is `num=1`.")
    leaves = tf.nest.flatten(batch)
    if not leaves or not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        odd = next((leaf for leaf in leaves if not isinstance(leaf, tf.Tensor)), batch)
        raise TypeError(
            f"`{_CALL}` needs a batch of tensors: got {described(odd)} in it. Only tensors are "
            "cut. Convert it, `tf.convert_to_tensor(x)`, or close over it in `fn`."
        )
    lengths = {leaf.shape[0] if leaf.shape.rank else None for leaf in leaves}
    scalars = [leaf for leaf in leaves if leaf.shape.rank == 0]
    if scalars or len(lengths - {None}) > 1:
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
    return known if known is not None else tf.shape(leaves[0])[0]
