"""What a step finds by name outside of itself, and whether a name leads elsewhere since.

A trace keeps what it was made with. Python finds things by name each time: globals, cells of
closures, attributes of objects, elements of containers; through helpers, methods, partials and
callable objects. This room reads the names from the code, goes where they lead, and sees when
one leads to something else. It asks by identity, and of plain values whether they are equal.
The parts of a model and what these were given run, too, though the step doesn't name them.

Not followed is what the code writes itself, as far as these are numbers and tensors (a count, the
last activations, a list that these are added to); code of libraries; and what no name in the code
tells, such as a name that is put together when the step runs.
"""

import functools
import inspect
import operator
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfloop._model.graphs import is_model, is_variable, unwrap
from tfloop._model.paths import unchecked_book
from tfloop._tracing import code
from tfloop._tracing.settings import PLAIN, getter, is_same

_OPAQUE = {"builtins", "keras", "numpy", "tensorflow", "tfloop", "sonnet"}
"""Whose objects are looked at as one."""
_LIBRARIES = sys.stdlib_module_names | _OPAQUE
"""Whose code isn't read."""
_INSTALLED = tuple({*site.getsitepackages(), sysconfig.get_paths()["purelib"]})
_TUNED = (keras.regularizers.Regularizer, keras.constraints.Constraint, keras.losses.Loss)
"""Small things whose strength is changed on the way."""
_CONTAINERS = (Mapping, list, tuple, set, frozenset)
_RESULTS = (*PLAIN, tf.Tensor, np.ndarray, np.generic)
"""What code may note of its own runs."""
_MOST_THINGS = 4096
"""So many are looked at, which bounds what a trace of a strange program costs."""
_MOST_ELEMENTS = 256
"""Containers up to this size are compared element by element before each call."""


