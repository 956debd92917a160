"""The object graphs of Keras, `tf.Module` and Sonnet: what a thing holds, and as what.

Which variables, layers and seeds one thing has, and the segment of a path for each. Whole paths,
sharing and uniqueness are `paths`'s; what of these libraries is private, `tfloop._backend`'s.
"""

import enum
import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfloop._backend import keras_layers, sonnet, tf_keras
from tfloop._backend.keras_variables import is_variable as is_variable
from tfloop._backend.keras_variables import tf_variable as tf_variable
from tfloop._backend.tensorflow import ignored_attributes, is_tracking
from tfloop._model.containers import KINDS, is_container, items_of, parts_of

Variable = Any
"""A `keras.Variable` or a `tf.Variable`."""

_KNOWN_LIBRARIES = {"builtins", "keras", "numpy", "tensorflow", "tf_keras", "tfloop"}


def variable_id(variable: Variable) -> int:
    """One identity for a `keras.Variable` and the `tf.Variable` inside it."""
    return id(tf_variable(variable))


def is_model(thing: object) -> bool:
    """Is it something that holds variables: a Keras layer, a `tf.Module`, or a view of one?"""
    return isinstance(unwrap(thing), (keras.layers.Layer, tf.Module))


def is_floating(variable: Variable) -> bool:
    """Can it have a gradient?"""
    return tf.as_dtype(variable.dtype).is_floating


def unwrap(thing: Any) -> Any:
    """The model behind a tfloop view; anything else as it is."""
    while getattr(type(thing), "is_tfloop_view", False):
        thing = thing.module
    return thing


def children(thing: Any) -> Iterator[tuple[str, Any]]:
    """What a node of the graph holds, with the segment for each, in a stable order.

    Segments of siblings may be equal here.
    """
    if is_container(thing):
        yield from ((str(key), child) for key, child in items_of(thing) if is_node(child))
    elif isinstance(thing, keras.random.SeedGenerator):
        yield "state", thing.state
    elif isinstance(thing, keras.layers.Layer):
        named = thing.layers if _has_named_layers(thing) else []
        records = keras_layers.records(thing)
        yield from _children_of_layer(thing, named, records, keras_layers.tracked(thing))
    elif tf_keras.is_layer(thing):
        named = thing.layers if tf_keras.has_named_layers(thing) else []
        yield from _children_of_layer(thing, named, tf_keras.records(), tf_keras.tracked(thing))
    elif isinstance(thing, tf.Module):
        yield from _attributes(thing, ignored=ignored_attributes(thing))


def is_node(thing: Any) -> bool:
    """Can variables be found at or below it? Empty containers and plain values can't have any."""
    if _kind(thing) is not _Kind.NODE:
        return False
    parts = parts_of(thing)
    return parts is None or any(map(is_node, parts))


def held_by(module: tf.Module) -> set[int]:
    """Ids of what a module holds, and of what that holds; they change when it holds another."""
    records = tf_keras.records() if tf_keras.is_layer(module) else ()
    return ids_below([value for name, value in vars(module).items() if name not in records])


def hidden_children(thing: Any) -> Iterator[tuple[str, Any]]:
    """What Keras and TensorFlow overlook: nodes inside a plain object that an attribute holds."""
    if not isinstance(thing, (keras.layers.Layer, tf.Module)):
        return
    for name, value in vars(thing).items():
        for holder in _plain_objects(value):
            for inner, child in vars(holder).items():
                for part in parts_of(child) or [child]:
                    if is_node(part):
                        yield f"{name}.{inner}", unwrap(part)


def is_built(layer: Any) -> bool:
    """Has it all its variables?

    A model that was never called may only hold others that are built: a GAN class, of which the
    parts are called.
    """
    if layer.built:
        return True
    has_own = type(layer).build not in (keras.Model.build, keras.layers.Layer.build)
    parts = keras_layers.inner_layers(layer)
    return not has_own and bool(layer.variables) and all(part.built for part in parts)


def call_arguments(model: Any) -> list[str]:
    """The names of what a call of a Keras layer or a tf.Module takes."""
    if isinstance(model, keras.layers.Layer):
        return list(model.call_signature_parameters)
    if tf_keras.is_layer(model):
        return _arguments(type(model).call)
    names = _arguments(type(model).__call__)
    if sonnet.refuses_flag(model):
        return [name for name in names if name != "is_training"]
    return names


@functools.lru_cache(maxsize=256)
def _arguments(method: Any) -> list[str]:
    return list(inspect.signature(sonnet.undecorated(method)).parameters)[1:]


