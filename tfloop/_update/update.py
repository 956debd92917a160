"""How the variables of one group are updated: by a Keras optimizer of their own.

It applies Keras' rules as they are, with three additions: several rates in one update, a subset of
the variables at a time, and state by path that survives when the set of variables changes.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfloop._backend import keras_optimizers
from tfloop._backend.keras_optimizers import rate_of
from tfloop._model.paths import Variable
from tfloop._replicas import contexts, synchronized
from tfloop._tensors import sparse
from tfloop._tensors.sparse import Gradient
from tfloop._update import rules
from tfloop._update.cell_update import CellUpdate
from tfloop._update.given_rate import GivenRate
from tfloop._update.keras_optimizer import (
    check_arguments,
    check_copy,
    clipping_of,
    copy_of,
    twin_of,
)
from tfloop._update.slots import OptimizerState


class GroupUpdate:
    """One group's own copy of a Keras optimizer, and the state of the variables it serves.

    Args:
      given: The optimizer that the user gave. It is never changed; its `learning_rate` is read at
        every step, so setting it later works.
      call: The public call, for messages.
      fused: Update many small variables as one vector and large ones in one pass, where the rule
        is elementwise.

    Attributes:
      given: As above.
      clipping: The clipping that `given` asked for by its own arguments, or `None`.
      state: The copy, and its state by path.
      rate: The learning rate of `given`.
    """

    def __init__(self, given: Optimizer, call: str, *, fused: bool = True) -> None:
        check_arguments(given, call)
        self.given = given
        self.rate = GivenRate(given)
        self.clipping = clipping_of(given)
        self.state = OptimizerState(copy_of(given, call), {}, fused)
        check_copy(given, self.state.optimizer, call)

    @property
    def variables(self) -> dict[str, Variable]:
        """Path -> variable: those that have state."""
        return self.state.variables

    @property
    def name(self) -> str:
        """The class of the optimizer."""
        return type(self.given).__name__

    def twin(self, memo: dict) -> "GroupUpdate":
        """One of its own with an equal rate, for the same variables and with equal state."""
        twin = GroupUpdate(
            twin_of(self.given, memo), "copy.deepcopy(optim)", fused=self.state.fused
        )
        twin.state = self.state.twin(self.variables)
        return twin

    def move(self, variables: Mapping[str, Variable]) -> None:
        """Goes on with the variables of a copied model, each by the path that it has here."""
        self.state = self.state.twin(variables)

    def own_rate(self) -> Any:
        """The rate of the optimizer that was given, at this group's count of updates."""
        return self.rate.value(self.state.optimizer.iterations)

    def takes_several_rates(self) -> bool:
        """Can one update use a rate of its own for each variable?

        Not where a subclass applies all gradients by itself.
        """
        return not rules.applies_alone(self.state.optimizer)

    def prepared(
        self,
        parts: list[tuple[tf.Tensor, dict[str, Gradient]]],
        when: Mapping[str, tf.Tensor] | None = None,
    ) -> "Work":
        """What `run` needs for one update; here everything is still a replica's own business.

        Args:
          parts: (rate, path -> gradient) for each rate. The gradients are of the variables' shapes
            and final: reduced and clipped.
          when: Path -> scalar bool: update this variable? By default all are. The group counts
            the update if any of them is.

        Raises:
          ValueError: A class with an `apply` of its own, which does all or nothing.
        """
        optimizer = self.state.optimizer
        grads = {path: grad for _, of_rate in parts for path, grad in of_rate.items()}
        rates: dict[str, tf.Tensor] = {}
        for rate, of_rate in parts:
            # Cast once, so that variables of one rate are seen to share it.
            rates |= dict.fromkeys(of_rate, tf.cast(rate, rate_of(optimizer).dtype))
        some = [] if when is None else [tf.reduce_any(tf.stack([when[p] for p in grads]))]
        if rules.applies_alone(optimizer):
            if when is not None or contexts.is_replica():
                raise ValueError(
                    f"`ModuleOptimizer.step(lr, model, grads)` can't make an update of {self.name} "
                    "depend on a run: got a class with an `apply` of its own, expected Keras'. It "
                    "applies all or nothing. Override `update_step` in its place, or step with "
                    "gradients: `optim.step(lr, model, accumulator.grads())`."
                )
            apply = functools.partial(self._apply_alone, grads, next(iter(rates.values())))
            return Work(apply, [], some)
        with keras.name_scope(optimizer.name):
            updates = [
                CellUpdate(self.state, cell)
                for cell in self.state.cells
                if any(path in grads for path in cell.paths)
            ]
            inputs = [update.inputs(grads, rates, when) for update in updates]
        return Work(functools.partial(self._apply, updates), inputs, some)

    def _apply(self, updates: list[CellUpdate], strategy: Any, inputs: list, some: list) -> None:
        """Runs once for all replicas: decay, Keras' rule, moving average, constraint, count."""
        optimizer = self.state.optimizer
        with keras.name_scope(optimizer.name):
            product = keras_optimizers.nadam_product(optimizer)
            if product is not None:
                synchronized.update(strategy, product, self._move_u_product, *some)
            for update, values in zip(updates, inputs, strict=True):
                update.run(strategy, values)
            synchronized.update(strategy, optimizer.iterations, _count, *some)

    def _move_u_product(self, product: tf.Variable, some: Any = None) -> None:
        """What Keras' Nadam does once per update:  u *= beta_1 * (1 - 0.96^t / 2).

        The 0.96 is that of Dozat, "Incorporating Nesterov Momentum into Adam" (2016), and no
        argument in Keras.
        """
        optimizer = self.state.optimizer
        step = tf.cast(optimizer.iterations + 1, product.dtype)
        half = 0.5 * tf.pow(tf.constant(0.96, product.dtype), step)
        moved = product * optimizer.beta_1 * (1.0 - half)
        product.assign(moved if some is None else tf.where(some, moved, product))

    def _apply_alone(self, grads: dict[str, Gradient], rate: tf.Tensor, *_: Any) -> None:
        """Leaves everything to a subclass that has an `apply` of its own."""
        optimizer, targets = self.state.optimizer, self.state.targets
        optimizer.learning_rate = rate
        values = [
            sparse.cast(sparse.densify(grad), tf.as_dtype(targets[path].dtype))
            for path, grad in grads.items()
        ]
        optimizer.apply_gradients(zip(values, [targets[p] for p in grads], strict=True))


class Work(NamedTuple):
    """One group's update, ready to run.

    Attributes:
      run: `run(strategy, inputs, some)`, once for all replicas.
      inputs: What it takes of each replica, for each cell.
      some: A scalar bool: does anything take part? Or nothing, if all do.
    """

    run: Callable[[Any, list, list], None]
    inputs: list[Any]
    some: list[tf.Tensor]


def _count(counter: tf.Variable, some: Any = None) -> None:
    """One update more, if the group took part."""
    counter.assign_add(1 if some is None else tf.cast(some, counter.dtype))
