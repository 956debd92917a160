"""Containers of models and variables: what is one, what it holds, and how it is made again.

Dicts, lists and tuples, plain or as TensorFlow wraps them; another kind is another branch of
`items_of` and `rebuilt`. Which things in them are models, `graphs` knows.
"""

from collections.abc import Callable, Mapping
from typing import Any

KINDS = (Mapping, list, tuple)


def is_container(thing: object) -> bool:
    """Is it a dict, list or tuple?"""
    return isinstance(thing, KINDS)


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """Keys or indices, and what is there."""
    named = container.items() if isinstance(container, Mapping) else enumerate(container)
    return list(named)


def parts_of(thing: Any) -> list[Any] | None:
    """What a container holds; `None` for anything else."""
    return [part for _, part in items_of(thing)] if is_container(thing) else None


def rebuilt(container: Any, fn: Callable[[Any], Any]) -> Any:
    """A plain dict, list or tuple of the same form with `fn` of each part."""
    if isinstance(container, Mapping):
        return {name: fn(part) for name, part in container.items()}
    parts = map(fn, container)
    if hasattr(container, "_fields"):
        return container.__class__(*parts)  # the type may be TensorFlow's wrapper
    return tuple(parts) if isinstance(container, tuple) else list(parts)
