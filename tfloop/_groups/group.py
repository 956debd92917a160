"""ParamGroup: which parameters? Matching on (path, variable), and the algebra of it.

A group is an immutable expression: leaves say what to look for (`patterns`), operators combine
them, and nothing is ever dropped. The room knows neither TensorFlow nor Keras; paths are made in
`paths`, and what a group means for an update is decided in `optimizer` and `schedulers`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tfloop._checks import messages
from tfloop._checks.messages import described
from tfloop._groups import patterns
from tfloop._model.paths import Variable, address_book, variable_id, variables_below

_BINDING = {"|": 1, "&": 2, "-": 3, "~": 4}
_TEXT_LEAVES = ("from_path", "from_name", "from_predicate", "from_regex")
_ARGUMENTS = {"all": 0, "from_predicate": 1, "from_regex": 1, "~": 1}


class ParamGroup:
    """A set of parameters, described by what their paths or they themselves must be.

    Groups are made by the constructors below and combined with `|` (either), `&` (both), `-`
    (the left one without the right one, also as `exclude`) and `~` (all the others). They compare
    and hash by structure, and read as the expression that makes them. A variable that several
    paths lead to (tied weights) matches a leaf if any of its paths does.

    Example:
      >>> import tfloop
      >>> group = tfloop.ParamGroup.from_name("encoder") - tfloop.ParamGroup.from_name("bias")
      >>> group.matches("encoder.dense.kernel"), group.matches("encoder.dense.bias")
      (True, False)
      >>> group
      ParamGroup.from_name('encoder') - ParamGroup.from_name('bias')
    """

    __slots__ = ("_key", "_kind", "_parts")
    _kind: str
    _parts: tuple[Any, ...]
    _key: tuple[str, Any]

    def __init__(self, *args: object) -> None:
        """Refuses: groups are made by the named constructors."""
        got = described(args[0]) if args else "no argument"
        raise TypeError(
            f"`ParamGroup(...)` doesn't say how to match: got {got}, expected one of its "
            "constructors. Paths are matched exactly, by words, by text or by a regular "
            "expression. Write for example `tfloop.ParamGroup.from_name('encoder')`."
        )

    @classmethod
    def _make(cls, kind: str, parts: Iterable[Any] = (), key: Any = None) -> "ParamGroup":
        group = object.__new__(cls)
        group._kind = kind
        group._parts = tuple(parts)
        group._key = (kind, group._parts if key is None else key)
        return group

    @classmethod
    def all(cls) -> "ParamGroup":
        """Every parameter."""
        return cls._make("all")

    @classmethod
    def from_ids(cls, variables: Iterable[Variable]) -> "ParamGroup":
        """These very variables, wherever they are found.

        Args:
          variables: Keras or TensorFlow variables; a `keras.Variable` and the `tf.Variable` inside
            it are the same. The group keeps them alive.

        Raises:
          TypeError: Something in it isn't a variable.
          ValueError: It is empty.
        """
        return cls._of_variables(patterns.variables("ParamGroup.from_ids(variables)", variables))

    @classmethod
    def from_layers(cls, *layers: Any) -> "ParamGroup":
        """The variables of these layers or modules, by identity.

        Args:
          *layers: Keras layers or models, `tf.Module`s, or views of them; a list of them is fine.
            Their variables are read when the group is matched, so a layer may be unbuilt here.

        Raises:
          TypeError: One of them has no `variables`.
          ValueError: None was given.
        """
        found = patterns.layers("ParamGroup.from_layers(*layers)", layers)
        return cls._make("from_layers", found, frozenset(id(layer) for layer in found))

    @classmethod
    def from_path(cls, *paths: str) -> "ParamGroup":
        """The parameters with exactly one of these paths.

        Args:
          *paths: Canonical paths or other paths to the same variable; a list of them is fine.

        Raises:
          TypeError: A path isn't a string.
          ValueError: There is none, or one is empty.
        """
        example = "ParamGroup.from_path('encoder.dense.kernel')"
        found = patterns.texts("ParamGroup.from_path(*paths)", paths, example)
        return cls._make("from_path", found)

    @classmethod
    def from_name(cls, *words: str) -> "ParamGroup":
        """The parameters whose path holds one of these names as whole words.

        `encoder` matches `encoder.dense.kernel` and `model.encoder.bias`, but not
        `encoder_2.kernel`; `encoder.dense` wants the two words next to each other.

        Args:
          *words: One name or several, any of which will do; a list of them is fine.

        Raises:
          TypeError: A name isn't a string.
          ValueError: There is none, or one has an empty word.
        """
        return cls._make("from_name", patterns.names("ParamGroup.from_name(words)", words))

    @classmethod
    def from_predicate(cls, predicate: str | Callable[[str, Variable], bool]) -> "ParamGroup":
        """The parameters whose path contains a text, or for which a function says yes.

        Args:
          predicate: A text, found anywhere in the path (`norm` finds `layernorm.gamma`, and
            `norm_head.kernel` too), or `fn(path, variable) -> bool`. `variable` is `None` when
            `matches` is asked about a path alone.

        Raises:
          TypeError: It is neither, or the function doesn't take two arguments.
          ValueError: The text is empty.
        """
        call = "ParamGroup.from_predicate(predicate)"
        if callable(predicate):
            key = (patterns.function(call, predicate),)
            return cls._make("from_predicate", (predicate,), key)
        example = "ParamGroup.from_predicate('norm')"
        return cls._make("from_predicate", patterns.texts(call, (predicate,), example))

    @classmethod
    def from_regex(cls, pattern: str) -> "ParamGroup":
        r"""The parameters in whose path a regular expression is found (`re.search`).

        Args:
          pattern: Python's `re` syntax, unanchored: `^head\.` for the start of a path.

        Raises:
          TypeError: It isn't a string.
          ValueError: It is empty or doesn't compile; the position is named.
        """
        return cls._make("from_regex", patterns.regex("ParamGroup.from_regex(pattern)", pattern))

    @classmethod
    def from_rank(cls, *ranks: int) -> "ParamGroup":
        """The parameters with one of these numbers of axes.

        `from_rank(0, 1)` are scalars and vectors: gains and most biases, whatever a model family
        calls them. The biases of Keras' attention have two axes, one for the heads; add their name:
        `from_rank(0, 1) | from_name("bias")`.

        Args:
          *ranks: Numbers from 0; a list of them is fine. A path alone, without its variable,
            matches none.

        Raises:
          TypeError: A rank isn't a whole number.
          ValueError: There is none, or one is negative.
        """
        return cls._make("from_rank", patterns.ranks("ParamGroup.from_rank(*ranks)", ranks))

    def __or__(self, other: "ParamGroup") -> "ParamGroup":
        """Either of the two."""
        return self._combined("|", other)

    def __and__(self, other: "ParamGroup") -> "ParamGroup":
        """Both at once."""
        return self._combined("&", other)

    def __sub__(self, other: "ParamGroup") -> "ParamGroup":
        """This group without the other one."""
        return self._combined("-", other)

    def __invert__(self) -> "ParamGroup":
        """Everything else."""
        return self._make("~", (self,))

    def exclude(self, other: "ParamGroup") -> "ParamGroup":
        """This group without the other one: `a.exclude(b)` is `a - b`.

        What the other group excludes itself isn't part of it, and so isn't excluded here.
        """
        return self - other

    def _combined(self, operator: str, other: "ParamGroup") -> "ParamGroup":
        as_group(f"group {operator} other", other)
        # A chain of one operator is one node, so that a union of thousands isn't deep.
        left = self._parts if self._kind == operator else (self,)
        return self._make(operator, (*left, other))

    def matches(self, path: str, variable: Variable | None = None) -> bool:
        """Is this parameter in the group?

        Args:
          path: Its path.
          variable: The variable; without it, groups made of variables or layers say no.

        Raises:
          TypeError: The path isn't a string.
        """
        if not isinstance(path, str):
            raise TypeError(
                f"`group.matches(path, variable)` asks for the path first: got {described(path)}, "
                "expected a string. A variable alone has no path. Write "
                "`group.matches('encoder.dense.kernel', variable)`."
            )
        return self.matches_any((path,), variable)

    def matches_any(self, paths: tuple[str, ...], variable: Variable | None = None) -> bool:
        """Is the parameter that all these paths lead to in the group?

        Each leaf is asked about all paths before the operators combine the answers, so `~` of a
        leaf is right for tied weights too.
        """
        match self._kind:
            case "|":
                return any(part.matches_any(paths, variable) for part in self._parts)
            case "&":
                return all(part.matches_any(paths, variable) for part in self._parts)
            case "-":
                kept, *excluded = (part.matches_any(paths, variable) for part in self._parts)
                return kept and not any(excluded)
            case "~":
                return not self._parts[0].matches_any(paths, variable)
            case "from_layers":
                return self._bound().matches_any(paths, variable)
            case "from_ids":
                # Its own id too: Keras may not have made the variable inside when it was given.
                ids = {id(variable), variable_id(variable)}
                return variable is not None and not ids.isdisjoint(self._key[1])
        return any(patterns.hits(self._kind, self._parts, path, variable) for path in paths)

    def select(self, model: Any) -> dict[str, Variable]:
        """The members that a model has, by canonical path, in the order of the model.

        Args:
          model: A built Keras model or layer, a `tf.Module`, a view of one, or a dict or list of
            these.

        Returns:
          Path -> variable: parameters, frozen ones included; statistics of BatchNorm aren't.
        Mutates: nothing.
        Graph mode: pure Python.

        Raises:
          ValueError: The model has no variables yet.
          TypeError: It isn't a model.
        """
        book = address_book(model, "group.select(model)")
        group = self.bind()
        return {
            path: variable
            for path, variable in book.trainable_kinds().items()
            if group.matches_any(book.paths_of(path), variable)
        }

    def bind(self) -> "ParamGroup":
        """The same group with the variables of its layers read now: for matching in bulk."""
        return self._map_leaves(lambda leaf: leaf._bound())

    def resolve(
        self,
        named: Mapping[str, Variable],
        paths_of: Callable[[str], tuple[str, ...]] = lambda path: (path,),
    ) -> "ParamGroup":
        """The same group over one model with identities and functions turned into exact paths.

        Args:
          named: Canonical path -> variable: everything that the group may meet.
          paths_of: All paths to the variable at a canonical path.
        """

        def resolved(leaf: ParamGroup) -> ParamGroup:
            if leaf._is_plain():
                return leaf
            bound = leaf._bound()
            found = [p for p, v in named.items() if bound.matches_any(paths_of(p), v)]
            return ParamGroup.from_path(*found) if found else ~ParamGroup.all()

        return self._map_leaves(resolved)

    def leaves(self) -> Iterator["ParamGroup"]:
        """What the group is made of, without the operators."""
        if self._kind in _BINDING:
            for part in self._parts:
                yield from part.leaves()
        else:
            yield self

    def patterns(self) -> list[str]:
        """The texts that the group looks for: paths, names, parts of paths and expressions."""
        found = (part for leaf in self.leaves() if leaf._is_plain() for part in leaf._parts)
        return list(dict.fromkeys(found))

    @property
    def needs_variables(self) -> bool:
        """Does it look at variables, so that paths alone don't tell its members?"""
        return not all(leaf._is_plain() for leaf in self.leaves())

    @classmethod
    def _of_variables(cls, variables: Iterable[Variable]) -> "ParamGroup":
        found = tuple(variables)
        return cls._make("from_ids", found, frozenset(map(variable_id, found)))

    def _bound(self) -> "ParamGroup":
        if self._kind != "from_layers":
            return self
        return self._of_variables(v for layer in self._parts for v in variables_below(layer))

    def _map_leaves(self, change: Callable[["ParamGroup"], "ParamGroup"]) -> "ParamGroup":
        if self._kind not in _BINDING:
            return change(self)
        return self._make(self._kind, [part._map_leaves(change) for part in self._parts])

    def _is_plain(self) -> bool:
        """Is it a leaf that asks about paths alone?"""
        texts = self._kind in _TEXT_LEAVES and all(isinstance(part, str) for part in self._parts)
        return texts or self._kind == "all"

    def to_config(self) -> dict[str, Any]:
        """The group as plain data for JSON: `{"-": [{"from_name": ["encoder"]}, ...]}`.

        Raises:
          ValueError: The group is made of variables, layers or a function, which mean nothing in
            another process, and `build` hasn't turned them into paths.
        """
        if self._kind in _BINDING:
            return {self._kind: [part.to_config() for part in self._parts]}
        if not self._is_plain() and self._kind != "from_rank":
            raise ValueError(
                f"`group.to_config()` can't write objects down: got {self}, expected paths, names, "
                "texts or expressions. Variables, layers and functions exist in this process "
                "alone. Write `tfloop.ParamGroup.from_path(*group.select(model)).to_config()`."
            )
        return {self._kind: list(self._parts)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ParamGroup":
        """The group that `to_config` wrote.

        Raises:
          ValueError: It isn't such a record.
        """
        kind, parts = next(iter(config.items())) if _is_record(config) else (None, ())
        if kind in (*_TEXT_LEAVES, "all", "from_rank"):
            return getattr(cls, kind)(*parts)
        if kind in _BINDING:
            return cls._make(kind, [cls.from_config(part) for part in parts])
        raise ValueError(
            f"`ParamGroup.from_config(config)` can't read the record: got {config!r}, expected one "
            "key, a constructor or an operator, with a list. It may be the record of something "
            "else. Write it with `group.to_config()`."
        )

    def __eq__(self, other: object) -> bool:
        """The same expression?"""
        return isinstance(other, ParamGroup) and self._key == other._key

    def __hash__(self) -> int:
        """By structure, as `==`."""
        return hash(self._key)

    def __bool__(self) -> bool:
        """Refuses: `a or b` would silently be `a`."""
        raise TypeError(
            f"`bool(group)` has no answer: got {self}, expected a question about a path. Python's "
            "`and`, `or` and `not` don't combine groups. Write `a & b`, `a | b` or `~a`."
        )

    def __repr__(self) -> str:
        """The expression that makes the group."""
        return self._text("ParamGroup.")

    def __str__(self) -> str:
        """The expression without the class name, for tables and messages."""
        return self._text("")

    def _text(self, prefix: str) -> str:
        if self._kind not in _BINDING:
            return f"{prefix}{self._kind}({patterns.shown(self._parts)})"
        level = _BINDING[self._kind]

        def inner(part: ParamGroup, needed: int) -> str:
            text = part._text(prefix)
            return f"({text})" if _BINDING.get(part._kind, 5) < needed else text

        first, *rest = self._parts
        if not rest:
            return f"~{inner(first, level)}"
        # The operators group to the left: an equal one on the right needs its parentheses.
        return f" {self._kind} ".join([inner(first, level), *(inner(p, level + 1) for p in rest)])

    def __copy__(self) -> "ParamGroup":
        """Itself: a group can't change."""
        return self

    def __deepcopy__(self, memo: dict) -> "ParamGroup":
        """Itself: copied variables would be other variables."""
        return self

    def __reduce__(self) -> tuple:
        """Pickles as its config."""
        return ParamGroup.from_config, (self.to_config(),)


def as_group(call: str, group: Any) -> ParamGroup:
    """The group, or a TypeError that says how to make one.

    Args:
      call: The public call as typed.
      group: What the user gave as group.

    Raises:
      TypeError: It isn't a group.
    """
    if isinstance(group, ParamGroup):
        return group
    name = group if isinstance(group, str) and group else "encoder"
    raise TypeError(
        f"`{call}` needs a ParamGroup: got {described(group)}, expected for example "
        "ParamGroup.all(). A text alone doesn't say how to match it. Write "
        f"`tfloop.ParamGroup.from_name({name!r})`."
    )


def _is_record(config: Any) -> bool:
    """One key with a list that is as long as the constructor or operator needs."""
    if not (isinstance(config, Mapping) and len(config) == 1):
        return False
    ((kind, parts),) = config.items()
    fewest = _ARGUMENTS.get(kind, 2 if kind in _BINDING else 1)
    return isinstance(parts, (list, tuple)) and (
        len(parts) == fewest or len(parts) > fewest and kind not in _ARGUMENTS
    )


def near_misses(group: ParamGroup, paths: Iterable[str], most: int = 5) -> list[str]:
    """Paths that somebody who wrote this group may have meant: for groups that match nothing."""
    known = list(paths)
    found = (p for text in group.patterns() for p in messages.near_misses(text, known, most))
    return list(dict.fromkeys(found))[:most]
