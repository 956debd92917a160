"""`train()` and `valid()`: a model seen in training or in inference mode, itself untouched.

A view passes the training flag explicitly at every call. Nothing ambient is switched: Keras'
own context isn't seen by other threads, and is left changed by some calls (see `valid`). The
functions that run or write a model with other values live here too.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfloop import _traces
from tfloop._messages import described, listed
from tfloop._paths import AddressBook, address_book, is_model, tf_variable, unwrap

_FLAGS = ("training", "is_training")


def train(model: Any) -> Any:
    """Gives a view of a model that runs in training mode.

    `view(x)` is `model(x, training=True)`, whether or not the model's `call` takes `training`: Keras
    passes it on to the layers inside. A `tf.Module` gets `training` or `is_training` if its
    `__call__` takes it. Attributes that are layers or modules come back as views of the same mode
    (`view.generator(z)`), other attributes as they are; methods run on the model itself. An
    explicit `training=` at the call wins. No variable is copied, and the model isn't changed.

    Args:
      model: A Keras model or layer, a `tf.Module`, a view, or a dict or list of these.

    Returns:
      A view, or a dict or list of views.
    Mutates: nothing.
    Graph mode: works; the mode is baked in when the call is traced.

    Raises:
      TypeError: It isn't a model.
    """
    return _view(model, True, "train(model)")


def valid(model: Any) -> Any:
    """Gives a view of a model that runs in inference mode and is off every tape.

    As `train`, with `training=False`: dropout is off, BatchNorm uses its moving statistics, and
    no statistic or seed moves. Outputs carry no gradient on any open tape, not even to the input,
    also with an explicit `training=True`. For a fixed network that must pass gradients on
    (a perceptual loss), call `model(x, training=False)` and leave it out of the step.

    Keras lets a flag leak: after `self.backbone(x, training=False)` inside a subclassed model,
    later layers of the same call run without training too (Keras 3.15). Pass `training` on
    to every layer in such a `call`. A flag that a model hard-codes can't be switched from outside.

    Args:
      model: A Keras model or layer, a `tf.Module`, a view, or a dict or list of these.

    Returns:
      A view, or a dict or list of views.
    Mutates: nothing. `model.losses` is renewed by a call, as by every call.
    Graph mode: works; the mode is baked in when the call is traced.

    Raises:
      TypeError: It isn't a model.
    """
    return _view(model, False, "valid(model)")


def _view(model: Any, training: bool, call: str) -> Any:
    model = unwrap(model)
    if isinstance(model, Mapping):
        return {name: _view(part, training, call) for name, part in model.items()}
    if isinstance(model, (list, tuple)):
        return [_view(part, training, call) for part in model]
    if not is_model(model):
        raise TypeError(
            f"`{call}` needs a model: got {described(model)}, expected a keras.Model or "
            "keras.Layer, a tf.Module, or a dict or list of these. "
            "Pass the model itself, not a result of it: `tfloop.train(model)(x)`."
        )
    return View(model, training)


class View:
    """A model in one mode; made by `train` and `valid`.

    Attributes:
      module: The model itself.
      training: The flag that a call passes.
    """

    is_tfloop_view = True
    __slots__ = ("module", "training", "_values")

    def __init__(self, module: Any, training: bool, values: dict[str, Any] | None = None) -> None:
        object.__setattr__(self, "module", module)
        object.__setattr__(self, "training", training)
        object.__setattr__(self, "_values", values)

    # Not kept from autograph: it must reach the `__call__` of a tf.Module.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model in this mode; an explicit `training=` wins."""
        kwargs = _with_flag(self.module, self.training, args, kwargs)
        if self._values is None:
            outputs = self.module(*args, **kwargs)
        else:
            outputs = _call_with_values(self.module, self._values, args, kwargs)
        return outputs if self.training else _detached(outputs)

    def train(self) -> "View":
        """The same model in training mode."""
        return View(self.module, True, self._values)

    def valid(self) -> "View":
        """The same model in inference mode, off every tape."""
        return View(self.module, False, self._values)

    @_traces.not_converted
    def with_values(self, values: Mapping[str, Any]) -> "View":
        """A view that runs with tensors in place of variables, differentiably.

        For methods that look ahead (MAML, SAM): the gradient flows into the tensors.

        Args:
          values: Path -> tensor of the variable's shape; other variables keep their values.

        Returns:
          A view of the same mode. State changes inside its calls (statistics, seeds) are dropped.
        Mutates: nothing.
        Graph mode: works.

        Raises:
          ValueError: An unknown path, or another shape.
          TypeError: The model isn't a Keras model.
        """
        call = "view.with_values(values)"
        if not isinstance(self.module, keras.layers.Layer):
            raise TypeError(
                f"`{call}` needs a Keras model: got {described(self.module)}. Keras alone can run "
                "with other values. Wrap the computation in a keras.Model, or write a function of "
                "the weights: `net(x, weights)`."
            )
        book = address_book(self.module, call)
        known = {_known_path(book, path, call): value for path, value in values.items()}
        for path, value in known.items():
            _check_shape(call, path, book.variables[path], value)
        return View(self.module, self.training, (self._values or {}) | known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return _seen(getattr(self.module, name), self.training)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"`view.{name} = ...` would change a view: got {described(self.module)}, expected the "
            f"model. A view holds no state. Set it on the model: `view.module.{name} = ...`."
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, View):
            return NotImplemented
        same = self.module is other.module and self.training == other.training
        return same and self._values is other._values

    def __hash__(self) -> int:
        return hash((id(self.module), self.training))

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    def __repr__(self) -> str:
        mode = "train" if self.training else "valid"
        values = f".with_values({listed(self._values)})" if self._values else ""
        return f"{mode}({described(self.module)}){values}"


