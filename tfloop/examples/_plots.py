"""The pictures of a run: how its curves went, and which classes it takes for which."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator


def curves(
    losses: Sequence[float],
    averages: Mapping[str, Sequence[tuple[float, float, int]]],
    *,
    per_epoch: int,
    first_epoch: int,
) -> Figure:
    """The loss of each iteration and epoch, and the accuracy of each epoch.

    Args:
      losses: Of the training iterations.
      averages: Split -> (loss, accuracy, samples) of each epoch.
      per_epoch: Iterations in an epoch.
      first_epoch: The one that the run began with.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    behind = (first_epoch - 1) * per_epoch
    iterations = range(behind + 1, behind + 1 + len(losses))
    left.plot(iterations, losses, color="0.8", linewidth=0.8, label="Train, iteration")
    for split, values in averages.items():
        epochs = range(first_epoch, first_epoch + len(values))
        ends = [min(epoch * per_epoch, behind + len(losses)) for epoch in epochs]
        left.plot(ends, [loss for loss, _, _ in values], marker="o", label=f"{split}, epoch")
        right.plot(epochs, [accuracy for _, accuracy, _ in values], marker="o", label=split)
    left.set(title="Loss", xlabel="Iteration", yscale="log")
    left.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
    left.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    left.yaxis.set_minor_formatter(FormatStrFormatter("%g"))
    right.set(title="Accuracy", xlabel="Epoch", ylabel="%")
    right.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
    for axes in (left, right):
        axes.grid(color="0.93")
        axes.legend()
    return figure


def confusion(counts: np.ndarray, *, epoch: int) -> Figure:
    """A confusion matrix, with the classes that occur.

    Args:
      counts: Whole numbers `[C, C]`: samples by their class (row) and by their prediction (column).
      epoch: When this was.
    """
    classes = np.flatnonzero(counts.sum(axis=0) + counts.sum(axis=1))
    shown = counts[np.ix_(classes, classes)]
    shares = shown / np.maximum(shown.sum(axis=1, keepdims=True), 1)
    figure = Figure(figsize=(7, 7), layout="constrained")
    axes = figure.subplots()
    # The root lets mistakes be seen, of which there are few.
    axes.imshow(np.sqrt(shares), cmap="Blues", vmin=0, vmax=1)
    for row, column in np.argwhere(shown):
        axes.text(
            column,
            row,
            shown[row, column],
            ha="center",
            va="center",
            fontsize=min(10, 110 / len(classes)),
            color="white" if shares[row, column] > 0.3 else "black",
        )
    axes.set(
        title=f"Validation after epoch {epoch}: {np.trace(counts):,} of {counts.sum():,} right",
        xlabel="Predicted class",
        ylabel="True class",
        xticks=range(len(classes)),
        yticks=range(len(classes)),
        xticklabels=classes,
        yticklabels=classes,
    )
    return figure
