"""What a trace bakes in of the things in a model: layers, flags, numbers, functions.

`dropout.rate`, `dense.activation`, a dtype policy, a layer that was added or replaced. Compared
before each compiled step, so values are read in bulk and compared by identity first. What Keras
keeps for its own purposes doesn't count, nor do values that a `call` of the user's writes.
"""

import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfloop._backend import keras_layers, tf_keras
from tfloop._backend.tensorflow import is_tracking
from tfloop._tracing import code

PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Those of Keras and TensorFlow are kinds of these, or say so.
_CONTAINERS = (list, dict, tuple)


class Settings:
    """The settings of some layers and modules, which are kept alive no longer than they live.

    Args:
      things: Keras layers and `tf.Module`s.
    """

    def __init__(self, things: Iterable[Any]) -> None:
        # Of each: it, what reads its settings, and the names of those that are containers.
        self._rows: list[tuple[weakref.ref, Callable[[Any], tuple[Any, ...]], list[str]]] = []
        for thing in things:
            names, held = _names(thing), vars(thing)
            if names:
                containers = [name for name in names if _can_change(held[name])]
                self._rows.append((weakref.ref(thing), getter(names), containers))

    def things(self) -> list[Any]:
        """Those that still live."""
        return [thing for ref, *_ in self._rows if (thing := ref()) is not None]

    def now(self) -> "Values":
        """What they are now; equal to an earlier one as long as a trace is right."""
        found: list[Any] = []
        for ref, get, containers in self._rows:
            thing = ref()
            if thing is None:
                continue
            held = vars(thing)
            try:
                found += get(held)
            except KeyError:  # one was deleted
                found.append(thing)
                continue
            for name in containers:
                found += _contents(held[name])
        return Values(found)


class Values:
    """Values compared by identity, plain ones by equality."""

    __slots__ = ("_found",)

    def __init__(self, found: list[Any]) -> None:
        self._found = found

    def __eq__(self, other: object) -> bool:
        """Is all what it was?"""
        if not isinstance(other, Values):
            return NotImplemented
        mine, theirs = self._found, other._found
        if len(mine) != len(theirs):
            return False
        return all(map(operator.is_, mine, theirs)) or all(map(is_same, mine, theirs))

    __hash__ = None  # type: ignore[assignment]


def is_same(one: Any, other: Any) -> bool:
    """Are they one object, or equal and of a kind that is known by its value alone?"""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, types.MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    return isinstance(one, (*PLAIN, tf.DType, tf.TensorShape, np.dtype)) and one == other


def getter(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """What gives the values of some names in a mapping, as a tuple in any case."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    (name,) = names
    return lambda held: (held[name],)


def _can_change(value: Any) -> bool:
    """Can what it holds be another though it is the same? A tuple of plain values stays."""
    inner = isinstance(value, tuple) and any(map(_can_change, value))
    return inner or isinstance(value, (list, dict))


def _contents(container: Any) -> list[Any]:
    """How much a container holds, and what, and what those in it hold."""
    if not isinstance(container, _CONTAINERS):  # not any more
        return []
    held = [*container.values()] if isinstance(container, dict) else [*container]
    inner = [_contents(part) for part in held if isinstance(part, _CONTAINERS)]
    return [len(held), *held, *itertools.chain(*inner)]


def _names(thing: Any) -> list[str]:
    """The attributes that tell how a layer or module computes."""
    kept = frozenset[str]()
    if isinstance(thing, keras.layers.Layer):
        kept = keras_layers.bookkeeping()
    elif tf_keras.is_layer(thing):
        kept = tf_keras.bookkeeping()
    kind: Any = type(thing)
    ours = _is_of_user(kind)
    written = _written(kind) if ours else frozenset[str]()
    return [
        name
        for name, value in vars(thing).items()
        if name not in kept
        and not is_tracking(name)
        and not (isinstance(value, tf.Tensor) and (ours or not hasattr(value, "numpy")))
        and not (name in written and isinstance(value, (*PLAIN, tuple)))
    ]


@functools.lru_cache(maxsize=1024)
def _written(kind: type) -> frozenset[str]:
    """The attributes that the `call` of a class sets, by itself or through other methods."""
    names, written = {"call", "__call__"}, set[str]()
    seen: set[str] = set()
    while fresh := names - seen:
        seen |= fresh
        for name in fresh:
            method = getattr(kind, name, None)
            if isinstance(method, types.FunctionType) and _is_of_user(method):
                found = code.names_in(method.__code__)
                names |= found.attributes
                written |= found.own | found.written
    return frozenset(written)


def _is_of_user(thing: Any) -> bool:
    name = str(thing.__module__).partition(".")[0]
    return name not in ("keras", "tensorflow", "tf_keras", "sonnet")
