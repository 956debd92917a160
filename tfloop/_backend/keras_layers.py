"""Private of `keras.layers.Layer` and `keras.Model`: what they track, and what is their own."""

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

import keras

from tfloop._backend.versions import required

try:
    from keras.src.backend.common.global_state import get_global_attribute
except ImportError:  # then a flag leaks as Keras lets it
    get_global_attribute = lambda name: None  # noqa: E731

_LAYER = "keras.layers.Layer"
_TRACKED = ("_trainable_variables", "_non_trainable_variables", "_seed_generators", "_layers")
# What a bare layer has, but it does tell how the layer computes.
_TELLING = {"_trainable", "_dtype_policy", "_layers", "_remat_mode", "activity_regularizer"}
# What `compile`, `fit` and `evaluate` set beside what a bare model has. Keras may add to them: a
# step is then traced again after these calls, and right.
_OF_FIT = {
    *("optimizer", "history", "stop_training", "stop_predicting", "stop_evaluating"),
    *("_compile_config", "_compiled_trainable_state", "_eval_epoch_iterator", "_loss_tracker"),
}


def tracked(layer: Any) -> list[Any]:
    """The variables, seed generators and layers that a layer holds itself, attributes or not."""
    return [thing for name in _TRACKED for thing in required(layer, name, _LAYER, "what it tracks")]


def inner_layers(layer: Any) -> list[Any]:
    """The layers below a layer, at any depth, each once."""
    found: dict[int, Any] = {}
    waiting = [layer]
    while waiting:
        for inner in required(waiting.pop(), "_layers", _LAYER, "its own layers"):
            if id(inner) not in found:
                found[id(inner)] = inner
                waiting.append(inner)
    return [*found.values()]


def own_losses(layer: Any) -> list[Any]:
    """What the last call of a layer added by `add_loss` and as activity penalty.

    Without the layers inside and without the penalties of variables, both of which `losses` has.
    """
    return required(layer, "_get_own_losses", _LAYER, "the losses that its last call added")()


@contextlib.contextmanager
def training_kept() -> Iterator[None]:
    """Keeps the training flag of the call of a layer in which this runs, if there is one.

    Keras notes a flag that is given to an inner layer for all layers that come after it.
    """
    context = get_global_attribute("current_call_ctx")
    flag = getattr(context, "training", None)
    try:
        yield
    finally:
        if context is not None:
            context.training = flag


def records(layer: Any) -> frozenset[str]:
    """The private attributes in which Keras keeps a second record of what the others hold.

    Those that a bare layer or model of its kind has, as this Keras makes it. Public ones, such as
    `loss`, may be the user's.
    """
    kind: Any = type(layer)
    return _records(kind)


@functools.lru_cache(maxsize=1024)
def _records(kind: type) -> frozenset[str]:
    own = _private_attributes()
    return frozenset[str]().union(*(own[base] for base in own if issubclass(kind, base)))


@functools.cache
def _private_attributes() -> dict[type, set[str]]:
    x = keras.Input((1,), name="bare")
    functional = keras.Model(x, _Nothing(name="nothing")(x), name="bare")
    bare = (*_bare(), keras.Sequential(name="bare"), functional)
    return {type(thing): {name for name in vars(thing) if name[0] == "_"} for thing in bare}


class _Nothing(keras.layers.Layer):
    """A layer that needs no trace, and gives a tensor that uses up no automatic name."""

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype, name="bare")


@functools.cache
def bookkeeping() -> frozenset[str]:
    """The attributes of a layer or model that don't tell how it computes."""
    return frozenset({name for thing in _bare() for name in vars(thing)} | _OF_FIT) - _TELLING


def snake_case(name: str) -> str:
    """Keras' own rule for automatic names: `Conv2D` gives `conv2d`, `MyBlock` `my_block`."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _bare() -> tuple[Any, Any]:
    # Named, so that no automatic name is used up.
    return keras.layers.Layer(name="bare"), keras.Model(name="bare")
