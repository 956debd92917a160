"""`Tape`: the one place that holds a `tf.GradientTape`, and makes a backward pass explicit.

It gives a model's gradients by path, or `Gradients`, one per variable or tensor that was asked for.
Keying them is `gradients`'s business.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, overload

import numpy as np
import tensorflow as tf

from tfloop._backend.keras_layers import own_losses
from tfloop._checks.messages import described
from tfloop._gradients.gradients import Gradients, unwatched, widened
from tfloop._gradients.params import GradientsParams
from tfloop._gradients.scaling import LossScaler
from tfloop._model.containers import parts_of
from tfloop._model.paths import (
    AddressBook,
    address_book,
    is_model,
    is_variable,
    tf_variable,
    unchecked_book,
    unwrap,
)
from tfloop._tracing import traces

_BACKWARD = "tape.backward(loss, wrt)"
_BACKWARD_MODEL = "tape.backward(loss, model)"

_MSG_NO_GRADIENT = (
    "`{call}` found no gradient at all: got {got}, expected a floating loss computed in the "
    "tape's block from variables or watched tensors. {cause}"
)


class Tape:
    """Records what happens in a `with` block, so that a loss can be differentiated.

    A context manager around `tf.GradientTape`: trainable variables are watched when they are
    read, tensors when they are named. Tapes nest; a backward pass of the inner one inside the
    outer block gives second order.

    Args:
      watch: Tensors, variables and models to watch from the start: inputs (adversarial examples,
        gradient penalty), or variables that were made with `trainable=False`, which a tape doesn't
        watch by itself, not even after they were unfrozen.
      persistent: Allow several backward passes; memory is kept until the tape is gone.
      scaler: `optim.scaler`: the backward pass runs scaled, and its result is unscaled float32.
        `None` is fine.

    Graph mode: works in `tf.function`, jitted too; open and close it in one trace.

    Raises:
      TypeError: Something to watch is neither a floating tensor nor a floating variable; `scaler`
        isn't one.
      ValueError: No optimizer owns the scaler.

    Example:
      >>> import tensorflow as tf, tfloop
      >>> x = tf.constant(3.0)
      >>> with tfloop.Tape(watch=[x]) as tape:
      ...     y = x * x
      >>> float(tape.backward(y).wrt(x))
      6.0
    """

    def __init__(
        self, *, watch: Any = (), persistent: bool = False, scaler: LossScaler | None = None
    ) -> None:
        if scaler is not None:
            if not isinstance(scaler, LossScaler):
                raise TypeError(
                    f"`Tape(scaler=...)` got {described(scaler)}, expected a LossScaler or None. "
                    "The optimizer holds it: `tfloop.Tape(scaler=optim.scaler)`."
                )
            scaler.check_owned("Tape(scaler=...)")
        self._scaler = scaler
        self._watched = list(_sources(watch, "Tape(watch=...)"))
        self._persistent = persistent
        self._tape = tf.GradientTape(persistent=persistent)
        self._opened = False
        self._spent = False

    def __enter__(self) -> "Tape":
        """Starts to record."""
        self._tape.__enter__()
        self._opened = True
        for source in self._watched:
            self._tape.watch(source)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops to record."""
        self._tape.__exit__(kind, error, traceback)

    @overload
    def backward(self, loss: Any, model: None = None, *, wrt: Any = None) -> Gradients: ...

    @overload
    def backward(self, loss: Any, model: Any) -> GradientsParams: ...

    @traces.not_converted
    def backward(
        self, loss: Any, model: Any = None, *, wrt: Any = None
    ) -> Gradients | GradientsParams:
        """Differentiates a loss.

            gradient of sum(loss) with respect to each source

        Args:
          loss: A floating tensor; one that isn't a scalar is summed, as in Burn and TensorFlow.
            For the mean, take it in the block: `tf.reduce_mean(loss)`.
          model: A model, or a dict of models and variables: its trainable parameters, keyed by
            path, as an update wants them. (A tensor, a variable or a list goes to `wrt`.)
          wrt: Models (their trainable parameters), variables, and tensors that the block watched or
            computed; one, or a container of them. Without either it is every variable that the
            block read, and what it watched.

        Returns:
          Of a model its `GradientsParams`, those of `GradientsParams.from_grads`; otherwise
          `Gradients`, of which several models can have their shares. Each is of its source's shape
          and dtype; float32 for 16-bit variables. An embedding gives `tf.IndexedSlices`, repeated
          rows as they come.
        Mutates: spends the tape, unless it is persistent.
        Graph mode: works; nothing here triggers a retrace.

        Raises:
          ValueError: No source has a gradient; the message lists the likely causes.
          TypeError: `loss` isn't a floating tensor, or a source isn't one; `model` and `wrt` both.
          RuntimeError: A second backward pass on a tape that isn't persistent, or one before the
            block.
        """
        if model is None:
            return self._gradients(loss, wrt, _BACKWARD)
        if wrt is not None:
            raise TypeError(
                f"`{_BACKWARD_MODEL}` got `wrt`, too: got two answers to what to differentiate by, "
                "expected one. A model's gradients are keyed by path, those of tensors by object. "
                "Ask for all at once: `grads = tape.backward(loss, wrt=[model, x])`, then "
                "`grads.wrt(x)` and `tfloop.GradientsParams.from_grads(grads, model)`."
            )
        root = unwrap(model)
        if not (is_model(root) or isinstance(root, Mapping)):
            return self._gradients(loss, model, _BACKWARD)
        return GradientsParams.from_grads(self._gradients(loss, root, _BACKWARD_MODEL), root)

    def _gradients(self, loss: Any, wrt: Any, call: str) -> Gradients:
        """The backward pass itself."""
        loss = self._checked(loss, call)
        seen = {id(source): source for source in self._tape.watched_variables()}
        seen |= {id(source): source for source in self._watched}
        sources = list(seen.values() if wrt is None else _sources(wrt, call))
        if not sources:
            got = "nothing to differentiate by"
            cause = "The block read no trainable variable. Call the model in it: `model(x)`."
            if wrt is not None:
                cause = "All of it is frozen now. Unfreeze it: `model.trainable = True`."
            raise ValueError(_MSG_NO_GRADIENT.format(call=call, got=got, cause=cause))
        scaler = self._scaler
        seed = None if scaler is None else scaler.seed(loss)
        came = grads = self._tape.gradient(loss, sources, output_gradients=seed)
        if scaler is not None:
            grads = [None if grad is None else scaler.unscaled(grad) for grad in came]
        self._spent = not self._persistent
        blind = [
            source
            for source, grad in zip(sources, grads, strict=True)
            if grad is None and id(source) not in seen and is_variable(source)
            if not source.trainable
        ]
        if blind:
            raise unwatched(call, blind)
        if all(grad is None for grad in grads):
            raise ValueError(_why_nothing(wrt, len(sources), call))
        return Gradients(
            sources,
            map(widened, sources, grads),
            scaled=None if scaler is None else map(widened, sources, came),
            of_everything=wrt is None,
        )

    def _checked(self, loss: Any, call: str) -> tf.Tensor:
        """Refuses what can't be differentiated, before the tape is spent."""
        if not self._opened:
            raise RuntimeError(
                f"`{call}` was called on a tape that never recorded: got an unopened tape, "
                "expected one after its block. Compute the loss in it: "
                "`with tfloop.Tape() as tape: loss = loss_fn(y, model(x))`."
            )
        if self._spent:
            raise RuntimeError(
                f"`{call}` was called twice: got a tape that is spent, expected a fresh or a "
                "persistent one. The first pass has freed what was recorded. Add the losses up in "
                "the block, or keep the tape: `tfloop.Tape(persistent=True)`."
            )
        number = isinstance(loss, (float, np.ndarray, np.number)) and not isinstance(loss, bool)
        if not (number or isinstance(loss, (tf.Tensor, int)) or is_variable(loss)):
            raise TypeError(
                f"`{call}` needs a loss: got {described(loss)}, expected one floating tensor. "
                "A loss function may return nothing, or several parts. Add them up in the block: "
                "`loss = tf.add_n(parts)`."
            )
        loss = tf.convert_to_tensor(loss)
        if not loss.dtype.is_floating:
            cause = "Integers carry no gradient. Cast before the sum: `tf.cast(x, tf.float32)`."
            got = f"a loss of dtype {loss.dtype.name}"
            raise ValueError(_MSG_NO_GRADIENT.format(call=call, got=got, cause=cause))
        return loss


