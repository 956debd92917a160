"""The address book: canonical path <-> variable, for every kind of model.

This is the one room that knows the object graphs of Keras, `tf.Module` and Sonnet. It
assigns the names by which gradients, groups, rates and checkpoints find a variable, and
says which variables are trainable now. It does not match patterns (`_groups`) and never
changes a model.
"""

import functools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfloop._messages import described, did_you_mean

Variable = Any
"""A `keras.Variable` or a `tf.Variable`."""

_MSG_UNBUILT = (
    "`{call}` needs a built model: got {model}, which has no variables yet. Variables are born "
    "at the first call. Build it first: `model(sample_batch)`, or for Keras "
    "`model.build(input_shape)`."
)
_MSG_NOT_A_MODEL = (
    "`{call}` needs a model: got {model}, expected a keras.Model or keras.Layer, a tf.Module, a "
    "view of one, or a dict or list of these and of variables. Pass the model itself: `{call}`."
)


def named_parameters(model: Any) -> dict[str, Variable]:
    """Gives the trainable floating-point variables of a model by canonical path.

    The canonical path is dotted and relative to the model's root, whose own name is left
    out: `encoder.dense.kernel`, `blocks.0.norm.gamma`. An attribute gives its name (a leading
    underscore dropped), a list its index, a dict its key; a layer of a Sequential or Functional
    model its own name. Names that Keras numbers by itself (`dense_7`) are numbered anew in order
    inside their parent (`dense`, `dense_1`), so a model built twice has the same paths. A variable
    that is reachable twice (tied, shared) appears once, under the first path found.

    A name you chose stays as it is, unless it has exactly the form of an automatic one
    (`Dense(name="dense_3")`), which Keras doesn't tell apart.

    Args:
      model: A built Keras model or layer, a `tf.Module` (Sonnet included), a tfloop view, or a
        dict or list of these and of variables; there the key is the first path segment.

    Returns:
      Path -> variable in the order of the walk. Variables that are frozen now (`trainable=False`
      on them or on their layer) and integer variables are left out.
    Mutates: nothing.
    Graph mode: pure Python; the flags are read when the call is traced.

    Raises:
      ValueError: The model has no variables yet.
      TypeError: It isn't a model.

    Example:
      >>> import keras, tfloop
      >>> net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
      >>> list(tfloop.named_parameters(net))
      ['dense.kernel', 'dense.bias']
    """
    return address_book(model, "named_parameters(model)").parameters()


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
      ValueError: The model has no variables yet.
      TypeError: It isn't a model.
    """
    return dict(address_book(model, "named_variables(model)").variables)


def variable_id(variable: Variable) -> int:
    """One identity for a `keras.Variable` and the `tf.Variable` inside it.

    Keras hands out a cast tensor as `.value` inside a call under mixed precision; `_value` is
    always the variable.
    """
    return id(tf_variable(variable))


def tf_variable(variable: Variable) -> tf.Variable:
    """The `tf.Variable` behind a Keras variable, or the variable itself."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def is_variable(thing: object) -> bool:
    """Is it a Keras or a TensorFlow variable?"""
    return isinstance(thing, (keras.Variable, tf.Variable))


def is_model(thing: object) -> bool:
    """Is it something that holds variables: a Keras layer, a `tf.Module`, or a view of one?"""
    return isinstance(unwrap(thing), (keras.layers.Layer, tf.Module))


def is_floating(variable: Variable) -> bool:
    """Can it have a gradient?"""
    return tf.as_dtype(variable.dtype).is_floating


def unwrap(thing: Any) -> Any:
    """The model behind a tfloop view; anything else as it is."""
    while getattr(type(thing), "is_tfloop_view", False):
        thing = thing.module
    return thing


