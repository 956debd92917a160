"""`train()` and `valid()`: a model seen in training or in inference mode, itself untouched.

A view passes the training flag explicitly at every call. Nothing ambient is switched: Keras'
own context isn't seen by other threads, and is left changed by some calls (see `valid`).
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, overload

import keras
import tensorflow as tf

from tfloop._backend import tf_keras
from tfloop._backend.keras_layers import training_kept
from tfloop._checks.messages import described, listed
from tfloop._model.containers import is_container, parts_of, rebuilt
from tfloop._model.graphs import call_arguments, is_plain_object
from tfloop._model.paths import (
    AddressBook,
    address_book,
    is_model,
    is_variable,
    unchecked_book,
    unwrap,
)
from tfloop._tensors import annotations
from tfloop._tracing import traces

_FLAGS = ("training", "is_training")
_Model = TypeVar("_Model", bound=Callable[..., Any], covariant=True)
# Whose base class has no types, as Keras' have none, counts as any class, so models come first in
# the signatures below; and no container can be called.
_Callable = TypeVar("_Callable", bound=Callable[..., Any])
_PROBABILITIES = {"Softmax": tf.nn.softmax, "Sigmoid": tf.sigmoid}


@overload
def train(model: _Callable) -> "View[_Callable]": ...


@overload
def train(model: Mapping[str, _Callable]) -> "dict[str, View[_Callable]]": ...


@overload
def train(model: list[_Callable]) -> "list[View[_Callable]]": ...


@overload
def train(model: Any) -> Any: ...


@traces.not_converted
def train(model: Any) -> Any:
    """Gives a view of a model that runs in training mode.

    `view(x)` is `model(x, training=True)`, whether or not the model's `call` takes `training`:
    Keras passes it on to the layers inside. A `tf.Module` gets `training` or `is_training` if its
    `__call__` names it. Attributes that are layers or modules come back as views of the same mode
    (`view.generator(z)`), other attributes as they are; methods run on the model itself. An
    explicit `training=` at the call wins. No variable is copied, and the model isn't changed.

    Args:
      model: A Keras model or layer, a `tf.Module`, a view, or a dict or list of these and of
        variables.

    Returns:
      A view, or a dict or list of views; variables in it as they are.
    Mutates: nothing.
    Graph mode: works; the mode is baked in when the call is traced.

    Raises:
      TypeError: It isn't a model.
    """
    return _view(model, True, "train(model)")


@overload
def valid(model: _Callable) -> "View[_Callable]": ...


@overload
def valid(model: Mapping[str, _Callable]) -> "dict[str, View[_Callable]]": ...


@overload
def valid(model: list[_Callable]) -> "list[View[_Callable]]": ...


@overload
def valid(model: Any) -> Any: ...


@traces.not_converted
def valid(model: Any) -> Any:
    """Gives a view of a model that runs in inference mode and is off every tape.

    As `train`, with `training=False`: dropout is off, and BatchNorm uses its moving statistics.
    Neither these nor the seeds of `Dropout` and the noise layers move. What a layer changes at
    every call it changes here, too, as in `model(x, training=False)`: the states of a recurrent
    layer with `stateful=True`, the seed of one with `dropout` (Keras draws a mask that it doesn't
    use), and what a `call` of your own assigns whatever the flag says.

    Outputs carry no gradient on any open tape, not even to the input, also with an explicit
    `training=True`. For a fixed network that must pass gradients on (a perceptual loss), call
    `model(x, training=False)` and leave it out of the step.

    Keras lets a flag leak: after `self.backbone(x, training=False)` inside a subclassed model,
    later layers of the same call run without training too (Keras 3.15). A view there keeps its flag
    to itself: `tfloop.valid(self.backbone)(x)`, or, where gradients must pass, hand `training` on
    to every layer. A flag that a model hard-codes can't be switched from outside.

    Args:
      model: A Keras model or layer, a `tf.Module`, a view, or a dict or list of these and of
        variables.

    Returns:
      A view, or a dict or list of views; variables in it as they are, on the tape.
    Mutates: nothing. `model.losses` is renewed by a call, as by every call.
    Graph mode: works; the mode is baked in when the call is traced.

    Raises:
      TypeError: It isn't a model.
    """
    return _view(model, False, "valid(model)")


def _view(model: Any, training: bool, call: str, inside: bool = False) -> Any:
    model = unwrap(model)
    if is_model(model):
        return View(model, training)
    if inside and is_variable(model):
        return model
    if not is_container(model):
        raise TypeError(
            f"`{call}` needs a model: got {described(model)}, expected a keras.Model or "
            "keras.Layer, a tf.Module, or a dict or list of these. It may be the result of a "
            "model. View the model, then call it: `tfloop.train(model)(x)`."
        )
    return rebuilt(model, lambda part: _view(part, training, call, inside=True))


class View(Generic[_Model]):
    """A model in one mode; made by `train` and `valid`.

    Attributes:
      module: The model itself.
      training: The flag that a call passes.
    """

    is_tfloop_view = True
    __slots__ = ("module", "training", "_values")

    module: _Model
    training: bool

    def __init__(self, module: Any, training: bool, values: Any = None) -> None:
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "training", training)
        object.__setattr__(self, "_values", values or {})

    # Not kept from autograph: it must reach the `__call__` of a tf.Module.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model in this mode; an explicit `training=` wins."""
        kwargs = _with_flag(self.module, self.training, args, kwargs)
        with _explained_flag(self.module, args, kwargs), training_kept():
            if self._values:
                outputs = _call_with_values(self.module, self._values, args, kwargs)
            else:
                outputs = self.module(*args, **kwargs)
        _note_flags(self.module)
        return outputs if self.training else _detached(outputs)

    @traces.not_converted
    def train(self) -> "View[_Model]":
        """The same model in training mode."""
        return View(self.module, True, self._values)

    @traces.not_converted
    def valid(self) -> "View[_Model]":
        """The same model in inference mode, off every tape."""
        return View(self.module, False, self._values)

    @traces.not_converted
    def with_values(self, values: Mapping[str, Any]) -> "View[_Model]":
        """A view that runs with tensors in place of variables, differentiably.

        For methods that look ahead (MAML, SAM): the gradient flows into the tensors. Views of the
        parts (`view.encoder`) run with them, too.

        Args:
          values: Path -> tensor of the variable's shape; other variables keep their values, or
            those of an earlier `with_values`.

        Returns:
          A view of the same mode. State changes inside its calls (statistics, seeds) are dropped,
          but for those of a raw `tf.Variable`, which Keras doesn't see.
        Mutates: nothing.
        Graph mode: works.

        Raises:
          ValueError: An unknown path, another shape, or two values for one variable.
          TypeError: The model isn't a Keras model, or a variable isn't Keras'.
        """
        call = "view.with_values(values)"
        if not isinstance(self.module, keras.layers.Layer):
            raise TypeError(
                f"`{call}` needs a Keras model: got {described(self.module)}, expected a "
                "keras.Model or keras.Layer. Keras alone can run with other values. Wrap the "
                "computation: `class Net(keras.Model): ...`."
            )
        if not isinstance(values, Mapping):
            raise TypeError(
                f"`{call}` needs a mapping: got {described(values)}, expected path -> tensor. "
                "A list has no paths. Key it: `dict(zip(tfloop.named_parameters(model), values))`."
            )
        book = address_book(self.module, call)
        given: dict[str, Any] = {}
        for path, value in values.items():
            canonical = _checked_path(book, path, value, call)
            if canonical in given:
                raise ValueError(
                    f"`{call}` got two values for one variable: {path!r} and another path lead to "
                    f"{canonical!r}, expected one. The variable is tied. Leave one out: "
                    f"`values.pop({path!r})`."
                )
            given[canonical] = value
        known = {id(v): (v, given[path]) for path, v in book.variables.items() if path in given}
        return View(self.module, self.training, self._values | known)

    def __getattr__(self, name: str) -> Any:
        """Parts of the model as views of the same mode; other attributes as they are."""
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._seen(getattr(self.module, name))

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses: a view holds nothing."""
        raise AttributeError(
            f"`view.{name} = ...` would change a view: got {self!r}, expected the model. A view "
            f"holds no state. Set it on the model: `view.module.{name} = ...`."
        )

    def __eq__(self, other: object) -> bool:
        """The same model in the same mode, with the same values?"""
        if not isinstance(other, View):
            return NotImplemented
        same = self.module is other.module and self.training == other.training
        return same and self._value_ids() == other._value_ids()

    def __hash__(self) -> int:
        """By identity of the model, as `==`."""
        return hash((id(self.module), self.training))

    def __reduce__(self) -> tuple:
        """Copies and pickles as its model."""
        return View, (self.module, self.training, self._values)

    def __copy__(self) -> "View[_Model]":
        """Another view of the same model."""
        return View(self.module, self.training, self._values)

    def __dir__(self) -> list[str]:
        """What the model has, and what the view adds."""
        return sorted({*object.__dir__(self), *dir(self.module)})

    def __repr__(self) -> str:
        """`train('net' (Sequential))`."""
        mode = "train" if self.training else "valid"
        names = listed(variable.path for variable, _ in self._values.values())
        values = f".with_values({names})" if self._values else ""
        return f"{mode}({described(self.module)}){values}"

    def _seen(self, value: Any) -> Any:
        if is_model(value):
            return View(unwrap(value), self.training, self._values)
        return rebuilt(value, self._seen) if _holds_models(value) else value

    def _value_ids(self) -> dict[int, int]:
        return {key: id(value) for key, (_, value) in self._values.items()}


def _holds_models(value: Any) -> bool:
    return any(is_model(part) or _holds_models(part) for part in parts_of(value) or ())


@traces.not_converted
def _with_flag(module: Any, training: bool, args: tuple, kwargs: dict) -> dict:
    """The keyword arguments with the training flag, unless the caller gave one."""
    if any(isinstance(x, keras.KerasTensor) for x in tf.nest.flatten((args, kwargs))):
        mode = "train" if training else "valid"
        raise TypeError(
            f"`{mode}(model)(x)` needs values: got a symbolic keras.KerasTensor, expected a tensor "
            "or array. A Functional model keeps no mode: the flag of its own call overrides it. "
            f"Build with the model, view the result: `tfloop.{mode}(keras.Model(x, model(x)))`."
        )
    names = call_arguments(module)
    given = [kwargs[flag] for flag in _FLAGS if flag in kwargs]
    taken = [flag for flag in _FLAGS if flag in names]
    if any(names.index(flag) < len(args) for flag in taken):
        return kwargs  # the caller gave it by position
    if isinstance(module, keras.layers.Layer):
        taken = ["training", *(flag for flag in taken if flag != "training")]
    elif not taken:
        _check_needs_no_flag(module, training)
        return kwargs
    others = {name: value for name, value in kwargs.items() if name not in _FLAGS}
    return others | dict.fromkeys(taken, given[0] if given else training)


def _check_needs_no_flag(module: Any, training: bool) -> None:
    """In Keras 2 layers inside get the flag by the `call` around them, or run without training."""
    if not training or not tf_keras.is_layer(module):
        return
    inner = (part for part in module.submodules if tf_keras.is_layer(part))
    deaf = next((part for part in inner if "training" in call_arguments(part)), None)
    if deaf is not None:
        raise TypeError(
            f"`train(model)(x)` can't train {described(module)} of tf_keras: got a `call` without "
            f"`training`, expected one that passes it on to {described(deaf)}, which would run in "
            "inference, in silence. Write `def call(self, x, training=None): ...`."
        )


@contextlib.contextmanager
def _explained_flag(module: Any, args: tuple, kwargs: dict) -> Iterator[None]:
    """Says what to do where a layer can't take a flag that the graph computes; some modules can."""
    try:
        yield
    except TypeError as error:
        named = {**dict(zip(call_arguments(module), args, strict=False)), **kwargs}
        odd = [flag for flag in _FLAGS if tf.is_symbolic_tensor(named.get(flag))]
        if not odd:
            raise
        raise TypeError(
            f"`view(x, {odd[0]}=flag)` can't take this flag: got a tensor of a graph, expected "
            "True, False or None. Layers decide in Python what they build; a compiled step makes "
            f"a tensor of a NumPy bool. Pass Python's: `step(batch, {odd[0]}=bool(flag))`."
        ) from error


