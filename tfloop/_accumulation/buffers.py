"""The variables that hold a window, and how it is written down by path and taken over again."""

import dataclasses
import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfloop._checks.messages import listed
from tfloop._replicas import per_replica, placement
from tfloop._replicas.reduction import KINDS
from tfloop._tensors import overwritten

_RESTORE = "restoring a GradientsAccumulator"
_DAMAGED = (ValueError, EOFError, KeyError, OSError, zipfile.BadZipFile)


@dataclasses.dataclass(frozen=True)
class Buffers:
    """What was accumulated; under a strategy each replica has its own.

    Attributes:
      reduction: `"sum"` or `"mean"`.
      count: The micro-batches.
      weight: The sum of their weights.
      present: For each of the sums: did it get anything? 1 or 0.
      sums: Path -> sum of the weighted gradients.
    """

    reduction: str
    count: tf.Variable
    weight: tf.Variable
    present: tf.Variable
    sums: Mapping[str, tf.Variable]

    def clear(self) -> None:
        """Empties the window."""
        for variable in (self.count, self.weight, self.present, *self.sums.values()):
            variable.assign(tf.zeros_like(variable))

    def state(self) -> dict[str, Any]:
        """The window: `count`, `weight`, and `<reduction>/<path>` for each that got anything.

        The same however many replicas it was accumulated on.
        """
        flags = self.present.numpy() > 0
        held = (pair for pair, there in zip(self.sums.items(), flags, strict=True) if there)
        sums = {
            self._key(path): per_replica.maximum(buffer)
            if overwritten.is_value(path)
            else self._mean(buffer)
            for path, buffer in held
        }
        return {"count": self.count, "weight": self._mean(self.weight), **sums}

    def variables(self) -> dict[str, tf.Variable]:
        """What may hold each entry of `state`, of which every replica has its own."""
        sums = {self._key(path): buffer for path, buffer in self.sums.items()}
        return {"count": self.count, "weight": self.weight, **sums}

    def assignments(self, state: Mapping[str, Any]) -> list[tuple[tf.Variable, Any]]:
        """Pairs of variable and value that make the window that of `state`, after all checks.

        Raises:
          ValueError: Another reduction, an unknown path, another shape or dtype.
        """
        self.check(state)
        keys = [self._key(path) for path in self.sums]
        flags = np.array([key in state for key in keys], np.float32)
        means = self._averaged()
        pairs = [(self.count, state["count"]), (self.weight, means * np.asarray(state["weight"]))]
        for key, (path, buffer) in zip(keys, self.sums.items(), strict=True):
            nothing = np.broadcast_to(buffer.dtype.as_numpy_dtype(0), buffer.shape)
            # TensorFlow divides what it is given between the replicas.
            times = self._replicas() if overwritten.is_value(path) else means
            pairs.append((buffer, times * np.asarray(state[key]) if key in state else nothing))
        return [*pairs, (self.present, flags)]

    def check(self, state: Mapping[str, Any]) -> None:
        """Compares a written window with these buffers.

        Raises:
          ValueError: As `assignments`.
        """
        keys = [key.partition("/") for key in state if "/" in key]
        others = {reduction for reduction, _, _ in keys if reduction != self.reduction}
        if others:
            raise ValueError(
                f"`{_RESTORE}` got a window of reduction={others.pop()!r}, expected "
                f"{self.reduction!r}: their sums differ. Make it as it was: "
                f"`tfloop.GradientsAccumulator(reduction={keys[0][0]!r})`."
            )
        unknown = [path for _, _, path in keys if path not in self.sums]
        if unknown:
            raise ValueError(
                f"`{_RESTORE}` got sums for {listed(unknown)}, expected only trainable parameters, "
                f"{listed(self.sums)}. The model or what is frozen was changed since the window "
                "was saved. Rebuild it as it was, or begin a new window: `accumulator.reset()`."
            )
        for _, _, path in keys:
            value, buffer = state[self._key(path)], self.sums[path]
            found = tuple(value.shape), tf.as_dtype(value.dtype).name
            expected = tuple(buffer.shape), buffer.dtype.name
            if found != expected:
                raise ValueError(
                    f"`{_RESTORE}` got a sum of shape {found[0]} and dtype {found[1]} for "
                    f"{path!r}, expected {expected[0]} and {expected[1]}. The model was changed "
                    "since the window was saved. Begin a new one: `accumulator.reset()`."
                )

    def _key(self, path: str) -> str:
        return f"{self.reduction}/{path}"

    def _mean(self, variable: tf.Variable) -> Any:
        """A sum over replicas as the one that a single device would have."""
        number = self._averaged()
        return variable if number == 1 else variable.read_value() / number

    def _averaged(self) -> int:
        """How many replicas' plain sums a step will take the mean of."""
        return 1 if KINDS[self.reduction].weighs else self._replicas()

    def _replicas(self) -> int:
        strategy = placement.strategy_of(self.sums.values())
        return 1 if strategy is None else strategy.num_replicas_in_sync


def dump(state: Mapping[str, Any]) -> bytes:
    """A window as bytes, for `tf.train.Checkpoint`."""
    file = io.BytesIO()
    window: dict[str, Any] = {key: np.asarray(value) for key, value in state.items()}
    np.savez(file, **window)
    return file.getvalue()


def load(written: bytes) -> dict[str, np.ndarray]:
    """Reads what `dump` wrote.

    Raises:
      ValueError: It is no window, or damaged.
    """
    try:
        with np.load(io.BytesIO(written), allow_pickle=False) as file:
            return {key: file[key] for key in dict.fromkeys(("count", "weight", *file.files))}
    except _DAMAGED as error:
        raise ValueError(
            f"`{_RESTORE}` can't read the state: got {len(written)} bytes that are no window, "
            f"expected those of `serialize` ({error}). The file is damaged, or another "
            "object's. Restore an older one: `checkpoint.restore(path)`."
        ) from error