class AddressBook:
    """Path <-> variable of one root, made by one walk.

    Keeps the variables alive, but not the layers, so that a book can be cached without keeping
    a model in memory.

    Attributes:
      variables: Canonical path -> variable.
      key: Identity of the root: the same for a model and for its views.
    """

    def __init__(self, root: Any, call: str = "named_parameters(model)") -> None:
        self.key = root_key(root, call)
        self.description = described(unwrap(root))
        self.variables: dict[str, Variable] = {}
        self._path_of: dict[int, str] = {}
        self._owners: list[Callable[[], Any]] = []
        self._aliases: list[tuple[str, str]] = []
        self._layers: list[weakref.ref] = []
        self._outermost: list[weakref.ref] = []
        unbuilt = _walk(root, self)
        if unbuilt is not None or not self.variables:
            model = described(unwrap(root) if unbuilt is None else unbuilt)
            raise ValueError(_MSG_UNBUILT.format(call=call, model=model))

    def parameters(self) -> dict[str, Variable]:
        """The variables that are trainable now and can have a gradient."""
        return {
            path: variable
            for (path, variable), owner in zip(self.variables.items(), self._owners, strict=True)
            if variable.trainable and is_floating(variable) and _is_thawed(owner)
        }

    def floating(self) -> dict[str, Variable]:
        """Everything that can have a gradient, frozen variables and statistics included."""
        return {path: v for path, v in self.variables.items() if is_floating(v)}

    def fingerprint(self) -> tuple[bool, ...]:
        """Everything about `trainable` that a trace bakes in; cheap enough for every call."""
        layers = tuple(layer is not None and layer.trainable for layer in self.live_layers())
        return layers + tuple(bool(v.trainable) for v in self.variables.values())

    def live_layers(self) -> list[Any]:
        """The Keras layers of the root, `None` for one that is gone."""
        return [layer() for layer in self._layers]

    def outermost_layers(self) -> list[Any]:
        """The Keras layers of the root that no other Keras layer holds."""
        return [layer for ref in self._outermost if (layer := ref()) is not None]

    def path_of(self, variable: Variable) -> str | None:
        """The canonical path of a variable, or `None` if it isn't the root's."""
        return self._path_of.get(variable_id(variable))

    def resolve(self, path: str) -> str | None:
        """The canonical path for any path that leads to a variable, or `None`."""
        seen = set()
        while path not in self.variables and path not in seen:
            seen.add(path)
            for alias, canonical in self._aliases:
                if path == alias or path.startswith(alias + "."):
                    path = canonical + path[len(alias) :]
                    break
        return path if path in self.variables else None

    def paths_of(self, path: str) -> tuple[str, ...]:
        """Every path that leads to the variable at a canonical path, the canonical one first."""
        found = [path]
        for known in found:
            for alias, canonical in self._aliases:
                if known == canonical or known.startswith(canonical + "."):
                    other = alias + known[len(canonical) :]
                    if other not in found and len(found) < 64:
                        found.append(other)
        return tuple(found)

    def unknown(self, path: str) -> str:
        """Words for an error: the path, what the model has, and near misses."""
        hint = did_you_mean(path, list(self.variables))
        return f"{path!r} is no variable of {self.description}.{hint}"

    def _enter(self, path: str, variable: Variable, owner: Any) -> None:
        """Writes down a variable once; a second way to reach it becomes an alias."""
        known = self._path_of.setdefault(variable_id(variable), path)
        if known != path:
            self._aliases.append((path, known))
            return
        self.variables[path] = variable
        self._owners.append(weakref.ref(owner) if owner is not None else _no_owner)


_BOOKS: dict[Any, tuple[tuple[int, ...], list[weakref.ref], AddressBook]] = {}


def address_book(model: Any, call: str = "named_parameters(model)") -> AddressBook:
    """The book of a root, walked anew only when the root's set of variables has changed."""
    key = root_key(model, call)
    roots = [unwrap(leaf) for leaf in _leaves(model)]
    fingerprint = tuple(i for root in roots for i in _variable_ids(root))
    cached = _BOOKS.get(key)
    if cached is not None and cached[0] == fingerprint and all(ref() is not None for ref in cached[1]):
        return cached[2]
    book = AddressBook(model, call)
    forget = lambda _: _BOOKS.pop(key, None)  # noqa: E731
    _BOOKS[key] = (fingerprint, [weakref.ref(root, forget) for root in roots], book)
    return book


