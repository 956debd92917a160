"""What an epoch of `fit` is: of which batches, and whether validation follows it."""

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from tfloop._checks.arguments import whole_number
from tfloop._checks.messages import described
from tfloop.learner._checks import FIT


class Portions:
    """Data in epochs of a fixed number of batches, drawn on from one to the next.

    Data that end are begun again, in the middle of an epoch too.

    Args:
      data: Batches; endless ones are welcome.
      steps: Batches of an epoch.
    """

    def __init__(self, data: Iterable[Any], steps: int) -> None:
        self._data = data
        self._steps = steps
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self._steps

    def after(self, done: int) -> Iterator[Any]:
        """The batches of an epoch of which some were run already."""
        return itertools.islice(self._endless(), self._steps - done)

    def _endless(self) -> Iterator[Any]:
        empty = 0
        while empty < 2:  # Once: a loader that was restored at the end of its epoch.
            if self._batches is None:
                self._batches = iter(self._data)
            empty += 1
            for batch in self._batches:
                empty = 0
                yield batch
            self._batches = None


def is_validated(epoch: int, frequency: int | Collection[int]) -> bool:
    """Does validation follow the epoch (from 1): one of every so many, or one of these?"""
    if isinstance(frequency, int):
        return epoch % frequency == 0
    return epoch in frequency


def as_frequency(frequency: Any) -> int | Collection[int]:
    """What `validation_freq` can be.

    Raises:
      TypeError: It is neither an int nor a collection of epochs.
      ValueError: It is below 1.
    """
    if isinstance(frequency, Collection) and not isinstance(frequency, str):
        return frequency
    return whole_number(FIT, "validation_freq", frequency, least=1, fix="validation_freq=5")


def as_verbose(verbose: Any, is_terminal: bool) -> int:
    """Keras' 0 (nothing), 1 (a bar) or 2 (a line an epoch).

    Raises:
      ValueError: It is something else.
    """
    if verbose == "auto":
        return 1 if is_terminal else 2
    if verbose not in (0, 1, 2):
        raise ValueError(
            f"`{FIT}` takes no such `verbose`: got {described(verbose)}, expected 'auto', 0 "
            "(nothing), 1 (a bar) or 2 (a line an epoch). Write `verbose=0`."
        )
    return int(verbose)
