"""`Tape`: the one place that holds a `tf.GradientTape`, and makes a backward pass explicit.

It gives `Gradients`, one per variable or tensor that was asked for. Keying them by path is
`_gradients`' business; scaling of losses, `_scaling`'s.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import tensorflow as tf

from tfloop import _sparse, _traces
from tfloop._gradients import Gradients
from tfloop._messages import described
from tfloop._paths import address_book, is_model, is_variable, tf_variable, unwrap

_MSG_NO_GRADIENT = (
    "`tape.backward(loss)` found no gradient at all: {got}, expected a floating loss computed in "
    "the tape's block from variables or watched tensors. {cause}"
)


class Tape:
    """Records what happens in a `with` block, so that a loss can be differentiated.

    A context manager around `tf.GradientTape`: trainable variables are watched when they are
    read, tensors when they are named. Tapes nest; a backward pass of the inner one inside the
    outer block gives second order.

    Args:
      watch: Tensors and variables to watch from the start: inputs (adversarial examples, gradient
        penalty), or variables made with `trainable=False`.
      persistent: Allow several backward passes; memory is kept until the tape is gone.

    Graph mode: works in `tf.function`, jitted too; open and close it in one trace.

    Raises:
      TypeError: Something to watch is neither a floating tensor nor a floating variable.

    Example:
      >>> import tensorflow as tf, tfloop
      >>> x = tf.constant(3.0)
      >>> with tfloop.Tape(watch=[x]) as tape:
      ...     y = x * x
      >>> float(tape.backward(y).wrt(x))
      6.0
    """

    def __init__(self, *, watch: Any = (), persistent: bool = False) -> None:
        self._watched = list(_sources(watch, "Tape(watch=...)"))
        self._persistent = persistent
        self._tape = tf.GradientTape(persistent=persistent)
        self._spent = False

    def __enter__(self) -> "Tape":
        self._tape.__enter__()
        for source in self._watched:
            self._tape.watch(source)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._tape.__exit__(kind, error, traceback)

    @_traces.not_converted
    def backward(self, loss: Any, wrt: Any = None) -> Gradients:
        """Differentiates a loss.

            gradient of sum(loss) with respect to each source

        Args:
          loss: A floating tensor; one that isn't a scalar is summed, as in Burn and TensorFlow.
            For the mean, take it in the block: `tf.reduce_mean(loss)`.
          wrt: Models (their trainable parameters), variables, and tensors that the block watched or
            computed; one, or a container of them. By default every variable that the block read,
            and what it watched.

        Returns:
          `Gradients`, of each source's shape and dtype; float32 for 16-bit variables. An embedding
          gives `tf.IndexedSlices`, repeated rows as they come.
        Mutates: spends the tape, unless it is persistent.
        Graph mode: works; nothing here triggers a retrace.

        Raises:
          ValueError: No source has a gradient; the message lists the likely causes.
          TypeError: `loss` isn't a floating tensor, or a source isn't one.
          RuntimeError: A second backward pass on a tape that isn't persistent.
        """
        loss = self._checked(loss)
        if wrt is None:
            seen = list(self._tape.watched_variables())
            known = {id(variable) for variable in seen}
            sources = seen + [source for source in self._watched if id(source) not in known]
        else:
            sources = list(_sources(wrt, "tape.backward(loss, wrt)"))
        if not sources:
            cause = "The block read no trainable variable. Call the model in it: `model(x)`."
            raise ValueError(_MSG_NO_GRADIENT.format(got="got an empty tape", cause=cause))
        grads = self._tape.gradient(loss, sources)
        self._spent = not self._persistent
        if all(grad is None for grad in grads):
            raise ValueError(self._why_nothing(wrt, len(sources)))
        return Gradients(sources, map(_widened, sources, grads))

    def _checked(self, loss: Any) -> tf.Tensor:
        """Refuses what can't be differentiated, before the tape is spent."""
        if self._spent:
            raise RuntimeError(
                "`tape.backward(loss)` was called twice: got a tape that is spent, expected a fresh "
                "or a persistent one. Several losses can be summed, or ask for a persistent tape: "
                "`tfloop.Tape(persistent=True)`."
            )
        if loss is None or isinstance(loss, (str, bool)):
            raise TypeError(
                f"`tape.backward(loss)` needs a loss: got {described(loss)}, expected a floating "
                "tensor. Did the loss function return nothing? End it with `return loss`."
            )
        loss = loss if isinstance(loss, tf.Tensor) else tf.convert_to_tensor(loss)
        if not loss.dtype.is_floating:
            cause = "Integers carry no gradient. Cast before the sum: `tf.cast(x, tf.float32)`."
            got = f"got a loss of dtype {loss.dtype.name}"
            raise ValueError(_MSG_NO_GRADIENT.format(got=got, cause=cause))
        return loss

    def _why_nothing(self, wrt: Any, count: int) -> str:
        cause = (
            "Likely: the loss was computed after the block or outside it; it went through NumPy, "
            "an integer, `tf.stop_gradient` or a `valid()` view; "
        )
        if wrt is None:
            cause += "or it uses other variables. Compute it inside: "
        else:
            cause += "or a tensor in `wrt` wasn't watched: `Tape(watch=[x])`. Compute it inside: "
        cause += "`with tfloop.Tape() as tape: loss = loss_fn(y, model(x))`."
        return _MSG_NO_GRADIENT.format(got=f"got None for all {count} sources", cause=cause)


