"""`DataLoader`: batches in an order that can be told again.

`_loader` keeps the place in the epoch, runs the user's functions and batches; `_sources` says
where rows come from: arrays in memory, or a `tf.data.Dataset`.
"""

from tfloop.data._loader import DataLoader

__all__ = ["DataLoader"]
