"""One walk over the object graph below a root: which variable is reached by which path.

Gives every variable, layer and container a path that is unique, and notes each further way to
it. What a single thing holds is `graphs`'s business.
"""

from typing import Any

import keras
import tensorflow as tf

from tfloop._backend import tf_keras
from tfloop._checks.messages import described
from tfloop._model.containers import parts_of
from tfloop._model.graphs import (
    Variable,
    children,
    hidden_children,
    is_built,
    is_variable,
    unused,
    unwrap,
    variable_id,
)


class Walk:
    """One walk over the object graph below a root, depth first.

    Attributes:
      variables: Canonical path -> variable, in the order in which they were met.
      gates: Canonical path -> the layers that must be trainable for the variable to be.
      aliases: Any other path to a variable, layer or container -> where it was met first.
      layers: Path -> Keras layer, each once.
      outermost: Those of them that no other Keras layer tracks.
      of_keras_2: Path -> layer of `tf_keras`, each once.
      holders: Modules and layers that hold what Keras doesn't track.
    """

    def __init__(self, root: Any) -> None:
        self.variables: dict[str, Variable] = {}
        self.gates: dict[str, tuple[Any, ...]] = {}
        self.aliases: dict[str, str] = {}
        self.layers: dict[str, Any] = {}
        self.outermost: list[Any] = []
        self.of_keras_2: dict[str, Any] = {}
        self.holders: list[Any] = []
        self._root = root
        self._met: dict[int, str] = {}
        self._open: set[int] = set()
        self._taken: set[str] = set()
        self._things: list[Any] = []  # an id is an identity only as long as its object lives
        self._visit(unwrap(root), "", (), None)

    def unbuilt(self) -> str | None:
        """The first Keras layer that isn't built yet, in words."""
        return next((described(layer) for layer in self.outermost if not is_built(layer)), None)

    def empty(self) -> str | None:
        """The first thing without variables that should have some, in words."""
        # A tf.Module can't say whether it is built. Part of a root, it should hold something.
        for leaf in leaves(self._root):
            if isinstance(leaf, tf.Module) and not self._holds_variables(leaf):
                return described(leaf)
        return None if self.variables else described(unwrap(self._root))

    def _holds_variables(self, thing: Any) -> bool:
        path = self._met[id(thing)]
        inside = f"{path}." if path else ""
        return any(known.startswith(inside) for known in (*self.variables, *self.aliases))

    def modules(self) -> list[Any]:
        """The layers and modules, each once."""
        return [t for t in self._things if isinstance(t, (keras.layers.Layer, tf.Module))]

    def hidden(self) -> list[str]:
        """What would be trainable, but is held where nobody looks."""
        return [
            f"{name} ({type(child).__name__})"
            for thing in self._things
            for name, child in hidden_children(thing)
            if self._identity(child) not in self._met and _has_parameters(child)
        ]

    def _visit(self, thing: Any, path: str, gates: tuple[Any, ...], tracker: Any) -> None:
        """Enters what is at and below `thing`.

        Args:
          thing: A node of the graph, not met before.
          path: Where it is.
          gates: The layers whose flag reaches it.
          tracker: The Keras layer that tracks it, as far as Keras can.
        """
        self._things.append(thing)
        self._met[self._identity(thing)] = path
        if isinstance(thing, (tf.Variable, tf.Module)) and tracker is not None:
            # Keras' flag doesn't reach it through the layer.
            self.holders.append(tracker)
            gates, tracker = (*gates, tracker), None
        if is_variable(thing):
            self.variables[path], self.gates[path] = thing, gates
            return
        if isinstance(thing, keras.layers.Layer):
            self.layers[path] = thing
            if tracker is None:
                gates = (*gates, thing)
                self.outermost.append(thing)
            tracker = thing
        elif isinstance(thing, tf.Module):
            self.holders.append(thing)
            if tf_keras.is_layer(thing):
                # Its flag isn't that of its variables.
                self.of_keras_2[path] = thing
                gates = (*gates, thing)
        self._open.add(id(thing))
        for segment, child in children(thing):
            self._descend(unwrap(child), f"{path}.{segment}" if path else segment, gates, tracker)
        self._open.discard(id(thing))

    def _descend(self, child: Any, path: str, gates: tuple[Any, ...], tracker: Any) -> None:
        """Visits a child, or notes that this is another path to it."""
        if id(child) in self._open:
            return  # it points back at what holds it: no second path
        path = unused(path, self._taken)
        self._taken.add(path)
        known = self._met.get(self._identity(child))
        if known is None:
            self._visit(child, path, gates, tracker)
        else:
            self.aliases[path] = known

    @staticmethod
    def _identity(thing: Any) -> int:
        return variable_id(thing) if is_variable(thing) else id(thing)


def _has_parameters(thing: Any) -> bool:
    found = [thing] if is_variable(thing) else Walk(thing).variables.values()
    return any(variable.trainable for variable in found)


def leaves(model: Any) -> list[Any]:
    """The models and variables of a root that may be a container."""
    model = unwrap(model)
    parts = parts_of(model)
    return [model] if parts is None else [leaf for part in parts for leaf in leaves(part)]