def root_key(model: Any, call: str = "named_parameters(model)") -> Any:
    """Identity of a root: equal for a model, its views, and a dict built again of the same parts.

    Raises:
      TypeError: It isn't a model, nor a container of models and variables.
    """
    model = unwrap(model)
    if isinstance(model, Mapping):
        return ("dict", *((str(name), root_key(part, call)) for name, part in model.items()))
    if isinstance(model, (list, tuple)):
        return ("list", *(root_key(part, call) for part in model))
    if isinstance(model, (keras.layers.Layer, tf.Module)):
        return id(model)
    if is_variable(model):
        return variable_id(model)
    raise TypeError(_MSG_NOT_A_MODEL.format(call=call, model=described(model)))


def _leaves(model: Any) -> Iterator[Any]:
    """The models and variables of a root that may be a container."""
    model = unwrap(model)
    if isinstance(model, Mapping):
        model = list(model.values())
    if isinstance(model, (list, tuple)):
        for part in model:
            yield from _leaves(part)
    else:
        yield model


def _variable_ids(root: Any) -> Iterator[int]:
    """What tells whether a root's set of variables has changed since the last walk."""
    yield id(root)
    if not is_variable(root):
        yield from map(id, root.variables)
        # A tf.Module overlooks the variables of the Keras layers that it holds.
        if not isinstance(root, keras.layers.Layer):
            for layer in _layers_under(root):
                yield from map(id, layer.variables)


def _layers_under(module: tf.Module) -> Iterator[Any]:
    yield from module._flatten(predicate=lambda leaf: isinstance(leaf, keras.layers.Layer))


def _no_owner() -> None:
    """Stands in for the weak reference where no Keras layer owns the variable."""


def _is_thawed(owner: Callable[[], Any]) -> bool:
    layer = owner()
    return layer is None or layer.trainable


def _walk(root: Any, book: AddressBook) -> Any:
    """Enters every variable below `root`; gives the first outermost unbuilt Keras layer, or `None`.

    Recursion follows the object graph; `first` remembers where an object was met first, `open_`
    what is being walked now (a child that points back to its parent is no second path).
    """
    first: dict[int, str] = {}
    open_: set[int] = set()
    alive: list[Any] = []  # an id is an identity only as long as its object lives
    unbuilt: list[Any] = []

    def visit(thing: Any, path: str, gate: Any) -> None:
        thing = unwrap(thing)
        if is_variable(thing):
            # Keras' flag of a layer reaches its Keras variables; a tf.Variable asks the layer.
            owner = gate[0] if isinstance(thing, keras.Variable) else gate[1]
            book._enter(path, thing, owner)
            return
        if id(thing) in open_:
            return
        if id(thing) in first:
            book._aliases.append((path, first[id(thing)]))
            return
        alive.append(thing)
        if path:
            first[id(thing)] = path
        if isinstance(thing, keras.layers.Layer):
            book._layers.append(weakref.ref(thing))
            if gate[0] is None:
                book._outermost.append(weakref.ref(thing))
                if not thing.built:
                    unbuilt.append(thing)
            gate = (gate[0] or thing, thing)
        open_.add(id(thing))
        for segment, child in _unique(_children(thing)):
            visit(child, f"{path}.{segment}" if path else segment, gate)
        open_.discard(id(thing))

    visit(root, "", (None, None))
    return unbuilt[0] if unbuilt else None


