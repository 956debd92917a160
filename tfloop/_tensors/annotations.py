"""What Keras notes on a tensor besides its numbers: the mask of padding, the logits of a softmax.

They are attributes of the tensor object, so whoever makes another tensor of it takes them along.
Losses, metrics and layers read them: without them padding counts, and a cross-entropy is computed
from probabilities that were rounded.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

# Keras has no public name for either; where it should rename one, nothing is taken along.
NAMES = ("_keras_mask", "_keras_logits")


def annotations(tensor: Any) -> dict[str, Any]:
    """What Keras has noted on a tensor, by the names that it goes by."""
    found = {name: getattr(tensor, name, None) for name in NAMES}
    return {name: note for name, note in found.items() if note is not None}


def annotate(tensor: Any, notes: Mapping[str, Any]) -> None:
    """Notes it on another tensor."""
    for name, note in notes.items():
        setattr(tensor, name, note)


def derived(fn: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
    """`fn(tensor)`, with what is noted on the tensor put through `fn`, too."""
    result = fn(tensor)
    annotate(result, {name: fn(note) for name, note in annotations(tensor).items()})
    return result
