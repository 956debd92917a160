"""`blend` and `to_device`: one model's values written into another, and a copy elsewhere.

Both go by path, and need nothing of a model but that it can be walked.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfloop._checks.arguments import is_number, wrong_scalar
from tfloop._checks.messages import listed
from tfloop._model import derived
from tfloop._model.containers import is_container, rebuilt
from tfloop._model.modes import View
from tfloop._model.paths import AddressBook, address_book, tf_variable
from tfloop._tensors import sparse
from tfloop._tracing import traces

_BLEND = "blend(target, source, rate)"
_TO_DEVICE = "to_device(model, device)"


@traces.not_converted
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
    Graph mode: works; the value of a tensor isn't checked. What a layer computes from its variables
      once they are set (`Normalization`) follows an eager call alone.

    Raises:
      ValueError: Paths or shapes differ, or a Python rate is outside [0, 1].
      TypeError: The rate isn't a number, or one of the two isn't a model.
    """
    _check_rate(rate)
    targets = address_book(target, _BLEND).floating()
    sources = address_book(source, _BLEND).floating()
    lone = [path for path in targets if path not in sources]
    extra = [path for path in sources if path not in targets]
    if lone or extra:
        raise ValueError(
            f"`{_BLEND}` needs two models of the same paths: got {listed(lone)} only in the "
            f"target and {listed(extra)} only in the source, expected none. They were built "
            "differently. Build both by one function: `target, source = build(), build()`."
        )
    for path, variable in targets.items():
        shapes = [tf.TensorShape(v.shape) for v in (sources[path], variable)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"`{_BLEND}` needs two models of the same shapes: got {shapes[0]} for {path!r}, "
                f"expected {shapes[1]}. They were built differently. Build both by one function: "
                "`target, source = build(), build()`."
            )
    for path, variable in targets.items():
        variable = tf_variable(variable)
        goal = tf.cast(tf.convert_to_tensor(tf_variable(sources[path])), variable.dtype)
        if is_number(rate) and rate == 1:
            variable.assign(goal)  # exact, where adding a difference would round
        else:
            variable.assign_add(sparse.scalar(rate, variable.dtype) * (goal - variable))
    if tf.executing_eagerly():
        derived.bring_up_to_date(address_book(target, _BLEND))


@traces.not_converted
def to_device(model: Any, device: str) -> Any:
    """Copies a model to a device, with the same paths, values and trainable flags.

    Gradients that are computed on the copy are keyed as those of the original, so they apply to
    it: `GradientsParams.from_grads(grads, copy)`, then `optim.step(lr, model, grads)`.

    Args:
      model: A built Keras model or layer, a `tf.Module`, a view (the copy has its mode), or a dict
        or list of these and of variables.
      device: A TensorFlow device, such as `"/GPU:0"`.

    Returns:
      The copy. It is independent: `blend(copy, model)` brings it up to date.
    Mutates: nothing.
    Graph mode: call it outside.

    Raises:
      ValueError: Neither Keras' config nor `copy.deepcopy` can copy it, or the copy has other
        paths; the message shows the lines that do.
      TypeError: It isn't a model.
      RuntimeError: It was called in a trace.
    """
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"`{_TO_DEVICE}` was called in a trace: got a graph, expected eager code. A copy made "
            "there would be made once, not at each step. Copy before the step: "
            "`replica = tfloop.to_device(model, '/GPU:1')`."
        )
    if isinstance(model, View):
        return View(to_device(model.module, device), model.training)
    book = address_book(model, _TO_DEVICE)
    problems = []
    with tf.device(device):
        for way in _ways_to_copy(model):
            try:
                other = way()
                copied = address_book(other)
            except Exception as error:  # noqa: BLE001 - any failure to copy has one answer
                problems.append(f"{type(error).__name__}: {error}")
                continue
            if list(copied.variables) == list(book.variables):
                _bring_up_to_date(copied, book)
                return other
            problems.append(f"its copy has other paths, {listed(copied.variables)}")
    raise ValueError(
        f"`{_TO_DEVICE}` can't copy the model: got {book.description}, expected one that Keras' "
        f"config or `copy.deepcopy` reproduces. {problems[0]}. Build the copy yourself: "
        "`with tf.device(device): other = build_model()`, then `tfloop.blend(other, model)`."
    )


def _ways_to_copy(model: Any) -> Iterator[Callable[[], Any]]:
    yield lambda: _by_config(model)
    yield lambda: _deep(model)


def _by_config(model: Any) -> Any:
    """Containers part by part, Keras models and layers from their config, others whole."""
    if is_container(model):
        return rebuilt(model, _by_config)
    if isinstance(model, keras.Model):
        return keras.models.clone_model(model)
    if not isinstance(model, keras.layers.Layer):
        return _deep(model)
    other = type(model).from_config(model.get_config())
    other.build_from_config(model.get_build_config())
    return other


def _deep(model: Any) -> Any:
    with warnings.catch_warnings():
        # Keras writes its parts to a file in memory, in a way that NumPy 2 finds old.
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        return copy.deepcopy(model)


def _bring_up_to_date(copied: AddressBook, book: AddressBook) -> None:
    """Values and flags: a config doesn't know what was frozen after construction."""
    for path, variable in copied.variables.items():
        tf_variable(variable).assign(tf.convert_to_tensor(tf_variable(book.variables[path])))
    for path in filter(book.layers.__contains__, copied.layers):
        copied.layers[path].trainable = book.layers[path].trainable
    for path, variable in copied.variables.items():
        if isinstance(variable, keras.Variable):
            variable.trainable = book.variables[path].trainable
    derived.bring_up_to_date(copied)


def _check_rate(rate: Any) -> None:
    wrong = wrong_scalar(rate)
    if wrong is not None:
        raise TypeError(
            f"`{_BLEND}` takes no such rate: got {wrong.got}, expected a number or a scalar "
            "tensor. One rate serves all paths. Write `tfloop.blend(target, source, 0.01)`."
        )
    if is_number(rate) and not (math.isfinite(rate) and 0.0 <= rate <= 1.0):
        raise ValueError(
            f"`{_BLEND}` takes no such rate: got {rate!r}, expected a number in [0, 1]. It is the "
            "share of the source. For a momentum m write `tfloop.blend(target, source, 1 - m)`."
        )
