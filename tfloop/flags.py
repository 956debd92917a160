"""absl flags from a `Config` class: one flag a field, nested fields with dots, and `--config`.

class TrainingConfig(tfloop.Config):
    lr: float = Field(1e-4, gt=0, description="Learning rate.")
    model: ModelConfig = ModelConfig()

tfloop.flags.define_config(TrainingConfig)      # --lr, --model.hidden_size, --config

def main(_):
    config = tfloop.flags.config()              # the file of --config, then the flags given
"""

import json
import pathlib
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

import absl.flags
from pydantic.fields import FieldInfo

from tfloop._checks.messages import described
from tfloop.config._config import Config, default_of, from_json, nested_class
from tfloop.config._errors import read_json

# absl then lists the flags under the module that calls `define_config`, where --help looks.
absl.flags.disclaim_key_flags()

_DEFINE: dict[Any, Callable[..., Any]] = {
    int: absl.flags.DEFINE_integer,
    float: absl.flags.DEFINE_float,
    str: absl.flags.DEFINE_string,
    bool: absl.flags.DEFINE_boolean,
}
_defined: dict[absl.flags.FlagValues, type[Config]] = {}


def define_config(
    config_class: type[Config], *, flag_values: absl.flags.FlagValues = absl.flags.FLAGS
) -> None:
    """Defines a flag for every field of a `Config` class, and `--config FILE`.

    Ints, floats, texts, bools (`--jit`, `--nojit`) and literals of texts are flags of their
    kind, with or without `| None`; any other type takes JSON (`--sizes '[8, 16]'`). The help
    text is the field's description, the default shown is the field's.

    Args:
      config_class: A subclass of `Config`; its nested configs give dotted flags.
      flag_values: Where to define them; absl's own by default.

    Raises:
      TypeError: `config_class` isn't a `Config` class.
      ValueError: A field has the name of a flag that exists, such as `config` or `help`, or
        another config was defined before.

    Example:
      >>> import absl.flags
      >>> import tfloop
      >>> class TrainingConfig(tfloop.Config):
      ...     lr: float = 1e-4
      >>> flags = absl.flags.FlagValues()
      >>> tfloop.flags.define_config(TrainingConfig, flag_values=flags)
      >>> flags(["program", "--lr", "0.5"])
      ['program']
      >>> tfloop.flags.config(flag_values=flags)
      TrainingConfig(lr=0.5)
    """
    if not (isinstance(config_class, type) and issubclass(config_class, Config)):
        raise TypeError(
            f"`define_config(config_class)` takes a class: got {described(config_class)}, "
            "expected a subclass of `tfloop.Config`. Pass the class itself, not an instance: "
            "`define_config(TrainingConfig)`."
        )
    if flag_values in _defined:
        raise ValueError(
            f"`define_config({config_class.__name__})` comes second: got flags of "
            f"{_defined[flag_values].__name__} already, expected one config a program. Nest "
            "one in the other, or use `flag_values=absl.flags.FlagValues()`."
        )
    fields = list(_flat_fields(config_class))
    for name, _, _ in fields:
        if name == "config" or name in flag_values:
            raise ValueError(
                f"`define_config({config_class.__name__})` can't define --{name}: got a flag of "
                "that name, expected a free one. Rename the field."
            )
    absl.flags.DEFINE_string(
        "config", None, "JSON file with settings; flags come before it.", flag_values=flag_values
    )
    for name, field, default in fields:
        _define(name, field, default, flag_values)
    _defined[flag_values] = config_class


def config(*, flag_values: absl.flags.FlagValues = absl.flags.FLAGS) -> Any:
    """The settings: defaults, then the file of `--config`, then the flags that were given.

    Args:
      flag_values: What `define_config` got.

    Returns:
      An instance of the class given to `define_config`.

    Raises:
      RuntimeError: No config was defined, or the command line wasn't parsed yet.
      FileNotFoundError: The file of `--config` doesn't exist.
      ValueError: A value is refused; the message names the field, which is the flag.
    """
    if flag_values not in _defined:
        raise RuntimeError(
            "`tfloop.flags.config()` has no flags to read: got no config class, expected one. "
            "Define it where the module is imported: `tfloop.flags.define_config(MyConfig)`."
        )
    if not flag_values.is_parsed():
        raise RuntimeError(
            "`tfloop.flags.config()` was called too early: got a command line that isn't parsed, "
            "expected a call inside `main`. Start it with `absl.app.run(main)`."
        )
    config_class = _defined[flag_values]
    file = flag_values["config"].value
    values = {} if file is None else read_json(f"--config={file}", file)
    for name, _, _ in _flat_fields(config_class):
        if not flag_values[name].using_default_value:
            _put(values, name.split("."), flag_values[name].value)
    call = "command line" if file is None else f"command line with --config={file}"
    return from_json(call, config_class, values)


def _flat_fields(
    config_class: type[Config], prefix: str = "", parent: Config | None = None
) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Every field that isn't a nested config: dotted name, field, default (None if required)."""
    for name, field in config_class.model_fields.items():
        default = default_of(name, field, parent)
        inner = nested_class(field)
        if inner is None:
            yield f"{prefix}{name}", field, default
        else:
            yield from _flat_fields(inner, f"{prefix}{name}.", default)


def _define(name: str, field: FieldInfo, default: Any, flag_values: absl.flags.FlagValues) -> None:
    kind = _without_none(field.annotation)
    text = field.description or f"Sets `{name}`."
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
    if kind in _DEFINE:
        _DEFINE[kind](name, default, text, flag_values=flag_values)
    elif choices and all(isinstance(choice, str) for choice in choices):
        absl.flags.DEFINE_enum(name, default, choices, text, flag_values=flag_values)
    elif kind is pathlib.Path:
        shown = None if default is None else str(default)
        absl.flags.DEFINE_string(name, shown, text, flag_values=flag_values)
    else:
        absl.flags.DEFINE(_JsonParser(), name, default, f"{text} (JSON)", flag_values=flag_values)


class _JsonParser(absl.flags.ArgumentParser):
    """A flag whose text is JSON; whether the field takes the value is the config's to say."""

    def parse(self, argument: Any) -> Any:
        """The value written in JSON; a value that isn't a text is taken as it is."""
        return json.loads(argument) if isinstance(argument, str) else argument

    def flag_type(self) -> str:
        """What --help calls it."""
        return "JSON"


def _without_none(annotation: Any) -> Any:
    """`X` for `X | None`, anything else as it is."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation


def _put(values: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets a value in nested dicts; what a file has in the place of one is left to be refused."""
    for part in path[:-1]:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            return
    values[path[-1]] = value
