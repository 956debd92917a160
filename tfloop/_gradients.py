"""`GradientsParams`: gradients by canonical path, and their algebra.

The container that walks from a backward pass to the optimizer. It holds one mapping and
nothing else, so that it crosses the boundaries of `tf.function`, `tf.cond`, `tf.while_loop` and
`strategy.run`. Where gradients come from is `_tape`'s business, what is done with them
`_optimizer`'s.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import tensorflow as tf

from tfloop import _sparse, _traces
from tfloop._groups import ParamGroup
from tfloop._messages import described, did_you_mean, listed
from tfloop._paths import AddressBook, address_book, variable_id
from tfloop._sparse import Gradient

_MSG_CONSUMED = (
    "`{call}` got gradients that `{consumer}` has consumed: expected fresh ones. Each backward pass "
    "pays for one update. Keep a copy before the first use: `spare = grads.copy()`."
)
_MSG_NOT_A_GRADIENT = (
    "`{call}` needs a gradient: got {what} for {path!r}, expected a tf.Tensor or tf.IndexedSlices "
    "of a floating dtype. {cause}"
)


class Gradients:
    """The result of one backward pass: a gradient for each variable and tensor that was asked.

    Made by `Tape.backward`. Holds the sources, so that their identities stay valid.
    """

    def __init__(self, sources: Iterable[Any], grads: Iterable[Gradient | None]) -> None:
        self._entries = {
            variable_id(source): (source, grad)
            for source, grad in zip(sources, grads, strict=True)
        }

    def wrt(self, source: Any) -> Gradient | None:
        """Gives the gradient with respect to one variable or watched tensor.

        Args:
          source: A variable or tensor of the backward pass, the very object.

        Returns:
          A tensor (or `tf.IndexedSlices`) of the source's shape; `None` if the loss doesn't
          depend on it.
        Mutates: nothing.
        Graph mode: works inside `tf.function`.

        Raises:
          KeyError: The backward pass wasn't asked for this source.
        """
        if variable_id(source) not in self._entries:
            raise KeyError(
                f"`grads.wrt(x)` was never asked for this gradient: got {_source_name(source)}, "
                f"expected one of {listed(_source_name(s) for s, _ in self._entries.values())}. "
                "A tensor must be the very object that was watched. Watch it: "
                "`Tape(watch=[x])`, or ask for it: `tape.backward(loss, wrt=[x])`."
            )
        return self._entries[variable_id(source)][1]

    def sources(self) -> list[Any]:
        """Everything that was asked for, dependent or not."""
        return [source for source, _ in self._entries.values()]

    def asked(self, source: Any) -> bool:
        """Was the backward pass asked for this source?"""
        return variable_id(source) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        rows = [f"  {_source_name(s)}: {_gradient_name(g)}" for s, g in self._entries.values()]
        return "\n".join(["Gradients(", *rows, ")"])


class GradientsParams(MutableMapping[str, Gradient]):
    """Gradients by canonical path; parameters without a gradient are absent, never zero.

    A mapping path -> `tf.Tensor` or `tf.IndexedSlices`. `ModuleOptimizer.step` and
    `GradientsAccumulator.accumulate` consume it: they leave a mark in the Python scope, and a
    second step or any algebra on it raises and names `copy()`. Plain reading keeps working. On an
    argument of a `tf.function`, change a `copy()`: TensorFlow refuses to see arguments mutated.

    Args:
      mapping: Path -> gradient, or pairs of these.

    Graph mode: a valid argument and result of `tf.function`, `tf.cond`, `tf.while_loop` and
      `strategy.run`, at 20 to 30 microseconds per tensor: compile whole steps.
    """

    def __init__(self, mapping: Mapping[str, Gradient] | Iterable[tuple[str, Any]] = ()) -> None:
        self._grads: dict[str, Gradient] = dict(mapping)
        self._consumer: str | None = None

    @classmethod
    @_traces.not_converted
    def from_grads(
        cls, grads: Gradients, model: Any, group: ParamGroup | Iterable[str] | None = None
    ) -> "GradientsParams":
        """Takes a model's share of a backward pass, keyed by path.

        `grads` stays usable, so one backward pass can feed several models.

        Args:
          grads: The result of `Tape.backward`.
          model: The model whose trainable parameters are wanted, as in `named_parameters`.
          group: Only these: a `ParamGroup`, or a list of paths.

        Returns:
          Path -> gradient, for the parameters that are trainable now and that the loss depends
          on; shape and dtype of the variable, float32 for 16-bit variables.
        Mutates: nothing.
        Graph mode: works; the trainable flags are read when the call is traced.

        Raises:
          ValueError: Nothing is left (see the message for the likely cause), or a path of the
            list is no trainable parameter of the model.
          TypeError: `grads` isn't the result of `Tape.backward`.
        """
        if not isinstance(grads, Gradients):
            raise TypeError(
                "`GradientsParams.from_grads(grads, model)` needs the result of a backward pass: "
                f"got {described(grads)}, expected Gradients. Ours remember which gradient is "
                "whose. Make one: `grads = tape.backward(loss)` on a `tfloop.Tape`."
            )
        book = address_book(model, "GradientsParams.from_grads(grads, model)")
        _traces.depends_on(book)
        parameters = book.parameters()
        wanted = _chosen(parameters, group, book)
        share = {path: grads.wrt(v) for path, v in wanted.items() if grads.asked(v)}
        found = {path: grad for path, grad in share.items() if grad is not None}
        if not found:
            raise ValueError(_why_empty(book, parameters, wanted, share, group))
        return cls(found)

    def register(self, path: str, grad: Gradient) -> None:
        """Puts a gradient under a path, in the place of an earlier one.

        Args:
          path: A canonical path, or another path to the variable; checked by `step`.
          grad: Floating, the shape of the variable.

        Raises:
          TypeError: It isn't a gradient.
        """
        self._check_fresh("grads.register(path, grad)")
        self._grads[path] = _as_gradient("grads.register(path, grad)", path, grad)

    def remove(self, path: str) -> Gradient:
        """Takes out the gradient of a path and gives it back.

        Raises:
          KeyError: There is none; near misses are named.
        """
        self._check_fresh("grads.remove(path)")
        grad = self[path]
        del self._grads[path]
        return grad

    def copy(self) -> "GradientsParams":
        """A fresh container with the same gradients; the way to use gradients twice."""
        return type(self)(self._grads)

    @_traces.not_converted
    def merge(self, other: "GradientsParams") -> "GradientsParams":
        """The union; the sum where both have a gradient (several graphs over shared parameters).

        Raises:
          ValueError: Two gradients of one path differ in shape.
        """
        if not isinstance(other, GradientsParams):
            raise TypeError(
                f"`grads.merge(other)` needs a GradientsParams: got {described(other)}. "
                "Key it first: `GradientsParams.from_grads(tape.backward(loss), model)`."
            )
        self._check_fresh("grads.merge(other)")
        other._check_fresh("grads.merge(other)")
        merged = dict(self._grads)
        for path, grad in other._grads.items():
            if path in merged:
                _check_same_shape("grads.merge(other)", path, merged[path], grad)
            merged[path] = _sparse.add(merged[path], grad) if path in merged else grad
        return type(self)(merged)

    @_traces.not_converted
    def select(self, group: ParamGroup, model: Any = None) -> "GradientsParams":
        """The gradients of one group, possibly none.

        Args:
          group: Which paths; a group of variables or layers, or a function, needs `model`.
          model: Whose paths these are; other paths to a tied variable match only with it.

        Raises:
          ValueError: The group looks at variables and no model was given.
        """
        self._check_fresh("grads.select(group)")
        return type(self)(self._of(group, model, "grads.select(group, model)"))

    @_traces.not_converted
    def scale(self, factor: Any) -> "GradientsParams":
        """Every gradient times a scalar; sparse ones stay sparse."""
        self._check_fresh("grads.scale(factor)")
        factor = tf.convert_to_tensor(factor)
        if factor.shape.rank not in (0, None):
            raise ValueError(
                f"`grads.scale(factor)` needs a scalar: got shape {tuple(factor.shape)}, expected "
                "(). One factor per path is a map: `GradientsParams({p: w[p] * g ...})`."
            )

        def scaled(grad: tf.Tensor) -> tf.Tensor:
            return grad * tf.cast(factor, grad.dtype)

        return type(self)({p: _sparse.map_values(scaled, g) for p, g in self._grads.items()})

    @_traces.not_converted
    def map(self, fn: Callable[[tf.Tensor], tf.Tensor]) -> "GradientsParams":
        """Applies `fn` to each gradient as a dense tensor.

        Args:
          fn: Tensor -> tensor of the same shape. Sparse gradients are made dense first, since
            `fn` may map 0 to something else.

        Raises:
          ValueError: `fn` changed a shape.
        """
        self._check_fresh("grads.map(fn)")
        mapped = {}
        for path, grad in self._grads.items():
            result = _as_gradient("grads.map(fn)", path, fn(_sparse.densify(grad)))
            _check_same_shape("grads.map(fn)", path, grad, result)
            mapped[path] = result
        return type(self)(mapped)

    def to_device(self, device: str) -> "GradientsParams":
        """A copy of every gradient on another device, such as `"/GPU:0"`."""
        self._check_fresh("grads.to_device(device)")
        with tf.device(device):
            moved = {
                path: tf.nest.map_structure(tf.identity, grad, expand_composites=True)
                for path, grad in self._grads.items()
            }
        return type(self)(moved)

    @_traces.not_converted
    def dot(self, other: "GradientsParams") -> tf.Tensor:
        """The scalar product with another set of gradients; an absent one counts as zero.

            sum over shared paths of sum(self[path] * other[path])

        Returns:
          A scalar, float32, or float64 if any gradient is.
        """
        self._check_fresh("grads.dot(other)")
        if not isinstance(other, GradientsParams):
            raise TypeError(
                f"`grads.dot(other)` needs a GradientsParams: got {described(other)}. "
                "Key it first: `GradientsParams.from_grads(tape.backward(loss), model)`."
            )
        other._check_fresh("grads.dot(other)")
        for path in self._grads.keys() & other._grads.keys():
            _check_same_shape("grads.dot(other)", path, self._grads[path], other._grads[path])
        shared = [path for path in self._grads if path in other._grads]
        return _total([_sparse.dot(self._grads[path], other._grads[path]) for path in shared])

    @_traces.not_converted
    def global_norm(self, group: ParamGroup | None = None, model: Any = None) -> tf.Tensor:
        """The Euclidean norm over all gradients, or over those of a group.

            sqrt(sum over paths of sum(self[path] ** 2))

        Args:
          group: Only these paths. Groups of variables or layers need `model`.
          model: Whose paths these are.

        Returns:
          A scalar, float32, or float64 if any gradient is; 0 where there is no gradient.
          Not finite if a gradient isn't.
        """
        self._check_fresh("grads.global_norm()")
        chosen = self._of(group, model, "grads.global_norm(group, model)")
        return tf.sqrt(_total([_sparse.squared_norm(grad) for grad in chosen.values()]))

    @_traces.not_converted
    def all_finite(self) -> tf.Tensor:
        """A scalar bool: no gradient holds a NaN or an infinity."""
        self._check_fresh("grads.all_finite()")
        flags = [_sparse.all_finite(grad) for grad in self._grads.values()]
        return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)

    def missing(self, model: Any) -> list[str]:
        """The trainable parameters of `model` that have no gradient here."""
        book = address_book(model, "grads.missing(model)")
        present = {book.resolve(path) for path in self._grads}
        return [path for path in book.parameters() if path not in present]

    def checked(self, book: AddressBook, call: str) -> dict[str, Gradient]:
        """The gradients by canonical path, each compared with its variable.

        Args:
          book: Of the root that they are for.
          call: The public call, for messages.

        Raises:
          ValueError: There is none, or an unknown path, another shape, a variable twice.
          RuntimeError: They were consumed before.
        """
        self._check_fresh(call)
        if not self._grads:
            raise ValueError(
                f"`{call}` got no gradient at all: expected at least one of "
                f"{listed(book.variables)}. Every one was removed, or the wrong group was "
                "selected. Look at them before: `print(grads)`."
            )
        checked: dict[str, Gradient] = {}
        for path, grad in self._grads.items():
            canonical = book.resolve(path)
            if canonical is None:
                raise ValueError(
                    f"`{call}` got the gradient of an unknown path: {book.unknown(path)} Key the "
                    "gradients by this model: `GradientsParams.from_grads(grads, model)`."
                )
            if canonical in checked:
                raise ValueError(
                    f"`{call}` got two gradients for one variable: {path!r} and another path lead "
                    f"to {canonical!r}. Add them up: `grads.merge(other)`."
                )
            shape = tf.TensorShape(book.variables[canonical].shape)
            grad = _sparse.with_dense_shape(grad, shape)
            if not _sparse.shape_of(grad).is_compatible_with(shape):
                raise ValueError(
                    f"`{call}` got a gradient of shape {_sparse.shape_of(grad)} for {path!r}, "
                    f"expected {tuple(shape)}. It was registered for another variable. "
                    "Look at them before: `print(grads)`."
                )
            checked[canonical] = grad
        return checked

    def __getitem__(self, path: str) -> Gradient:
        if path not in self._grads:
            hint = did_you_mean(str(path), self._grads.keys())
            raise KeyError(
                f"`grads[path]` has no gradient for {path!r}: got {len(self._grads)} paths, "
                f"{listed(self._grads)}.{hint} A parameter that the loss doesn't depend on is "
                "absent: `grads.get(path)` gives None, `grads.missing(model)` lists them."
            )
        return self._grads[path]

    __setitem__ = register

    def __delitem__(self, path: str) -> None:
        self.remove(path)

    def __iter__(self) -> Iterator[str]:
        return iter(self._grads)

    def __len__(self) -> int:
        return len(self._grads)

    def __contains__(self, path: object) -> bool:
        return path in self._grads

    # Comparing tensors elementwise would be a trap: two containers are equal if they are one.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        consumed = f", consumed by {self._consumer}" if self._consumer else ""
        width = max(map(len, self._grads), default=0)
        rows = [f"  {path:<{width}}  {_gradient_name(g)}" for path, g in self._grads.items()]
        return "\n".join([f"GradientsParams({len(self)} gradients{consumed}", *rows, ")"])

    def _consume(self, consumer: str) -> dict[str, Gradient]:
        """Hands the gradients over, once."""
        self._check_fresh(consumer)
        self._consumer = consumer
        return dict(self._grads)

    def _check_fresh(self, call: str) -> None:
        if self._consumer is not None:
            raise RuntimeError(_MSG_CONSUMED.format(call=call, consumer=self._consumer))

    def _of(self, group: ParamGroup | None, model: Any, call: str) -> dict[str, Gradient]:
        """The share of a group; without a model a path stands for itself."""
        if group is None:
            return self._grads
        if model is None:
            if group.needs_variables:
                raise ValueError(
                    f"`{call}` needs the model: got None, and {group} looks at variables, not at "
                    f"paths. Pass it: `{call}`."
                )
            return {path: grad for path, grad in self._grads.items() if group.matches(path)}
        book = address_book(model, call)
        known = {path: book.resolve(path) for path in self._grads}
        for path, canonical in known.items():
            if canonical is None:
                raise ValueError(
                    f"`{call}` got the gradient of an unknown path: {book.unknown(path)} "
                    "Pass the model that the gradients were keyed by."
                )
        return {
            path: self._grads[path]
            for path, canonical in known.items()
            if group.matches_any(book.paths_of(canonical), book.variables[canonical])
        }


def _chosen(
    parameters: dict[str, Any], group: ParamGroup | Iterable[str] | None, book: AddressBook
) -> dict[str, Any]:
    """The parameters of a group or of a list of paths."""
    if group is None:
        return parameters
    if isinstance(group, ParamGroup):
        return {p: v for p, v in parameters.items() if group.matches_any(book.paths_of(p), v)}
    if isinstance(group, str):
        raise TypeError(
            f"`from_grads(grads, model, group)` got the string {group!r} as group, expected a "
            f"ParamGroup or a list of paths. Put it in a list: `[{group!r}]`."
        )
    wanted = {}
    for path in group:
        canonical = book.resolve(path)
        if canonical is None:
            raise ValueError(
                f"`from_grads(grads, model, group)` got an unknown path: {book.unknown(path)} "
                "`tfloop.named_parameters(model)` lists them all."
            )
        if canonical in parameters:
            wanted[canonical] = parameters[canonical]
    return wanted


def _why_empty(
    book: AddressBook, parameters: dict, wanted: dict, share: dict, group: object
) -> str:
    """Says why a model has no gradient in a backward pass, most likely cause first."""
    call = "`GradientsParams.from_grads(grads, model)` found no gradient"
    if not parameters:
        return (
            f"{call}: {book.description} has no trainable parameter now. It is frozen. "
            "Thaw it: `model.trainable = True`."
        )
    if not wanted:
        return (
            f"{call}: got the group {group}, which holds none of the {len(parameters)} trainable "
            f"parameters of {book.description}: {listed(parameters)}. Widen the group or thaw it: "
            "`layer.trainable = True`."
        )
    if not share:
        return (
            f"{call}: got a backward pass without any of the {len(wanted)} parameters of "
            f"{book.description}: {listed(wanted)}. The model wasn't called in the tape's block, "
            "or another model was. Call it inside: `with tfloop.Tape() as tape: y = model(x)`."
        )
    return (
        f"{call}: the loss doesn't depend on any parameter of {book.description}: "
        f"{listed(wanted)}. The output was detached (a `valid()` view, `tf.stop_gradient`, "
        "`.numpy()`) or not used. Train through the training view: `tfloop.train(model)(x)`."
    )


def _as_gradient(call: str, path: str, grad: Any) -> Gradient:
    """Checks and converts what is given as a gradient."""
    if isinstance(grad, tf.IndexedSlices):
        return grad
    cause = "A parameter without gradient is absent: leave it out."
    if grad is None or isinstance(grad, (str, bool)):
        what = described(grad)
        raise TypeError(_MSG_NOT_A_GRADIENT.format(call=call, what=what, path=path, cause=cause))
    tensor = tf.convert_to_tensor(grad)
    if not tensor.dtype.is_floating:
        cause = "Cast it: `tf.cast(grad, tf.float32)`."
        what = f"dtype {tensor.dtype.name}"
        raise TypeError(_MSG_NOT_A_GRADIENT.format(call=call, what=what, path=path, cause=cause))
    return tensor


def _check_same_shape(call: str, path: str, one: Gradient, other: Gradient) -> None:
    shapes = [_sparse.shape_of(grad) for grad in (one, other)]
    if not shapes[0].is_compatible_with(shapes[1]):
        raise ValueError(
            f"`{call}` got two shapes for {path!r}: {shapes[0]} and {shapes[1]}, expected the "
            "variable's. One of them belongs to another model. Compare `print(grads)`."
        )


def _total(scalars: list[tf.Tensor]) -> tf.Tensor:
    """The sum of scalars in the widest dtype among them; float32 zero for none."""
    if not scalars:
        return tf.constant(0.0)
    dtype = _sparse.accumulation_dtype(*(scalar.dtype for scalar in scalars))
    return tf.add_n([tf.cast(scalar, dtype) for scalar in scalars])


def _source_name(source: Any) -> str:
    name = getattr(source, "path", None) or (
        source.name if isinstance(source, tf.Variable) else "tensor"
    )
    return f"{name} {tuple(source.shape)}" if source.shape.rank is not None else str(name)


def _gradient_name(grad: Gradient | None) -> str:
    if grad is None:
        return "None"
    sparse = ", sparse" if _sparse.is_sparse(grad) else ""
    return f"{_sparse.shape_of(grad)} {grad.dtype.name}{sparse}"
