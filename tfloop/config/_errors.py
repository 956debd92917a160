"""What is wrong with settings, in one message: reading a JSON file, reading pydantic's findings.

Works on any pydantic model; `config` decides when to raise.
"""

import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import pydantic

from tfloop._checks.messages import did_you_mean, listed

_MOST_SHOWN = 5


def read_json(call: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file, or the error that says what is there instead."""
    path = pathlib.Path(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise FileNotFoundError(
            f"`{call}` found no file: got {str(path)!r}, expected a JSON file."
            f"{did_you_mean(path.name, siblings)} Write one with `config.save(path)`."
        ) from None
    except IsADirectoryError:
        raise ValueError(
            f"`{call}` found a folder: got {str(path)!r}, expected a JSON file. "
            f"Name the file in it: `{path / 'config.json'}`."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"`{call}` found no JSON: got {error}, expected an object such as "
            '{"lr": 0.001}. The file may be cut off or edited by hand. Write it with '
            "`config.save(path)`."
        ) from None
    if not isinstance(values, dict):
        raise ValueError(
            f"`{call}` found no settings: got a JSON {type(values).__name__}, expected an object "
            'such as {"lr": 0.001}. Write it with `config.save(path)`.'
        )
    return values


def explained(call: str, cls: type[pydantic.BaseModel], error: pydantic.ValidationError) -> str:
    """Pydantic's findings as one message, field by field, with near misses and defaults."""
    found = [_finding(cls, item) for item in error.errors()]
    hidden = len(found) - _MOST_SHOWN
    more = f" And {hidden} more." if hidden > 0 else ""
    return f"`{call}` refuses its settings: {' '.join(found[:_MOST_SHOWN])}{more}"


def _finding(cls: type[pydantic.BaseModel], item: Any) -> str:
    where = item["loc"]
    path = ".".join(str(part) for part in where)
    fields = _fields_at(cls, where[:-1])
    if item["type"] == "extra_forbidden":
        hint = did_you_mean(str(where[-1]), fields) or f" It has {listed(fields)}."
        return f"unknown key '{path}'.{hint}"
    if item["type"] == "missing":
        return f"missing key '{path}', which has no default."
    expected = item["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    field = fields.get(where[-1]) if where else None
    default = ""
    if field is not None and not field.is_required() and not field.default_factory:
        default = f" The default is {field.default!r}."
    return f"`{path or cls.__name__}` got {item['input']!r}, {expected}.{default}"


def _fields_at(cls: Any, where: Iterable[Any]) -> dict[Any, Any]:
    """The fields of the settings nested at a location; none where it leads elsewhere."""
    for part in where:
        field = getattr(cls, "model_fields", {}).get(part)
        cls = None if field is None else field.annotation
    return dict(getattr(cls, "model_fields", {}))
