"""The shortest way into a function that is traced already.

`tf.function` looks at its arguments anew at each call, for some 0.4 ms. A launcher knows by their
dtypes, shapes and structure which traced function they lead to, and starts it through the public
`tf.raw_ops.StatefulPartitionedCall`, the operation by which TensorFlow calls functions in graphs.
Where that isn't the same call, it goes the ordinary way. Which way a function takes follows from
its graph and never from a clock, so that runs are alike.
"""

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfloop._backend.tensorflow import (
    EagerTensor,
    a_strategy_is_open,
    a_tape_is_open,
    dtype_of,
    has_state,
    located,
    looks_up_anew,
    shape_of,
)

# Found once: the way to them through TensorFlow's modules is longer than they are.
_functions_run_eagerly = tf.config.functions_run_eagerly
_floatx = keras.config.floatx
_WRAPPED = re.compile(r"\{\{function_node __wrapped__[^}]*\}\}")
_LARGE, _SEVERAL = 2**17, 4
"""Elements of a tensor, and how many tensors of so many, from which on operations gain more from
running side by side, which the short way gives up, than a call costs."""

# Operations that TensorFlow calls stateful, but whose state is all in the variables that they are
# handed; and calls of functions, which are looked into.
_ON_WHAT_THEY_GET = {
    *("ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"),
    *("ResourceGather", "ResourceGatherNd", "ResourceScatterNdUpdate", "ResourceScatterNdAdd"),
    *("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterUpdate"),
    *("ResourceStridedSliceAssign", "VarIsInitializedOp", "VariableShape", "Assert"),
    *("PartitionedCall", "StatefulPartitionedCall", "If", "While", "Case"),
}

_LOOPS = {"While", "StatelessWhile"}


class _Unknown(Exception):
    """An argument of a kind that only `tf.function` itself can judge."""


class _Plan(NamedTuple):
    """How a traced function is started.

    Attributes:
      concrete: It, kept alive.
      order: Which leaf of the arguments each input is.
      captured: Its other inputs.
      dtypes: Of its outputs.
      pack: Its results from the flat outputs.
    """

    concrete: Any
    order: Sequence[int]
    captured: list[tf.Tensor]
    dtypes: list[tf.DType]
    pack: Callable[[list[tf.Tensor]], Any]


