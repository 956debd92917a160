"""Gradients that another tape or another library made, as one of our backward passes.

A list beside its variables, pairs, a mapping by path, a tree of dicts and lists: each becomes a
`Gradients`, of which `gradients` takes a model's share as of any other.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfloop._checks.messages import described, listed
from tfloop._gradients import checks
from tfloop._gradients.gradients import FROM_GRADS, Gradients, source_name, widened
from tfloop._model.paths import (
    AddressBook,
    Variable,
    address_book,
    is_model,
    is_variable,
    tf_variable,
    unwrap,
    variable_id,
)
from tfloop._tensors import sparse
from tfloop._tensors.sparse import Gradient


def as_gradients(grads: Any, model: Any, variables: Iterable[Any] | None) -> Gradients:
    """The gradients of variables as a backward pass; see `GradientsParams.from_grads`."""
    book = address_book(model, FROM_GRADS)
    is_one = hasattr(grads, "dtype") or isinstance(grads, str)
    # An iterator, such as the `zip` that Keras takes, can be looked at once.
    things = list(grads) if isinstance(grads, Iterator) else grads
    if is_one or not isinstance(things, Collection) or not things:
        raise TypeError(
            f"`{FROM_GRADS}` takes no such gradients: got {described(things)}, expected the result "
            "of `tape.backward(loss)` of a `tfloop.Tape`, a list of gradients beside its "
            "variables, pairs (gradient, variable), or a dict by path. One gradient is a dict, "
            "too: `tfloop.GradientsParams.from_grads({'encoder.dense.kernel': grad}, model)`."
        )
    pairs = _are_pairs(things)
    tree = not pairs and (isinstance(things, Mapping) or any(map(_is_branch, things)))
    if variables is not None and (pairs or tree):
        raise not_beside_a_list(things)
    if pairs:
        found = [(variable, grad) for grad, variable in things]
    elif tree:
        found = [(_at(book, path), grad) for path, grad in _leaves(things, "")]
    else:
        found = _beside(things, model, variables)
    return _checked(found, book)


def not_beside_a_list(grads: Any) -> TypeError:
    """The error for variables beside gradients that say themselves whose they are."""
    return TypeError(
        f"`{FROM_GRADS}` got variables beside {described(grads)}, expected them beside a list of "
        "gradients alone. These say already whose they are. Leave the variables out: "
        "`tfloop.GradientsParams.from_grads(grads, model)`."
    )


def _are_pairs(things: Any) -> bool:
    return not isinstance(things, Mapping) and all(
        isinstance(thing, (tuple, list)) and len(thing) == 2 and is_variable(thing[1])
        for thing in things
    )


def _is_branch(thing: Any) -> bool:
    return isinstance(thing, (Mapping, list, tuple)) and not isinstance(thing, tf.IndexedSlices)


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Each gradient of a tree under its keys, joined by dots."""
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    for key, thing in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if _is_branch(thing):
            yield from _leaves(thing, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", thing


def _at(book: AddressBook, path: str) -> Variable:
    """The variable that a path leads to."""
    canonical = book.resolve(path)
    if canonical is None:
        raise ValueError(
            f"`{FROM_GRADS}` got the gradient of an unknown path: {book.unknown(path)} Other "
            "libraries name layers otherwise, and a dict from elsewhere may have a level more. "
            "List the paths: `tfloop.named_parameters(model)`."
        )
    return book.variables[canonical]


def _beside(grads: Any, model: Any, variables: Iterable[Any] | None) -> list[tuple[Any, Any]]:
    """Each variable with its gradient; lists of unequal lengths are nobody's."""
    if variables is None:
        root = unwrap(model)
        if not is_model(root):
            raise TypeError(
                f"`{FROM_GRADS}` can't tell whose these gradients are: got a list and "
                f"{described(root)}, expected the variables, too. A container has no order of its "
                "own. Name what was differentiated by: `from_grads(grads, model, variables=v)`."
            )
        variables = root.trainable_variables
    variables = list(variables)
    if len(grads) != len(variables):
        book = address_book(model, FROM_GRADS)
        left_over = [book.path_of(v) or source_name(v) for v in variables[len(grads) :]]
        whose = f"none is left for {listed(left_over)}" if left_over else "some are nobody's"
        raise ValueError(
            f"`{FROM_GRADS}` got {len(grads)} gradients beside {len(variables)} variables, "
            f"expected as many: {whose}. The list was cut, or it was differentiated by others. "
            "Name these: `from_grads(grads, model, variables=the_list_given_to_gradient)`."
        )
    return list(zip(variables, grads, strict=True))


def _checked(found: list[tuple[Any, Any]], book: AddressBook) -> Gradients:
    """The backward pass, each gradient compared with its variable."""
    known: set[Any] = set()
    grads: list[Gradient | None] = []
    for variable, grad in found:
        if not is_variable(variable):
            raise TypeError(
                f"`{FROM_GRADS}` got {described(variable)} among the variables, expected a "
                "keras.Variable or tf.Variable. An update changes variables alone. Leave it and "
                "its gradient out: `variables=model.trainable_variables`."
            )
        name = book.path_of(variable) or source_name(variable)
        if variable_id(variable) in known:
            raise ValueError(
                f"`{FROM_GRADS}` got two gradients for {name!r}, expected one. The variable is "
                "tied, or named twice. Add them up: `tf.add_n([one, other])`."
            )
        known.add(variable_id(variable))
        grads.append(None if grad is None else _of(variable, grad, name))
    return Gradients([tf_variable(variable) for variable, _ in found], grads)


def _of(variable: Variable, grad: Any, name: str) -> Gradient:
    shape = tf.TensorShape(variable.shape)
    grad = sparse.with_dense_shape(checks.as_gradient(FROM_GRADS, name, grad), shape)
    if not sparse.shape_of(grad).is_compatible_with(shape):
        raise ValueError(
            f"`{FROM_GRADS}` takes no such gradient for {name!r}: got the shape "
            f"{sparse.shape_of(grad)}, expected {shape}. It is another variable's: the gradients "
            "and their variables are in two orders. Name theirs: "
            "`from_grads(grads, model, variables=the_list_given_to_gradient)`."
        )
    return widened(variable, grad)
