"""What a group's constructors accept, when one pattern hits, and how it reads.

Plain functions under `ParamGroup`: each checks the arguments of one constructor and says what is
wrong with them, or answers for one path. Combining the answers is `group`'s business.
"""

import inspect
import numbers
import re
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from tfloop._checks.messages import described
from tfloop._model.paths import Variable, is_model, is_variable, unwrap

_MSG_EMPTY = (
    "`{call}` has nothing to look for: got {what}, expected something to match. A list that came "
    "out empty would match nothing, or everything. Write `{example}`, or "
    "`tfloop.ParamGroup.all()` for every parameter."
)
_MSG_KIND = "`{call}` takes {taken}: got {got}, expected {expected}. {cause}. Write {fix}."


def texts(call: str, values: Iterable[Any], example: str) -> tuple[str, ...]:
    """Strings, sorted and once each, so that equal groups have equal texts and equal keys."""
    found = flat(values)
    _check_kind(
        call,
        found,
        lambda text: isinstance(text, str),
        taken="text",
        expected="a string",
        cause="Variables and layers have the constructors `from_ids` and `from_layers`",
        fix=f"`{example}`",
    )
    if "" in found:
        raise ValueError(_MSG_EMPTY.format(call=call, what="an empty text", example=example))
    return tuple(sorted(set(_some(call, found, example))))


def names(call: str, words: Iterable[Any]) -> tuple[str, ...]:
    """Names of whole words: dots only between words."""
    found = texts(call, words, "ParamGroup.from_name('encoder')")
    for name in found:
        if not all(name.split(".")):
            mended = ".".join(filter(None, name.split("."))) or "encoder"
            raise ValueError(
                f"`{call}` has an empty word: got {name!r}, expected words with single dots "
                "between them. Whole words are matched, so dots at the ends aren't needed. Write "
                f"`tfloop.ParamGroup.from_name({mended!r})`."
            )
    return found


def regex(call: str, pattern: Any) -> tuple[str, ...]:
    """One regular expression that compiles."""
    found = texts(call, (pattern,), r"ParamGroup.from_regex(r'blocks\.[01]\.')")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"`{call}` can't read the expression: got {pattern!r}, which has an error at position "
            f"{error.pos} ({error.msg}), expected Python's `re` syntax. A character that is meant "
            "literally needs a backslash. Write "
            f"`tfloop.ParamGroup.from_predicate({pattern!r})` to look for this very text."
        ) from error
    return found


def ranks(call: str, values: Iterable[Any]) -> tuple[int, ...]:
    """Numbers of axes, sorted and once each."""
    example = "ParamGroup.from_rank(0, 1)"
    found = flat(values)
    _check_kind(
        call,
        found,
        lambda rank: isinstance(rank, numbers.Integral) and not isinstance(rank, bool),
        taken="numbers of axes",
        expected="an int",
        cause="A matrix has 2, a vector 1, a scalar 0",
        fix=f"`{example}`",
    )
    for rank in found:
        if rank < 0:
            raise ValueError(
                f"`{call}` got a negative rank: got {rank}, expected 0 or more. Ranks are counted, "
                f"not indexed from the end. Write `{example}`."
            )
    return tuple(sorted({int(rank) for rank in _some(call, found, example)}))


def function(call: str, predicate: Callable[..., Any]) -> Any:
    """A function of (path, variable); gives what stands for it in comparisons."""
    try:
        inspect.signature(predicate).bind("path", None)
    except ValueError:  # a builtin without a signature
        pass
    except TypeError as error:
        raise TypeError(
            f"`{call}` calls the function with two arguments: got "
            f"{_function_name(predicate)}{inspect.signature(predicate)}, expected "
            "fn(path, variable). The variable comes second, even where it isn't needed. Write "
            "`tfloop.ParamGroup.from_predicate(lambda path, variable: 'norm' in path)`."
        ) from error
    return predicate if isinstance(predicate, Hashable) else id(predicate)


def variables(call: str, values: Any) -> tuple[Variable, ...]:
    """Variables themselves; a single one is fine."""
    single = is_variable(values) or not isinstance(values, Iterable)
    found = [values] if single else list(values)
    _check_kind(
        call,
        found,
        is_variable,
        taken="the variables themselves",
        expected="a keras.Variable or a tf.Variable",
        cause="Paths have constructors of their own",
        fix="`ParamGroup.from_ids(layer.trainable_variables)` or "
        "`tfloop.ParamGroup.from_path('encoder.kernel')`",
    )
    return tuple(_some(call, found, "ParamGroup.from_ids(layer.trainable_variables)"))


def layers(call: str, values: Iterable[Any]) -> tuple[Any, ...]:
    """Layers or modules themselves, taken out of their views."""
    found = [unwrap(layer) for layer in flat(values)]
    _check_kind(
        call,
        found,
        is_model,
        taken="the layers themselves",
        expected="a Keras layer or a tf.Module",
        cause="Names and variables have constructors of their own",
        fix="`ParamGroup.from_layers(model.encoder)` or `tfloop.ParamGroup.from_name('encoder')`",
    )
    return tuple(_some(call, found, "ParamGroup.from_layers(model.encoder)"))


def hits(kind: str, parts: tuple[Any, ...], path: str, variable: Variable | None) -> bool:
    """Does a pattern of this kind, named after its constructor, match one path?"""
    match kind:
        case "all":
            return True
        case "from_path":
            return path in parts
        case "from_name":
            return any(f".{name}." in f".{path}." for name in parts)
        case "from_regex":
            return re.search(parts[0], path) is not None
        case "from_rank":
            return variable is not None and len(variable.shape) in parts
        case _:
            (wanted,) = parts
            return wanted in path if isinstance(wanted, str) else bool(wanted(path, variable))


def shown(parts: tuple[Any, ...]) -> str:
    """The arguments of a constructor as text; at most five objects, then how many more."""
    if all(isinstance(part, (str, int)) for part in parts):
        return ", ".join(repr(part) for part in parts)
    hidden = f" and {len(parts) - 5} more" if len(parts) > 5 else ""
    return ", ".join(_object_name(part) for part in parts[:5]) + hidden


def flat(values: Iterable[Any]) -> list[Any]:
    """One level of lists and tuples opened."""
    return [v for value in values for v in (value if isinstance(value, (list, tuple)) else [value])]


def _check_kind(
    call: str, values: Iterable[Any], is_right: Callable[[Any], bool], **words: str
) -> None:
    for value in values:
        if not is_right(value):
            raise TypeError(_MSG_KIND.format(call=call, got=described(value), **words))


def _some(call: str, values: list[Any], example: str) -> list[Any]:
    if not values:
        raise ValueError(_MSG_EMPTY.format(call=call, what="an empty list", example=example))
    return values


def _object_name(thing: Any) -> str:
    if is_variable(thing):
        return f"<{thing.name} {tuple(thing.shape)}>"
    if hasattr(thing, "variables"):
        return f"<{type(thing).__name__} {getattr(thing, 'name', '')!r}>"
    return f"<{_function_name(thing)}>"


def _function_name(thing: Any) -> str:
    return getattr(thing, "__qualname__", type(thing).__qualname__)