class Bindings:
    """What the names in a function lead to.

    Args:
      fn: A function, a bound method, a partial or a callable object.

    Attributes:
      models: The models among them.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        search = _Search(fn)
        self._watches = search.watches()
        self.models = search.models

    def changed(self) -> str | None:
        """The first name that leads elsewhere since, in words."""
        for watch in self._watches:
            name = watch.changed()
            if name is not None:
                return name
        return None


_Place = tuple[str, Mapping[str, Any], set[str]]


class _Watch:
    """Some of what a mapping or a container holds.

    Args:
      owner: In words.
      names: Of what is held.
      read: Gives the present values, in the order of the names.
    """

    __slots__ = ("_names", "_owner", "_read", "_seen")

    def __init__(self, owner: str, names: Sequence[Any], read: Callable[[], Sequence[Any]]) -> None:
        self._owner, self._names, self._read = owner, names, read
        self._seen = read()

    def changed(self) -> str | None:
        """The first name that holds something else now, in words."""
        seen = self._seen
        try:
            now = self._read()
        except (KeyError, AttributeError, ValueError):  # deleted, or a cell that is empty
            return f"{self._owner}.{self._names[0]}"
        if len(now) == len(seen) and all(map(operator.is_, now, seen)):
            return None
        if len(now) != len(seen):
            return self._owner
        for name, new, old in zip(self._names, now, seen, strict=True):
            if not is_same(new, old):
                return f"{self._owner}.{name}"
        self._seen = now  # equal ones, which are the same from now on
        return None


class _Arrivals:
    """Names that an object or a module hasn't itself, but may get.

    Then what its class or the builtins have under the name counts no more.

    Args:
      places: Owner in words, what it holds, and names.
      is_kept: Does the code set such a value itself?
    """

    __slots__ = ("_is_kept", "_mappings", "_places", "_sizes")

    def __init__(self, places: Sequence[_Place], is_kept: Callable[[str, Any], bool]) -> None:
        self._places, self._is_kept = places, is_kept
        self._mappings = [held for _, held, _ in places]
        self._sizes = [*map(len, self._mappings)]

    def changed(self) -> str | None:
        """The first of the names that is held now, in words."""
        sizes = [*map(len, self._mappings)]
        if sizes == self._sizes:
            return None
        self._sizes = sizes
        for owner, held, names in self._places:
            for name in names.intersection(held):
                if not self._is_kept(name, held[name]):
                    return f"{owner}.{name}"
        return None


class _Search:
    """Goes wherever the names in a function lead."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.models: list[Any] = []
        self._met: dict[int, Any] = {}  # an id is an identity only as long as its object lives
        self._names: set[str] = set()
        self._asked: set[str] = set()
        self._written: set[str] = set()
        self._owned: dict[int, Set[str]] = {}  # what functions set on their first argument
        self._methods: set[int] = set()  # those of them that classes hold
        self._found: list[tuple[str, Sequence[Any], Callable[[], Sequence[Any]]]] = []
        self._containers: list[tuple[str, Sequence[Any], Callable[[], Sequence[Any]], Any]] = []
        self._led_to: dict[int, set[str]] = {}  # the names that lead to a container
        # Of each thing with attributes: it in words, these, and the classes that it has more from.
        self._holders: list[tuple[str, Mapping[str, Any], tuple[type, ...]]] = []
        self._looked: list[set[str]] = []  # for each of them: the names that were looked up
        self._modules: dict[int, tuple[dict[str, Any], set[str]]] = {}  # names of their functions
        self._home = _home(fn)
        if inspect.ismethod(fn):
            self._enter(fn.__self__)  # the object of a step, whatever its class
        self._see(fn)
        # A name found late may be that of an attribute of what was met early.
        while self._look_up():
            pass
        self._written.update(*(own for n, own in self._owned.items() if n not in self._methods))

    def watches(self) -> tuple[_Watch | _Arrivals, ...]:
        """What is to be compared before each call."""
        made: list[_Watch | _Arrivals] = [_Watch(*found) for found in self._found]
        for owner, names, read, container in self._containers:
            if not (self._is_written(container) and _is_result(container)):
                made.append(_Watch(owner, names, read))
        named = list(zip(self._holders, self._looked, strict=True))
        places: list[_Place] = []
        # Once for all functions of a module.
        for module, asked in self._modules.values():
            owner = module.get("__name__", "module")
            named.append(((owner, module, ()), asked.intersection(module)))
            places.append((owner, module, asked.difference(module)))  # builtins, for one
        for (owner, held, kinds), looked in named:
            written = self._written_by_methods(kinds)
            kept = [n for n in sorted(looked) if not self._keeps_for_itself(n, held[n], written)]
            if kept:
                made.append(_Watch(owner, kept, _call(getter(kept), held)))
            if kinds:
                may_come = (self._names & self._names_in(kinds) | self._asked).difference(held)
                places.append((owner, held, may_come - written))
        return (*made, _Arrivals([place for place in places if place[2]], self._keeps_for_itself))

    def _written_by_methods(self, kinds: Iterable[type]) -> set[str]:
        """The attributes that methods which were read set on objects of some classes."""
        methods = (fn for kind in kinds for fn in vars(kind).values() if id(fn) in self._owned)
        return {name for fn in methods for name in self._owned[id(fn)]}

    def _is_written(self, container: Any) -> bool:
        return not self._written.isdisjoint(self._led_to.get(id(container), ()))

    def _keeps_for_itself(self, name: str, value: Any, written: Set[str] = frozenset()) -> bool:
        """Is it a number or tensor that the code itself writes: a count, the last activations?"""
        return (name in self._written or name in written) and isinstance(value, _RESULTS)

    def _look_up(self) -> bool:
        """Looks up all names in all holders; `False` if nothing was new."""
        is_new, number = False, 0
        while number < len(self._holders) and len(self._met) < _MOST_THINGS:
            held, looked = self._holders[number][1], self._looked[number]
            for name in (self._names - looked).intersection(held):
                looked.add(name)
                is_new = True
                if isinstance(held, types.MappingProxyType):  # of a class
                    self._methods.add(id(held[name]))
                self._see(held[name], name)
            number += 1
        return is_new

    def _see(self, thing: Any, name: str | None = None) -> None:
        """Goes on from something that a name leads to."""
        thing = unwrap(thing)
        if name is not None and isinstance(thing, _CONTAINERS):
            self._led_to.setdefault(id(thing), set()).add(name)
        if isinstance(thing, PLAIN) or id(thing) in self._met or len(self._met) >= _MOST_THINGS:
            return
        self._met[id(thing)] = thing
        if isinstance(thing, types.FunctionType):
            self._see_function(thing)
        elif isinstance(thing, types.MethodType):
            self._see(thing.__self__)
            self._see(thing.__func__)
        elif isinstance(thing, functools.partial):
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self._see(part)
        elif isinstance(thing, property):
            self._see(thing.fget)
        elif isinstance(thing, (staticmethod, classmethod)):
            self._see(thing.__func__)
        elif isinstance(thing, functools.cached_property):
            self._see(thing.func)
        elif callable(inner := _python_function(thing)):  # a `tf.function`, or a step of ours
            self._see(inner)
        elif isinstance(thing, _CONTAINERS) and not is_variable(thing):
            self._see_container(thing)
        else:
            self._see_object(thing)

    def _see_function(self, fn: types.FunctionType) -> None:
        if not self._is_users(fn.__globals__.get("__name__")):
            return
        names = code.names_in(fn.__code__)
        self._names |= names.attributes
        self._asked |= names.asked
        self._owned[id(fn)] = names.own
        self._written |= names.written
        for imported in names.imported:
            self._see(sys.modules.get(imported))
        # What a function is made of may be exchanged, too.
        parts = ("__code__", "__defaults__", "__kwdefaults__")
        self._found.append((fn.__qualname__, parts, _call(operator.attrgetter(*parts), fn)))
        for default in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            self._see(default)
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        inside = {name: _content(cell) for name, cell in cells.items()}
        kept = [name for name in cells if not self._keeps_for_itself(name, inside[name])]
        if kept:
            self._found.append(
                (fn.__qualname__, kept, _call(_contents, [cells[name] for name in kept]))
            )
        module = fn.__globals__
        outside = {name: module[name] for name in sorted(names.globals) if name in module}
        self._modules.setdefault(id(module), (module, set()))[1].update(names.globals)
        for name, thing in (*inside.items(), *outside.items()):
            self._see(thing, name)

    def _see_container(self, thing: Any) -> None:
        elements = list(thing.values()) if isinstance(thing, Mapping) else list(thing)
        if len(elements) <= _MOST_ELEMENTS and not isinstance(thing, (tuple, frozenset)):
            owner = f"a {type(thing).__name__}"
            if isinstance(thing, Mapping):
                self._containers.append((owner, [*thing, *thing], _call(_items, thing), thing))
            else:
                self._containers.append((owner, range(len(elements)), _call(tuple, thing), thing))
        for element in elements[:_MOST_ELEMENTS]:
            self._see(element)

    def _see_object(self, thing: Any) -> None:
        if isinstance(thing, _TUNED):
            self._watch_settings(thing)
        if is_model(thing):
            self.models.append(thing)
            for part in unchecked_book(thing).parts():
                self._see_given(part)
                if id(part) not in self._met and self._is_users(type(part).__module__):
                    self._enter(part)
        elif _is_opaque(thing):
            self._see_given(thing)
            return
        self._enter(thing)

    def _see_given(self, thing: Any) -> None:
        """Goes on to what a thing runs though no name leads there: an activation, a constraint."""
        for value in list(getattr(thing, "__dict__", {}).values()):
            is_users = self._is_users(type(value).__module__) and not is_model(value)
            if is_users or isinstance(value, (types.FunctionType, functools.partial, *_TUNED)):
                self._see(value)

    def _watch_settings(self, thing: Any) -> None:
        """Watches what a library's code reads of a thing, of which the user's code has no name."""
        plain = [name for name, value in vars(thing).items() if isinstance(value, PLAIN)]
        if plain:
            self._found.append((type(thing).__name__, plain, _call(getter(plain), vars(thing))))

    def _enter(self, thing: Any) -> None:
        """Notes a thing whose attributes names may lead to, and the classes it has them from."""
        self._met[id(thing)] = thing
        if isinstance(thing, types.ModuleType):
            if self._is_users(thing.__name__):
                self._hold(thing.__name__, vars(thing))
            return
        kinds = thing.__mro__ if isinstance(thing, type) else type(thing).__mro__
        if not isinstance(thing, type):
            for held in _held(thing):
                self._hold(type(thing).__name__, held, kinds)
        for number, kind in enumerate(kinds):
            if self._is_users(kind.__module__) and (kind is thing or id(kind) not in self._met):
                self._met[id(kind)] = kind
                self._hold(kind.__name__, vars(kind), kinds[number + 1 :])
                # Called by the language or by a library, so named in no code.
                self._names |= {"call", "__call__"}

    def _hold(self, owner: str, held: Mapping[str, Any], kinds: tuple[type, ...] = ()) -> None:
        self._holders.append((owner, held, kinds))
        self._looked.append(set())

    def _names_in(self, kinds: Iterable[type]) -> set[str]:
        """What the user's own among some classes have."""
        return {name for k in kinds if self._is_users(k.__module__) for name in vars(k)}

    def _is_users(self, module: str | None) -> bool:
        """Is a module the user's own: neither of a library nor installed, or that of the step?"""
        if not isinstance(module, str):
            return False
        if module == self._home:
            return True
        if module.partition(".")[0] in _LIBRARIES:
            return False
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        return not file.startswith(_INSTALLED)