@traces.not_converted
def _note_flags(module: Any) -> None:
    """Tells the trace being made that a frozen layer runs in its own way."""
    if traces.is_recorded():
        traces.depends_on(unchecked_book(module))


@traces.not_converted
def _call_with_values(module: Any, values: dict[int, Any], args: tuple, kwargs: dict) -> Any:
    """Runs a Keras model with tensors in the place of variables."""
    with keras.StatelessScope(state_mapping=list(values.values())):
        return module(*args, **kwargs)


@traces.not_converted
def _detached(outputs: Any) -> Any:
    """Cuts outputs from every tape, whatever they are packed in."""
    copies: dict[int, Any] = {}

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, tf.Tensor):
            return annotations.derived(_cut, leaf)
        if is_variable(leaf):
            return tf.stop_gradient(tf.convert_to_tensor(leaf))
        if is_plain_object(leaf) and id(leaf) not in copies:  # such as a dataclass
            copies[id(leaf)] = other = copy.copy(leaf)
            for name, value in vars(leaf).items():
                object.__setattr__(other, name, mapped(value))  # which may be frozen
        return copies.get(id(leaf), leaf)

    def mapped(value: Any) -> Any:
        return tf.nest.map_structure(cut, value, expand_composites=True)

    return mapped(outputs)


