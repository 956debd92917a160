"""What a `Learner` is given, checked before its first step.

Pure checks and conversions to Keras' own kinds; the loop is in `learner`.
"""

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfloop._checks.messages import described, listed
from tfloop._model.paths import is_model
from tfloop._optimizer.optimizer import ModuleOptimizer
from tfloop._replicas.reduction import KINDS
from tfloop.schedulers._kinds import is_schedule
from tfloop.schedulers._module import ModuleLrScheduler
from tfloop.schedulers._rates import ModuleLearningRate

NEW = "Learner(model, optim, loss)"
FIT = "Learner.fit(train, valid)"


# What Keras calls the ways in which a loss puts its samples together.
_MEANS, _WEIGHTED_MEAN, _SUMS = ("sum_over_batch_size", "mean"), "mean_with_sample_weight", ("sum",)


class _Mean(keras.losses.Loss):
    """A function that gives a loss a sample, as a Keras loss."""

    def __init__(self, fn: Any) -> None:
        super().__init__(name="loss")  # of a scope in the graph, which takes no "<lambda>"
        self._fn = fn

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """The losses; a mean as a batch of one, which Keras treats like any other."""
        losses = tf.convert_to_tensor(self._fn(y_true, y_pred))
        return tf.reshape(losses, [1]) if losses.shape.rank == 0 else losses


def parts(batch: Any) -> tuple[Any, Any, Any]:
    """x, y and the sample weights or `None`.

    Raises:
      TypeError: The batch is no such tuple.
    """
    if isinstance(batch, (tuple, list)) and len(batch) in (2, 3):
        x, y, *weights = batch
        return x, y, weights[0] if weights else None
    found = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else described(batch)
    raise TypeError(
        f"`Learner` can't read the batch: got {found}, expected `(x, y)` or `(x, y, "
        "sample_weight)`, as in Keras. Let the data give that: "
        "`tfloop.DataLoader(data, lambda b: (b['image'], b['label']), batch_size=64)`."
    )


def as_loss(loss: Any, accumulate: int) -> keras.losses.Loss:
    """What `keras.Model.compile` takes as a loss, as an object that gives a mean.

    Raises:
      TypeError: It is none.
      ValueError: Keras can't make it, or it gives no mean where one is needed.
    """
    try:
        found = keras.losses.get(loss)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"`{NEW}` can't make a loss: got {described(loss)}, expected a Keras loss, its name "
            "or a function. Write `keras.losses.MeanSquaredError()`."
        ) from error
    if found is None:
        raise TypeError(
            f"`{NEW}` needs a loss: got None, expected a Keras loss, its name or a function. "
            "Nothing else says what to minimise. Write `keras.losses.MeanSquaredError()`."
        )
    found = found if isinstance(found, keras.losses.Loss) else _Mean(found)
    allowed = [*_MEANS, _WEIGHTED_MEAN, *(_SUMS if accumulate == 1 else ())]
    if found.reduction not in allowed:
        raise ValueError(
            f"`{NEW}` got the loss {found.name!r} with reduction={found.reduction!r} and "
            f"accumulate={accumulate}, expected a mean over the batch. Windows and epochs take "
            "means over samples. Write "
            f"`keras.losses.{type(found).__name__}(..., reduction='mean')`."
        )
    return found


def divides_by_weights(loss: keras.losses.Loss) -> bool:
    """Is it a mean over the sample weights, where there are any, in place of the samples?"""
    return loss.reduction == _WEIGHTED_MEAN


def as_rates(lr: Any) -> ModuleLearningRate | ModuleLrScheduler | None:
    """What `lr` can be, with a number as a `ModuleLearningRate`.

    Raises:
      TypeError: It is a bare schedule, or no rate.
      ValueError: It is out of range.
    """
    if lr is None or isinstance(lr, (ModuleLearningRate, ModuleLrScheduler)):
        return lr
    if is_schedule(lr):
        raise TypeError(
            f"`{NEW}` got a schedule as lr: got {type(lr).__name__}, expected what counts its "
            "steps. Wrap it: `tfloop.Learner(..., lr=tfloop.ModuleLrScheduler(schedule))`."
        )
    return ModuleLearningRate(lr)


def as_metrics(metrics: Any) -> list[keras.metrics.Metric]:
    """The metrics as a list.

    Raises:
      TypeError: One of them isn't a metric.
      ValueError: Two have one name.
    """
    found = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    for metric in found:
        if not isinstance(metric, keras.metrics.Metric):
            raise TypeError(
                f"`{NEW}` got {described(metric)} as a metric, expected a keras.metrics.Metric. A "
                "name means different metrics for different outputs. Write "
                "`metrics=[keras.metrics.SparseCategoricalAccuracy()]`."
            )
    names = ["loss", *(metric.name for metric in found)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"`{NEW}` got several metrics of one name: {listed(twice)}, expected names of their "
            "own; the loss is 'loss'. Logs are kept by name. Name them: "
            "`keras.metrics.Mean(name='other')`."
        )
    return found