def _seen(value: Any, training: bool) -> Any:
    """An attribute of a viewed model: parts in the same mode, other things as they are."""
    if is_model(value):
        return View(unwrap(value), training)
    if isinstance(value, Mapping) and any(_holds_models(part) for part in value.values()):
        return {name: _seen(part, training) for name, part in value.items()}
    if isinstance(value, (list, tuple)) and any(_holds_models(part) for part in value):
        return [_seen(part, training) for part in value]
    return value


def _holds_models(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_models(part) for part in value)
    return is_model(value)


@_traces.not_converted
def _with_flag(module: Any, training: bool, args: tuple, kwargs: dict) -> dict:
    """The keyword arguments with the training flag, unless the caller gave one."""
    if isinstance(module, keras.layers.Layer):
        # What the trace bakes in: a frozen BatchNorm runs as in inference.
        if module.built and module.variables:
            _traces.depends_on(address_book(module))
        name, parameters = "training", inspect.signature(module.call).parameters
    else:
        parameters = inspect.signature(type(module).__call__).parameters
        parameters = dict(list(parameters.items())[1:])
        name = next((flag for flag in _FLAGS if flag in parameters), "")
    explicit = next((flag for flag in _FLAGS if flag in kwargs and name), None)
    position = list(parameters).index(name) if name in parameters else len(args)
    if not name or position < len(args):
        return kwargs
    if explicit is None:
        return {**kwargs, name: training}
    return {**{k: v for k, v in kwargs.items() if k != explicit}, name: kwargs[explicit]}


def _call_with_values(module: Any, values: dict[str, Any], args: tuple, kwargs: dict) -> Any:
    """Runs a Keras model with tensors in the place of variables."""
    variables = address_book(module).variables
    mapping = [(variables[path], value) for path, value in values.items()]
    with keras.StatelessScope(state_mapping=mapping):
        return module(*args, **kwargs)


