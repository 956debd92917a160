"""Where Keras' optimizer keeps its state, read by path; it follows when variables come and go."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfloop._backend import keras_optimizers
from tfloop._backend.keras_optimizers import rate_of
from tfloop._backend.keras_variables import around, replace_tf_variable
from tfloop._checks.messages import listed
from tfloop._model.paths import Variable, tf_variable, variable_id
from tfloop._replicas import placement
from tfloop._tensors import overwritten
from tfloop._tracing import traces
from tfloop._update import rules
from tfloop._update.fused import Cell, cells_of, first_value, has_value
from tfloop._update.keras_optimizer import copy_of

_BUILD = "ModuleOptimizer.build(model)"


class OptimizerState:
    """A Keras optimizer and the variables it is built on, read by path.

    Attributes:
      optimizer: The optimizer.
      variables: Path -> variable, as the model holds it.
      targets: Path -> the same as `keras.Variable`.
      cells: What is updated at once, in the order of the optimizer's own lists.
      fused: May small variables be updated together?
      waiting: The paths of variables that were made in a trace and have no value yet, where the
        state begins with it, as moving averages do. It is made anew once they have: TensorFlow
        gives them theirs after that trace, and traces once more before it runs anything.
    """

    def __init__(self, optimizer: Optimizer, variables: dict[str, Variable], fused: bool) -> None:
        self.optimizer = optimizer
        self.variables = variables
        self.fused = fused
        self.targets = {path: _as_keras(path, v) for path, v in variables.items()}
        self.cells: list[Cell] = []
        self.waiting: set[str] = set()
        self._cell: dict[str, int] = {}

    def for_variables(self, variables: Mapping[str, Variable]) -> "OptimizerState":
        """State for another set of variables, with what this one has of them; or this one.

        Raises:
          ValueError: The optimizer keeps state that isn't found by path.
        """
        if (
            not self.waiting
            and list(variables) == list(self.variables)
            and all(self.variables[path] is variable for path, variable in variables.items())
        ):
            return self
        # Sought by the variable: a layer put in before others renumbers their paths.
        known = {variable_id(variable): path for path, variable in self.variables.items()}
        ids = {path: variable_id(variable) for path, variable in variables.items()}
        return self._carried_to(variables, {p: known[i] for p, i in ids.items() if i in known})

    def twin(self, variables: Mapping[str, Variable]) -> "OptimizerState":
        """Equal state for the same variables, or for those of a copied model by the same paths."""
        # Exclusions know the variables of the original, not those of the copy.
        undecayed = [v for path, v in variables.items() if not self.is_decayed(path)]
        return self._carried_to(variables, {path: path for path in variables}, undecayed)

    def _carried_to(
        self,
        variables: Mapping[str, Variable],
        before: Mapping[str, str],
        undecayed: Iterable[Variable] = (),
    ) -> "OptimizerState":
        """State for other variables.

        Args:
          variables: Path -> variable.
          before: Path -> that of the same variable in this state.
          undecayed: What is left out of weight decay besides.
        """
        with placement.scope_of(variables.values()):
            new = OptimizerState(copy_of(self.optimizer, _BUILD), dict(variables), self.fused)
            if not variables:
                return new
            keras_optimizers.exclude(new.optimizer, undecayed)
            new._build()
        counts = self.counters()
        for name, counter in new.counters().items():
            if name in counts:
                counter.assign(counts[name])
        for path, earlier in before.items():
            if earlier not in self.waiting:
                kept = self.slots(earlier)
                for name, slot in new.slots(path).items():
                    slot.assign(tf.convert_to_tensor(kept[name]))
        return new

    def _build(self) -> None:
        """Makes the slots.

        Raises:
          ValueError: Some of them aren't found by path.
        """
        optimizer = self.optimizer
        fuse = self.fused and rules.is_elementwise(optimizer)
        self.cells = cells_of(self.targets, fuse=fuse)
        self._cell = {path: n for n, cell in enumerate(self.cells) for path in cell.paths}
        uninitialized = [path for path, target in self.targets.items() if not has_value(target)]
        with _lent_values(optimizer, [cell.target for cell in self.cells]) as targets:
            optimizer.build(targets)
            if optimizer.use_ema:
                # Keras fills the averages at its first update, of those that take part then.
                averages = keras_optimizers.moving_averages(optimizer)
                for average, target in zip(averages, targets, strict=True):
                    if average is not None:
                        average.assign(target)
        self.waiting = {p for p in uninitialized if any(map(_has_nan, self.slots(p).values()))}
        found = [self.counters(), *map(self.slots_of, self.cells)]
        known = {id(variable) for named in found for variable in named.values()}
        known.add(id(tf_variable(rate_of(optimizer))))
        lost = [v.name for v in optimizer.variables if id(tf_variable(v)) not in known]
        if lost:
            raise ValueError(
                f"`{_BUILD}` found state of {type(optimizer).__name__} that no path leads to: got "
                f"{listed(lost)}, expected lists with an entry per variable, or single variables. "
                "It could be neither saved nor kept when groups change. Make it in `build`: "
                "`self.momentums = self.add_optimizer_variables(variables, 'momentum')`."
            )

    def can_begin(self) -> bool:
        """Have variables that it waits for got their values meanwhile?"""
        return bool(self.waiting) and traces.eagerly(
            lambda: any(has_value(self.variables[path]) for path in self.waiting)
        )

    def slots(self, path: str) -> dict[str, Any]:
        """Slot -> variable or piece of one, for one path.

        The names are Keras' attributes without the underscore.
        """
        if path not in self._cell:
            return {}
        cell = self.cells[self._cell[path]]
        return {name: cell.slot(path, slot) for name, slot in self.slots_of(cell).items()}

    def slots_of(self, cell: Cell) -> dict[str, tf.Variable]:
        """Slot -> variable, from the lists that Keras keeps parallel to its variables."""
        index, count = self._cell[cell.paths[0]], len(self.cells)
        return keras_optimizers.slots_of(self.optimizer, cell.target, index, count)

    def counters(self) -> dict[str, tf.Variable]:
        """Counter -> variable: what all its variables share, but for the rate."""
        return keras_optimizers.counters_of(self.optimizer)

    def is_decayed(self, path: str) -> bool:
        """Was a variable not excluded from weight decay?"""
        return keras_optimizers.is_decayed(self.optimizer, tf_variable(self.targets[path]))

    def decay_of(self, path: str) -> float | None:
        """The weight decay that reaches a variable, if any."""
        if not self.is_decayed(path):
            return None
        return keras_optimizers.decay_of(self.optimizer, self.targets[path]) or None


@contextlib.contextmanager
def _lent_values(
    optimizer: Optimizer, targets: list[keras.Variable]
) -> Iterator[list[keras.Variable]]:
    """Lets an optimizer be built on variables of which some have no value: they get NaN for it."""
    uninitialized = [(target, tf_variable(target)) for target in targets if not has_value(target)]
    for target, _ in uninitialized:
        replace_tf_variable(target, tf.Variable(first_value(target), name=target.name))
    try:
        yield targets
    finally:
        for target, variable in uninitialized:
            replace_tf_variable(target, variable)
    if uninitialized:
        keras_optimizers.index_anew(optimizer, targets)


def _has_nan(slot: Any) -> bool:
    if not slot.dtype.is_floating:
        return False
    return bool(tf.reduce_any(tf.math.is_nan(tf.cast(slot, tf.float64))))


def _as_keras(path: str, variable: Variable) -> keras.Variable:
    """A `keras.Variable` around a raw `tf.Variable`: Muon asks for its `path`."""
    if isinstance(variable, keras.Variable):
        return variable
    target = around(variable, path.replace("/", "_") or "variable")
    target.constraint = variable.constraint
    target.overwrite_with_gradient = overwritten.overwrites(variable)
    return target
