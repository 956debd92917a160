"""Private of `tf_keras`, Keras 2, which may not be loaded: what its layers track.

They are `tf.Module`s whose variables have more names than one, and flags of their own.
"""

import functools
import sys
from typing import Any

import tensorflow as tf

from tfloop._backend.versions import required

_LAYER = "tf_keras.layers.Layer"
_TRACKED = ("_trainable_weights", "_non_trainable_weights", "_self_tracked_trackables")
# What a bare layer has, but it does tell how the layer computes.
_TELLING = {"_trainable", "_dtype_policy", "_activity_regularizer"}


def is_layer(thing: Any) -> bool:
    """Is it a layer or model of Keras 2?"""
    legacy = sys.modules.get("tf_keras")
    return legacy is not None and isinstance(thing, legacy.layers.Layer)


def has_named_layers(layer: Any) -> bool:
    """Is it a Sequential or Functional model, where Keras keeps layer names unique?"""
    legacy: Any = sys.modules["tf_keras"]
    return isinstance(layer, legacy.Model) and bool(getattr(layer, "_is_graph_network", False))


def tracked(layer: Any) -> list[Any]:
    """The variables and layers that a layer holds itself, attributes or not."""
    lists = (required(layer, name, _LAYER, "what it tracks") for name in _TRACKED)
    found = [thing for things in lists for thing in things]
    # Containers are among them, to which attributes lead.
    return [thing for thing in found if isinstance(thing, tf.Variable) or is_layer(thing)]


@functools.cache
def records() -> frozenset[str]:
    """The attributes in which Keras 2 keeps its own account of a layer or model."""
    legacy: Any = sys.modules["tf_keras"]
    # Named, so that no automatic name is used up.
    x = legacy.Input((1,), name="bare")
    layer = legacy.layers.Layer(name="bare")
    bare = (layer, legacy.Model(name="bare"), legacy.Sequential(name="bare"), legacy.Model(x, x))
    return frozenset(name for thing in bare for name in vars(thing))


def bookkeeping() -> frozenset[str]:
    """The attributes of a layer or model that don't tell how it computes."""
    return records() - _TELLING
