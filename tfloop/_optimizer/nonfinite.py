"""What an optimizer does about gradients that aren't finite, and how it says where they are.

Whether they are is decided for all replicas together; where they are, by each for itself.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfloop._checks.messages import described
from tfloop._model.paths import Variable
from tfloop._optimizer.checks import STEP
from tfloop._replicas import contexts, placement, synchronized
from tfloop._tensors import sparse
from tfloop._tensors.sparse import Gradient
from tfloop._tracing import traces

CHOICES = (None, "skip", "raise")

# Without apostrophes, which TensorFlow would show with a backslash each.
_MSG = (
    f"`{STEP}` got gradients that are not finite: got NaN or infinity, {{where}}, expected finite "
    "numbers. {count}. Nothing was changed. If all have it, the loss or its input is not finite; "
    "else look for a root, logarithm or division between that parameter and the loss: "
    "`tf.debugging.enable_check_numerics()`.{rest}"
)
_FIRST = "in the backward pass first for `{}`"
_ELSEWHERE = "from another replica, or in the norm that a clipping takes"


def checked(call: str, on_nonfinite: Any, skip_nonfinite: Any, scaler: Any) -> str | None:
    """What is to be done, one of `CHOICES`.

    Raises:
      ValueError: It is none of them, or contradicts the other arguments.
    """
    if on_nonfinite not in CHOICES:
        raise ValueError(
            f"`{call}` got {described(on_nonfinite)} as on_nonfinite, expected 'skip', 'raise' or "
            "None, which applies what it gets. Write "
            "`tfloop.ModuleOptimizer(optimizer, on_nonfinite='raise')`."
        )
    skips = "a scaler" if scaler is not None else "skip_nonfinite=True" if skip_nonfinite else None
    if skips and on_nonfinite == "raise":
        raise ValueError(
            f"`{call}` got on_nonfinite='raise' with {skips}, expected one of them: what is "
            "skipped can't raise. A scaler finds its scale by skipping. Leave one out: "
            "`tfloop.ModuleOptimizer(optimizer, on_nonfinite='raise')`."
        )
    return "skip" if skips else on_nonfinite


def flags_of(grads: Mapping[str, Gradient]) -> dict[str, tf.Tensor]:
    """Path -> is the gradient finite, a scalar bool?"""
    return {path: sparse.all_finite(grad) for path, grad in grads.items()}


class Alarm:
    """Says where gradients weren't finite: when the step runs, or under XLA before the next one.

    A step that XLA compiles can't raise. It leaves the update out and notes what it has met.
    """

    def __init__(self) -> None:
        kind = {"dtype": tf.int64, "trainable": False, "name": "nonfinite"}
        self._noted = traces.eagerly(lambda: tf.Variable([0, 0, 0, 0], **kind))
        self._paths: list[str] = []
        self._is_late = False

    def place_with(self, variables: Iterable[Variable]) -> None:
        """Keeps its note where these variables are."""
        self._noted = placement.placed_with(self._noted, variables, placement.MIRRORED)

    def findings(
        self, flags: Mapping[str, tf.Tensor], parameters: Iterable[str], updates: tf.Tensor
    ) -> tf.Tensor:
        """What was met here: how many of how many aren't finite, the first's place, the updates.

        Args:
          flags: Path -> is the gradient of this replica finite?
          parameters: The paths of the model, in its order.
          updates: How many were made before.
        """
        # Backward: what isn't finite spreads from the loss to the parameters before.
        self._paths = [*parameters][::-1]
        places = [place for place, path in enumerate(self._paths) if path in flags]
        found = tf.stack([flags[self._paths[place]] for place in places])
        wrong = tf.cast(tf.logical_not(found), tf.int64)
        first = tf.gather(tf.constant(places, tf.int64), tf.argmax(wrong))
        counts = [tf.reduce_sum(wrong), tf.constant(len(places), tf.int64)]
        return tf.stack([*counts, first, tf.cast(updates, tf.int64)])

    def asserted(self, finite: tf.Tensor, met: tf.Tensor) -> list[tf.Tensor]:
        """An assertion that they are finite, which names the first parameter whose isn't.

        Args:
          finite: Are they, on all replicas together?
          met: As `findings` gives it.
        """
        if traces.is_for_xla():
            self._is_late = True
            return []

        rest, data = " Gradients that have it, of so many, path, updates before:", [met]
        if contexts.is_replica():
            rest = f"{rest[:-1]}; replica:"
            data.append(tf.distribute.get_replica_context().replica_id_in_sync_group)
        said = functools.partial(_MSG.format, count="Counts follow", rest=rest)
        is_plain = tf.executing_eagerly() or traces.is_current()

        def fail() -> tf.Tensor:
            wrong, _, first, _ = tf.unstack(met)
            if is_plain:
                begin, end = said(where=_FIRST).split("{}")
                text = tf.strings.join([begin, tf.gather(self._paths, first), end])
                tf.raw_ops.Assert(condition=tf.equal(wrong, 0), data=[text, *data], summarize=4)
            else:
                # XLA takes no text that isn't known when it is traced, and nobody tells whether a
                # `tf.function` is for XLA: one assertion for each path, which takes time to trace.
                for place, path in enumerate(self._paths):
                    other = tf.logical_or(tf.equal(wrong, 0), tf.not_equal(first, place))
                    text = said(where=_FIRST.format(path))
                    tf.raw_ops.Assert(condition=other, data=[text, *data], summarize=4)
            tf.raw_ops.Assert(condition=False, data=[said(where=_ELSEWHERE), *data], summarize=4)
            return tf.constant(0)

        return [tf.cond(finite, lambda: tf.constant(0), fail)]

    def note(self, strategy: Any, finite: tf.Tensor, met: tf.Tensor) -> None:
        """Keeps the first of what was met, once for all replicas, where it can't raise."""
        if self._is_late:
            keeps = tf.logical_or(finite, self._noted[1] > 0)
            synchronized.assign(strategy, self._noted, tf.where(keeps, self._noted, met))

    def ring(self) -> None:
        """Raises what a step under XLA has noted, once.

        Raises:
          tf.errors.InvalidArgumentError: As the assertion does.
        """
        if not (self._is_late and tf.executing_eagerly()):
            return
        wrong, of, first, updates = self._noted.numpy()
        if of:
            self._noted.assign(tf.zeros_like(self._noted))
            where = _FIRST.format(self._paths[first]) if wrong else _ELSEWHERE
            count = f"{wrong} of {of} have it, after {updates} updates, in a step under XLA"
            text = _MSG.format(where=where, count=count, rest="")
            raise tf.errors.InvalidArgumentError(None, None, text)
