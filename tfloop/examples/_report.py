"""What a run tells: lines on the terminal, averages of each epoch, files for later."""

import json
import math
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import rich.progress
import tensorflow as tf

import tfloop
from tfloop.examples import _workdir
from tfloop.examples._command import UnusableInput


class Iteration(NamedTuple):
    """Means over the samples of one iteration, or of an epoch."""

    loss: float
    accuracy: float
    samples: int


class Report(tf.train.experimental.PythonState):
    """Takes what every iteration of the splits has to tell: loss, accuracy, more scalars.

    A tensor is read back only where its line is printed, and at the end of the epoch, so that
    the loop never waits for it. Ctrl-C ends the run after the iteration, a second one at once.

    With a `workdir`, `config.json` is written as the run starts, TensorBoard scalars at the end of
    each epoch, and the pictures at the end of the run, early or not. It is state: in a checkpoint
    it saves the epochs behind it, so that the curves of a resumed run are those of the whole one.

    Attributes:
      history: Split -> its iterations.
      averages: Split -> its epochs.
      confusion: The last whole epoch and its confusion matrix `[C, C]`, None without one.
    """

    def __init__(
        self, config: tfloop.Config, lengths: dict[str, int], *, workdir: str | None, log_every: int
    ) -> None:
        """Writes nothing yet.

        Args:
          config: Saved as `config.json`.
          lengths: Batches of each split, for the progress bar: `{"Train": 23, "Valid": 6}`.
          workdir: A folder, made where missing; None writes no files.
          log_every: Iterations from one line to the next.
        """
        self.history: dict[str, list[Iteration]] = {split: [] for split in lengths}
        self.averages: dict[str, list[Iteration]] = {split: [] for split in lengths}
        self._epoch: dict[str, list[dict[str, Any]]] = {split: [] for split in lengths}
        self.confusion: tuple[int, np.ndarray] | None = None
        self._counts: Any = None  # The confusion matrix of the epoch that runs.
        self._lengths, self._log_every = lengths, log_every
        self._first, self._step = 1, 0  # The epoch that this run began with, steps behind it.
        self._has_news = False  # beyond what was restored
        self._config = config
        self._workdir = None if workdir is None else pathlib.Path(workdir).expanduser()
        self._writers: dict[str, Any] = {}
        self._bar = rich.progress.Progress(
            *rich.progress.Progress.get_default_columns(),
            "{task.fields[shown]}",
            transient=True,
            disable=not sys.stdout.isatty(),
        )
        self._clock = time.perf_counter()
        self._is_interrupted = False

    def iteration(
        self,
        split: str,
        epoch: int,
        iteration: int,
        loss: Any,
        accuracy: Any,
        samples: Any,
        scalars: Mapping[str, Any] | None = None,
    ) -> None:
        """Notes one iteration or several, and prints the first and then every `log_every`-th.

        Args:
          split: Which of those that the report was told of.
          epoch: From 1.
          iteration: From 0 in each epoch; the first of several.
          loss: A number or a tensor, as are all that follow: a scalar, or `[K]` of K iterations.
          accuracy: In %.
          samples: How many these are means over.
          scalars: More for TensorBoard, by tag.
        """
        if iteration == 0:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(f"{split} {epoch}", total=self._lengths[split], shown="")
        iterations = range(iteration, iteration + math.prod(getattr(loss, "shape", ())))
        self._bar.advance(self._bar.task_ids[0], len(iterations))
        self._has_news = True
        if split == "Train":
            if not self._step:
                self._first = epoch
            self._step = (epoch - 1) * self._lengths[split] + iterations.stop
        noted = {"loss": loss, "accuracy": accuracy, "samples": samples, **(scalars or {})}
        self._epoch[split].append(noted)
        if self._is_interrupted:
            raise KeyboardInterrupt
        lines = [number for number in iterations if number % self._log_every == 0]
        if not lines:
            return
        read = _read(noted)
        for number in lines:
            one = read[number - iteration]
            print(
                f"[{split} - Epoch {epoch} - Iteration {number}] "
                f"Loss {one['loss']:.3f} | Accuracy {one['accuracy']:.3f} %",
                flush=True,
            )
        shown = f"loss {read[-1]['loss']:.3f} {read[-1]['accuracy']:5.1f} %"
        self._bar.update(self._bar.task_ids[0], shown=shown, refresh=True)

    def confuse(self, counts: Any) -> None:
        """Adds to the confusion matrix of the epoch.

        Args:
          counts: Whole numbers `[N, C, C]`, the sum over N counts: samples by their class (row)
            and by the class that they were taken for (column).
        """
        counts = tf.reduce_sum(counts, axis=0)
        self._counts = counts if self._counts is None else self._counts + counts

    def epoch(self, epoch: int) -> None:
        """Prints the averages of an epoch, weighted by samples, and begins the next."""
        parts = []
        for split in self._epoch:
            average = self._close(split)
            parts.append(
                f"{split} loss {average.loss:.3f}, accuracy {average.accuracy:.2f} %"
                if average.samples
                else f"{split} had no batches"
            )
        now = time.perf_counter()
        print(f"[Epoch {epoch}] {' | '.join(parts)} | {now - self._clock:.1f} s", flush=True)
        self._clock = now
        if self._counts is not None:
            self.confusion = (epoch, np.asarray(self._counts))
            self._counts = None

    def _close(self, split: str) -> Iteration:
        """Moves the iterations of a split from the epoch to the history, as floats."""
        noted, self._epoch[split] = self._epoch[split], []
        read = [one for several in noted for one in _read(several)]
        values = [Iteration(one["loss"], one["accuracy"], int(one["samples"])) for one in read]
        average = _average(values)
        self.history[split] += values
        if not average.samples:
            return average
        self.averages[split].append(average)
        if split in self._writers:
            with self._writers[split].as_default():
                _scalar("loss", average.loss, self._step)
                _scalar("accuracy", average.accuracy, self._step)
                for step, one in enumerate(read, self._step - len(read) + 1):
                    for tag in one.keys() - Iteration._fields:
                        _scalar(tag, one[tag], step)
        return average

    def serialize(self) -> str:
        """The epochs that are over, as JSON; `tfloop.Checkpoint` calls it."""
        confusion = self.confusion and (self.confusion[0], self.confusion[1].tolist())
        names = {"lengths": self._lengths, "history": self.history, "averages": self.averages}
        return json.dumps({**names, "confusion": confusion})

    def deserialize(self, string_value: str) -> None:
        """Goes on after epochs of an earlier run.

        Raises:
          ValueError: They had other numbers of batches.
        """
        record = json.loads(string_value)
        if record["lengths"] != self._lengths:
            raise ValueError(
                f"got data of {self._lengths} batches, expected {record['lengths']} as the run "
                "had. Name the same data: --dataset."
            )
        for mine, values in ((self.history, "history"), (self.averages, "averages")):
            mine.update({split: [Iteration(*v) for v in record[values][split]] for split in mine})
        if record["confusion"] is not None:
            epoch, counts = record["confusion"]
            self.confusion = (epoch, np.asarray(counts))
        self._step = len(self.history["Train"])

    def __enter__(self) -> Self:
        """Opens the work folder, starts the progress bar, on a terminal alone, watches for Ctrl-C.

        Raises:
          UnusableInput: The folder can't be written.
        """
        if self._workdir is not None:
            try:
                self._config.save(self._workdir / "config.json")
                self._writers = _workdir.open_writers(
                    self._workdir, self._lengths, last_step=self._step
                )
            except (OSError, tf.errors.OpError) as error:
                raise UnusableInput(f"--workdir={self._workdir} can't be written: {error}.") from (
                    error
                )
        self._bar.start()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # TensorFlow may abort where a KeyboardInterrupt hits it while it draws a batch.
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _interrupt(self, *_: Any) -> None:
        self._is_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Writes what there is, also when the run was interrupted."""
        self._bar.stop()
        if signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        result = self._result()
        for split in self._epoch:
            self._close(split)
        if kind is KeyboardInterrupt or not self._has_news:
            how = "Interrupted" if kind is KeyboardInterrupt else "Ended"
            print(f"{how} after {len(self.history['Train'])} iterations.", flush=True)
        elif kind is None and result:
            print(result, flush=True)
        if self._workdir is not None:
            for writer in self._writers.values():
                writer.close()
            print(f"Wrote {self._plot(self._workdir)} to {self._workdir}.", flush=True)

    def _result(self) -> str:
        """What the last whole epoch reached, and what could have been kept of the run."""
        split = next((name for name in reversed(self.averages) if self.averages[name]), None)
        if split is None:
            return ""
        epochs = self.averages[split]
        hint = "" if self._workdir else " Nothing was kept; --workdir=FOLDER keeps all of a run."
        return f"{split} accuracy {epochs[-1].accuracy:.2f} % after epoch {len(epochs)}.{hint}"

    def _plot(self, folder: pathlib.Path) -> str:
        """Draws what there is, and says which files the folder holds now."""
        from tfloop.examples import _plots  # Matplotlib, late: the first line comes sooner.

        curves = _plots.curves(
            [value.loss for value in self.history["Train"]],
            self.averages,
            per_epoch=self._lengths["Train"],
            first_epoch=self._first,
        )
        curves.savefig(folder / "curves.png")
        if self.confusion is None:
            return "config.json, scalars and curves.png"
        epoch, counts = self.confusion
        _plots.confusion(counts, epoch=epoch).savefig(folder / "confusion.png")
        return "config.json, scalars, curves.png and confusion.png"


def _read(noted: Mapping[str, Any]) -> list[dict[str, float]]:
    """The values of each iteration as floats; a scalar is that of all."""
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(x)) for x in noted.values()))
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [dict(zip(noted, row, strict=True)) for row in rows]


def _average(values: list[Iteration]) -> Iteration:
    """The mean weighted by samples; NaN over none."""
    samples = sum(value.samples for value in values)
    if samples == 0:
        return Iteration(math.nan, math.nan, 0)
    loss = sum(value.loss * value.samples for value in values) / samples
    accuracy = sum(value.accuracy * value.samples for value in values) / samples
    return Iteration(loss, accuracy, samples)


def _scalar(tag: str, value: float, step: int) -> None:
    # `tf.summary.scalar` asks for the tensorboard package; writing needs none.
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = "scalars"
    tf.summary.write(tag, tf.constant(value, tf.float32), step=step, metadata=metadata)
