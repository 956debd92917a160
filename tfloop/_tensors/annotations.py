"""What Keras notes on a tensor besides its numbers: the mask of padding, the logits of a softmax.

They are attributes of the tensor object, so whoever makes another tensor of it takes them along.
Losses, metrics and layers read them: without them padding counts, and a cross-entropy is computed
from probabilities that were rounded.
"""

from collections.abc import Callable

import tensorflow as tf

from tfloop._backend.keras_tensors import NOTES, annotate, annotations

__all__ = ["NOTES", "annotate", "annotations", "derived"]


def derived(fn: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor) -> tf.Tensor:
    """`fn(tensor)`, with what is noted on the tensor put through `fn`, too."""
    result = fn(tensor)
    annotate(result, {name: fn(note) for name, note in annotations(tensor).items()})
    return result
