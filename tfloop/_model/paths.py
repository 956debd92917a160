"""The address book: canonical path <-> variable, for every kind of model.

The names by which gradients, groups, rates and checkpoints find a variable, and which variables
are trainable now. Finding them is `walk`'s business, matching patterns `group`'s. No model is
ever changed here.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tfloop._checks.messages import described, did_you_mean, listed
from tfloop._model.containers import is_container, items_of
from tfloop._model.graphs import Variable as Variable
from tfloop._model.graphs import held_by
from tfloop._model.graphs import is_floating as is_floating
from tfloop._model.graphs import is_model as is_model
from tfloop._model.graphs import is_variable as is_variable
from tfloop._model.graphs import tf_variable as tf_variable
from tfloop._model.graphs import unwrap as unwrap
from tfloop._model.graphs import variable_id as variable_id
from tfloop._model.walk import Walk, leaves
from tfloop._tracing import traces
from tfloop._tracing.settings import Settings, Values

_MOST_ALIASES = 64

_MSG_UNBUILT = (
    "`{call}` needs a built model: got {model}, which has no variables yet, expected one that was "
    "called. Variables are born at the first call. Build it first: `model(sample_batch)`, or for "
    "Keras `model.build(input_shape)`."
)
_MSG_NOT_A_MODEL = (
    "`{call}` needs a model: got {model}, expected a keras.Model or keras.Layer, a tf.Module, a "
    "view of one, or a dict or list of these and of variables. Pass the model itself: `{call}`."
)
_MSG_HIDDEN = (
    "`{call}` found trainable variables that would never be trained: got {parts} in {model}, "
    "expected layers and variables in attributes, lists and dicts. Neither Keras nor TensorFlow "
    "looks into a plain object. Make its class a layer, `class Part(keras.layers.Layer)`, or "
    "freeze what isn't to be trained: `part.trainable = False`."
)


@traces.not_converted
def named_parameters(model: Any) -> dict[str, Variable]:
    """Gives the trainable floating-point variables of a model by canonical path.

    The canonical path is dotted and relative to the model's root, whose own name is left
    out: `encoder.dense.kernel`, `blocks.0.norm.gamma`. An attribute gives its name (a leading
    underscore dropped), a list its index, a dict its key; a layer of a Sequential or Functional
    model its own name. Names that Keras numbers by itself (`dense_7`) are numbered anew in order
    inside their parent (`dense`, `dense_1`), so a model built twice has the same paths. A variable
    that is reachable twice (tied, shared) appears once, under the first path found.

    A name you chose stays as it is, unless it has exactly the form of an automatic one
    (`Dense(name="dense_3")`): Keras doesn't tell them apart, so it is numbered anew, too. Names
    of siblings that you count from 0 (`dense_0`, `dense_1`) stay.

    Args:
      model: A built Keras model or layer, a `tf.Module` (Sonnet included), a tfloop view, or a
        dict or list of these and of variables; there the key is the first path segment.

    Returns:
      Path -> variable in the order of the walk. Variables that are frozen now (`trainable=False`
      on them or on their layer) and integer variables are left out.
    Mutates: nothing.
    Graph mode: pure Python; the flags are read when the call is traced.

    Raises:
      ValueError: The model has no variables yet, or a plain object in it holds trainable ones,
        where neither Keras nor TensorFlow looks.
      TypeError: It isn't a model.

    Example:
      >>> import keras, tfloop
      >>> net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
      >>> list(tfloop.named_parameters(net))
      ['dense.kernel', 'dense.bias']
    """
    return address_book(model, "named_parameters(model)").parameters()


@traces.not_converted
def named_variables(model: Any) -> dict[str, Variable]:
    """Gives every variable of a model by canonical path: frozen ones, statistics, seed states too.

    The paths are those of `named_parameters`. Metrics and optimizers that a model holds are not
    part of it, as in `keras.Model.variables`; a `tf.Variable` held by a Keras layer is.

    Args:
      model: As in `named_parameters`.

    Returns:
      Path -> variable in the order of the walk, each variable exactly once.
    Mutates: nothing.
    Graph mode: pure Python.

    Raises:
      ValueError: The model has no variables yet, or a plain object in it holds trainable ones,
        where neither Keras nor TensorFlow looks.
      TypeError: It isn't a model.
    """
    return dict(address_book(model, "named_variables(model)").variables)


class AddressBook:
    """Path <-> variable of one root, made by one walk.

    Keeps nothing alive: neither variables nor layers, so that a book can be cached.

    Attributes:
      variables: Canonical path -> variable.
      layers: Path -> Keras layer, each once; the root's own path is empty.
      of_keras_2: Path -> layer of `tf_keras`, each once.
      key: Identity of the root: the same for a model and for its views.
      description: The root in words.
    """

    def __init__(self, root: Any, call: str = "named_parameters(model)") -> None:
        root = unwrap(root)
        self.key = root_key(root, call)
        self.description = described(root)
        walk = Walk(root)
        self.variables: Mapping[str, Variable] = weakref.WeakValueDictionary(walk.variables)
        self._path_of = {variable_id(v): path for path, v in walk.variables.items()}
        self._gates = {path: [*map(weakref.ref, gate)] for path, gate in walk.gates.items()}
        self.layers: Mapping[str, Any] = weakref.WeakValueDictionary(walk.layers)
        self.of_keras_2: Mapping[str, Any] = weakref.WeakValueDictionary(walk.of_keras_2)
        # Read before each compiled step, for which a weak dictionary is slow.
        flagged = (
            *walk.layers.values(),
            *walk.of_keras_2.values(),
            *walk.variables.values(),
        )
        self._flagged = [*map(weakref.ref, flagged)]
        self._settings = Settings(walk.modules())
        self._outermost = [*map(weakref.ref, walk.outermost)]
        self._canonical = walk.aliases
        self._aliases: dict[str, list[str]] = {}
        for alias, canonical in walk.aliases.items():
            self._aliases.setdefault(canonical, []).append(alias)
        self._unbuilt, self._empty, self._hidden = walk.unbuilt(), walk.empty(), walk.hidden()
        self._holders = [*map(weakref.ref, walk.holders)]
        self._signature = _signature(walk.outermost, walk.layers.values(), walk.holders)

    def check(self, call: str, *, may_be_empty: bool = False) -> None:
        """Raises for a model that isn't built, or has variables to which no path leads."""
        unbuilt = self._unbuilt or (None if may_be_empty else self._empty)
        if unbuilt is not None:
            raise ValueError(_MSG_UNBUILT.format(call=call, model=unbuilt))
        if self._hidden:
            parts = listed(self._hidden)
            raise ValueError(_MSG_HIDDEN.format(call=call, parts=parts, model=self.description))

    def parameters(self) -> dict[str, Variable]:
        """The variables that are trainable now and can have a gradient."""
        return {
            path: variable
            for path, variable in self.variables.items()
            if variable.trainable and is_floating(variable) and self._is_unfrozen(path)
        }

    def floating(self) -> dict[str, Variable]:
        """Everything that can have a gradient, frozen variables and statistics included."""
        return {path: v for path, v in self.variables.items() if is_floating(v)}

    def trainable_kinds(self) -> dict[str, Variable]:
        """The parameters, frozen ones included; statistics, which are never trained, aren't."""
        return {
            path: variable
            for path, variable in self.floating().items()
            if variable.trainable or tf_variable(variable).trainable
        }

    def fingerprint(self) -> tuple[list[bool], Values]:
        """Everything of the root that a trace bakes in; cheap enough for every call."""
        things = [ref() for ref in self._flagged]
        return [thing.trainable for thing in things if thing is not None], self._settings.now()

    def parts(self) -> list[Any]:
        """The layers and modules whose settings `fingerprint` compares."""
        return self._settings.things()

    def is_like(self, other: "AddressBook") -> bool:
        """Could one root be a copy of the other: have they the same paths and shapes?"""
        shapes = [{p: tuple(v.shape) for p, v in b.variables.items()} for b in (self, other)]
        return shapes[0] == shapes[1]

    def path_of(self, variable: Variable) -> str | None:
        """The canonical path of a variable, or `None` if it isn't the root's."""
        path = self._path_of.get(variable_id(variable))
        known = self.variables.get(path) if path is not None else None
        same = known is not None and tf_variable(known) is tf_variable(variable)
        return path if same else None

    def resolve(self, path: str) -> str | None:
        """The canonical path for any path that leads to a variable, or `None`."""
        while path not in self.variables:
            if not isinstance(path, str):
                return None
            alias = next((p for p in _prefixes(path) if p in self._canonical), None)
            if alias is None:
                return None
            path = self._canonical[alias] + path[len(alias) :]
        return path

    def paths_of(self, path: str) -> tuple[str, ...]:
        """Every path that leads to the variable at a canonical path, the canonical one first."""
        found = [path]
        for known in found:
            for prefix in _prefixes(known):
                for alias in self._aliases.get(prefix, ()):
                    if len(found) < _MOST_ALIASES:
                        found.append(alias + known[len(prefix) :])
        return tuple(dict.fromkeys(found))

    def unknown(self, path: object) -> str:
        """Words for an error: the path, what the model has, and near misses."""
        hint = did_you_mean(str(path), list(self.variables))
        return f"{path!r}, expected a path of {self.description}.{hint}"

    def _is_unfrozen(self, path: str) -> bool:
        return all(layer.trainable for layer in _alive(self._gates[path]))

    def _is_current(self) -> bool:
        """Would another walk find the same?"""
        # Ids are compared, so all that they stand for must still live.
        return len(self.variables) == len(self._path_of) and self._signature == _signature(
            _alive(self._outermost), self.layers.values(), _alive(self._holders)
        )

    def _equals(self, other: "AddressBook") -> bool:
        """Same paths to the same variables, through the same layers?"""
        mine, theirs = dict(self.variables), dict(other.variables)
        return (
            list(mine) == list(theirs)
            and all(mine[path] is theirs[path] for path in mine)
            and self._canonical == other._canonical
            and [*map(id, self.layers.values())] == [*map(id, other.layers.values())]
        )