def _unique(children: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Numbers siblings that would have the same segment: `fc`, `fc_1`."""
    taken: set[str] = set()
    for segment, child in children:
        name, number = segment, 0
        while name in taken:
            number += 1
            name = f"{segment}_{number}"
        taken.add(name)
        yield name, child


def _children(thing: Any) -> Iterator[tuple[str, Any]]:
    """What a node of the object graph holds, with the segment for each, in a stable order."""
    if isinstance(thing, Mapping):
        yield from ((str(key), child) for key, child in thing.items() if _is_node(child))
    elif isinstance(thing, (list, tuple)):
        yield from ((str(index), child) for index, child in enumerate(thing) if _is_node(child))
    elif isinstance(thing, keras.random.SeedGenerator):
        yield "state", thing.state
    elif _has_named_layers(thing):
        yield from _named_by_keras(thing.layers)
        yield from _attributes(thing, met={id(layer) for layer in thing.layers})
    elif isinstance(thing, keras.layers.Layer):
        yield from _attributes(thing, met=set())
    elif isinstance(thing, tf.Module):
        ignored = set(thing._TF_MODULE_IGNORED_PROPERTIES)
        for name, child in vars(thing).items():
            if name not in ignored and not name.startswith("_self_") and _is_node(child):
                yield name.lstrip("_") or name, child


def _attributes(layer: Any, met: set[int]) -> Iterator[tuple[str, Any]]:
    """The attributes of a Keras layer in the order of assignment, then what Keras alone tracks.

    The second part finds weights, layers and seeds that no attribute leads to (`add_weight`
    without keeping the result, layers in a plain object).
    """
    for name, child in vars(layer).items():
        if name in _keras_internals() or name.startswith("_self_") or not _is_node(child):
            continue
        met |= _ids_below(child)
        yield name.lstrip("_") or name, child
    variables = layer._trainable_variables + layer._non_trainable_variables
    rest = [*variables, *layer._seed_generators, *layer._layers]
    yield from _named_by_keras([child for child in rest if id(child) not in met])


def _ids_below(child: Any) -> set[int]:
    """Ids of an attribute's value and, for containers, of what is in it."""
    found = {id(child)}
    if isinstance(child, Mapping):
        child = list(child.values())
    if isinstance(child, (list, tuple)):
        for part in child:
            found |= _ids_below(part)
    return found


def _named_by_keras(things: list[Any]) -> Iterator[tuple[str, Any]]:
    """Children by their own names; automatic names are numbered anew, chosen ones come first."""
    bases = [_automatic_base(thing) for thing in things]
    taken = {thing.name for thing, base in zip(things, bases, strict=True) if base is None}
    for thing, base in zip(things, bases, strict=True):
        if base is None:
            yield thing.name, thing
            continue
        name, number = base, 0
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add(name)
        yield name, thing


def _automatic_base(thing: Any) -> str | None:
    """`dense` for a Dense named `dense` or `dense_7`; `None` for a name somebody chose."""
    if is_variable(thing):
        base = "variable"
    else:
        base = _snake_case(type(thing).__name__)
    return base if re.fullmatch(rf"{re.escape(base)}(_\d+)?", thing.name) else None


def _snake_case(name: str) -> str:
    """Keras' own rule for automatic names: `Conv2D` gives `conv2d`, `MyBlock` `my_block`."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _is_node(thing: Any) -> bool:
    """Can variables be found at or below it? Empty containers and plain values can't have any."""
    thing = unwrap(thing)
    if isinstance(thing, Mapping):
        thing = list(thing.values())
    if isinstance(thing, (list, tuple)):
        return any(_is_node(part) for part in thing)
    return is_variable(thing) or isinstance(
        thing, (keras.layers.Layer, tf.Module, keras.random.SeedGenerator)
    )


def _has_named_layers(thing: Any) -> bool:
    """Is it a Sequential or Functional model, where Keras keeps layer names unique?"""
    functional = isinstance(getattr(type(thing), "operations", None), property)
    return isinstance(thing, keras.Sequential) or (isinstance(thing, keras.Model) and functional)


@functools.cache
def _keras_internals() -> frozenset[str]:
    """Attributes that Keras itself sets on layers and models; none names a part of the model."""
    compiled = {"optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker", "_tracked"}
    symbolic = {"_functional", "_inputs_struct", "_outputs_struct", "_inputs", "_outputs"}
    graph = {"_nodes", "_nodes_by_depth", "_operations", "_operations_by_depth"}
    return frozenset({*vars(keras.Model()), *compiled, *symbolic, *graph})
