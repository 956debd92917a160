"""What a run tells: lines on the terminal, averages of each epoch, files for later."""

import math
import pathlib
import sys
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple, Self

import rich.progress
import tensorflow as tf

import tfloop
from tfloop.examples._command import UnusableInput


class Iteration(NamedTuple):
    """Scalars of one iteration over its samples; tensors until somebody reads them."""

    loss: Any
    accuracy: Any
    samples: int


class Report:
    """Takes the loss and the accuracy of every iteration of the splits that it was told of.

    A tensor is read back only where its line is printed, and at the end of the epoch, so that
    the loop never waits for it. With a `workdir`, `config.json` is written at once, TensorBoard
    scalars at the end of each epoch, and `curves.png` at the end of the run, early or not.
    """

    def __init__(
        self, config: tfloop.Config, lengths: dict[str, int], *, workdir: str | None, log_every: int
    ) -> None:
        """Prepares the work folder.

        Args:
          config: Saved as `config.json`.
          lengths: Batches of each split, for the progress bar: `{"Train": 23, "Valid": 6}`.
          workdir: A folder, made where missing; None writes no files.
          log_every: Iterations from one line to the next.

        Raises:
          UnusableInput: The folder can't be written.
        """
        self.history: dict[str, list[Iteration]] = {split: [] for split in lengths}
        self.averages: dict[str, list[Iteration]] = {split: [] for split in lengths}
        self._epoch: dict[str, list[Iteration]] = {split: [] for split in lengths}
        self._lengths, self._log_every = lengths, log_every
        self._workdir = None if workdir is None else pathlib.Path(workdir).expanduser()
        self._writers: dict[str, Any] = {}
        if self._workdir is not None:
            self._writers = _open(config, self._workdir, lengths)
        self._bar = rich.progress.Progress(transient=True, disable=not sys.stdout.isatty())
        self._clock = time.perf_counter()

    def iteration(
        self, split: str, epoch: int, iteration: int, loss: Any, accuracy: Any, samples: int
    ) -> None:
        """Notes one iteration, and prints the first and then every `log_every`-th."""
        if iteration == 0:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(f"{split} {epoch}", total=self._lengths[split])
        self._bar.advance(self._bar.task_ids[0])
        self._epoch[split].append(Iteration(loss, accuracy, samples))
        if iteration % self._log_every == 0:
            print(
                f"[{split} - Epoch {epoch} - Iteration {iteration}] "
                f"Loss {float(loss):.3f} | Accuracy {float(accuracy):.3f} %",
                flush=True,
            )

    def epoch(self, epoch: int) -> None:
        """Prints the averages of an epoch, weighted by samples, and begins the next."""
        parts = []
        for split, seen in self._epoch.items():
            average = self._close(split, seen)
            parts.append(
                f"{split} loss {average.loss:.3f}, accuracy {average.accuracy:.2f} %"
                if average.samples
                else f"{split} had no batches"
            )
        now = time.perf_counter()
        print(f"[Epoch {epoch}] {' | '.join(parts)} | {now - self._clock:.1f} s", flush=True)
        self._clock = now

    def _close(self, split: str, seen: list[Iteration]) -> Iteration:
        """Moves the iterations of a split from the epoch to the history, as floats."""
        values = [Iteration(float(loss), float(accuracy), n) for loss, accuracy, n in seen]
        seen.clear()
        average = _average(values)
        self.history[split] += values
        if average.samples:
            self.averages[split].append(average)
        if average.samples and split in self._writers:
            with self._writers[split].as_default(step=len(self.history["Train"])):
                _scalar("loss", average.loss)
                _scalar("accuracy", average.accuracy)
        return average

    def __enter__(self) -> Self:
        """Starts the progress bar, on a terminal alone."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Writes what there is, also when the run was interrupted."""
        self._bar.stop()
        for split, seen in self._epoch.items():
            self._close(split, seen)
        if kind is KeyboardInterrupt or not self.history["Train"]:
            how = "Interrupted" if kind is KeyboardInterrupt else "Ended"
            print(f"{how} after {len(self.history['Train'])} iterations.", flush=True)
        if self._workdir is not None:
            for writer in self._writers.values():
                writer.close()
            _plot(self.history, self.averages, self._workdir / "curves.png")
            print(f"Wrote config.json, scalars and curves.png to {self._workdir}.", flush=True)


def _average(values: list[Iteration]) -> Iteration:
    """The mean weighted by samples; NaN over none."""
    samples = sum(value.samples for value in values)
    if samples == 0:
        return Iteration(math.nan, math.nan, 0)
    loss = sum(value.loss * value.samples for value in values) / samples
    accuracy = sum(value.accuracy * value.samples for value in values) / samples
    return Iteration(loss, accuracy, samples)


def _open(config: tfloop.Config, folder: pathlib.Path, splits: Iterable[str]) -> dict[str, Any]:
    """Saves the config and opens a TensorBoard writer a split."""
    try:
        config.save(folder / "config.json")
        return {
            split: tf.summary.create_file_writer(str(folder / split.lower())) for split in splits
        }
    except (OSError, tf.errors.OpError) as error:
        raise UnusableInput(f"--workdir={folder} can't be written: {error}.") from error


def _scalar(name: str, value: float) -> None:
    # `tf.summary.scalar` asks for the tensorboard package; writing needs none.
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = "scalars"
    tf.summary.write(name, tf.constant(value, tf.float32), metadata=metadata)


def _plot(
    history: dict[str, list[Iteration]], averages: dict[str, list[Iteration]], path: pathlib.Path
) -> None:
    """Draws the training loss by iteration, and the accuracy of each split by epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    loss, accuracy = figure.subplots(1, 2)
    loss.plot([value.loss for value in history["Train"]], marker=".", linewidth=0.8)
    loss.set(title="Training loss", xlabel="Iteration", yscale="log")
    for split, values in averages.items():
        epochs = range(1, len(values) + 1)
        accuracy.plot(epochs, [value.accuracy for value in values], marker="o", label=split)
    accuracy.set(title="Accuracy", xlabel="Epoch", ylabel="%")
    accuracy.legend()
    figure.savefig(path)