@_traces.not_converted
def _detached(outputs: Any) -> Any:
    """Cuts outputs from every tape, whatever they are packed in."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, tf.Tensor):
            return tf.stop_gradient(leaf)
        if isinstance(leaf, (tf.Variable, keras.Variable)):
            return tf.stop_gradient(tf.convert_to_tensor(leaf))
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = {f.name: _detached(getattr(leaf, f.name)) for f in dataclasses.fields(leaf)}
            return dataclasses.replace(leaf, **fields)
        return leaf

    return tf.nest.map_structure(cut, outputs, expand_composites=True)


@_traces.not_converted
def blend(target: Any, source: Any, rate: Any = 1.0) -> None:
    """Moves the float variables of one model towards those of another, path by path.

        target += rate * (source - target)

    A rate of 1 copies (target networks), 1 - momentum keeps an average (EMA teachers).

    Args:
      target: The model that is written, as in `named_variables`.
      source: The model that is read; the same paths and shapes.
      rate: A number or scalar tensor in [0, 1].

    Mutates: every floating variable of `target`, frozen ones and statistics included; or nothing,
      if it raises.
    Graph mode: works; a tensor rate isn't checked.

    Raises:
      ValueError: Paths or shapes differ, or a Python rate is outside [0, 1].
    """
    call = "blend(target, source)"
    if isinstance(rate, (int, float)) and not 0.0 <= rate <= 1.0:
        raise ValueError(
            f"`blend(target, source, rate)` needs a rate in [0, 1]: got {rate!r}. It is the share "
            "of the source; for a momentum m write `rate=1 - m`."
        )
    targets = address_book(target, call).floating()
    sources = address_book(source, call).floating()
    lone = [path for path in targets if path not in sources]
    extra = [path for path in sources if path not in targets]
    if lone or extra:
        raise ValueError(
            f"`{call}` needs two models of the same paths: got {listed(lone)} only in the target, "
            f"{listed(extra)} only in the source. Build both from one function: "
            "`target = build(); source = build()`."
        )
    for path, variable in targets.items():
        _check_shape(call, path, variable, sources[path])
    for path, variable in targets.items():
        goal = tf.cast(tf.convert_to_tensor(tf_variable(sources[path])), variable.dtype)
        if isinstance(rate, (int, float)) and rate == 1.0:
            tf_variable(variable).assign(goal)  # exact, where adding a difference would round
        else:
            variable = tf_variable(variable)
            variable.assign_add(tf.cast(rate, variable.dtype) * (goal - variable))


def to_device(model: Any, device: str) -> Any:
    """Copies a model to a device, with the same paths and values.

    Gradients that are computed on the copy are keyed as those of the original, so they apply to
    it: `GradientsParams.from_grads(grads, copy)`, then `optim.step(lr, model, grads)`.

    Args:
      model: A built Keras model or layer, a `tf.Module`, or a view (the copy has its mode).
      device: A TensorFlow device, such as `"/GPU:0"`.

    Returns:
      The copy. It is independent: `blend(copy, model)` brings it up to date.
    Mutates: nothing.
    Graph mode: call it outside.

    Raises:
      ValueError: Neither Keras' config nor `copy.deepcopy` can copy it, or the copy has
        other paths; the message shows the lines that do.
      TypeError: It isn't a model.
    """
    if getattr(type(model), "is_tfloop_view", False):
        return View(to_device(model.module, device), model.training)
    book = address_book(model, "to_device(model, device)")
    ways: list[Callable[[], Any]] = [lambda: copy.deepcopy(model)]
    if isinstance(model, keras.Model):
        ways.insert(0, lambda: keras.models.clone_model(model))
    problem = "the copy has other paths"
    with tf.device(device):
        for way in ways:
            try:
                other = way()
                same = list(address_book(other).variables) == list(book.variables)
            except Exception as error:  # noqa: BLE001 - any failure to copy has one answer
                problem = f"{type(error).__name__}: {error}"
                continue
            if same:
                for path, variable in address_book(other).variables.items():
                    variable.assign(book.variables[path])
                return other
    raise ValueError(
        f"`to_device(model, device)` can't copy {book.description}: {problem}. "
        "Build the copy yourself: `with tf.device(device): other = build_model()`, then "
        "`tfloop.blend(other, model)`."
    )


def _known_path(book: AddressBook, path: str, call: str) -> str:
    canonical = book.resolve(path)
    if canonical is None:
        raise ValueError(
            f"`{call}` got an unknown path: {book.unknown(path)} "
            "`tfloop.named_variables(model)` lists them all."
        )
    return canonical


def _check_shape(call: str, path: str, variable: Any, value: Any) -> None:
    shape = tf.TensorShape(value.shape if hasattr(value, "shape") else tf.shape(value))
    if not shape.is_compatible_with(tf.TensorShape(variable.shape)):
        raise ValueError(
            f"`{call}` got the shape {tuple(shape)} for {path!r}, expected "
            f"{tuple(variable.shape)}. The value belongs to another variable. "
            "Compare `tfloop.named_variables(model)`."
        )
