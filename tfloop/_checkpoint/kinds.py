"""What the state of an object is in a checkpoint, and how a saved one is compared with it.

One class for each kind of object. A part has named values, says the rest in words of JSON, and
pairs what is there with what was saved. Files and roots are none of its business.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfloop._accumulation.accumulator import GradientsAccumulator
from tfloop._checks.messages import described, listed
from tfloop._groups.group import ParamGroup
from tfloop._model import derived
from tfloop._model.containers import is_container
from tfloop._model.paths import (
    AddressBook,
    address_book,
    is_model,
    is_variable,
    root_key,
    tf_variable,
)
from tfloop._optimizer import record
from tfloop._optimizer.as_keras import GroupedOptimizer
from tfloop._optimizer.optimizer import ModuleOptimizer
from tfloop._replicas import per_replica, reduction, seeds

Saved = Mapping[str, tf.Tensor]
Pairs = list[tuple[Any, Any]]
"""(what has `assign`, value): live variables and what they were when they were saved."""


class _Kind:
    """What most have in common.

    Attributes:
      own: Name -> variable, for those of the values of which each replica may have its own.
      statistics: The names of those that are the mean of these where they must be one.
    """

    own: Mapping[str, Any] = {}
    statistics: Collection[str] = ()

    def finish(self) -> None:
        """What is left to do once all values are assigned."""


class Variables(_Kind):
    """A metric, a Keras optimizer or a variable: variables by path, or by their number."""

    def __init__(self, kind: str, variables: Mapping[str, Any]) -> None:
        self.kind = kind
        self.values = {path: tf_variable(variable) for path, variable in variables.items()}
        self.own: Mapping[str, Any] = self.values
        self.said: dict[str, Any] = {}

    def pairs(self, said: Mapping[str, Any], saved: Saved, strict: bool) -> Pairs:
        """Pairs of variable and value, after all checks; a ValueError says what doesn't fit."""
        missing = [path for path in self.values if path not in saved]
        extra = [path for path in saved if path not in self.values]
        if (missing or extra) if strict else len(missing) == len(self.values):
            raise ValueError(
                f"got other variables, missing in the checkpoint {listed(missing)}, unknown here "
                f"{listed(extra)}, expected the same. It was built otherwise when it was saved. "
                "Build it as it was, or take what both have: `checkpoint.restore(strict=False)`."
            )
        shared = {path: variable for path, variable in self.values.items() if path in saved}
        for path, variable in shared.items():
            found, dtype = tf.TensorShape(saved[path].shape), tf.as_dtype(saved[path].dtype)
            expected = tf.TensorShape(variable.shape)  # which may be open
            if not expected.is_compatible_with(found) or dtype != variable.dtype:
                raise ValueError(
                    f"got shape {tuple(found)} and dtype {dtype.name} for {path!r}, expected "
                    f"{tuple(variable.shape)} and {variable.dtype.name}. The model was changed "
                    "since it was saved. Build it as it was: `build_model(config)`."
                )
        return [(variable, saved[path]) for path, variable in shared.items()]


class Model(Variables):
    """A model: its variables, and what its layers compute from them."""

    def __init__(self, book: AddressBook) -> None:
        super().__init__("model", book.variables)
        self._book = book
        self.statistics = reduction.moved_state(book)

    def only(self, group: ParamGroup) -> "Model":
        """The same model as if it had no variables but the members of a group."""
        named = self._book.variables.items()
        paths = {p for p, v in named if group.matches_any(self._book.paths_of(p), v)}
        part = copy.copy(self)
        part.own = part.values = {path: self.values[path] for path in self.values if path in paths}
        return part

    def finish(self) -> None:
        """As in `Variables`."""
        derived.bring_up_to_date(self._book)


class Optimizer(_Kind):
    """A `ModuleOptimizer`: groups, which are known by their members."""

    kind = "ModuleOptimizer"

    def __init__(self, optim: ModuleOptimizer, root: Any) -> None:
        waiting: Mapping[int, Any] = {}
        if root is None:
            self._groups = optim._assembly.records()
        else:
            self._groups, waiting = optim._assembly.first_records(root)
        self.values = {
            f"{number}/{key}": waiting.get(id(variable), variable)
            for number, group in enumerate(self._groups)
            for key, variable in group.variables().items()
        }
        groups = [{"optimizer": g.optimizer, "members": list(g.slots)} for g in self._groups]
        self.said = {"groups": groups}

    def pairs(self, said: Mapping[str, Any], saved: Saved, strict: bool) -> Pairs:
        """As in `Variables`; whole groups or none, strict or not."""
        found: list[record.Saved] = [
            (group["optimizer"], group["members"], {}) for group in said["groups"]
        ]
        for key, value in saved.items():
            number, _, rest = key.partition("/")
            found[int(number)][2][rest] = value
        return record.assignments(found, self._groups)


