"""`compile`: a step as a `tf.function` that is traced again exactly when it would be stale.

Knows signatures, traces and when they end. What a trace depends on is collected in `_traces`
by the rooms that read it.
"""

import copy
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeGuard, TypeVar, overload

import tensorflow as tf

from tfloop._checks.arguments import whole_number
from tfloop._checks.messages import described, not_pickled
from tfloop._compile import distribution, loop
from tfloop._compile.bindings import Bindings
from tfloop._compile.launch import Launcher, as_argument
from tfloop._compile.turns import STEPS
from tfloop._model.paths import AddressBook, unchecked_book
from tfloop._replicas import contexts
from tfloop._tracing import traces
from tfloop._tracing.traces import Dependency

_MANY_CHANGES = 5
"""So many new traces for the same name are worth a warning."""

_Params = ParamSpec("_Params")
_Others = ParamSpec("_Others")
_Return = TypeVar("_Return")
_Owner = TypeVar("_Owner")
_Batch = TypeVar("_Batch")


# `tf.distribute.Strategy` would be unknown to Pyright, and a strict program that compiles an error.
@overload
def compile(
    fn: Callable[_Params, _Return],
    *,
    jit_compile: bool = False,
    strategy: Any = None,
) -> "CompiledStep[_Params, _Return]": ...


@overload
def compile(
    fn: None = None,
    *,
    jit_compile: bool = False,
    strategy: Any = None,
) -> "_Decorator": ...


def compile(  # noqa: A001
    fn: Callable[..., Any] | None = None,
    *,
    jit_compile: bool = False,
    strategy: tf.distribute.Strategy | None = None,
) -> Any:
    """Compiles a step, as decorator or call.

    The function becomes a `tf.function` with these rules. Python numbers (not bools) become
    tensors, so another rate or epoch number costs no trace. A shorter last batch costs at
    most one more trace: the second shape makes that axis open. When a group is added, a parameter
    frozen or unfrozen, an optimizer's rate replaced by a schedule, a layer added or changed, or a
    name that the step uses bound to something else, the next call traces again.

    Args:
      fn: The step. Batches and rates are arguments; models, optimizers and loss functions are best
        captured. Structures of tensors, `GradientsParams` and `ModuleLearningRate` may cross.
      jit_compile: Compile with XLA. Asserts are dropped then, and each new shape compiles again.
      strategy: Run the step on every replica of it. The first argument is the batch then: tensors
        with one common leading axis, of which each replica gets its share of rows, or what
        `strategy.experimental_distribute_dataset` yields. The other arguments, and a number, flag
        or text in its place, are the same for all; none is fine, too.
        A step in it weighs each replica by its rows, so that the result is that of one device. What
        replicas return comes back as one: floating scalars as their mean weighted by rows, whole
        scalars as their sum, the rest end to end. A `keras.losses` object gives the mean of a
        replica's rows there; under a bare `strategy.run` Keras divides it by the replicas. Models
        are built in `strategy.scope()`.

    Returns:
      A `CompiledStep`, called as `fn` is; without `fn`, a decorator that makes one.
    Mutates: nothing.
    Graph mode: called inside another trace, it becomes a part of that one, as a `tf.function` does.

    Raises:
      TypeError: `fn` isn't callable, or `strategy` is none.
      ValueError: `jit_compile` around several replicas, which TensorFlow can't do.

    Example:
      >>> import tfloop
      >>> @tfloop.compile
      ... def scaled(x, rate):
      ...     return x * rate
      >>> [float(scaled(2.0, rate)) for rate in (0.5, 0.25)], scaled.trace_count
      ([1.0, 0.5], 1)
    """
    if not isinstance(jit_compile, bool):
        raise TypeError(
            f"`tfloop.compile(jit_compile=...)` got {described(jit_compile)}, expected True or "
            "False. Write `@tfloop.compile(jit_compile=True)`."
        )
    if strategy is not None and not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            f"`tfloop.compile(strategy=...)` got {described(strategy)}, expected a "
            "tf.distribute.Strategy or None. Make one: `strategy=tfloop.strategy('auto')`."
        )
    if jit_compile and strategy is not None and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            f"`tfloop.compile(jit_compile=True, strategy=...)` got {type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas, expected one: XLA can't compile around "
            "replicas. Compile what is inside: decorate the function that computes the loss and "
            "its gradients with `@tf.function(jit_compile=True)`."
        )
    if fn is None:
        return functools.partial(compile, jit_compile=jit_compile, strategy=strategy)
    if isinstance(fn, CompiledStep):
        fn = fn.python_function
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(
            f"`tfloop.compile(fn)` needs a function: got {described(fn)}, expected a step. It was "
            "called already, or used with positional options. Write `@tfloop.compile` above it, or "
            "`@tfloop.compile(jit_compile=True)`."
        )
    if hasattr(fn, "get_concrete_function"):
        raise TypeError(
            "`tfloop.compile(fn)` needs a plain function: got a tf.function, expected the function "
            "inside. It would keep its own traces, stale ones included. Leave the other decorator "
            "out, or write `tfloop.compile(fn.python_function)`."
        )
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        raise TypeError(
            f"`tfloop.compile(fn)` needs a function that returns: got {described(fn)}, a generator "
            "or coroutine, expected `return`. A trace runs to its end at once. Loop outside: "
            "`for batch in loader: step(batch)`."
        )
    return CompiledStep(fn, jit_compile, strategy)


