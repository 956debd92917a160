"""A clipping at work for one group: what it is handed, and what it remembers between updates.

A clipping is a value that several groups may share; its state belongs to one group, as variables
beside those of the group's optimizer.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfloop._checks.messages import listed
from tfloop._clipping.clipping import GradientClipping
from tfloop._model.paths import Variable, tf_variable
from tfloop._replicas import placement, synchronized
from tfloop._tensors import overwritten
from tfloop._tensors.sparse import Gradient
from tfloop._tracing import traces


class Clipper:
    """Clips the gradients of one group.

    Args:
      clipping: How.
    """

    def __init__(self, clipping: GradientClipping) -> None:
        self.clipping = clipping
        self._state: dict[str, tf.Variable] = traces.eagerly(
            lambda: {
                name: tf.Variable(value, trainable=False, name=name)
                for name, value in clipping.initial_state().items()
            }
        )

    def variables(self) -> dict[str, tf.Variable]:
        """What it remembers, by names that no counter of an optimizer has."""
        return {f"clipping.{name}": variable for name, variable in self._state.items()}

    def twin(self) -> "Clipper":
        """One of its own that remembers the same."""
        twin = Clipper(self.clipping)
        for name, variable in self._state.items():
            twin._state[name].assign(tf.convert_to_tensor(variable))
        return twin

    def place_with(self, variables: Iterable[Variable]) -> None:
        """Puts the state where the variables of the model are."""
        variables = list(variables) if self._state else []
        for name, variable in self._state.items():
            self._state[name] = placement.placed_with(variable, variables, placement.MIRRORED)

    def clip(
        self, grads: dict[str, Gradient], variables: Mapping[str, Variable]
    ) -> tuple[dict[str, Gradient], list[tf.Tensor]]:
        """The gradients within the bound, and what is to be remembered; changes nothing.

        What overwrites a variable is no gradient to bound.

        Raises:
          ValueError: The clipping gave another number of gradients, or other names of state.
        """
        bounded, _ = overwritten.split(grads)
        if not bounded:
            return grads, []
        state = {name: tf.convert_to_tensor(held) for name, held in self._state.items()}
        given = list(bounded.values())
        found = self.clipping.clip(given, [tf_variable(variables[path]) for path in bounded], state)
        if len(found) != len(given) or state.keys() != self._state.keys():
            got = f"{len(found)} gradients and the state {listed(state)}"
            expected = f"{len(given)} and {listed(self._state)}"
            raise ValueError(
                f"`{type(self.clipping).__name__}.clip(grads, parameters, state)` gave something "
                f"else than it got: got {got}, expected {expected}. Names of state are those of "
                "`initial_state`. Put new values in their places: `state[name] = value`."
            )
        moved = [
            tf.ensure_shape(tf.cast(state[name], held.dtype), held.shape)
            for name, held in self._state.items()
        ]
        return grads | dict(zip(bounded, found, strict=True)), moved

    def remember(self, strategy: Any, moved: list[tf.Tensor], some: list[tf.Tensor]) -> None:
        """Takes over what `clip` gave, once for all replicas; not where the group took no part."""
        for variable, value in zip(self._state.values(), moved, strict=True):
            synchronized.update(strategy, variable, _assign, value, *some)


def _assign(variable: tf.Variable, value: tf.Tensor, some: Any = None) -> None:
    variable.assign(value if some is None else tf.where(some, value, variable))
