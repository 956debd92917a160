"""`Learner`: the loop itself, for those who want it written.

It stands on the public primitives alone, so its loop can be copied out and changed: what is
imported from the rooms below is `tfloop.train`, `tfloop.Tape` and so on. Callbacks, metrics,
losses, the progress bar and the history are Keras' own.
"""

import contextlib
import copy
import itertools
import operator
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfloop._accumulation.accumulator import GradientsAccumulator
from tfloop._checkpoint.checkpoint import Checkpoint
from tfloop._checks.arguments import whole_number
from tfloop._checks.copying import with_attributes_of
from tfloop._checks.messages import not_pickled
from tfloop._compile.step import compile  # noqa: A004
from tfloop._gradients.tape import Tape, total_loss
from tfloop._model.modes import train, valid
from tfloop._model.paths import unwrap
from tfloop._optimizer.optimizer import ModuleOptimizer
from tfloop._replicas.contexts import is_default
from tfloop.data import DataLoader
from tfloop.learner._callbacks import ForCallbacks, Rate
from tfloop.learner._checks import (
    FIT,
    NEW,
    as_callbacks,
    as_loss,
    as_metrics,
    as_rates,
    check_data,
    check_drawn,
    check_folder,
    check_parts,
    divides_by_weights,
    parts,
)
from tfloop.learner._epochs import Portions, as_frequency, as_verbose, is_validated
from tfloop.learner._progress import Progress
from tfloop.schedulers._module import ModuleLrScheduler


