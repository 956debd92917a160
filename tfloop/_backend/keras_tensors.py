"""Private of tensors in Keras: what it notes on them, and losses, metrics and layers read."""

import functools
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfloop._backend.versions import unsupported

NOTES = ("_keras_mask", "_keras_logits")
"""The mask of padding, and the logits that a softmax or sigmoid was computed of."""


def annotations(tensor: Any) -> dict[str, Any]:
    """What Keras has noted on a tensor, by the names that it goes by."""
    _check_notes()
    found = {name: getattr(tensor, name, None) for name in NOTES}
    return {name: note for name, note in found.items() if note is not None}


def annotate(tensor: Any, notes: Mapping[str, Any]) -> None:
    """Notes it on another tensor."""
    for name, note in notes.items():
        setattr(tensor, name, note)


@functools.cache
def _check_notes() -> None:
    """Once: most tensors have no note, so that a note of another name would just be lost."""
    with tf.init_scope():  # nothing of it belongs into a trace
        masked = keras.layers.Masking(name="probe")(tf.ones((1, 1, 1)))
        made = dict(zip(NOTES, (masked, keras.activations.softmax(tf.ones((1, 2)))), strict=True))
    for name, tensor in made.items():
        if getattr(tensor, name, None) is None:
            raise unsupported(name, "keras.KerasTensor", "what Keras notes on a tensor")