def _why_nothing(wrt: Any, count: int, call: str) -> str:
    """Says why a loss has no gradient, most likely causes first."""
    cause = (
        "Likely: the loss was computed after the block or outside it; it went through NumPy, "
        "an integer, `tf.stop_gradient` or a `valid()` view; "
    )
    if wrt is None:
        cause += "or it uses other variables. Compute it inside: "
    elif call == _BACKWARD_MODEL:
        cause += "or the model wasn't called in the block. Compute it inside: "
    else:
        cause += "or a tensor in `wrt` wasn't watched: `tfloop.Tape(watch=[x])`. "
        cause += "Compute it inside: "
    cause += "`with tfloop.Tape() as tape: loss = loss_fn(y, model(x))`."
    return _MSG_NO_GRADIENT.format(call=call, got=f"None for all {count} sources", cause=cause)


@traces.not_converted
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
      TypeError: It isn't floating, or `model` isn't a model.

    Example:
      >>> import keras, tensorflow as tf, tfloop
      >>> net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(
      ...     1, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5))])
      >>> float(tfloop.total_loss(tf.constant(2.0), net))
      2.5
    """
    call = "total_loss(loss, model)"
    loss = tf.convert_to_tensor(loss)
    if not loss.dtype.is_floating:
        raise TypeError(
            f"`{call}` needs a floating loss: got dtype {loss.dtype.name}, expected for example "
            "float32. Integers carry no gradient. Cast it: `tf.cast(loss, tf.float32)`."
        )
    if loss.shape.rank not in (0, None):
        raise ValueError(
            f"`{call}` needs a scalar: got the shape {tuple(loss.shape)}, expected (). The penalty "
            "would be counted once per element. Reduce first: `tf.reduce_mean(loss)`."
        )
    book = unchecked_book(model, call)
    book.check(call, may_be_empty=True)  # a model without variables may have activity losses
    traces.depends_on(book)
    extra = [tf.cast(part, loss.dtype) for part in _losses(book)]
    return tf.add_n([loss, *extra]) if extra else loss


def _losses(book: AddressBook) -> Iterator[tf.Tensor]:
    """What `layer.losses` of all outermost layers holds, shared layers and variables once."""
    for layer in book.layers.values():
        yield from own_losses(layer)
    inside = {id(part) for layer in book.of_keras_2.values() for part in layer.submodules}
    for layer in book.of_keras_2.values():
        if id(layer) not in inside:
            yield from layer.losses
    for variable in book.parameters().values():
        regularizer = getattr(variable, "regularizer", None)
        if regularizer is not None:
            yield regularizer(variable)


def _sources(things: Any, call: str) -> Iterator[Any]:
    """Flattens models, variables and tensors into what a `tf.GradientTape` takes."""
    things = unwrap(things)
    parts = parts_of(things)
    if parts is not None:
        for part in parts:
            yield from _sources(part, call)
    elif is_model(things):
        yield from map(tf_variable, address_book(things, call).parameters().values())
    elif is_variable(things) or isinstance(things, tf.Tensor):
        if not tf.as_dtype(things.dtype).is_floating:
            raise TypeError(
                f"`{call}` takes no such source: got dtype {tf.as_dtype(things.dtype).name}, "
                "expected a floating one. Integers carry no gradient. Cast it before the block: "
                "`x = tf.cast(x, tf.float32)`."
            )
        yield tf_variable(things)
    elif isinstance(things, Iterable) and not isinstance(things, (str, bytes, np.ndarray)):
        yield from _sources(list(things), call)
    else:
        raise TypeError(
            f"`{call}` takes no such source: got {described(things)}, expected models, variables "
            "or tensors. Only what TensorFlow computes can be watched. Convert it before the "
            "block: `x = tf.convert_to_tensor(x)`."
        )