class Learner:
    """Trains a model as `keras.Model.fit` does, with tfloop's optimizer, windows and rates.

    A batch is `(x, y)` or `(x, y, sample_weight)`, as in Keras: the sample weights shape the loss
    alone, and the losses of the model's layers are added. Every metric, the loss included, counts
    each sample once. With `accumulate=k` an update follows every k batches and is that of
    their samples taken as one batch; the last window of an epoch may be shorter.

    Callbacks find `model.optimizer.learning_rate` and `iterations`. That rate is the base of `lr`,
    and setting it multiplies the rates of all groups alike; with `lr=None` it is that of
    `ModuleOptimizer.as_keras`. The model isn't compiled: a `ModelCheckpoint` writes it without the
    optimizer. Whole runs are the business of `fit(checkpoint=...)`.

    Args:
      model: A built Keras model or layer, a `tf.Module`, or a view of one.
      optim: The optimizer with its groups.
      loss: As in `keras.Model.compile`: a Keras loss, its name, or `fn(y, outputs)` that gives a
        loss a sample or their mean.
      lr: A number, `ModuleLearningRate` or `ModuleLrScheduler` (a step an update, not a batch);
        `None` for the rates of the optimizers that were given.
      metrics: Keras metrics, updated with `(y, outputs)`.
      accumulate: Batches behind an update.
      strategy: Each batch is spread over its replicas, with the result of one device. Model and
        metrics are made in its scope.

    Raises:
      TypeError: An argument has the wrong kind.
      ValueError: The model isn't built, a group serves nothing, two metrics have one name, the loss
        has no mean, or a number is out of range.

    Example:
      >>> import keras, numpy as np, tfloop
      >>> net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
      >>> _ = net.layers[0].kernel.assign([[1.0]])
      >>> learner = tfloop.Learner(net, tfloop.ModuleOptimizer("sgd"), "mse", lr=0.5)
      >>> logs = learner.train_step((np.ones((1, 1)), np.zeros((1, 1))))
      >>> float(logs["loss"]), float(net.layers[0].kernel[0, 0])
      (1.0, 0.0)
    """

    def __init__(
        self,
        model: Any,
        optim: ModuleOptimizer,
        loss: Any,
        *,
        lr: Any = None,
        metrics: Iterable[keras.metrics.Metric] = (),
        accumulate: int = 1,
        strategy: tf.distribute.Strategy | None = None,
    ) -> None:
        """See the class."""
        check_parts(model, optim, strategy)
        self.accumulate = whole_number(NEW, "accumulate", accumulate, least=1, fix="accumulate=4")
        self.loss = as_loss(loss, self.accumulate)
        self.lr = as_rates(lr)
        self._strategy = None if is_default(strategy) else strategy
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            self.metrics = [keras.metrics.Mean(name="loss"), *as_metrics(metrics)]
        self.model, self.optim = unwrap(model), optim.build(model)
        self._progress = Progress(self.metrics)
        self._window = GradientsAccumulator(reduction="mean")
        self._waiting = 0  # batches in the window
        self._rate = Rate(self.lr, optim, model)
        self._train = compile(self._train_batch, strategy=strategy)
        self._valid = compile(self._valid_batch, strategy=strategy)
        self._update = compile(self._apply_window, strategy=strategy)

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Trains on one batch; with `accumulate=k`, every k-th call updates the model.

        Args:
          batch: `(x, y)` or `(x, y, sample_weight)`.

        Returns:
          Metric -> its value since the epoch began, a scalar.
        Mutates: the model, the optimizer and the metrics.
        """
        _, logs = self._run(self._train, batch, 1, self._rate.numbers())
        self._trained(1)
        return logs

    def valid_step(self, batch: Any) -> dict[str, Any]:
        """Evaluates one batch; the result is as that of `train_step`.

        Mutates: the metrics alone.
        """
        _, logs = self._run(self._valid, batch, 1)
        return logs

    def fit(
        self,
        train: Iterable[Any],
        valid: Iterable[Any] | None = None,
        *,
        epochs: int,
        callbacks: Iterable[keras.callbacks.Callback] = (),
        verbose: Any = "auto",
        steps_per_epoch: int | None = None,
        validation_freq: int | Collection[int] = 1,
        steps_per_execution: int = 1,
        checkpoint: str | os.PathLike | Checkpoint | None = None,
        resume: bool = True,
    ) -> keras.callbacks.History:
        """Runs the loop: epochs of training, each followed by validation.

        Args:
          train: Batches, iterated once an epoch: a `DataLoader`, a `tf.data.Dataset`, a list.
          valid: Likewise, for validation.
          epochs: The epochs of the whole run, those before a resume included.
          callbacks: Keras callbacks, as they are. Their own state isn't in a checkpoint.
          verbose: As in Keras: 0 shows nothing, 1 a bar, 2 a line an epoch; `"auto"` is a bar on a
            terminal and lines elsewhere.
          steps_per_epoch: Batches of an epoch, for data without end or a long epoch. `train` is
            drawn on from one epoch to the next, and begun again at its end. A run that goes on
            from a checkpoint finds its place in a `DataLoader`, and begins other data anew.
          validation_freq: Validate after every so many epochs, or after these (from 1).
          steps_per_execution: Batches in one call of a graph, with the same result; callbacks run
            between the calls, and count batches as in Keras. A window of `accumulate` batches ends
            a call.
          checkpoint: A folder for `tfloop.Checkpoint`, saved before the first epoch and after each:
            model, optimizer, rates, and the places of DataLoaders. A callback that stops within an
            epoch has it saved there, with the window and the metrics, if `train` is a `DataLoader`;
            other data can't be entered in the middle, and its epoch begins anew. The step that
            `restore` gives is the number of whole epochs. Or a `Checkpoint` of your own, which is
            saved between epochs alone.
          resume: Go on, exactly, from what `checkpoint` holds, if it holds anything. An epoch that
            was begun is ended: its callbacks hear of the batches that were left, and its metrics
            are those of all.

        Returns:
          Keras' history of the epochs that this call ran, or ended.
        Mutates: the model, the optimizer and the metrics.

        Raises:
          TypeError: An argument has the wrong kind, or a batch is no such tuple.
          ValueError: No batches, an iterator that would last one epoch only, or the checkpoint
            doesn't fit.
        """
        epochs = whole_number(FIT, "epochs", epochs, least=0, fix="epochs=10")
        if steps_per_epoch is not None:
            steps_per_epoch = whole_number(
                FIT, "steps_per_epoch", steps_per_epoch, least=1, fix="steps_per_epoch=100"
            )
        check_data("train", train, epochs, in_portions=steps_per_epoch is not None)
        validation_freq = as_frequency(validation_freq)
        verbose = as_verbose(verbose, sys.stdout.isatty())
        if valid is not None:
            check_data("valid", valid, epochs)
        at_once = whole_number(
            FIT, "steps_per_execution", steps_per_execution, least=1, fix="steps_per_execution=50"
        )
        saver = self._saver(checkpoint, train=train, valid=valid)
        keeps_place = saver is not checkpoint and isinstance(train, DataLoader)
        batches = train if steps_per_epoch is None else Portions(train, steps_per_epoch)
        model = ForCallbacks(self.model, self._rate)
        events = keras.callbacks.CallbackList(
            as_callbacks(callbacks),
            add_history=True,
            add_progbar=verbose != 0,
            model=model,
            verbose=verbose,
            epochs=epochs,
            steps=_length(batches),
        )
        self._progress.batches = 0
        done = saver.restore() if saver is not None and resume else None
        if saver is not None and done is None and epochs > 0:
            saver.save(0)  # for a run that doesn't come to the end of its first epoch
        events.on_train_begin()
        logs: dict[str, float] = {}
        for epoch in range(done or 0, epochs):
            events.on_epoch_begin(epoch)
            self._reset()
            if self._progress.batches:
                self._go_on(saver, batches)
            logs = self._train_epoch(batches, events, model, at_once)
            is_whole = self._progress.batches == 0
            if saver is not None and keeps_place and not is_whole:
                # Before validation and the callbacks: the whole epoch will have its own.
                saver.save(epoch)
            if valid is not None and is_validated(epoch + 1, validation_freq):
                found = self._valid_epoch(valid, events, model, at_once)
                logs |= {f"val_{name}": value for name, value in found.items()}
            events.on_epoch_end(epoch, logs)
            if saver is not None and is_whole:
                saver.save(epoch + 1)
            if model.stop_training:
                break
        if epochs > 0:
            self._rate.finalize()  # as in Keras: moving averages become the weights
        events.on_train_end(logs)
        return model.history

    def __copy__(self) -> "Learner":
        """As `copy.deepcopy`: two learners can't share a window."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict) -> "Learner":
        """A learner of its own, at the same place; the loss, which has no state, is shared."""
        with contextlib.nullcontext() if self._strategy is None else self._strategy.scope():
            model, optim, lr, metrics, window = copy.deepcopy(
                [self.model, self.optim, self.lr, self.metrics[1:], self._window], memo
            )
        twin = type(self)(
            model,
            optim,
            self.loss,
            lr=lr,
            metrics=metrics,
            accumulate=self.accumulate,
            strategy=self._strategy,
        )
        for metric, copied in zip(self.metrics, twin.metrics, strict=True):
            for variable, value in zip(copied.variables, metric.variables, strict=False):
                variable.assign(value)  # Keras copies a metric without what it has seen
        twin._window, twin._waiting = window, self._waiting
        twin._progress.batches = self._progress.batches
        twin._rate.take_over(self._rate)
        return with_attributes_of(self, twin, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled."""
        raise not_pickled(self)

    def _go_on(self, saver: Any, data: Any) -> None:
        """Takes up an epoch where it was left, whatever callbacks did as it began once more."""
        if not all(metric.variables for metric in self.metrics):
            batches = data.after(0) if isinstance(data, Portions) else iter(data)
            self.valid_step(next(batches))  # some metrics make theirs with the first batch
        saver.restore()  # the place in the data, too
        self._waiting = int(self._window.count.numpy())

    def _train_epoch(
        self, data: Iterable[Any] | Portions, events: Any, model: Any, at_once: int
    ) -> dict[str, float]:
        done = self._progress.batches
        batches = data.after(done) if isinstance(data, Portions) else iter(data)
        if self.accumulate > 1 and not done:  # an interrupted epoch may have left something
            self._window.reset()
            self._waiting = 0
        is_stopped = False
        while not is_stopped:
            steps = at_once
            if self.accumulate > 1:  # a call ends with the window
                steps = min(steps, self.accumulate - self._waiting)
            drawn = _drawn(batches, steps)
            if drawn is None:
                break
            events.on_train_batch_begin(done)
            ran, logs = self._run(self._train, drawn, steps, self._rate.numbers())
            self._trained(ran)
            events.on_train_batch_end(done + steps - 1, logs)
            done += ran
            self._progress.batches = done
            is_stopped = model.stop_training and done != _length(data)
        check_drawn("train", done)
        if is_stopped:  # a window that isn't full waits with the epoch
            return self._results()
        self._progress.batches = 0
        if self._waiting:  # the rest of the epoch is a shorter window
            self._update(self._rate.numbers())
            self._waiting = 0
        return self._results()

    def _valid_epoch(
        self, data: Iterable[Any], events: Any, model: Any, at_once: int
    ) -> dict[str, float]:
        self._reset()
        model.stop_evaluating = False
        events.on_test_begin()
        batches, done = iter(data), 0
        while (drawn := _drawn(batches, at_once)) is not None:
            events.on_test_batch_begin(done)
            ran, logs = self._run(self._valid, drawn, at_once)
            events.on_test_batch_end(done + at_once - 1, logs)
            done += ran
            if model.stop_evaluating:
                for _ in batches:  # to the end of the epoch, where a loader's next one begins
                    pass
        check_drawn("valid", done)
        logs = self._results()
        events.on_test_end(logs)
        return logs

    def _run(self, step: Any, drawn: Any, steps: int, *args: Any) -> tuple[int, Any]:
        """Runs a step on a batch, or up to so many on an iterator: their number, the last logs."""
        if not isinstance(drawn, Iterator):
            _, logs = step(drawn, *args)
            return 1, logs or self._results()
        rows, stacked = step.run(drawn, *args, steps=steps)
        logs = {name: values[-1] for name, values in stacked.items()} if len(rows) else {}
        return len(rows), logs or self._results()

    def _trained(self, batches: int) -> None:
        """Counts batches, and updates the model when they fill a window."""
        self._waiting = (self._waiting + batches) % self.accumulate
        if self.accumulate > 1 and self._waiting == 0:
            self._update(self._rate.numbers())

    def _train_batch(self, batch: Any, numbers: list[Any]) -> Any:
        x, y, sample_weight = parts(batch)
        weight = self._weight(x, sample_weight)
        with Tape(scaler=self.optim.scaler) as tape:
            outputs = train(self.model)(x)
            loss = self._loss(y, outputs, sample_weight)
        grads = tape.backward(loss, self.model)
        if self.accumulate == 1:
            shares = {} if self._strategy is None else {"weight": weight}
            self.optim.step(self._rate.rates(numbers), self.model, grads, **shares)
        else:
            self._window.accumulate(self.model, grads, weight=weight)
        return _rows(x), self._measure(loss, weight, y, outputs)

    def _apply_window(self, numbers: list[Any]) -> None:
        self.optim.step(self._rate.rates(numbers), self.model, self._window)

    def _valid_batch(self, batch: Any) -> Any:
        x, y, sample_weight = parts(batch)
        outputs = valid(self.model)(x)
        loss = self._loss(y, outputs, sample_weight)
        return _rows(x), self._measure(loss, self._weight(x, sample_weight), y, outputs)

    def _loss(self, y: Any, outputs: Any, sample_weight: Any) -> tf.Tensor:
        loss = self.loss(y, outputs, sample_weight)
        return total_loss(loss, self.model)

    def _weight(self, x: Any, sample_weight: Any) -> tf.Tensor:
        """What the mean over a batch counts in a mean over several."""
        if sample_weight is not None and divides_by_weights(self.loss):
            return tf.reduce_sum(sample_weight)
        return _rows(x)

    def _measure(self, loss: Any, weight: Any, y: Any, outputs: Any) -> dict[str, tf.Tensor]:
        mean, *metrics = self.metrics
        # The mean over no samples, on a replica that got none, is NaN.
        mean.update_state(tf.where(weight > 0, loss, tf.zeros_like(loss)), sample_weight=weight)
        for metric in metrics:
            metric.update_state(y, outputs)
        # A replica knows its own part alone.
        return {} if self._strategy is not None else _logs(self.metrics)

    def _reset(self) -> None:
        for metric in self.metrics:
            metric.reset_state()

    def _results(self) -> dict[str, Any]:
        found = {name: np.asarray(value) for name, value in _logs(self.metrics).items()}
        return {name: value if value.ndim else float(value) for name, value in found.items()}

    def _saver(self, checkpoint: Any, **data: Any) -> Checkpoint | None:
        """The checkpoint with all that a run needs to go on."""
        if checkpoint is None or isinstance(checkpoint, Checkpoint):
            return checkpoint
        check_folder(checkpoint)
        objects = {"model": self.model, "optim": self.optim, "rate_factor": self._rate.factor}
        objects["progress"] = self._progress
        if self.accumulate > 1:
            objects["window"] = self._window
        if isinstance(self.lr, ModuleLrScheduler):
            objects["scheduler"] = self.lr
        loaders = {name: loader for name, loader in data.items() if isinstance(loader, DataLoader)}
        return Checkpoint(checkpoint, **objects, **loaders)


def _logs(metrics: list[keras.metrics.Metric]) -> dict[str, Any]:
    """The results by name; those that are several bring names of their own, as in Keras."""
    found: dict[str, Any] = {}
    for metric in metrics:
        result = metric.result()
        found |= result if isinstance(result, dict) else {metric.name: result}
    return found


def _length(data: Any) -> int | None:
    """How many batches there are, where that is known."""
    try:
        return len(data)
    except TypeError:
        return None


def _drawn(batches: Iterator[Any], at_once: int) -> Any:
    """The next batch, or an iterator for a call that draws several; `None` at the end."""
    left = operator.length_hint(batches, -1)
    if at_once == 1 or left == 0:
        return next(batches, None)
    if left > 0 and hasattr(batches, "stack"):
        return batches  # a DataLoader's, which knows what is left and stacks it itself
    several = list(itertools.islice(batches, at_once))
    return iter(several) if several else None


def _rows(x: Any) -> tf.Tensor:
    return tf.shape(tf.nest.flatten(x)[0])[0]