def as_callbacks(callbacks: Any) -> list[keras.callbacks.Callback]:
    """The callbacks as a list.

    Raises:
      TypeError: One of them isn't a callback.
      ValueError: One of them needs `keras.Model.fit`, or a package that isn't there.
    """
    found = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    for callback in found:
        if not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(
                f"`{FIT}` got {described(callback)} as a callback, expected a "
                "keras.callbacks.Callback. Make one of a function: "
                "`keras.callbacks.LambdaCallback(on_epoch_end=fn)`."
            )
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                f"`{FIT}` got BackupAndRestore, expected its own way to resume: the callback "
                "tells `keras.Model.fit` alone where to go on. Write "
                "`learner.fit(..., checkpoint='runs/1')`."
            )
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            raise ValueError(
                f"`{FIT}` got SwapEMAWeights, expected no callback for moving averages: it "
                "exchanges the slots of one Keras optimizer, and a group has its own. At its end "
                "`fit` puts them into the model. Write `keras.optimizers.AdamW(use_ema=True)`."
            )
        if isinstance(callback, keras.callbacks.TensorBoard):
            try:
                importlib.import_module("tensorboard.summary.v2")
            except ImportError as error:
                raise ValueError(
                    f"`{FIT}` got TensorBoard, expected its package too: it would fail after the "
                    "first batch. TensorFlow doesn't install it. Write `pip install tensorboard`."
                ) from error
    return found


def check_data(name: str, data: Any, epochs: int, *, in_portions: bool = False) -> None:
    """Refuses what can't give batches, or not in every epoch.

    Args:
      name: The argument.
      data: What it got.
      epochs: How often it is iterated, unless it is drawn on `in_portions`.
      in_portions: Is it?

    Raises:
      TypeError: It isn't iterable, or holds no batches.
      ValueError: It never ends, or it is an iterator, and there are several epochs.
    """
    arrays = (np.ndarray, tf.Tensor)
    whole = isinstance(data, (tuple, list)) and any(isinstance(part, arrays) for part in data)
    if not isinstance(data, Iterable) or isinstance(data, (Mapping, str, *arrays)) or whole:
        raise TypeError(
            f"`{FIT}` got {described(data)} as {name}, expected batches. Arrays aren't cut into "
            "batches here. Write `tfloop.DataLoader((x, y), batch_size=64)`."
        )
    if in_portions:
        return
    if isinstance(data, tf.data.Dataset) and data.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"`{FIT}` got a data set without end as {name}, expected the batches of one epoch. It "
            "is repeated already. Leave `.repeat()` out, or cut it: `data.take(100)`, or for "
            "training `fit(..., steps_per_epoch=100)`."
        )
    if isinstance(data, Iterator) and epochs > 1:
        raise ValueError(
            f"`{FIT}` got an iterator as {name}: got {described(data)} for {epochs} epochs, "
            "expected what can be iterated again. It is empty after the first. Give what it was "
            "made from: `fit(loader, ...)`, not `fit(iter(loader), ...)`."
        )


def check_folder(checkpoint: Any) -> None:
    """Raises a TypeError for what is no path."""
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise TypeError(
            f"`{FIT}` got {described(checkpoint)} as checkpoint, expected a folder or a "
            "tfloop.Checkpoint. Everything a run needs is saved there. Write "
            "`checkpoint='runs/1'`."
        )


def check_drawn(name: str, batches: int) -> None:
    """Raises a ValueError for an epoch without batches."""
    if batches == 0:
        raise ValueError(
            f"`{FIT}` got no batches from {name}, expected at least one an epoch. It may be used "
            "up, or drop a last batch that is its only one. Look: `len(list(loader))`."
        )


def check_parts(model: Any, optim: Any, strategy: Any) -> None:
    """Refuses what can't be called or can't step.

    Raises:
      TypeError: The one isn't a model, the other no `ModuleOptimizer`, or the last no strategy.
      ValueError: The optimizer takes no means over replicas.
    """
    if not is_model(model):
        raise TypeError(
            f"`{NEW}` needs a model: got {described(model)}, expected one that can be called. "
            "Several networks need a loop of their own. Give a `keras.Model`."
        )
    if not isinstance(optim, ModuleOptimizer):
        raise TypeError(
            f"`{NEW}` needs a ModuleOptimizer: got {described(optim)}, expected the one with "
            "the groups. Wrap it: `tfloop.ModuleOptimizer(keras.optimizers.Adam())`."
        )
    if strategy is not None and not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            f"`{NEW}` got strategy={described(strategy)}, expected a tf.distribute.Strategy or "
            "None. Make one: `strategy=tfloop.strategy('auto')`."
        )
    if strategy is not None and not KINDS[optim.reduction].weighs:
        raise ValueError(
            f"`{NEW}` got an optimizer with reduction={optim.reduction!r} and a strategy, expected "
            "'mean': losses are means over samples. Leave it out: "
            "`tfloop.ModuleOptimizer(optimizer)`."
        )
