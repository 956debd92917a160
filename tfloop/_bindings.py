"""What a step finds by name outside of itself: models, optimizers and the like that it uses.

A trace keeps the objects that it was made with. A name that means another optimizer since then
makes it stale, and this room sees that. Numbers and plain values aren't followed: these are
arguments.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfloop._graphs import is_model

Read = Callable[[], Any]


class Bindings:
    """The models and optimizers to which the names in a function lead now.

    Args:
      fn: A function or bound method; the functions of its module that it uses are looked into too.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._held = [(read, read()) for read in _reads(fn, set()) if _is_followed(read())]

    def have_changed(self) -> bool:
        """Does a name lead to another object than at first?"""
        for read, held in self._held:
            if read() is not held:
                return True
        return False


def _is_followed(thing: Any) -> bool:
    return isinstance(thing, tf.train.experimental.PythonState) or is_model(thing)


def _reads(fn: Any, known: set[int]) -> Iterator[Read]:
    """Ways to read what the names of a function mean."""
    if inspect.ismethod(fn):
        owner = fn.__self__
        for name in vars(owner) if hasattr(owner, "__dict__") else ():
            yield functools.partial(vars(owner).get, name)
        fn = fn.__func__
    if not inspect.isfunction(fn) or id(fn) in known:
        return
    known.add(id(fn))
    for cell in fn.__closure__ or ():
        yield functools.partial(_content, cell)
        yield from _reads_of_helper(fn, _content(cell), known)
    for name in fn.__code__.co_names:
        if name in fn.__globals__:
            yield functools.partial(fn.__globals__.get, name)
            yield from _reads_of_helper(fn, fn.__globals__[name], known)


def _reads_of_helper(fn: Any, helper: Any, known: set[int]) -> Iterator[Read]:
    """Those of a function beside it."""
    if inspect.isfunction(helper) and helper.__module__ == fn.__module__:
        yield from _reads(helper, known)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None