_BOOKS: dict[Any, tuple[list[weakref.ref], AddressBook]] = {}
_LOCK = threading.RLock()


def address_book(model: Any, call: str = "named_parameters(model)") -> AddressBook:
    """The book of a root; the same object as long as the root has the same variables.

    Args:
      model: The root.
      call: The public call, for messages.

    Raises:
      ValueError: The root isn't built, or has variables to which no path leads.
      TypeError: It isn't a root.
    """
    book = unchecked_book(model, call)
    book.check(call)
    return book


def unchecked_book(model: Any, call: str = "named_parameters(model)") -> AddressBook:
    """The book of a root that may not be built; see `address_book`."""
    key = root_key(model, call)
    with _LOCK:
        book = _BOOKS[key][1] if key in _BOOKS else None
        if book is None or not book._is_current():
            fresh = AddressBook(model, call)
            if book is not None and book._equals(fresh):
                book._signature, book._holders = fresh._signature, fresh._holders
                book._unbuilt, book._empty = fresh._unbuilt, fresh._empty
                book._hidden, book._settings = fresh._hidden, fresh._settings
            else:
                book = fresh
                forget = lambda _: _BOOKS.pop(key, None)  # noqa: E731
                _BOOKS[key] = ([weakref.ref(root, forget) for root in leaves(model)], book)
    return book


