"""`Gradients`: the result of one backward pass, and a model's share of it.

A pass knows variables and tensors by identity, a model by path; here the two meet. Making a pass
is `tape`'s business, what is done with a share `params`'.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfloop._checks.messages import described, listed
from tfloop._groups.group import ParamGroup
from tfloop._model.paths import (
    AddressBook,
    Variable,
    address_book,
    is_variable,
    tf_variable,
    variable_id,
)
from tfloop._replicas import contexts
from tfloop._tensors import overwritten, sparse
from tfloop._tensors.sparse import Gradient
from tfloop._tracing import traces

FROM_GRADS = "GradientsParams.from_grads(grads, model, group)"

_MSG_UNWATCHED = (
    "`{call}` has no gradient for variables that the tape didn't watch: got {names}, expected "
    "variables made with `trainable=True`. A tape watches these alone by itself, whatever the flag "
    "says now. Name what you unfreeze: `with tfloop.Tape(watch=[model]) as tape:`."
)


class Gradients:
    """The result of one backward pass: a gradient for each variable and tensor that was asked.

    Made by `Tape.backward`. Holds the sources, so that their identities stay valid.
    """

    def __init__(
        self,
        sources: Iterable[Any],
        grads: Iterable[Gradient | None],
        *,
        scaled: Iterable[Gradient | None] | None = None,
        of_everything: bool = False,
    ) -> None:
        """Keeps what a pass gave.

        Args:
          sources: What was asked for.
          grads: The gradient of each.
          scaled: What came before a scale was divided out, where there was one. Only a
            `keras.Variable` tells whether it takes a value, and a tape sees what is inside of it.
          of_everything: Was all asked for that the tape had watched?
        """
        sources, grads = list(sources), list(grads)
        ids = list(map(variable_id, sources))
        self._entries = dict(zip(ids, zip(sources, grads, strict=True), strict=True))
        self._scaled = {} if scaled is None else dict(zip(ids, scaled, strict=True))
        self._of_everything = of_everything

    @traces.not_converted
    def wrt(self, source: Any) -> Gradient | None:
        """Gives the gradient with respect to one variable or watched tensor.

        Args:
          source: A variable or tensor of the backward pass, the very object.

        Returns:
          A tensor (or `tf.IndexedSlices`) of the source's shape; `None` if the loss doesn't
          depend on it. For a variable with `overwrite_with_gradient` (the scales of a float8
          layer) its new value, which no scale is divided out of.
        Mutates: nothing.
        Graph mode: works inside `tf.function`.

        Raises:
          KeyError: The backward pass wasn't asked for this source.
        """
        if not self._asked(source):
            known = listed(source_name(known) for known, _ in self._entries.values())
            raise KeyError(
                f"`grads.wrt(x)` was never asked for this gradient: got {source_name(source)}, "
                f"expected one of {known}. A tensor must be the very object that was watched. "
                "Watch it: `tfloop.Tape(watch=[x])`, or ask for it: `tape.backward(loss, wrt=[x])`."
            )
        key = variable_id(source)
        if overwritten.overwrites(source) and key in self._scaled:
            return self._scaled[key]
        return self._entries[key][1]

    def __len__(self) -> int:
        """How many sources were asked for, dependent or not."""
        return len(self._entries)

    def __repr__(self) -> str:
        """A line for each source: its name, and its gradient's shape and dtype."""
        rows = [f"  {source_name(s)}: {gradient_name(g)}" for s, g in self._entries.values()]
        return "\n".join(["Gradients(", *rows, ")"])

    def _asked(self, source: Any) -> bool:
        return variable_id(source) in self._entries

    def _overlooked(self, variable: Variable) -> bool:
        """Did the tape not watch it, although everything was asked for?"""
        watched_by_itself = tf_variable(variable).trainable
        return self._of_everything and not watched_by_itself and not self._asked(variable)