class Window(_Kind):
    """A `GradientsAccumulator`: what got anything in its window."""

    kind = "GradientsAccumulator"

    def __init__(self, accumulator: GradientsAccumulator) -> None:
        self._accumulator = accumulator
        self.values = accumulator.state()
        self.own = accumulator._buffers.variables()
        self.said: dict[str, Any] = {}

    def pairs(self, said: Mapping[str, Any], saved: Saved, strict: bool) -> Pairs:
        """As in `Variables`; the whole window or none, strict or not."""
        return self._accumulator._buffers.assignments(saved)


class State(_Kind):
    """Another `PythonState`, such as a `DataLoader`: bytes that it alone can judge."""

    def __init__(self, thing: tf.train.experimental.PythonState) -> None:
        self.kind = type(thing).__name__
        self._thing = thing
        self.values = {"state": thing.serialize()}
        self.said: dict[str, Any] = {}

    def pairs(self, said: Mapping[str, Any], saved: Saved, strict: bool) -> Pairs:
        """This, in the place of a variable: it judges its state when it is assigned."""
        return [(self, saved["state"].numpy())]

    def assign(self, state: Any) -> None:
        """Takes over a state, or raises and keeps the one it has."""
        self._thing.deserialize(state)


Part = Variables | Optimizer | Window | State


def part_of(thing: Any, call: str, root: Any = None) -> Part:
    """An object as a checkpoint sees it, with the state that it has now.

    Args:
      thing: What has the state.
      call: The public call, for messages.
      root: For an optimizer that isn't built: whose state it would begin with.

    Raises:
      ValueError: It is a model that isn't built.
    """
    if isinstance(thing, ModuleOptimizer):
        return Optimizer(thing, root)
    if isinstance(thing, GradientsAccumulator):
        return Window(thing)
    if isinstance(thing, tf.train.experimental.PythonState):
        return State(thing)
    if isinstance(thing, keras.metrics.Metric):
        return Variables("metric", {f"{n}.{v.name}": v for n, v in enumerate(thing.variables)})
    if is_variable(thing):
        return Variables("variable", {"value": thing})
    if isinstance(thing, keras.optimizers.Optimizer):
        # Keras numbers the names of layers on, so that only the order of variables stays.
        variables = {str(number): v for number, v in enumerate(thing.variables)}
        return Variables(type(thing).__name__, variables)
    return Model(address_book(thing, call))


def is_root(thing: Any) -> bool:
    """Can it have the paths that optimizers and accumulators go by?"""
    return is_model(thing) or is_container(thing)


def check_kind(thing: Any, call: str) -> None:
    """Refuses what has no state.

    Raises:
      TypeError: It has none, or another object has it.
    """
    kinds = (tf.train.experimental.PythonState, keras.metrics.Metric)
    if isinstance(thing, kinds) or is_variable(thing):
        return
    if is_root(thing):
        root_key(thing, call)
        return
    fix = "Keep a number in a variable: `tf.Variable(0)`."
    if isinstance(thing, keras.optimizers.Optimizer):
        if thing.built and not isinstance(thing, GroupedOptimizer):
            return
        fix = (
            "A Keras optimizer has some once it is built: "
            "`optimizer.build(model.trainable_variables)`. Where a "
            "`tfloop.ModuleOptimizer(optimizer)` steps, give that."
        )
    elif isinstance(thing, keras.random.SeedGenerator):
        fix = "Give its variable: `generator.state`."
    raise TypeError(
        f"`{call}` has no state that can be saved: got {described(thing)}, expected a model, "
        "ModuleOptimizer, GradientsAccumulator, scheduler, DataLoader, metric, variable or built "
        f"Keras optimizer. {fix}"
    )


def mean_of(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One value for what replicas have apart, as a step would make it."""
    stacked = tf.constant(np.stack(parts).astype(np.float64))
    mean = reduction.mean_of_parts(stacked, tf.ones(len(parts), tf.float64))
    return mean.numpy().astype(parts[0].dtype)


def take_over(pairs: Pairs, apart: Sequence[tuple[Any, Sequence[Any]]]) -> None:
    """Assigns all values or none: what may still refuse one comes first.

    Args:
      pairs: Each with a value for all replicas.
      apart: Pairs of a variable among these and what each replica had of it.
    """
    done: list[State] = []
    try:
        for target, value in pairs:
            if isinstance(target, State):
                target.assign(value)
                done.append(target)
    except Exception:
        for target in done:
            target.assign(target.values["state"])
        raise
    rest = [pair for pair in pairs if not isinstance(pair[0], State)]
    for target, value in rest:
        per_replica.assign_total(target, value)
    seeds.make_distinct([target for target, _ in rest if is_variable(target)], anew=True)
    for target, values in apart:
        per_replica.assign_each(target, values)
