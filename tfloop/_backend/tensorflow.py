"""Private of TensorFlow: eager tensors, open tapes and strategies, graphs, traced functions.

What the short way into a traced function asks has a fallback that is right and slower.
"""

import contextlib
import operator
import threading
from typing import Any

import tensorflow as tf

from tfloop._backend.versions import required


class _NoTensor:
    """The kind of nothing: without the kind of eager tensors, no argument is known as one."""


# Not the type of a tensor made here: the first tensor fixes the devices, see `tfloop.strategy`.
EagerTensor: Any = getattr(getattr(tf, "__internal__", None), "EagerTensor", _NoTensor)
"""The kind of what eager code computes."""

dtype_of: Any = getattr(EagerTensor, "_datatype_enum", None) or operator.attrgetter("dtype")
"""The dtype of an eager tensor as a number, which is compared without Python, or as it is."""

shape_of: Any = getattr(EagerTensor, "_shape_tuple", None) or operator.attrgetter("shape")
"""The shape of an eager tensor as a tuple, or as it is."""

try:
    from tensorflow.python.eager.record import could_possibly_record
except ImportError:

    def could_possibly_record() -> bool:
        return True


a_tape_is_open = could_possibly_record
"""Does any tape record what is computed now? Where TensorFlow doesn't say, one may."""

try:
    from tensorflow.python.framework.op_def_registry import get as _definition
except ImportError:

    def _definition(name: str) -> Any:
        return None


_default_graph = tf.compat.v1.get_default_graph  # the way to it is longer than it is


def a_strategy_is_open() -> bool:
    """Is this the scope or a replica of a strategy?"""
    # The list at which `has_strategy` looks; an empty one costs it an exception.
    stack = getattr(_default_graph(), "_distribution_strategy_stack", True)
    return stack and tf.distribute.has_strategy()


def is_default_strategy(strategy: Any) -> bool:
    """Is it TensorFlow's default strategy, one device without replicas?"""
    with tf.Graph().as_default():  # a graph has scopes of its own, and this one none
        default = tf.distribute.get_strategy()
    return type(strategy.extended) is type(default.extended)


def has_state(kind: str) -> bool:
    """Does an operation of this kind keep state, or work on the world? What isn't known does."""
    definition = _definition(kind)
    return definition is None or definition.is_stateful


def looks_up_anew(concrete: Any) -> bool:
    """Does a traced function look some of its captures up at each call? Perhaps, if unknown."""
    return bool(getattr(concrete.graph, "deferred_external_captures", True))


def located(concrete: Any) -> tuple[contextlib.AbstractContextManager, str] | None:
    """What adds the lines of the user's code to an error of a traced function.

    Returns:
      A context in which to raise it, and the words in its message by which TensorFlow knows the
      function; `None` where this TensorFlow has no such thing.
    """
    try:
        from tensorflow.python.eager.polymorphic_function import atomic_function

        context = atomic_function.InterpolateRuntimeError(concrete.inference_fn)
        return context, f"{{{{function_node {concrete.inference_fn.name.decode()}}}}}"
    except (ImportError, AttributeError):
        return None


def outer_graph(graph: tf.Graph) -> tf.Graph | None:
    """The graph or eager context in which a function is traced; `None` for what is no function."""
    if not graph.building_function:
        return None
    return required(graph, "outer_graph", "tensorflow.Graph", "the graph in which it is traced")


def replica_graph() -> tf.Graph | None:
    """The graph in which this replica's code began, where replicas run in threads.

    TensorFlow compares the present one with it, in words that help nobody, before replicas meet.
    """
    return getattr(threading.current_thread(), "graph", None)


def is_tracking(name: str) -> bool:
    """Is an attribute TensorFlow's own, in which it keeps what a checkpoint follows?"""
    return name.startswith("_self_")


def ignored_attributes(module: tf.Module) -> frozenset[str]:
    """The attributes that a `tf.Module` doesn't look into for variables."""
    return getattr(module, "_TF_MODULE_IGNORED_PROPERTIES", frozenset())