def _plain_objects(value: Any) -> list[Any]:
    if _kind(value) is _Kind.INERT:
        return []
    if is_plain_object(value):
        return [value]
    return [holder for part in parts_of(value) or () for holder in _plain_objects(part)]


def is_plain_object(thing: Any) -> bool:
    """Is it an instance of somebody's own class that no library looks into?"""
    return _kind(thing) is _Kind.PLAIN and hasattr(thing, "__dict__")


class _Kind(enum.Enum):
    NODE = "a node of the graph, or a container of anything"
    PLAIN = "an object of somebody's own class"
    INERT = "anything else"


def _kind(thing: Any) -> _Kind:
    """By class, since it is asked for every attribute of every layer."""
    return _kind_of_class(type(thing))  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _kind_of_class(cls: type) -> _Kind:
    nodes = (keras.layers.Layer, tf.Module, keras.random.SeedGenerator)
    # TensorFlow wraps the dicts and tuples of a tf.Module in proxies.
    is_proxy = hasattr(cls, "__wrapped__") or getattr(cls, "is_tfloop_view", False)
    if is_proxy or issubclass(cls, (keras.Variable, tf.Variable, *nodes, *KINDS)):
        return _Kind.NODE
    known = cls.__module__.partition(".")[0] in _KNOWN_LIBRARIES
    return _Kind.INERT if known or issubclass(cls, type) else _Kind.PLAIN


def _children_of_layer(
    layer: Any, named: list[Any], records: frozenset[str], tracked: list[Any]
) -> Iterator[tuple[str, Any]]:
    """Layers of a Sequential or Functional model by name, attributes, what Keras alone tracks.

    The last part finds weights, layers and seeds that no attribute leads to: `add_weight` without
    keeping the result, layers in a set.
    """
    attributes = list(_attributes(layer, ignored=records))
    met = {id(child) for child in named} | ids_below([child for _, child in attributes])
    yield from _named_by_keras(named)
    yield from attributes
    yield from _named_by_keras([child for child in tracked if id(child) not in met])


def _attributes(thing: Any, ignored: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that are nodes, in the order of their first assignment."""
    mangled = tuple(f"_{cls.__name__.lstrip('_')}__" for cls in type(thing).__mro__)
    for name, child in vars(thing).items():
        if name not in ignored and not is_tracking(name) and is_node(child):
            for prefix in filter(name.startswith, mangled):  # `self.__deep` in a class body
                name = name.removeprefix(prefix)
            yield name.lstrip("_") or name, child


def ids_below(things: list[Any]) -> set[int]:
    """Ids of the nodes and containers among these things and in them."""
    found = set()
    for thing in things:
        if _kind(thing) is _Kind.NODE:
            found |= {id(thing)} | ids_below(parts_of(thing) or [])
    return found


def _named_by_keras(things: list[Any]) -> Iterator[tuple[str, Any]]:
    """Children by their own names; automatic names are numbered anew, chosen ones come first.

    Keras starts with a bare `block` and goes on with `block_1`. Siblings that are called `block_0`,
    `block_1` and so on have been counted by somebody else.
    """
    bases = [_automatic_base(thing) for thing in things]
    names = {thing.name for thing in things}
    counted = {
        base
        for base in filter(None, bases)
        if {f"{base}_{number}" for number in range(bases.count(base) + 1)} <= names
    }
    bases = [None if base in counted else base for base in bases]
    taken = {thing.name for thing, base in zip(things, bases, strict=True) if base is None}
    for thing, base in zip(things, bases, strict=True):
        segment = thing.name if base is None else unused(base, taken)
        taken.add(segment)
        yield segment, thing


def unused(name: str, taken: set[str]) -> str:
    """The name itself, or with the first number that makes it unique: `dense`, `dense_1`."""
    candidate, number = name, 0
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def _automatic_base(thing: Any) -> str | None:
    """`dense` for a Dense named `dense` or `dense_7`; `None` for a name somebody chose."""
    base = "variable" if is_variable(thing) else keras_layers.snake_case(type(thing).__name__)
    return base if re.fullmatch(rf"{re.escape(base)}(_[1-9]\d*)?", thing.name) else None


def _has_named_layers(layer: Any) -> bool:
    """Is it a Sequential or Functional model, where Keras keeps layer names unique?"""
    functional = isinstance(getattr(type(layer), "operations", None), property)
    return isinstance(layer, keras.Sequential) or (isinstance(layer, keras.Model) and functional)