def root_key(model: Any, call: str = "named_parameters(model)") -> Any:
    """Identity of a root: equal for a model, its views, and a dict built again of the same parts.

    Raises:
      TypeError: It isn't a model, nor a container of models and variables.
    """
    model = unwrap(model)
    if is_model(model):
        return id(model)
    if not is_container(model):
        raise TypeError(_MSG_NOT_A_MODEL.format(call=call, model=described(model)))
    return _container_key(model, call, "")


def _container_key(container: Any, call: str, where: str) -> Any:
    key: list[Any] = [isinstance(container, Mapping)]
    for name, part in items_of(container):
        part, place = unwrap(part), f"{where}[{name!r}]"
        if is_container(part):
            key.append((str(name), _container_key(part, call, place)))
        elif is_variable(part) or is_model(part):
            key.append((str(name), variable_id(part)))
        else:
            model = f"{described(part)} at {place}"
            raise TypeError(_MSG_NOT_A_MODEL.format(call=call, model=model))
    return tuple(key)


def variables_below(thing: Any) -> list[Variable]:
    """Every variable that a layer or module has now, each once; none if it isn't built."""
    return list(Walk(thing).variables.values())


def _alive(references: list[weakref.ref]) -> list[Any]:
    return [thing for reference in references if (thing := reference()) is not None]


def _prefixes(path: str) -> Iterator[str]:
    """`a.b.c` gives itself, `a.b` and `a`."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _signature(outermost: list[Any], layers: Iterable[Any], holders: list[Any]) -> tuple[Any, ...]:
    """What changes whenever a root gets other variables; cheaper than a walk."""
    tracked = [id(variable) for layer in outermost for variable in layer.variables]
    attributes = [len(vars(layer)) for layer in layers]  # a new one may be what Keras ignores
    held = [frozenset(held_by(holder)) for holder in holders]
    return (*tracked, *attributes, *held)