def _cut(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor without a gradient."""
    kind = tensor.op.type if tf.is_symbolic_tensor(tensor) else None
    if kind in _PROBABILITIES:
        # In a graph Keras' losses find the logits behind the last operation, so it stays the last.
        return _PROBABILITIES[kind](tf.stop_gradient(tensor.op.inputs[0]))
    return tf.stop_gradient(tensor)


def _checked_path(book: AddressBook, path: str, value: Any, call: str) -> str:
    """The canonical path of a Keras variable that a value fits."""
    canonical = book.resolve(path)
    if canonical is None:
        raise ValueError(
            f"`{call}` got an unknown path: {book.unknown(path)} It was keyed by another model. "
            "List them all: `tfloop.named_variables(model)`."
        )
    variable = book.variables[canonical]
    if not isinstance(variable, keras.Variable):
        raise TypeError(
            f"`{call}` can't replace {path!r}: got a tf.Variable, expected a Keras one. Keras' "
            "layers don't read it through Keras. Make it a weight of its layer: "
            "`self.scale = self.add_weight(...)`."
        )
    shape = tf.TensorShape(value.shape) if hasattr(value, "shape") else tf.constant(value).shape
    if not shape.is_compatible_with(tf.TensorShape(variable.shape)):
        raise ValueError(
            f"`{call}` takes no such value for {path!r}: got the shape {shape}, expected "
            f"{tuple(variable.shape)}. It belongs to another variable. "
            "Compare them: `tfloop.named_variables(model)`."
        )
    return canonical