@_traces.not_converted
def total_loss(loss: Any, model: Any) -> tf.Tensor:
    """Adds the losses that the model's layers made in their last call.

        loss + sum(model.losses)

    These are weight regularisers and activity losses, which a hand-written loop forgets easily.
    Call it in the tape's block, right after the model. A model without any adds 0.

    Args:
      loss: A floating scalar. (A penalty added to a vector would be counted once per element.)
      model: As in `named_parameters`.

    Returns:
      A scalar of the loss's dtype.
    Mutates: nothing.
    Graph mode: works.

    Raises:
      ValueError: `loss` isn't a scalar.

    Example:
      >>> import keras, tensorflow as tf, tfloop
      >>> net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(
      ...     1, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5))])
      >>> float(tfloop.total_loss(tf.constant(2.0), net))
      2.5
    """
    loss = tf.convert_to_tensor(loss)
    if loss.shape.rank not in (0, None):
        raise ValueError(
            f"`total_loss(loss, model)` needs a scalar: got shape {tuple(loss.shape)}, expected "
            "(). The penalty would be counted once per element. Reduce first: "
            "`tf.reduce_mean(loss)`."
        )
    extra = [tf.cast(part, loss.dtype) for part in _losses(model)]
    return tf.add_n([loss, *extra]) if extra else loss


def _losses(model: Any) -> Iterator[tf.Tensor]:
    """The losses of every outermost Keras layer of a root."""
    layers = address_book(model, "total_loss(loss, model)").outermost_layers()
    for layer in layers:
        yield from layer.losses


def _sources(things: Any, call: str) -> Iterator[Any]:
    """Flattens models, variables and tensors into what a `tf.GradientTape` takes."""
    things = unwrap(things)
    if isinstance(things, Mapping):
        things = list(things.values())
    if is_model(things):
        yield from map(tf_variable, address_book(things, call).parameters().values())
    elif is_variable(things) or isinstance(things, tf.Tensor):
        if not tf.as_dtype(things.dtype).is_floating:
            raise TypeError(
                f"`{call}` got a source of dtype {tf.as_dtype(things.dtype).name}, expected a "
                "floating one: integers carry no gradient. Cast it: `tf.cast(x, tf.float32)`."
            )
        yield tf_variable(things)
    elif isinstance(things, Iterable) and not isinstance(things, (str, bytes)):
        for thing in things:
            yield from _sources(thing, call)
    else:
        raise TypeError(
            f"`{call}` got {described(things)}, expected models, variables or tensors. Only what "
            "TensorFlow computes can be watched: `x = tf.convert_to_tensor(x)`."
        )


def _widened(source: Any, grad: Any) -> Any:
    """The gradient of a 16-bit variable in float32, where sums over many steps stay right."""
    is_short = grad is not None and is_variable(source) and grad.dtype.size < 4
    return _sparse.cast(grad, tf.float32) if is_short else grad
