"""`Config`: the settings of a run as a frozen, checked value that is a JSON file too.

`OptimizerConfig` and `AdamConfig` are settings that make an optimizer. How flags fill settings
is `flags`'s.
"""

import functools
import inspect
import json
import math
import os
import pathlib
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar

import keras
import pydantic
from pydantic import Field
from pydantic.fields import FieldInfo

from tfloop._checks.messages import did_you_mean, listed
from tfloop._optimizer.optimizer import ModuleOptimizer
from tfloop.config._errors import explained, read_json

if TYPE_CHECKING:  # Its address is private; its identity isn't.
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(pydantic.BaseModel)

C = TypeVar("C", bound="Config")


class _OneMessage(ModelMetaclass):
    """Makes a wrong constructor call raise one sentence in place of pydantic's table."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        try:
            return super().__call__(*args, **values)
        except pydantic.ValidationError as error:
            call = f"{cls.__name__}(...)"
            raise ValueError(explained(call, cls, error)) from None  # type: ignore[arg-type]


class Config(pydantic.BaseModel, metaclass=_OneMessage):
    """Settings with types, defaults and ranges: subclass it and list the fields.

    Frozen, compared by value, nested at will. Values must have the declared type: a text isn't
    a number, a bool isn't an int; an int is a float. Unknown keys are refused, and so are NaN
    and infinity, which JSON can't write. Ranges and help texts are pydantic's `Field`.

    Raises:
      ValueError: At construction: an unknown or missing key, a wrong type or value; each is
        named.

    Example:
      >>> import tfloop
      >>> class ModelConfig(tfloop.Config):
      ...     hidden_size: int = 512
      >>> class TrainingConfig(tfloop.Config):
      ...     num_epochs: int = 10
      ...     model: ModelConfig = ModelConfig()
      >>> TrainingConfig(num_epochs=3).replace(model=ModelConfig(hidden_size=8))
      TrainingConfig(num_epochs=3, model=ModelConfig(hidden_size=8))
    """

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False
    )

    @pydantic.model_validator(mode="after")
    def _is_json(self) -> Self:
        # Typed floats are checked by pydantic; this is for what hides in `Any` and in extras.
        if not _all_finite({**self.__dict__, **(self.model_extra or {})}):
            raise ValueError("expected finite numbers, since JSON has no NaN or infinity")
        return self

    def __str__(self) -> str:
        """The settings as indented JSON, as `save` writes them."""
        return self.model_dump_json(indent=2, serialize_as_any=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the settings as JSON: whole or not at all, folders made where missing.

        Args:
          path: The file; one that exists is replaced.

        Raises:
          OSError: The folder can't be made or written.
        """
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            draft.write_text(f"{self}\n", encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads settings; keys that the file leaves out take their defaults.

        Args:
          path: A JSON file, as `save` writes it.

        Raises:
          FileNotFoundError: There is no such file; the message has the near misses.
          ValueError: The file isn't JSON, has unknown keys, or values that the fields refuse.
        """
        call = f"{cls.__name__}.load({str(path)!r})"
        return from_json(call, cls, read_json(call, path))

    def replace(self, **changes: Any) -> Self:
        """The same settings with some fields changed, checked as at construction.

        Raises:
          ValueError: A field doesn't exist or refuses its value.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**values, **(self.model_extra or {}), **changes})


def from_json(call: str, cls: type[C], values: Mapping[str, Any]) -> C:
    """Settings from what `json.load` gives; an error names `call`."""
    try:
        return cls.model_validate_json(json.dumps(_filled(cls, values, None)))
    except pydantic.ValidationError as error:
        raise ValueError(explained(call, cls, error)) from None


class OptimizerConfig(Config, extra="allow"):
    """Any Keras optimizer by name, with its arguments: `OptimizerConfig("adamw", beta_1=0.8)`.

    Only what is given is stored, the rest stays Keras' default. The learning rate is for
    `step(model, grads)`; a schedule is given as `keras.optimizers.schedules.serialize` writes it.

    Args:
      name: The class in `keras.optimizers`, in any case.
      **hyperparameters: Arguments of its constructor, as JSON values.

    Raises:
      ValueError: No such optimizer, or no such argument; with near misses.

    Example:
      >>> import tfloop
      >>> print(tfloop.OptimizerConfig("adamw", weight_decay=0.01))
      {
        "name": "adamw",
        "weight_decay": 0.01
      }
    """

    name: str

    def __init__(self, name: str | None = None, **hyperparameters: Any) -> None:
        """See the class; without a name the error says so."""
        super().__init__(name=name, **hyperparameters)

    @pydantic.model_validator(mode="after")
    def _is_known(self) -> Self:
        known = _optimizers()
        if self.name.lower() not in known:
            hint = did_you_mean(self.name, known) or f" Keras has {listed(known)}."
            raise ValueError(f"expected a Keras optimizer, not {self.name!r}.{hint}")
        arguments = set(inspect.signature(known[self.name.lower()].__init__).parameters)
        arguments -= {"self", "name", "kwargs"}
        for argument in self.model_extra or {}:
            if argument not in arguments:
                hint = did_you_mean(argument, arguments) or f" It has {listed(sorted(arguments))}."
                raise ValueError(f"expected arguments of {self.name!r}, not {argument!r}.{hint}")
        return self

    def init(self, **options: Any) -> ModuleOptimizer:
        """A new optimizer with these settings and no state.

        Args:
          **options: Of `ModuleOptimizer`, such as `clipping` or `scaler`.
        """
        arguments = dict(self.model_extra or {})
        if isinstance(arguments.get("learning_rate"), int):
            arguments["learning_rate"] = float(arguments["learning_rate"])
        return ModuleOptimizer(_optimizers()[self.name.lower()].from_config(arguments), **options)


class AdamConfig(Config):
    """Keras' `Adam`, every setting pinned: a saved file keeps its meaning when defaults change.

    The fields are the arguments of `keras.optimizers.Adam` under their own names. `epsilon` is
    "epsilon hat" in the paper; Burn's 1e-5 stands elsewhere in the formula.

    Raises:
      ValueError: A setting is out of its range.

    Example:
      >>> import tfloop
      >>> tfloop.AdamConfig(beta_1=0.8).beta_2
      0.999
    """

    learning_rate: float | None = Field(
        None, ge=0, description="For `step(model, grads)` alone: a rate given to `step` goes first."
    )
    beta_1: float = Field(0.9, ge=0, lt=1, description="Decay of the mean of gradients.")
    beta_2: float = Field(0.999, ge=0, lt=1, description="Decay of the mean of their squares.")
    epsilon: float = Field(1e-7, gt=0, description="Keeps the division finite.")
    amsgrad: bool = Field(False, description="Divide by the largest mean of squares so far.")
    weight_decay: float | None = Field(None, ge=0, description="Decoupled, times the rate.")

    def init(self, **options: Any) -> ModuleOptimizer:
        """A new optimizer with these settings and no state.

        Args:
          **options: Of `ModuleOptimizer`, such as `clipping` or `scaler`.
        """
        given = {name: value for name, value in self if value is not None}
        return ModuleOptimizer(keras.optimizers.Adam(**given), **options)


def nested_class(field: FieldInfo) -> type[Config] | None:
    """The `Config` class that a field holds, if it holds one."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Config) else None


def default_of(name: str, field: FieldInfo, parent: Config | None) -> Any:
    """A field's default, None if it has none; a parent that is a default itself has the say."""
    if parent is not None:
        return getattr(parent, name)
    return None if field.is_required() else field.get_default(call_default_factory=True)


def _filled(cls: type[Config], values: Mapping[str, Any], default: Config | None) -> dict[str, Any]:
    """The values, and what they leave out of nested settings as the parent's default has it."""
    # Settings open to any key, an optimizer's arguments, mean something else once one changes.
    keep = default is not None and default.model_extra is None
    filled = {**(json.loads(str(default)) if keep else {}), **values}
    for name, field in cls.model_fields.items():
        inner = nested_class(field)
        if inner is not None and isinstance(values.get(name), Mapping):
            filled[name] = _filled(inner, values[name], default_of(name, field, default))
    return filled


@functools.cache
def _optimizers() -> dict[str, type[keras.optimizers.Optimizer]]:
    """Keras' optimizers by lower-case name, without the bases and the wrappers."""
    wrappers = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}
    classes = inspect.getmembers(keras.optimizers, inspect.isclass)
    return {
        name.lower(): cls
        for name, cls in classes
        if issubclass(cls, keras.optimizers.Optimizer) and name not in wrappers
    }


def _all_finite(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_all_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_all_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
