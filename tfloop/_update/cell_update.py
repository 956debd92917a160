"""How Keras' rule runs on one cell: a variable, a large one by XLA, or a vector of many."""

import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfloop._backend import keras_optimizers
from tfloop._model.paths import tf_variable
from tfloop._replicas import placement, synchronized
from tfloop._tensors import overwritten, sparse
from tfloop._tensors.sparse import Gradient
from tfloop._tracing import traces
from tfloop._update import rules
from tfloop._update.fused import Cell, Fused
from tfloop._update.slots import OptimizerState

_LARGE = 3 * 2**20
"""Elements from which on it pays to let XLA make one pass of a rule's dozen: it compiles for some
0.07 s, and saves milliseconds with each update. Smaller ones are hidden behind what runs beside
them, as XLA isn't: beside convolutions it gained nothing at two million, 5 to 14 % at four."""


class CellUpdate:
    """One update of what an optimizer updates at once.

    Args:
      state: The optimizer, and its state by path.
      cell: One of `state.cells`.
    """

    def __init__(self, state: OptimizerState, cell: Cell) -> None:
        self._state = state
        self._optimizer = state.optimizer
        self._cell = cell
        self._by_xla = self._gains_by_xla()

    def inputs(
        self,
        grads: Mapping[str, Gradient],
        rates: Mapping[str, tf.Tensor],
        when: Mapping[str, tf.Tensor] | None,
    ) -> tuple[Any, ...]:
        """What `run` takes of each replica: gradient, rate, and a mask where not all is updated."""
        return self._grad(grads), self._cell.rate(rates), *self._cell.mask(grads, when)

    def run(self, strategy: Any, inputs: tuple[Any, ...]) -> None:
        """Updates the cell, once for all replicas."""
        fused = isinstance(self._cell, Fused)
        update = self._update_vector if fused else self._update_one
        synchronized.update(strategy, self._cell.target, update, *inputs)

    def _grad(self, grads: Mapping[str, Gradient]) -> Gradient:
        """The cell's gradient as its rule takes it."""
        grad = self._cell.grad(grads)
        if not self._by_xla:
            rows = rules.takes_rows(self._optimizer)
            grad = sparse.deduplicate(grad) if rows else sparse.densify(grad)
        elif not sparse.has_known_rows(grad):
            grad = sparse.densify(grad)  # XLA sums rows, too, but compiles for each number of them.
        # Repeated rows are summed before a 16-bit dtype would round each of them.
        return sparse.cast(grad, tf.as_dtype(self._cell.target.dtype))

    def _gains_by_xla(self) -> bool:
        """Is it worth while, and safe, to let XLA compile the rule for this cell alone?

        In a graph on a CPU; there Keras' rule reads and writes a large variable a dozen times.
        """
        if tf.executing_eagerly() or traces.is_for_xla() or isinstance(self._cell, Fused):
            return False
        variable = tf_variable(self._cell.target)
        return (
            self._state.fused
            and rules.is_elementwise(self._optimizer)
            and rules.moves_all_rows(self._optimizer)
            and math.prod(variable.shape) >= _LARGE
            and variable.dtype in (tf.float32, tf.float64)
            and "CPU" in variable.device
            and placement.strategy_of([variable]) is None
        )

    def _update_one(
        self, variable: tf.Variable, grad: Gradient, rate: tf.Tensor, flag: Any = None
    ) -> None:
        """Updates one variable, if the flag says so."""

        def run() -> tf.Tensor:
            target = self._cell.target
            if overwritten.overwrites(target):
                variable.assign(sparse.densify(grad))
                return tf.constant(0)
            update = self._update_by_xla if self._by_xla else self._update_now
            update(variable, grad, rate)
            if target.constraint is not None:
                variable.assign(target.constraint(variable))
            return tf.constant(0)

        if flag is None:
            run()
        else:
            tf.cond(flag, run, lambda: tf.constant(0))

    def _update_vector(
        self, vector: tf.Variable, grad: tf.Tensor, rate: tf.Tensor, mask: Any = None
    ) -> None:
        """Updates many variables; those that the mask leaves out are put back, slots too."""
        cell = self._cell
        assert isinstance(cell, Fused)
        vector.assign(cell.values())
        kept = [] if mask is None else [vector, *self._state.slots_of(cell).values()]
        before = [tf.identity(variable) for variable in kept]
        self._update_now(vector, grad, rate)
        for variable, old in zip(kept, before, strict=True):
            variable.assign(tf.where(mask, variable, old))
        cell.write_back(vector)

    def _update_by_xla(self, variable: tf.Variable, grad: Gradient, rate: tf.Tensor) -> None:
        """The same in one pass over the variable and its state."""
        if sparse.is_sparse(grad):
            grad = tf.IndexedSlices(grad.values, grad.indices)  # The shape must be known to XLA.

        @tf.function(autograph=False, jit_compile=True)
        def update(grad: Gradient, rate: tf.Tensor) -> None:
            grad = sparse.densify(sparse.with_dense_shape(grad, variable.shape))
            self._update_now(variable, grad, rate)

        update(grad, rate)

    def _update_now(self, variable: tf.Variable, grad: Gradient, rate: tf.Tensor) -> None:
        """Decay, rule and moving average."""
        optimizer = self._optimizer
        with keras_optimizers.rate_set(optimizer, rate) as rate:
            own_decay = keras_optimizers.own_decay(optimizer)
            if own_decay is not None:
                own_decay([self._cell.target])
            elif optimizer.weight_decay is not None:
                self._decay(variable, rate)
            optimizer.update_step(grad, variable, rate)
        if optimizer.use_ema:
            self._average(variable)

    def _decay(self, variable: tf.Variable, rate: tf.Tensor) -> None:
        """Keras' decoupled decay, which leaves out what was excluded."""
        flags = [self._state.is_decayed(path) for path in self._cell.paths]
        if not any(flags):
            return
        decay = tf.cast(self._optimizer.weight_decay, variable.dtype)
        rate = tf.cast(rate, variable.dtype)
        if not all(flags):
            decay = tf.where(self._cell.spread(flags), decay, tf.zeros_like(decay))
        variable.assign_sub(variable * decay * rate)

    def _average(self, variable: tf.Variable) -> None:
        """Keras' moving average."""
        optimizer = self._optimizer
        average = keras_optimizers.moving_average_of(optimizer, variable)
        value = tf.convert_to_tensor(variable)
        started = tf.not_equal(optimizer.iterations, 0)
        momentum = tf.cast(started, value.dtype) * optimizer.ema_momentum
        average.assign(momentum * average + (1 - momentum) * value)
        every = optimizer.ema_overwrite_frequency
        if every:
            due = tf.equal((optimizer.iterations + 1) % every, 0)
            variable.assign(tf.where(due, average, value))