def share_of(
    grads: Gradients, model: Any, group: ParamGroup | Iterable[str] | None
) -> dict[str, Gradient]:
    """A model's share of a backward pass by path; see `GradientsParams.from_grads`."""
    book = address_book(model, FROM_GRADS)
    traces.depends_on(book)
    parameters = book.parameters()
    wanted = _chosen(parameters, group, book)
    overlooked = [path for path, variable in wanted.items() if grads._overlooked(variable)]
    if overlooked:
        raise ValueError(_MSG_UNWATCHED.format(call=FROM_GRADS, names=listed(overlooked)))
    asked = {
        overwritten.path_for(path, v): grads.wrt(v) for path, v in wanted.items() if grads._asked(v)
    }
    share = {path: grad for path, grad in asked.items() if grad is not None}
    if not share:
        contexts.check_context(FROM_GRADS, book.variables)  # the likelier cause
        why = _why_empty(book, parameters, wanted, asked, group)
        raise ValueError(f"`{FROM_GRADS}` found no gradient: {why}")
    return share


def unwatched(call: str, sources: Iterable[Any]) -> ValueError:
    """The error for variables whose gradient the tape can't know."""
    return ValueError(_MSG_UNWATCHED.format(call=call, names=listed(map(source_name, sources))))


def gradient_name(grad: Gradient | None) -> str:
    """A gradient in words: shape, dtype, and whether it is sparse."""
    if not isinstance(grad, (tf.Tensor, tf.IndexedSlices)):
        return described(grad)
    kind = ", sparse" if sparse.is_sparse(grad) else ""
    return f"{sparse.shape_of(grad)} {grad.dtype.name}{kind}"


def source_name(source: Any) -> str:
    """A variable or tensor in words: Keras' path or TensorFlow's name, and the shape."""
    shape = getattr(source, "shape", None)
    if shape is None:
        return described(source)
    name = getattr(source, "path", None)
    if name is None:
        name = source.name if isinstance(source, tf.Variable) else "tensor"
    return f"{name} {shape}"


def widened(source: Any, grad: Any) -> Any:
    """The gradient of a 16-bit variable in float32, where sums over many steps stay right."""
    is_short = grad is not None and is_variable(source) and grad.dtype.size < 4
    return sparse.cast(grad, tf.float32) if is_short else grad


def _chosen(
    parameters: dict[str, Variable], group: ParamGroup | Iterable[str] | None, book: AddressBook
) -> dict[str, Variable]:
    """The trainable parameters of a group or of a list of paths."""
    if group is None:
        return parameters
    if isinstance(group, ParamGroup):
        bound = group.bind()
        return {p: v for p, v in parameters.items() if bound.matches_any(book.paths_of(p), v)}
    if isinstance(group, str) or not isinstance(group, Iterable):
        raise TypeError(
            f"`{FROM_GRADS}` takes no such group: got {described(group)}, expected a ParamGroup "
            f"or a list of paths. One path goes in a list, too: `[{group!r}]`."
        )
    wanted = {}
    for path in group:
        canonical = book.resolve(path) if isinstance(path, str) else None
        if canonical is None:
            raise ValueError(
                f"`{FROM_GRADS}` got an unknown path: {book.unknown(path)} It is "
                "misspelt, or another model's. List them all: `tfloop.named_parameters(model)`."
            )
        if canonical in parameters:
            wanted[canonical] = parameters[canonical]
    return wanted


def _why_empty(
    book: AddressBook, parameters: dict, wanted: dict, asked: dict, group: object
) -> str:
    """Says why a model has no gradient in a backward pass, most likely cause first."""
    if not parameters:
        return (
            f"got {book.description}, expected a trainable parameter. All of it is frozen now. "
            "Unfreeze it: `model.trainable = True`."
        )
    if not wanted:
        return (
            f"got the group {group}, expected some of the {len(parameters)} trainable parameters "
            f"of {book.description}: {listed(parameters)}. The group is too narrow, or frozen. "
            "Unfreeze it: `layer.trainable = True`."
        )
    if not asked:
        return (
            f"got a backward pass of other variables, expected some of the {len(wanted)} "
            f"parameters of {book.description}: {listed(wanted)}. The model wasn't called in the "
            "tape's block, or another model was. Call it there: "
            "`with tfloop.Tape() as tape: y = model(x)`."
        )
    return (
        f"got a loss that depends on none of the {len(wanted)} parameters of {book.description}, "
        f"expected some: {listed(wanted)}. The output was detached (a `valid()` view, "
        "`tf.stop_gradient`, `.numpy()`) or not used. Train through the training view: "
        "`tfloop.train(model)(x)`."
    )