class _Decorator(Protocol):
    def __call__(self, fn: Callable[_Params, _Return], /) -> "CompiledStep[_Params, _Return]": ...


class CompiledStep(Generic[_Params, _Return]):
    """A compiled step; made by `compile`.

    Attributes:
      python_function: The function that was compiled.
      trace_count: How often it has been traced.
    """

    def __init__(
        self,
        fn: Callable[_Params, _Return],
        jit_compile: bool,
        strategy: tf.distribute.Strategy | None = None,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.python_function = fn
        self.trace_count = 0
        self._jit_compile = jit_compile
        self._strategy = None if contexts.is_default(strategy) else strategy
        if self._strategy is not None:
            distribution.keep_losses_whole()
        self._attribute = getattr(fn, "__name__", None)
        self._owner: CompiledStep | None = None  # of a method: the step in its class
        try:
            self._signature: inspect.Signature | None = inspect.signature(fn)
        except (TypeError, ValueError):  # written in C
            self._signature = None
        self._program: _Program | None = None
        self._returned: Any = None  # by `run`, whose next call may have no step to run
        self._changes: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: _Params.args, **kwargs: _Params.kwargs) -> _Return:
        """Runs one step."""
        try:
            if tf.executing_eagerly():
                with STEPS:
                    return self._current().launch(args, kwargs)
            return self._as_part(args, kwargs)
        except TypeError:
            self._check_arguments(args, kwargs)
            raise

    @traces.not_converted
    def _as_part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Becomes a part of an outer trace, which is watched by its owner or not at all.

        Made anew, so that the outer one learns what it depends on and checks what it must.
        """
        args, kwargs = tf.nest.map_structure(as_argument, (args, kwargs))
        return self._traceable(self._traced)(*args, **kwargs)

    @traces.not_converted
    def run(
        self: "CompiledStep[Concatenate[_Batch, _Others], _Return]",
        iterator: Iterator[_Batch],
        *args: Any,
        steps: int,
        **kwargs: Any,
    ) -> _Return:
        """Runs up to `steps` steps in one call of the graph.

        The batches are drawn and stacked first; a `DataLoader`'s iterator stacks them ahead of the
        loop. The results are those of as many single calls. Where fewer than `steps` batches are
        left, or the last is shorter, these run one by one.

        Args:
          iterator: Batches, as `iter(loader)` gives them.
          *args: The step's other arguments, the same for all steps. A rate that changes per step
            comes from the optimizer (`lr=None`) or from a scheduler stepped inside.
          steps: At most so many.
          **kwargs: As `args`.

        Returns:
          What the steps return, each tensor with a leading axis of the steps that were run: 0 once
          the iterator is at its end.

        Raises:
          ValueError: The iterator is empty from the start, or `steps` is below 1.
          TypeError: It is no iterator, or `steps` no int.
          RuntimeError: It is called in a trace.
        """
        call = "compiled_step.run(iterator, steps=K)"
        steps = whole_number(call, "steps", steps, least=1, fix="steps=10")
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"`{call}` was called in a trace: got a graph, expected eager code. Batches drawn "
                "there would become a part of it. Call it between the steps."
            )
        stack, rest = loop.drawn(iterator, steps)
        if stack is not None and not tf.config.functions_run_eagerly():
            try:
                with STEPS:
                    self._returned = self._current().launch_many((stack, *args), kwargs)
            except TypeError:
                self._check_arguments((stack, *args), kwargs)
                raise
            return self._returned
        if stack is not None:
            rest = [tf.nest.map_structure(lambda t, n=n: t[n], stack) for n in range(steps)]
        if rest:
            self._returned = loop.joined([self(batch, *args, **kwargs) for batch in rest])
            return self._returned
        loop.check_not_empty(self._returned)
        return loop.nothing_like(self._returned)

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Says which argument a call lacks or has too many, in the user's names.

        TensorFlow names its own wrappers. Asked once something has failed, so that it costs
        nothing before.
        """
        if self._signature is None:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"`{self._written()}` can't be called so: {error}. Every argument of a step is "
                "given at each call, a rate too. Compare the call with the function's `def`."
            ) from None

    def _written(self) -> str:
        """The step as its user wrote it: name and parameters, without annotations."""
        name = getattr(self.python_function, "__name__", type(self.python_function).__name__)
        if self._signature is None:
            return f"{name}(...)"
        bare = [p.replace(annotation=p.empty) for p in self._signature.parameters.values()]
        return f"{name}{inspect.Signature(bare)}"

    def __repr__(self) -> str:
        """The function as it was written, how it is compiled, and how often it was traced."""
        jit = ", jit_compile=True" if self._jit_compile else ""
        kind = f", {type(self._strategy).__name__}" if self._strategy is not None else ""
        traced = f"{self.trace_count} trace{'' if self.trace_count == 1 else 's'}"
        return f"<CompiledStep {self._written()}{jit}{kind}: {traced}>"

    def _current(self) -> "_Program":
        """The program whose traces are still right."""
        program = self._program
        if program is not None and not program.is_stale():
            return program
        with self._lock:
            if self._program is program or self._program is None:
                self._program = _Program(self)
            return self._program  # Another thread may have made it meanwhile.

    def _note_change(self, name: str) -> None:
        """Says so where the same name makes one call after the other trace again."""
        self._changes[name] = self._changes.get(name, 0) + 1
        if self._changes[name] == _MANY_CHANGES:
            warnings.warn(
                f"The compiled step {self._attribute!r} is traced anew each time: got another "
                f"`{name}` for the {_MANY_CHANGES}th time, expected a value that stays. It is read "
                "by name, and a trace is right for one value alone. Pass it as an argument, or "
                "keep it in a `tf.Variable`.",
                stacklevel=5,
            )

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    @overload
    def __get__(
        self, instance: None, owner: type | None = None
    ) -> "CompiledStep[_Params, _Return]": ...

    @overload
    def __get__(
        self: "CompiledStep[Concatenate[_Owner, _Others], _Return]",
        instance: _Owner,
        owner: type | None = None,
    ) -> "CompiledStep[_Others, _Return]": ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Methods work too: each instance gets a step of its own."""
        if instance is None:
            return self
        held = getattr(instance, "__dict__", None)
        if not isinstance(held, dict):
            raise TypeError(
                f"`tfloop.compile` can't keep the step {self._attribute!r}: got "
                f"{described(instance)}, which has no `__dict__`, expected an object that has one. "
                "Each call would trace again. "
                f"Compile it in `__init__`: `self.{self._attribute} = tfloop.compile(...)`."
            )
        # Kept on the instance, so that the next access finds it and its traces. A shallow copy of
        # the instance finds it, too, but bound to the original.
        name = self._attribute or ""
        kept = held.get(name)
        if not self._has_made(kept):
            name = self._kept_as(type(instance))
            kept = held.get(name)
        if self._has_made(kept):
            if getattr(kept.python_function, "__self__", None) is instance:
                return kept
        elif name in held and name == self._attribute:
            return kept  # set by the user
        bound = CompiledStep(
            self.python_function.__get__(instance, owner), self._jit_compile, self._strategy
        )
        bound._owner = self
        held[name] = bound
        return bound

    def _has_made(self, kept: Any) -> "TypeGuard[CompiledStep[Any, Any]]":
        return isinstance(kept, CompiledStep) and kept._owner is self

    def _kept_as(self, kind: type) -> str:
        """What an instance keeps its step as: its name, unless that is a step of another class.

        So it is where one method overrides another and calls it by `super()`.
        """
        name = self._attribute or ""
        found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), self)
        return name if found is self else f"{name}@{id(self):x}"

    # With this a class' own step is asked before what the instance holds.
    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._attribute] = value

    def __delete__(self, instance: Any) -> None:
        del instance.__dict__[self._attribute]

    def __copy__(self) -> "CompiledStep[_Params, _Return]":
        """A step of its own for the same function."""
        return CompiledStep(self.python_function, self._jit_compile, self._strategy)

    def __deepcopy__(self, memo: dict) -> "CompiledStep[_Params, _Return]":
        """A step of its own, bound to the copy where it is a method."""
        fn = copy.deepcopy(self.python_function, memo)
        return CompiledStep(fn, self._jit_compile, self._strategy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled."""
        raise not_pickled(self)

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        # With `tf.config.run_functions_eagerly(True)` there is no trace to count.
        self.trace_count += not tf.executing_eagerly()
        if self._strategy is None:
            with traces.for_xla(self._jit_compile):
                return self.python_function(*args, **kwargs)
        return distribution.run(self._strategy, self.python_function, args, kwargs)

    def _traceable(self, fn: Callable[..., Any]) -> Any:
        options = {"jit_compile": True} if self._jit_compile else {}
        return tf.function(self._signed(fn), reduce_retracing=True, **options)

    def _signed(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` with the parameters of the user's function, by which TensorFlow tells arguments.

        Without these it takes two calls with one and with two arguments for relatives, and fails.
        """
        # TensorFlow counts traces by the function's code and warns of many, and the code of `fn` is
        # that of all steps. A partial has none, so it is counted by itself.
        signed = functools.partial(fn)
        if self._signature is not None:
            signed.__signature__ = self._signature  # type: ignore[attr-defined]
        return signed


class _Program:
    """The `tf.function` of a step, and what its traces depend on."""

    def __init__(self, step: CompiledStep) -> None:
        self._step = step
        self._watched: tuple[tuple[Callable[[], object], object], ...] = ()
        self._refreshed: tuple[Callable[[], None], ...] = ()
        self._bindings: Bindings | None = None
        launcher = functools.partial(
            Launcher,
            trace_count=self._trace_count,
            signature=step._signature,
            jitted=step._jit_compile,
        )
        self.launch_many = launcher(self._function(loop.looped(self._recorded)))
        self.launch = launcher(self._function(self._recorded))

    def is_stale(self) -> bool:
        """Has something changed that a trace has read?"""
        for refresh in self._refreshed:
            refresh()
        for fingerprint, seen in self._watched:
            if fingerprint() != seen:
                return True
        name = self._bindings.changed() if self._bindings is not None else None
        if name is not None:
            self._step._note_change(name)
        return name is not None

    def _function(self, fn: Callable[..., Any]) -> Any:
        make = functools.partial(self._made, fn)
        signature = self._step._signature
        kinds = {parameter.kind for parameter in signature.parameters.values()} if signature else ()
        any_number = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        return make() if any_number.isdisjoint(kinds) else _ByNumber(make)

    def _made(self, fn: Callable[..., Any]) -> Any:
        function = self._step._traceable(fn)
        if not self._step._jit_compile:
            return function
        # XLA heeds a call within a graph, but not one that is launched, so that is a plain one.
        return tf.function(self._step._signed(function), autograph=False, reduce_retracing=True)

    def _trace_count(self) -> int:
        return self._step.trace_count

    # Autograph must go through here to the user's function.
    def _recorded(self, *args: Any, **kwargs: Any) -> Any:
        with traces.recording() as found:
            outputs = self._step._traced(*args, **kwargs)
        self._note(found)
        return outputs

    @traces.not_converted
    def _note(self, found: dict[int, Dependency]) -> None:
        """Notes what a trace depends on, after it was made: what it changed itself is its own."""
        bindings = Bindings(self._step.python_function)
        things = found | {id(book): book for book in _books(bindings.models, found.values())}
        refreshers = [thing.refresh for thing in things.values() if hasattr(thing, "refresh")]
        for refresh in refreshers:
            refresh()
        with self._step._lock:
            known = [ask for ask, _ in self._watched]
            asks = [thing.fingerprint for thing in things.values()]
            # New tuples: another thread may be reading the old ones.
            self._watched += tuple((ask, ask()) for ask in asks if ask not in known)
            self._refreshed += tuple(r for r in refreshers if r not in self._refreshed)
            self._bindings = bindings


class _ByNumber:
    """A `tf.function` for each number of arguments, of one that takes any (`*args`, `**kwargs`).

    TensorFlow takes calls with one and with two of them for relatives, and fails.

    Args:
      make: Makes such a `tf.function`.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._functions: dict[Any, Any] = {}

    def _of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = len(args), frozenset(kwargs)
        if key not in self._functions:
            self._functions.setdefault(key, self._make())
        return self._functions[key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What a `tf.function` does."""
        return self._of(args, kwargs)(*args, **kwargs)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> Any:
        """What that of a `tf.function` does."""
        return self._of(args, kwargs).get_concrete_function(*args, **kwargs)


def _books(models: Iterable[Any], known: Iterable[Any]) -> list[AddressBook]:
    """The books of models that are found by name, but for parts of what another book tells of."""
    told = {id(layer) for book in known if isinstance(book, AddressBook) for layer in book.parts()}
    books = []
    for model in models:
        if id(model) not in told:
            book = unchecked_book(model)
            books.append(book)
            told.update(map(id, book.parts()))
    return books