class Launcher:
    """Calls a `tf.function`, the short way where that is safe.

    Args:
      function: It.
      trace_count: How often it has been traced so far.
      signature: Its parameters, if they are known.
      jitted: Is it compiled by XLA?
    """

    def __init__(
        self,
        function: Any,
        trace_count: Callable[[], int],
        signature: inspect.Signature | None = None,
        *,
        jitted: bool = False,
    ) -> None:
        self._function = function
        self._trace_count = trace_count
        self._signature = signature
        self._jitted = jitted
        self._plans: dict[Any, _Plan | None] = {}
        self._seen: set[Any] = set()
        self._has_loop: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The function's result."""
        if a_tape_is_open() or a_strategy_is_open() or _functions_run_eagerly():
            if self._jitted and a_tape_is_open() and not _functions_run_eagerly():
                self._check_differentiable(args, kwargs)
            return self._ordinary(args, kwargs)
        leaves: list[tf.Tensor] = []
        try:
            key = self._key(args, leaves)
            if kwargs:
                key = key, self._key((kwargs,), leaves)
            plan = self._plans[key]
        except _Unknown:
            return self._ordinary(args, kwargs)
        except KeyError:
            return self._first_calls(key, args, kwargs)
        if plan is None:
            return self._ordinary(args, kwargs)
        inputs = [leaves[place] for place in plan.order]
        try:
            outputs = tf.raw_ops.StatefulPartitionedCall(
                args=inputs + plan.captured, Tout=plan.dtypes, f=plan.concrete
            )
        except tf.errors.OpError as error:
            _raise_located(error, plan.concrete)
        return plan.pack(outputs)

    def _key(self, things: Iterable[Any], leaves: list[tf.Tensor]) -> Any:
        """What decides which trace fits, by value; collects the tensors on the way.

        Raises:
          _Unknown: Something else than tensors, numbers, flags and plain containers of these.
        """
        key: list[Any] = []
        for thing in things:
            kind = type(thing)
            if kind is float or kind is int:
                thing = _constant(thing, _floatx())
                kind = type(thing)
            if kind is EagerTensor:
                leaves.append(thing)
                key += (dtype_of(thing), shape_of(thing))
            elif kind is tuple or kind is list or _is_namedtuple(thing):
                key += (kind, self._key(thing, leaves))
            elif kind is dict:
                key += (kind, (*thing, self._key(thing.values(), leaves)))
            elif thing is None or kind is bool or kind is str:
                key += (kind, thing)
            else:
                raise _Unknown
        return tuple(key)

    def _ordinary(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tf.nest.map_structure(as_argument, (args, kwargs))
        return self._function(*args, **kwargs)

    def _check_differentiable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses a loop in XLA under a tape, at which TensorFlow fails or even dies.

        Raises:
          RuntimeError: The function has a loop.
        """
        args, kwargs = tf.nest.map_structure(as_argument, (args, kwargs))
        concrete = self._function.get_concrete_function(*args, **kwargs)
        if concrete not in self._has_loop:
            self._has_loop[concrete] = not _LOOPS.isdisjoint(_kinds(concrete))
        if self._has_loop[concrete]:
            raise RuntimeError(
                "`compiled_step(...)` was called under an open tape: got a loop, such as that of a "
                "recurrent layer, compiled by XLA, expected none. TensorFlow can't record it there "
                "(it may end the process). Call the step outside of the tape's block, or compile "
                "it without: `@tfloop.compile`."
            )

    def _first_calls(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first call goes the ordinary way and may trace; after the second all is known."""
        args, kwargs = tf.nest.map_structure(as_argument, (args, kwargs))
        outputs = self._function(*args, **kwargs)
        if key in self._seen:
            self._plans[key] = self._planned(args, kwargs)
        self._seen.add(key)
        return outputs

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Plan | None:
        """How these arguments lead to a traced function, or `None` for the ordinary way."""
        if _optimizes_otherwise():
            return None
        traces = self._trace_count()
        concrete = self._function.get_concrete_function(*args, **kwargs)
        if self._trace_count() != traces or not _gains(concrete):
            return None
        # Copies, so that one tensor in two places can be told apart.
        args, kwargs = tf.nest.map_structure(
            lambda leaf: tf.identity(leaf) if isinstance(leaf, tf.Tensor) else leaf, (args, kwargs)
        )
        leaves: list[tf.Tensor] = []
        self._key(args, leaves)
        self._key((kwargs,), leaves)
        place = {id(leaf): number for number, leaf in enumerate(leaves)}
        try:
            kind = concrete.function_type
            inputs = kind.unpack_inputs(kind.bind(*args, **self._with_defaults(args, kwargs)))
            order = [place[id(tensor)] for tensor in inputs]
            pack = _packer(concrete.structured_outputs, iter(range(len(concrete.outputs))))
        except (AttributeError, KeyError, TypeError, _Unknown):
            return None  # Another TensorFlow, or arguments that it converts.
        captured = list(concrete.captured_inputs)
        if len(order) + len(captured) != len(concrete.inputs):
            return None
        dtypes = [output.dtype for output in concrete.outputs]
        return _Plan(concrete, order, captured, dtypes, pack)

    def _with_defaults(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments, and the defaults of the parameters that got nothing."""
        if self._signature is None:
            return kwargs
        given = self._signature.bind(*args, **kwargs).arguments
        return kwargs | {
            name: parameter.default
            for name, parameter in self._signature.parameters.items()
            if name not in given and parameter.default is not parameter.empty
        }


def _is_namedtuple(thing: Any) -> bool:
    return isinstance(thing, tuple) and hasattr(type(thing), "_fields")


def as_argument(leaf: Any) -> Any:
    """A number as a tensor, so that a new value is no new trace; bools and enums stay Python."""
    return _as_tensor(leaf) if _is_number(leaf) else leaf


def _as_tensor(number: Any) -> Any:
    """A number as a tensor; one that no integer dtype holds stays as it is."""
    if isinstance(number, (int, np.integer)):
        if -(2**31) <= number < 2**31:
            return tf.constant(number, tf.int32)
        return tf.constant(number, tf.int64) if -(2**63) <= number < 2**63 else number
    double = keras.config.floatx() == "float64"
    return tf.constant(number, tf.float64 if double else tf.float32)


# A rate is most often the same as before.
_constant = functools.lru_cache(maxsize=64, typed=True)(lambda number, floatx: _as_tensor(number))


def _is_number(leaf: Any) -> bool:
    kind = type(leaf)
    return kind is int or kind is float or isinstance(leaf, (np.integer, np.floating))


def _optimizes_otherwise() -> bool:
    """Did the user ask for XLA clusters or the like, of which the short way knows nothing?"""
    options = tf.config.optimizer.get_experimental_options()
    asked = [name for name, on in options.items() if on or not name.startswith("disable_")]
    return bool(asked or tf.config.optimizer.get_jit())


def _gains(concrete: Any) -> bool:
    """Can it go the short way, and is a call dear beside what it computes?

    Convolutions and several large tensors say no.
    """
    if looks_up_anew(concrete):
        return False
    if not _is_exact(concrete):
        return False
    operations = concrete.graph.get_operations()
    devices = {held.device for held in concrete.captured_inputs if held.dtype == tf.resource}
    if len(devices) > 1 or len({op.device for op in operations if op.device}) > 1:
        return False  # Only `tf.function` knows how to start what spans devices.
    if any("Conv" in operation.type for operation in operations):
        return False
    sizes = [out.shape.num_elements() or 0 for op in operations for out in op.outputs]
    return sum(size >= _LARGE for size in sizes) <= _SEVERAL


def _is_exact(concrete: Any) -> bool:
    """Is a call by another operation the same call, whatever came before?

    What is started by another operation has kernels of its own, and with them their state: a seeded
    generator begins again, a table or a queue that is made inside is another one. So the graph and
    all functions in it may hold operations without state, those that only change what they are
    handed, and assertions.
    """
    return all(
        kind in _ON_WHAT_THEY_GET
        or kind.startswith(("ResourceApply", "ResourceSparseApply"))
        or not has_state(kind)
        for kind in _kinds(concrete)
    )


def _kinds(concrete: Any) -> set[str]:
    """The kinds of the operations in a traced function and in all functions that it calls."""
    graph = concrete.graph.as_graph_def()
    inner = {fn.signature.name for fn in graph.library.function}
    nodes = [*graph.node, *(node for fn in graph.library.function for node in fn.node_def)]
    return {node.op for node in nodes} - inner


def _packer(structure: Any, numbers: Any) -> Callable[[list[tf.Tensor]], Any]:
    """A function from flat outputs to the structure; the order is that of `tf.nest`.

    Raises:
      _Unknown: The structure has other containers, or leaves that are no plain tensors.
    """
    if isinstance(structure, tf.Tensor):
        number = next(numbers)
        return lambda outputs: outputs[number]
    if structure is None:
        return lambda outputs: None
    kind = type(structure)
    if kind is dict:
        # Flat outputs follow the sorted keys.
        made = {name: _packer(structure[name], numbers) for name in sorted(structure)}
        parts = {name: made[name] for name in structure}
        return lambda outputs: {name: part(outputs) for name, part in parts.items()}
    if kind in (tuple, list) or _is_namedtuple(structure):
        packers = [_packer(part, numbers) for part in structure]
        if hasattr(kind, "_fields"):
            return lambda outputs: kind(*[part(outputs) for part in packers])
        return lambda outputs: kind([part(outputs) for part in packers])
    raise _Unknown


def _raise_located(error: tf.errors.OpError, concrete: Any) -> NoReturn:
    """Raises the error with the lines of the user's code, as `tf.function` does.

    TensorFlow finds them by the name of the function, which an error of ours lacks.
    """
    found = located(concrete)
    if found is None:
        raise error from None
    lines, tag = found
    message = _WRAPPED.sub(tag, error.message, count=1)
    with lines:
        raise type(error)(error.node_def, error.op, message) from None
