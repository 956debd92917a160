"""What a compiled step of ours was traced with, so that `compile` can tell when it is stale.

A trace bakes Python state in: which parameters are trainable, which group owns them. Rooms
that read such state while a trace is being made say so here; `compile` compares fingerprints
before each call. Knows nothing of models or optimizers.
"""

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from tfloop._backend.tensorflow import outer_graph

_F = TypeVar("_F", bound=Callable[..., Any])


class Dependency(Protocol):
    """Something whose Python state a trace has read."""

    def fingerprint(self) -> object:
        """Equal as long as a trace made earlier is still right."""


# By the graph that is being traced: the replicas of a strategy trace it in threads of their own.
_recorders: dict[int, dict[int, Dependency]] = {}


@contextlib.contextmanager
def recording() -> Iterator[dict[int, Dependency]]:
    """Collects what the trace being made reads while the block runs, by identity."""
    key = id(tf.compat.v1.get_default_graph())
    outer = _recorders.get(key)
    found = _recorders[key] = {}
    try:
        yield found
    finally:
        _recorders.pop(key)
        if outer is not None:  # steps within steps, while functions run eagerly
            _recorders[key] = outer


def depends_on(thing: Dependency) -> None:
    """Says that the trace being made, if one is, has read the state of `thing`."""
    for found in _open_recorders():
        found[id(thing)] = thing


def is_recorded() -> bool:
    """Is the trace being made one that `compile` watches over?"""
    return bool(_open_recorders())


def is_current() -> bool:
    """Is what is traced now checked by `compile` itself before each of its calls?

    Not what a `tf.function` of the user's traces within: that keeps traces of its own.
    """
    return not tf.executing_eagerly() and id(tf.compat.v1.get_default_graph()) in _recorders


def assert_fresh(version: int, present: tf.Variable, message: str) -> list[tf.Operation]:
    """In a trace, an assertion that state is still that of the version that was traced.

    `compile` traces again in time, and needs none. This is for a `tf.function` of the user's, also
    one that a compiled step calls.

    Args:
      version: Of the Python state that the trace bakes in.
      present: Holds the version when the trace runs.
      message: What is wrong where they differ.
    """
    if tf.executing_eagerly() or is_current():
        return []
    fresh = tf.equal(present, tf.constant(version, present.dtype))
    return [tf.raw_ops.Assert(condition=fresh, data=[message])]


_JITTED: contextvars.ContextVar[bool] = contextvars.ContextVar("jitted", default=False)


@contextlib.contextmanager
def for_xla(jitted: bool) -> Iterator[None]:
    """Says that what is traced in the block is for XLA, if it is."""
    token = _JITTED.set(jitted or _JITTED.get())
    try:
        yield
    finally:
        _JITTED.reset(token)


def is_for_xla() -> bool:
    """Is the trace being made for XLA, as far as we know? A `tf.function` doesn't tell."""
    return _JITTED.get()


def _open_recorders() -> list[dict[int, Dependency]]:
    """The recorders of the graph being traced and of those around it."""
    found = []
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        if id(graph) in _recorders:
            found.append(_recorders[id(graph)])
        graph = outer_graph(graph)
    return found


def eagerly(fn: Callable[[], Any]) -> Any:
    """Runs `fn` outside any trace that is being made, and outside any strategy.

    Variables made in a trace raise on the second trace, and `tf.init_scope` doesn't help, since
    the creators that `tf.function` installs stay in force. A fresh thread has no graph, no
    creators and no scopes. It has no dtype policy of the caller's either: `fn` must take
    dtypes from variables.
    """
    if tf.executing_eagerly() and not tf.distribute.has_strategy():
        return fn()
    outcome: dict[str, Any] = {}

    def target() -> None:
        try:
            outcome["value"] = fn()
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            outcome["error"] = error

    thread = threading.Thread(target=target, name="tfloop-eager")
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def not_converted(fn: _F) -> _F:
    """Keeps autograph out of our own code, which is slow to convert and gains nothing.

    It stays out of all that is called inside, so a function that calls the user's code back
    (a view calling a `tf.Module`) isn't decorated.
    """
    return functools.wraps(fn)(tf.autograph.experimental.do_not_convert(fn))  # type: ignore[return-value]
