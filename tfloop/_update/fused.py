"""What a Keras optimizer updates at once: one variable, or many small ones as one vector.

A Keras rule costs the same Python and the same dozen graph nodes for three numbers as for three
million. Small variables are therefore laid end to end in a vector that goes through Keras' own
rule once; their slots are pieces of the vector's slots. Knows layouts, not rules.
"""

import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfloop._model.paths import Variable, tf_variable
from tfloop._replicas import placement
from tfloop._tensors import overwritten, sparse
from tfloop._tensors.sparse import Gradient

_SMALL = 16_384
"""Elements up to which a variable gains from the vector; beyond, the copies cost more."""
_FEW = 4
"""So many small variables are worth a vector."""


class Single:
    """One variable, updated alone.

    Attributes:
      paths: Its path.
      target: What the optimizer is built on.
    """

    def __init__(self, path: str, target: keras.Variable) -> None:
        self.paths = [path]
        self.target = target

    def grad(self, grads: Mapping[str, Gradient]) -> Gradient:
        """The gradient of the target."""
        return grads[self.paths[0]]

    def rate(self, rates: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """The rate of the target."""
        return rates[self.paths[0]]

    def mask(
        self, grads: Mapping[str, Gradient], when: Mapping[str, tf.Tensor] | None
    ) -> list[tf.Tensor]:
        """Which elements are updated: a scalar bool, or nothing for all."""
        return [] if when is None else [when[self.paths[0]]]

    def spread(self, flags: list[bool]) -> Any:
        """A Python flag per variable, in the shape of the target or as a scalar."""
        return flags[0]

    def slot(self, path: str, slot: tf.Variable) -> Any:
        """The part of a slot that belongs to a path."""
        return slot


class Fused:
    """Small variables of one dtype, updated as one vector.

    The vector is filled from the variables before an update and written back after it, so that
    what users assign in between counts.

    Attributes:
      paths: Their paths.
      target: The vector, which the optimizer is built on.
    """

    def __init__(self, members: Mapping[str, keras.Variable]) -> None:
        # Those that differ in their first axis alone are joined along it, so that a reshape serves
        # all of them: in a graph of many small operations it is their number that costs.
        blocks: dict[Any, list[str]] = {}
        for path, variable in members.items():
            blocks.setdefault(tuple(variable.shape[1:]) or path, []).append(path)
        self._blocks = list(blocks.values())
        self.paths = [path for block in self._blocks for path in block]
        self._members = {path: tf_variable(members[path]) for path in self.paths}
        self._shapes = {path: tuple(members[path].shape) for path in self.paths}
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        starts = np.cumsum([0, *self._sizes[:-1]])
        self._start = dict(zip(self.paths, map(int, starts), strict=True))
        first = self._joined({path: first_value(v) for path, v in self._members.items()})
        self.target = keras.Variable(first, trainable=True, name="fused", autocast=False)

    def values(self) -> tf.Tensor:
        """The variables end to end."""
        return self._joined(self._members)

    def write_back(self, vector: tf.Variable) -> None:
        """Gives each variable its part of the vector."""
        sizes = [sum(math.prod(self._shapes[path]) for path in block) for block in self._blocks]
        for block, part in zip(self._blocks, tf.split(vector, sizes), strict=True):
            shapes = [self._shapes[path] for path in block]
            if len(block) > 1:
                rows = [shape[0] for shape in shapes]
                pieces = tf.split(tf.reshape(part, [sum(rows), *shapes[0][1:]]), rows)
            else:
                pieces = [part if len(shapes[0]) == 1 else tf.reshape(part, shapes[0])]
            for path, piece in zip(block, pieces, strict=True):
                self._members[path].assign(piece, read_value=False)

    def grad(self, grads: Mapping[str, Gradient]) -> tf.Tensor:
        """The gradients end to end, zeros where there is none."""
        dtype = self.target.dtype
        return self._joined(
            {
                path: sparse.densify(grads[path]) if path in grads else tf.zeros(shape, dtype)
                for path, shape in self._shapes.items()
            }
        )

    def rate(self, rates: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """One rate, or where they differ a vector of them."""
        different = {id(rate): rate for rate in rates.values()}
        any_rate = next(iter(different.values()))
        if len(different) == 1:
            return any_rate
        return self._spread([rates.get(path, any_rate) for path in self.paths])

    def mask(
        self, grads: Mapping[str, Gradient], when: Mapping[str, tf.Tensor] | None
    ) -> list[tf.Tensor]:
        """Which elements are updated: a bool vector, or nothing for all."""
        present = [path in grads for path in self.paths]
        if when is not None:
            no = tf.constant(False)
            return [self._spread([when[path] if path in grads else no for path in self.paths])]
        return [] if all(present) else [tf.constant(np.repeat(present, self._sizes))]

    def spread(self, flags: list[bool]) -> Any:
        """A Python flag per variable, in the shape of the target or as a scalar."""
        return flags[0] if len(set(flags)) == 1 else np.repeat(flags, self._sizes)

    def slot(self, path: str, slot: tf.Variable) -> "Piece":
        """The part of a slot that belongs to a path."""
        return Piece(slot, self._start[path], self._shapes[path])

    def _joined(self, tensors: Mapping[str, Any]) -> tf.Tensor:
        flat = []
        for block in self._blocks:
            parts = [tensors[path] for path in block]
            joined = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
            flat.append(joined if joined.shape.rank == 1 else tf.reshape(joined, [-1]))
        return tf.concat(flat, 0)

    def _spread(self, scalars: list[tf.Tensor]) -> tf.Tensor:
        # `tf.repeat` would make a mask of all variables times the largest.
        which = np.repeat(np.arange(len(scalars), dtype=np.int32), self._sizes)
        return tf.gather(tf.stack(scalars), which)


class Piece:
    """A part of a vector variable, read and written like a variable of its own.

    Attributes:
      shape: The shape of the part.
      dtype: That of the vector.
    """

    def __init__(self, vector: tf.Variable, start: int, shape: tuple[int, ...]) -> None:
        self.shape = tf.TensorShape(shape)
        self.dtype = vector.dtype
        self._vector = vector
        self._start = start
        self._stop = start + math.prod(shape)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """The present value."""
        return tf.reshape(self._vector[self._start : self._stop], self.shape)

    def numpy(self) -> np.ndarray:
        """The present value as an array."""
        return self.__tf_tensor__().numpy()

    def assign(self, value: Any) -> None:
        """Writes the part; the rest of the vector stays."""
        part = tf.reshape(tf.cast(value, self.dtype), [-1])
        before, after = self._vector[: self._start], self._vector[self._stop :]
        self._vector.assign(tf.concat([before, part, after], 0))


Cell = Single | Fused


def cells_of(targets: Mapping[str, keras.Variable], *, fuse: bool) -> list[Cell]:
    """Lays out variables: small ones of one dtype and device together, the others alone.

    Args:
      targets: Path -> variable.
      fuse: Whether vectors are wanted and the rule is elementwise.
    """
    bundles: dict[Any, dict[str, keras.Variable]] = {}
    if fuse:
        for path, target in targets.items():
            if _is_small(target):
                variable = tf_variable(target)
                key = (variable.dtype, variable.device)
                bundles.setdefault(key, {})[path] = target
    bundles = {key: members for key, members in bundles.items() if len(members) >= _FEW}
    fused = {path for members in bundles.values() for path in members}
    cells: list[Cell] = [Fused(members) for members in bundles.values()]
    return cells + [Single(path, t) for path, t in targets.items() if path not in fused]


def has_value(variable: Variable) -> bool:
    """Has a variable a value yet? One that is born in a trace gets it after that; ask eagerly."""
    return bool(tf_variable(variable).is_initialized())


def first_value(variable: Variable) -> tf.Tensor:
    """The value of a variable, or NaN while it has none, which shows in all that is made of it."""
    if has_value(variable):
        return tf.convert_to_tensor(tf_variable(variable))
    return tf.fill(variable.shape, tf.cast(math.nan, variable.dtype))


def _is_small(target: keras.Variable) -> bool:
    """Does it gain from the vector, and has it nothing that must be done to it alone?"""
    alone = target.constraint is not None or overwritten.overwrites(target)
    strategy = placement.strategy_of([target])
    replicated = strategy is not None and strategy.num_replicas_in_sync > 1
    return math.prod(target.shape) <= _SMALL and not alone and not replicated
