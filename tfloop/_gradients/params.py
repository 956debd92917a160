"""`GradientsParams`: gradients by canonical path, and their algebra.

The container that walks from a backward pass to the optimizer. It holds one mapping and
nothing else, so that it crosses the boundaries of `tf.function`, `tf.cond`, `tf.while_loop` and
`strategy.run`. Where gradients come from is `gradients`'s business, what is done with them
`optimizer`'s.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfloop._checks.arguments import wrong_scalar
from tfloop._checks.messages import described, did_you_mean, listed
from tfloop._gradients import checks, foreign, gradients
from tfloop._gradients.gradients import Gradients as Gradients
from tfloop._gradients.gradients import gradient_name
from tfloop._groups.group import ParamGroup, as_group
from tfloop._model.paths import AddressBook, address_book
from tfloop._replicas import contexts, reduction
from tfloop._tensors import overwritten, sparse
from tfloop._tensors.counts import checked_weight
from tfloop._tensors.sparse import Gradient
from tfloop._tracing import traces

_MSG_CONSUMED = (
    "`{call}` can't use these gradients again: got some that `{consumer}` has consumed, expected "
    "fresh ones. Each backward pass pays for one update. If both uses are meant, give one of them "
    "a copy: `grads.copy()`."
)


class GradientsParams(Mapping[str, Gradient]):
    """Gradients by canonical path; parameters without a gradient are absent, never zero.

    A mapping path -> `tf.Tensor` or `tf.IndexedSlices`. `ModuleOptimizer.step` and
    `GradientsAccumulator.accumulate` consume it: they leave a mark in the Python scope, and a
    second step or any algebra on it raises and names `copy()`. Plain reading keeps working. On an
    argument of a `tf.function`, change a `copy()`: TensorFlow refuses to see arguments mutated.

    What comes for a variable with `overwrite_with_gradient` (a scale of a Keras float8 layer) is
    its new value, and no gradient: `scale` and `map` leave it as it is, `merge`, `reduce` and
    accumulation take the maximum, `dot` and `global_norm` leave it out. `from_grads` knows such
    paths, and they stay known in all that is made of them; one that you write out yourself is
    taken for a gradient's until `step` or `accumulate` sees the model.

    Args:
      mapping: Path -> gradient, or pairs of these.

    Graph mode: a valid argument and result of `tf.function`, `tf.cond`, `tf.while_loop` and
      `strategy.run`, at 20 to 30 microseconds per tensor: compile whole steps.

    Raises:
      TypeError: The mapping is the result of a backward pass, which has no paths yet.
    """

    def __init__(self, mapping: Mapping[str, Gradient] | Iterable[tuple[str, Any]] = ()) -> None:
        if isinstance(mapping, Gradients):
            raise TypeError(
                "`GradientsParams(mapping)` needs paths: got Gradients, expected a mapping path -> "
                "gradient. A backward pass knows variables, not paths. Take a model's share: "
                "`tfloop.GradientsParams.from_grads(grads, model)`."
            )
        # Not checked further: TensorFlow fills the container with specs and placeholders, too.
        self._grads: dict[str, Gradient] = dict(mapping)
        self._consumer: str | None = None

    @classmethod
    @traces.not_converted
    def from_grads(
        cls,
        grads: Any,
        model: Any,
        group: ParamGroup | Iterable[str] | None = None,
        *,
        variables: Iterable[Any] | None = None,
    ) -> "GradientsParams":
        """Takes a model's share of a backward pass, keyed by path; of ours, or of one elsewhere.

        `grads` stays usable, so one backward pass can feed several models.

        Args:
          grads: The result of `Tape.backward`, or gradients made elsewhere, tensors or arrays:
            a list beside `variables`, as `tf.GradientTape.gradient` gives it; pairs `(gradient,
            variable)`, as Keras' `apply_gradients` takes them; a dict by path; or a tree of dicts
            and lists whose keys, joined by dots, are the paths. `None` is no gradient.
          model: The model whose trainable parameters are wanted, as in `named_parameters`.
          group: Only these: a `ParamGroup`, or a list of paths.
          variables: What a list of gradients was differentiated by, in its order; by default
            `model.trainable_variables`.

        Returns:
          Path -> gradient, for the parameters that are trainable now and that the loss depends
          on; shape and dtype of the variable, float32 for 16-bit variables.
        Mutates: nothing.
        Graph mode: works; the trainable flags are read when the call is traced.

        Raises:
          ValueError: Nothing is left (see the message for the likely cause); the list has an
            unknown path; a parameter was unfrozen that the tape didn't watch. Of gradients made
            elsewhere: a list of another length than its variables, a path or variable that the
            model lacks, a variable twice, another shape than the variable's.
          TypeError: `grads` is none of these, or holds something that isn't a gradient; `group`
            is neither, or there are `variables` beside what isn't a list.
          RuntimeError: The model lies in a strategy, and this is called outside of its replicas;
            `grads` was consumed before.

        Example:
          >>> import keras, tensorflow as tf, tfloop
          >>> net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
          >>> with tf.GradientTape() as tape:
          ...     loss = tf.reduce_sum(net(tf.ones((1, 3))))
          >>> grads = tape.gradient(loss, net.trainable_variables)
          >>> list(tfloop.GradientsParams.from_grads(grads, net))
          ['dense.kernel', 'dense.bias']
        """
        if isinstance(grads, GradientsParams):
            grads._check_fresh(gradients.FROM_GRADS)
        if not isinstance(grads, Gradients):
            grads = foreign.as_gradients(grads, model, variables)
        elif variables is not None:
            raise foreign.not_beside_a_list(grads)
        return cls(gradients.share_of(grads, model, group))

    @traces.not_converted
    def register(self, path: str, grad: Gradient) -> None:
        """Puts a gradient under a path, in the place of an earlier one.

        Args:
          path: A canonical path, or another path to the variable; checked by `step`.
          grad: Floating, the shape of the variable.

        Raises:
          TypeError: It isn't a gradient, or the path isn't a string.
        """
        call = "grads.register(path, grad)"
        self._fresh(call)
        if not isinstance(path, str):
            raise TypeError(
                f"`{call}` takes no such path: got {described(path)}, expected a string. A "
                "variable's path is its key in `tfloop.named_parameters(model)`. Write it out: "
                "`grads.register('encoder.dense.kernel', grad)`."
            )
        self._grads[path] = checks.as_gradient(call, path, grad)

    @traces.not_converted
    def remove(self, path: str) -> Gradient:
        """Takes out the gradient of a path and gives it back.

        Raises:
          KeyError: There is none; near misses are named.
        """
        self._fresh("grads.remove(path)")
        grad = self[path]
        del self._grads[path]
        return grad

    @traces.not_converted
    def get(self, path: str, default: Any = None) -> Any:
        """The gradient of a path, or `default` where there is none."""
        return self._grads.get(path, default)

    @traces.not_converted
    def copy(self) -> "GradientsParams":
        """A fresh container with the same gradients; the way to use gradients twice."""
        return type(self)(self._grads)

    __copy__ = copy

    @traces.not_converted
    def merge(self, other: "GradientsParams") -> "GradientsParams":
        """The union; the sum where both have a gradient (several graphs over shared parameters).

        Args:
          other: Gradients by the same paths.

        Returns:
          A fresh container. A sum is sparse where both parts are, and has the wider dtype.

        Raises:
          ValueError: Two gradients of one path differ in shape.
          TypeError: `other` isn't a `GradientsParams`.
        """
        mine, theirs = self._both("grads.merge(other)", other)
        merged = {**mine, **theirs}
        for path in filter(theirs.__contains__, mine):
            both = overwritten.larger if overwritten.is_value(path) else sparse.add
            merged[path] = both(mine[path], theirs[path])
        return type(self)(merged)

    @traces.not_converted
    def select(self, group: ParamGroup, model: Any = None) -> "GradientsParams":
        """The gradients of one group, possibly none.

        Args:
          group: Which paths; a group of variables or layers, or a function, needs `model`.
          model: Whose paths these are; other paths to a tied variable match only with it.

        Raises:
          ValueError: The group looks at variables and no model was given, or the model lacks
            a path.
          TypeError: `group` isn't a `ParamGroup`.
        """
        return type(self)(self._of(group, model, "grads.select(group, model)"))

    @traces.not_converted
    def scale(self, factor: Any) -> "GradientsParams":
        """Every gradient times a scalar; sparse ones stay sparse.

        Raises:
          ValueError: The factor isn't a scalar.
          TypeError: It isn't a number.
        """
        call = "grads.scale(factor)"
        grads = self._fresh(call)
        wrong = wrong_scalar(factor)
        if wrong is not None and not wrong.has_axes:
            raise TypeError(
                f"`{call}` needs a number: got {wrong.got}, expected a float or a scalar "
                "tensor. A factor for each path is arithmetic over the mapping: "
                "`tfloop.GradientsParams({path: w[path] * grad for path, grad in grads.items()})`."
            )
        if wrong is not None:
            raise ValueError(
                f"`{call}` needs a scalar: got the {wrong.got}, expected (). "
                "Elementwise factors differ from path to path. Reduce it: "
                "`grads.scale(tf.reduce_mean(factor))`."
            )
        scaled, _ = overwritten.split(grads)
        scaled = {path: sparse.scale(grad, factor) for path, grad in scaled.items()}
        return type(self)({**grads, **scaled})

    @traces.not_converted
    def map(self, fn: Callable[[tf.Tensor], tf.Tensor]) -> "GradientsParams":
        """Applies `fn` to each gradient as a dense tensor.

        Args:
          fn: Tensor -> tensor of the same shape. Sparse gradients are made dense first, since
            `fn` may map 0 to something else.

        Raises:
          ValueError: `fn` changed a shape.
          TypeError: `fn` gave something that isn't a gradient.
        """
        call = "grads.map(fn)"
        mapped = dict(self._fresh(call))
        for path, grad in overwritten.split(mapped)[0].items():
            result = checks.as_gradient(call, path, fn(sparse.densify(grad)))
            checks.same_shape(call, path, grad, result)
            mapped[path] = result
        return type(self)(mapped)

    @traces.not_converted
    def to_device(self, device: str) -> "GradientsParams":
        """A copy of every gradient on another device, such as `"/GPU:0"`."""
        grads = self._fresh("grads.to_device(device)")
        with tf.device(device):
            return type(self)(tf.nest.map_structure(tf.identity, grads, expand_composites=True))

    @traces.not_converted
    def reduce(self, weight: Any = None) -> "GradientsParams":
        """The mean over the replicas of the strategy, the same on each.

            sum of weight_i * grad_i / sum of weight_i

        For reading or changing what all replicas have together. `step` does it by itself, unless
        its optimizer has `reduction=None`, which is then the right one. On one device it is a copy.

        Args:
          weight: How much this replica counts, as in `ModuleOptimizer.step`.

        Raises:
          ValueError: The weight is negative, not finite or no scalar; they sum to 0.
          RuntimeError: It is called outside of the replicas.
        """
        call = "grads.reduce(weight)"
        grads = self._fresh(call)
        contexts.check_context(call, {})
        share = contexts.share()
        if weight is not None:
            weight = checked_weight(call, weight)
        elif share is not None:
            weight = tf.cast(share.rows, tf.float64)
        contribution = reduction.Contribution(grads, weight)
        total = reduction.total(contribution, reduction.KINDS["mean"])
        with tf.control_dependencies(reduction.check_counts(call, total.weight)):
            return type(self)(
                tf.nest.map_structure(tf.identity, total.grads, expand_composites=True)
            )

    @traces.not_converted
    def dot(self, other: "GradientsParams") -> tf.Tensor:
        """The scalar product with another set of gradients; an absent one counts as zero.

            sum over shared paths of sum(self[path] * other[path])

        Returns:
          A scalar, float32, or float64 if any gradient is.

        Raises:
          ValueError: Two gradients of one path differ in shape.
          TypeError: `other` isn't a `GradientsParams`.
        """
        mine, theirs = self._both("grads.dot(other)", other)
        grads, _ = overwritten.split(mine)
        shared = filter(theirs.__contains__, grads)
        return _total([sparse.dot(mine[path], theirs[path]) for path in shared])

    @traces.not_converted
    def global_norm(self, group: ParamGroup | None = None, model: Any = None) -> tf.Tensor:
        """The Euclidean norm over all gradients, or over those of a group.

            sqrt(sum over paths of sum(self[path] ** 2))

        Args:
          group: Only these paths. Groups of variables or layers need `model`.
          model: Whose paths these are.

        Returns:
          A scalar, float32, or float64 if any gradient is; 0 where there is no gradient.
          Not finite if a gradient isn't.

        Raises:
          ValueError: As in `select`.
          TypeError: `group` isn't a `ParamGroup`.
        """
        chosen = self._of(group, model, "grads.global_norm(group, model)")
        grads, _ = overwritten.split(chosen)
        return tf.sqrt(_total([sparse.squared_norm(grad) for grad in grads.values()]))

    @traces.not_converted
    def all_finite(self) -> tf.Tensor:
        """A scalar bool: no gradient holds a NaN or an infinity."""
        flags = [sparse.all_finite(grad) for grad in self._fresh("grads.all_finite()").values()]
        return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)

    @traces.not_converted
    def missing(self, model: Any) -> list[str]:
        """The trainable parameters of `model` that have no gradient here."""
        book = address_book(model, "grads.missing(model)")
        traces.depends_on(book)
        present = {book.resolve(path) for path in self._grads}
        return [path for path in book.parameters() if path not in present]

    def checked(self, book: AddressBook, call: str) -> dict[str, Gradient]:
        """The gradients by canonical path, each compared with its variable.

        Args:
          book: Of the root that they are for.
          call: The public call, for messages.

        Raises:
          ValueError: There is none, or an unknown path, another shape, a variable twice.
          TypeError: One isn't a gradient.
          RuntimeError: They were consumed before.
        """
        return checks.against_book(self._fresh(call), book, call)

    def __getitem__(self, path: str) -> Gradient:
        """The gradient of a path; a KeyError with near misses where there is none."""
        if path not in self._grads:
            hint = did_you_mean(str(path), self._grads.keys())
            raise KeyError(
                f"`grads[path]` has no such gradient: got {path!r}, expected one of "
                f"{listed(self._grads)}.{hint} A parameter that the loss doesn't depend on is "
                "absent; these are listed by `grads.missing(model)`. Allow it: `grads.get(path)`."
            )
        return self._grads[path]

    def __iter__(self) -> Iterator[str]:
        """The paths."""
        return iter(self._grads)

    def __len__(self) -> int:
        """How many parameters have a gradient."""
        return len(self._grads)

    def __contains__(self, path: object) -> bool:
        """Has the path a gradient?"""
        return path in self._grads

    # Comparing tensors elementwise would be a trap: two containers are equal if they are one.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        """A line for each path: shape, dtype, and whether it is sparse."""
        consumed = f", consumed by {self._consumer}" if self._consumer else ""
        width = max(map(len, self._grads), default=0)
        rows = [f"  {path:<{width}}  {gradient_name(g)}" for path, g in self._grads.items()]
        return "\n".join([f"GradientsParams({len(self)} gradients{consumed}", *rows, ")"])

    def _consume(self, consumer: str) -> dict[str, Gradient]:
        """Hands the gradients over, once."""
        grads = dict(self._fresh(consumer))
        self._consumer = consumer
        return grads

    def _check_fresh(self, call: str) -> None:
        if self._consumer is not None:
            raise RuntimeError(_MSG_CONSUMED.format(call=call, consumer=self._consumer))

    def _fresh(self, call: str) -> dict[str, Gradient]:
        """The gradients, if nobody has consumed them and each is one."""
        self._check_fresh(call)
        for path, grad in self._grads.items():
            if grad is None:
                checks.as_gradient(call, path, grad)
        return self._grads

    def _both(
        self, call: str, other: "GradientsParams"
    ) -> tuple[dict[str, Gradient], dict[str, Gradient]]:
        """Both sets of gradients, of equal shapes where they have the same path."""
        if not isinstance(other, GradientsParams):
            raise TypeError(
                f"`{call}` needs a GradientsParams: got {described(other)}, expected gradients by "
                "path. A backward pass has none yet. Key it first: "
                "`tfloop.GradientsParams.from_grads(tape.backward(loss), model)`."
            )
        mine, theirs = self._fresh(call), other._fresh(call)
        for path in filter(theirs.__contains__, mine):
            checks.same_shape(call, path, mine[path], theirs[path])
        return mine, theirs

    def _of(self, group: ParamGroup | None, model: Any, call: str) -> dict[str, Gradient]:
        """The share of a group; without a model a path stands for itself."""
        grads = self._fresh(call)
        if group is None:
            return grads
        bound = as_group(call, group).bind()
        if model is not None:
            book = address_book(model, call)
            known = {path: checks.known_path(book, path, call) for path in grads}
            return {
                path: grads[path]
                for path, canonical in known.items()
                if bound.matches_any(book.paths_of(canonical), book.variables[canonical])
            }
        if group.needs_variables:
            raise ValueError(
                f"`{call}` needs the model: got None and the group {group}, expected a group of "
                f"paths. This one looks at variables. Pass their model: `{call}`."
            )
        return {path: grad for path, grad in grads.items() if bound.matches(path)}


def _total(scalars: list[tf.Tensor]) -> tf.Tensor:
    """The sum of scalars in the widest dtype among them; float32 zero for none."""
    if not scalars:
        return tf.constant(0.0)
    dtype = sparse.accumulation_dtype(*(scalar.dtype for scalar in scalars))
    return tf.add_n([tf.cast(scalar, dtype) for scalar in scalars])