def _is_result(thing: Any) -> bool:
    """Is it a number, a tensor, or a container of nothing else?"""
    if isinstance(thing, _CONTAINERS):
        return all(map(_is_result, thing.values() if isinstance(thing, Mapping) else thing))
    return isinstance(thing, _RESULTS)


def _home(fn: Any) -> str | None:
    """The module of a step."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    if not isinstance(fn, types.FunctionType):  # an object that can be called
        return type(fn).__module__
    return fn.__globals__.get("__name__")


def _is_opaque(thing: Any) -> bool:
    named = thing if isinstance(thing, type) else type(thing)
    name = thing.__name__ if isinstance(thing, types.ModuleType) else named.__module__
    return str(name).partition(".")[0] in _OPAQUE


def _python_function(thing: Any) -> Any:
    return None if isinstance(thing, type) else getattr(thing, "python_function", None)


def _held(thing: Any) -> list[Mapping[str, Any]]:
    """The attributes that a thing has by itself, in one or two places."""
    held = getattr(thing, "__dict__", None)
    has_slots = any(getattr(kind, "__slots__", ()) for kind in type(thing).__mro__)
    return [*([] if held is None else [held]), *([_Slots(thing)] if has_slots else [])]


class _Slots(Mapping[str, Any]):
    """The slots of an object as a mapping."""

    def __init__(self, thing: Any) -> None:
        found = (getattr(kind, "__slots__", ()) for kind in type(thing).__mro__)
        names = [(s,) if isinstance(s, str) else tuple(s) for s in found]
        self._thing = thing
        self._all = [name for some in names for name in some if not name.startswith("__")]

    def __getitem__(self, name: str) -> Any:
        try:
            if name in self._all:
                return getattr(self._thing, name)
        except AttributeError:
            pass  # not set
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(name for name in self._all if hasattr(self._thing, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _call(fn: Callable[[Any], Any], thing: Any) -> Callable[[], Any]:
    return functools.partial(fn, thing)


def _items(mapping: Mapping[Any, Any]) -> tuple[Any, ...]:
    return (*mapping, *mapping.values())


def _contents(cells: Sequence[Any]) -> tuple[Any, ...]:
    return tuple([_content(cell) for cell in cells])


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None
