"""`compile`: a step as a `tf.function` that is traced again exactly when it would be stale.

Knows signatures, traces and when they end. What a trace depends on is collected in `_traces`
by the rooms that read it.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfloop import _traces
from tfloop._messages import described
from tfloop._traces import Dependency


def compile(fn: Callable[..., Any] | None = None, *, jit_compile: bool = False) -> Any:  # noqa: A001
    """Compiles a step, as decorator or call.

    The function becomes a `tf.function` with these rules. Python numbers (not bools) become
    tensors, so another rate or epoch number costs no trace. A shorter last batch costs at
    most one more trace: the second shape makes that axis open. When a group is added, a parameter
    frozen or thawed, or an optimizer's rate replaced by a schedule, the next call traces again.

    Args:
      fn: The step. Batches and rates are arguments; models, optimizers and loss functions are best
        captured. Structures of tensors, `GradientsParams` and `ModuleLearningRate` may cross.
      jit_compile: Compile with XLA. Asserts are dropped then, and each new shape compiles again.

    Returns:
      A `CompiledStep`, called as `fn` is; without `fn`, a decorator that makes one.
    Mutates: nothing.
    Graph mode: called inside another trace, it becomes a part of that one, as a `tf.function` does.

    Raises:
      TypeError: `fn` isn't callable.

    Example:
      >>> import tfloop
      >>> @tfloop.compile
      ... def scaled(x, rate):
      ...     return x * rate
      >>> [float(scaled(2.0, rate)) for rate in (0.5, 0.25)], scaled.trace_count
      ([1.0, 0.5], 1)
    """
    if fn is None:
        return functools.partial(compile, jit_compile=jit_compile)
    if isinstance(fn, CompiledStep):
        fn = fn.python_function
    if not callable(fn):
        raise TypeError(
            f"`tfloop.compile(fn)` needs a function: got {described(fn)}. It was called, or used "
            "with positional options. Write `@tfloop.compile` above it, or "
            "`@tfloop.compile(jit_compile=True)`."
        )
    return CompiledStep(fn, jit_compile)


class CompiledStep:
    """A compiled step; made by `compile`.

    Attributes:
      python_function: The function that was compiled.
      trace_count: How often it has been traced.
    """

    def __init__(self, fn: Callable[..., Any], jit_compile: bool) -> None:
        functools.update_wrapper(self, fn)
        self.python_function = fn
        self.trace_count = 0
        self._jit_compile = jit_compile
        self._function: Any = None
        self._fingerprints: dict[int, tuple[Dependency, object]] = {}

    @_traces.not_converted
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step."""
        if self._function is None or self._is_stale():
            self._fingerprints = {}
            self._function = self._new_function()
        args, kwargs = tf.nest.map_structure(_as_argument, (args, kwargs))
        return self._function(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Methods work too: each instance gets a step of its own."""
        if instance is None:
            return self
        bound = CompiledStep(self.python_function.__get__(instance, owner), self._jit_compile)
        # Kept on the instance, so that the next access finds it and its traces.
        instance.__dict__[self.__name__] = bound
        return bound

    def _is_stale(self) -> bool:
        """Has something changed that a trace has read?"""
        return any(thing.fingerprint() != seen for thing, seen in self._fingerprints.values())

    def _new_function(self) -> Any:
        """A `tf.function` that counts its traces and notes what they depend on."""
        fingerprints = self._fingerprints

        def traced(*args: Any, **kwargs: Any) -> Any:
            self.trace_count += 1
            with _traces.recording() as found:
                outputs = self.python_function(*args, **kwargs)
            fingerprints.update({key: (t, t.fingerprint()) for key, t in found.items()})
            return outputs

        options = {"jit_compile": True} if self._jit_compile else {}
        return tf.function(traced, reduce_retracing=True, **options)


def _as_argument(leaf: Any) -> Any:
    """Numbers as tensors, so that a new value is no new trace."""
    if isinstance(leaf, (bool, np.bool_)):
        return leaf
    if isinstance(leaf, (int, np.integer)):
        fits = -(2**31) <= leaf < 2**31
        return tf.constant(leaf, tf.int32 if fits else tf.int64)
    if isinstance(leaf, (float, np.floating)):
        return tf.constant(leaf, tf.float32)
    return leaf
