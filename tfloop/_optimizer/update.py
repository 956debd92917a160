"""How the variables of one group are updated: by a Keras optimizer of their own.

It applies Keras' rules as they are, with three additions: several rates in one update, a subset of
the variables at a time, and state by path that survives when the set of variables changes.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.optimizers import Optimizer
from keras.optimizers.schedules import LearningRateSchedule

from tfloop._backend import keras_optimizers
from tfloop._backend.keras_optimizers import rate_of
from tfloop._backend.keras_variables import around, replace_tf_variable
from tfloop._checks.messages import listed
from tfloop._model.paths import Variable, is_variable, tf_variable, variable_id
from tfloop._optimizer.fused import Cell, Fused, Single, cells_of, first_value, has_value
from tfloop._optimizer.keras_optimizer import (
    check_arguments,
    check_copy,
    clipping_of,
    copy_of,
    twin_of,
)
from tfloop._replicas import contexts, placement, synchronized
from tfloop._tensors import overwritten, sparse
from tfloop._tensors.sparse import Gradient
from tfloop._tracing import traces

_BUILD = "ModuleOptimizer.build(model)"
_ROW_RULES = {
    kind.update_step
    for kind in keras_optimizers.kinds("SGD", "Adam", "Adamax", "Nadam", "Ftrl", "Lion", "Lamb")
}
# Rules that treat each element alone, so that many variables can go through them as one vector.
_ELEMENTWISE = keras_optimizers.kinds(
    *("SGD", "Adam", "AdamW", "RMSprop", "Nadam", "Lion", "Adagrad", "Adamax", "Ftrl"),
    *("Adadelta", "ScheduleFreeAdamW"),
)
_LARGE = 3 * 2**20
"""Elements from which on it pays to let XLA make one pass of a rule's dozen: it compiles for some
0.07 s, and saves milliseconds with each update. Smaller ones are hidden behind what runs beside
them, as XLA isn't: beside convolutions it gained nothing at two million, 5 to 14 % at four."""


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
      rate_changes: How often the object that holds the rate was replaced, as `refresh` has seen it;
        that makes a trace stale.
    """

    def __init__(self, given: Optimizer, call: str, *, fused: bool = True) -> None:
        check_arguments(given, call)
        self.given = given
        self._rate_source: Any = rate_of(given)
        self.clipping = clipping_of(given)
        self.state = State(copy_of(given, call), {}, fused)
        check_copy(given, self.state.optimizer, call)
        self.rate_changes = 0
        self._called_rate: tf.Variable | None = None
        self._asked = False

    @property
    def variables(self) -> dict[str, Variable]:
        """Path -> variable: those that have state."""
        return self.state.variables

    @property
    def name(self) -> str:
        """The class of the optimizer."""
        return type(self.given).__name__

    def decay_of(self, path: str) -> float | None:
        """The weight decay that reaches the variable at `path`, if any."""
        if not self._is_decayed(path):
            return None
        return keras_optimizers.decay_of(self.state.optimizer, self.state.targets[path]) or None

    def _is_decayed(self, path: str) -> bool:
        """Was it not excluded from weight decay?"""
        variable = tf_variable(self.state.targets[path])
        return keras_optimizers.is_decayed(self.state.optimizer, variable)

    def state_for(self, variables: Mapping[str, Variable]) -> "State":
        """Makes the state for a set of variables; those that have state keep it.

        Nothing of this object changes until the result is put into `state`.

        Raises:
          ValueError: The optimizer keeps state that isn't found by path.
        """
        old = self.state
        if (
            not old.waiting
            and list(variables) == list(old.variables)
            and all(old.variables[path] is variable for path, variable in variables.items())
        ):
            return old
        # Sought by the variable: a layer put in before others renumbers their paths.
        known = {variable_id(variable): path for path, variable in old.variables.items()}
        ids = {path: variable_id(variable) for path, variable in variables.items()}
        return self._taken_over(old, variables, {p: known[i] for p, i in ids.items() if i in known})

    def twin(self, memo: dict) -> "GroupUpdate":
        """One of its own with an equal rate, for the same variables and with equal state."""
        twin = GroupUpdate(twin_of(self.given, memo), _BUILD, fused=self.state.fused)
        twin.state = self._taken_over(self.state, self.variables, {p: p for p in self.variables})
        return twin

    def move(self, variables: Mapping[str, Variable]) -> None:
        """Goes on with the variables of a copied model, each by the path that it has here."""
        decayed = filter(self._is_decayed, self.variables)
        undecayed = [variables[path] for path in self.variables.keys() - set(decayed)]
        same = {path: path for path in self.variables}
        self.state = self._taken_over(self.state, variables, same, undecayed)

    def _taken_over(
        self,
        old: "State",
        variables: Mapping[str, Variable],
        before: Mapping[str, str],
        undecayed: Iterable[Variable] = (),
    ) -> "State":
        """State for variables, with what an older one has of them.

        Args:
          old: The older one.
          variables: Path -> variable.
          before: Path -> that of the same variable in the older one.
          undecayed: What is left out of weight decay besides.
        """
        with placement.scope_of(variables.values()):
            new = State(copy_of(old.optimizer, _BUILD), dict(variables), old.fused)
            if not variables:
                return new
            keras_optimizers.exclude(new.optimizer, undecayed)
            new.build()
        counts = old.counters()
        for name, counter in new.counters().items():
            if name in counts:
                counter.assign(counts[name])
        for path, earlier in before.items():
            if earlier not in old.waiting:
                kept = old.slots(earlier)
                for name, slot in new.slots(path).items():
                    slot.assign(tf.convert_to_tensor(kept[name]))
        return new

    def slots(self, path: str) -> dict[str, tf.Variable]:
        """The state of one variable by Keras' attribute names, without the underscore."""
        return self.state.slots(path)

    def counters(self) -> dict[str, tf.Variable]:
        """The state that the whole group shares: its iterations, and what else Keras counts."""
        return self.state.counters()

    def rate_variable(self) -> dict[str, tf.Variable]:
        """The rate of the optimizer that was given, where that is a variable, and so state."""
        rate = rate_of(self.given)
        return {"learning_rate": tf_variable(rate)} if is_variable(rate) else {}

    def own_rate(self) -> Any:
        """The rate of the optimizer that was given: a number, a tensor or a variable.

        A schedule is asked at the count of this group's updates. A function is called; the
        plain number that it may give would be baked into a trace, so a trace reads it from a
        variable, which `refresh` brings up to date.
        """
        rate = rate_of(self.given)
        if isinstance(rate, LearningRateSchedule):
            return rate(self.state.optimizer.iterations)
        if not _is_function(rate):
            return tf_variable(rate)
        value = rate()
        known = None if is_variable(value) else tf.get_static_value(value)
        if tf.executing_eagerly() or known is None:
            return value
        traces.eagerly(lambda: self._remember(known))
        self._asked = traces.is_recorded()
        return self._called_rate

    def schedule_name(self) -> str | None:
        """The class of the schedule that gives the rate, if one does."""
        rate = rate_of(self.given)
        return type(rate).__name__ if isinstance(rate, LearningRateSchedule) else None

    def refresh(self) -> None:
        """Brings up to date what a trace reads; called before each compiled step."""
        if (rate := rate_of(self.given)) is not self._rate_source:
            self._rate_source = rate
            self.rate_changes += 1
        if self._called_rate is not None and _is_function(self._rate_source):
            if not self._asked:
                self._remember(self._rate_source())
            self._asked = False  # what its own trace asked counts for the first run

    def _remember(self, value: Any) -> None:
        value = tf.cast(value, rate_of(self.state.optimizer).dtype)
        if self._called_rate is None:
            self._called_rate = tf.Variable(value, trainable=False, name="rate")
        self._called_rate.assign(value)

    def takes_several_rates(self) -> bool:
        """Can one update use a rate of its own for each variable?

        Not where a subclass applies all gradients by itself.
        """
        return not _applies_alone(self.state.optimizer)

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
        grads = {path: grad for _, share in parts for path, grad in share.items()}
        rates: dict[str, tf.Tensor] = {}
        for rate, share in parts:
            # Cast once, so that variables of one rate are seen to share it.
            rates |= dict.fromkeys(share, tf.cast(rate, rate_of(optimizer).dtype))
        some = [] if when is None else [tf.reduce_any(tf.stack([when[p] for p in grads]))]
        if _applies_alone(optimizer):
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
            cells = [cell for cell in self.state.cells if any(p in grads for p in cell.paths)]
            inputs = [
                (self._readied(cell, grads), cell.rate(rates), *cell.mask(grads, when))
                for cell in cells
            ]
        return Work(functools.partial(self._apply, cells), inputs, some)

    def _readied(self, cell: Cell, grads: dict[str, Gradient]) -> Gradient:
        """A cell's gradient as its rule takes it."""
        grad = cell.grad(grads)
        if not self._is_for_xla(cell):
            takes_rows = _takes_rows(self.state.optimizer)
            grad = sparse.deduplicate(grad) if takes_rows else sparse.densify(grad)
        elif not sparse.has_known_rows(grad):
            grad = sparse.densify(grad)  # XLA sums rows, too, but compiles for each number of them.
        # Repeated rows are summed before a 16-bit dtype would round each of them.
        return sparse.cast(grad, tf.as_dtype(cell.target.dtype))

    def _is_for_xla(self, cell: Cell) -> bool:
        """Is it worth while, and safe, to let XLA compile the rule for this cell alone?

        In a graph on a CPU; there Keras' rule reads and writes a large variable a dozen times.
        """
        if tf.executing_eagerly() or traces.is_for_xla() or isinstance(cell, Fused):
            return False
        variable, optimizer = tf_variable(cell.target), self.state.optimizer
        return (
            self.state.fused
            and type(optimizer) in _ELEMENTWISE
            and _moves_all_rows(optimizer)
            and math.prod(variable.shape) >= _LARGE
            and variable.dtype in (tf.float32, tf.float64)
            and "CPU" in variable.device
            and placement.strategy_of([variable]) is None
        )

    def _apply(self, cells: list[Cell], strategy: Any, inputs: list, some: list) -> None:
        """Runs once for all replicas: decay, Keras' rule, moving average, constraint, count."""
        optimizer = self.state.optimizer
        with keras.name_scope(optimizer.name):
            product = keras_optimizers.nadam_product(optimizer)
            if product is not None:
                synchronized.update(strategy, product, self._move_u_product, *some)
            for cell, values in zip(cells, inputs, strict=True):
                if isinstance(cell, Fused):
                    run = functools.partial(self._update_vector, cell)
                else:
                    run = functools.partial(self._update_one, cell)
                synchronized.update(strategy, cell.target, run, *values)
            synchronized.update(strategy, optimizer.iterations, _count, *some)

    def _update_one(
        self, cell: Single, variable: tf.Variable, grad: Gradient, rate: tf.Tensor, flag: Any = None
    ) -> None:
        """Updates one variable, if the flag says so."""

        def run() -> tf.Tensor:
            owner = cell.target
            if overwritten.overwrites(owner):
                variable.assign(sparse.densify(grad))
                return tf.constant(0)
            if self._is_for_xla(cell):
                self._update_by_xla(cell, variable, grad, rate)
            else:
                self._update_now(cell, variable, grad, rate)
            if owner.constraint is not None:
                variable.assign(owner.constraint(variable))
            return tf.constant(0)

        if flag is None:
            run()
        else:
            tf.cond(flag, run, lambda: tf.constant(0))

    def _update_vector(
        self, cell: Fused, vector: tf.Variable, grad: tf.Tensor, rate: tf.Tensor, mask: Any = None
    ) -> None:
        """Updates many variables; those that the mask leaves out are put back, slots too."""
        vector.assign(cell.values())
        kept = [] if mask is None else [vector, *self.state.slots_of(cell).values()]
        before = [tf.identity(variable) for variable in kept]
        self._update_now(cell, vector, grad, rate)
        for variable, old in zip(kept, before, strict=True):
            variable.assign(tf.where(mask, variable, old))
        cell.write_back(vector)

    def _update_by_xla(
        self, cell: Cell, variable: tf.Variable, grad: Gradient, rate: tf.Tensor
    ) -> None:
        """The same in one pass over the variable and its state."""
        if sparse.is_sparse(grad):
            grad = tf.IndexedSlices(grad.values, grad.indices)  # The shape must be known to XLA.

        @tf.function(autograph=False, jit_compile=True)
        def update(grad: Gradient, rate: tf.Tensor) -> None:
            grad = sparse.densify(sparse.with_dense_shape(grad, variable.shape))
            self._update_now(cell, variable, grad, rate)

        update(grad, rate)

    def _update_now(
        self, cell: Cell, variable: tf.Variable, grad: Gradient, rate: tf.Tensor
    ) -> None:
        """Decay, rule and moving average."""
        optimizer = self.state.optimizer
        with keras_optimizers.rate_set(optimizer, rate) as rate:
            own_decay = keras_optimizers.own_decay(optimizer)
            if own_decay is not None:
                own_decay([cell.target])
            elif optimizer.weight_decay is not None:
                self._decay(cell, variable, rate)
            optimizer.update_step(grad, variable, rate)
        if optimizer.use_ema:
            self._average(variable)

    def _decay(self, cell: Cell, variable: tf.Variable, rate: tf.Tensor) -> None:
        """Keras' decoupled decay, which leaves out what was excluded."""
        optimizer = self.state.optimizer
        flags = [self._is_decayed(path) for path in cell.paths]
        if not any(flags):
            return
        decay = tf.cast(optimizer.weight_decay, variable.dtype)
        rate = tf.cast(rate, variable.dtype)
        if not all(flags):
            decay = tf.where(cell.spread(flags), decay, tf.zeros_like(decay))
        variable.assign_sub(variable * decay * rate)

    def _average(self, variable: tf.Variable) -> None:
        """Keras' moving average."""
        optimizer = self.state.optimizer
        average = keras_optimizers.moving_average_of(optimizer, variable)
        value = tf.convert_to_tensor(variable)
        started = tf.not_equal(optimizer.iterations, 0)
        momentum = tf.cast(started, value.dtype) * optimizer.ema_momentum
        average.assign(momentum * average + (1 - momentum) * value)
        every = optimizer.ema_overwrite_frequency
        if every:
            due = tf.equal((optimizer.iterations + 1) % every, 0)
            variable.assign(tf.where(due, average, value))

    def _move_u_product(self, product: tf.Variable, some: Any = None) -> None:
        """What Keras' Nadam does once per update:  u *= beta_1 * (1 - 0.96^t / 2)."""
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


class State:
    """A Keras optimizer and the variables it is built on, read by path.

    Attributes:
      optimizer: The optimizer.
      variables: Path -> variable, as the model holds it.
      targets: Path -> the same as `keras.Variable`.
      cells: What is updated at once, in the order of the optimizer's own lists.
      fused: May small variables be updated together?
      waiting: The paths of variables that were born in a trace and have no value yet, where the
        state begins with it, as moving averages do. It is made anew once they have: TensorFlow
        gives them theirs after that trace, and traces once more before it runs anything.
    """

    def __init__(self, optimizer: Optimizer, variables: dict[str, Variable], fused: bool) -> None:
        self.optimizer = optimizer
        self.variables = variables
        self.fused = fused
        self.targets = {path: _as_keras(path, v) for path, v in variables.items()}
        self.cells: list[Cell] = []
        self.waiting: set[str] = set()
        self._cell: dict[str, int] = {}

    def build(self) -> None:
        """Makes the slots.

        Raises:
          ValueError: Some of them aren't found by path.
        """
        optimizer = self.optimizer
        self.cells = cells_of(self.targets, fuse=self.fused and type(optimizer) in _ELEMENTWISE)
        self._cell = {path: n for n, cell in enumerate(self.cells) for path in cell.paths}
        unborn = [path for path, target in self.targets.items() if not has_value(target)]
        with _lent_values(optimizer, [cell.target for cell in self.cells]) as targets:
            optimizer.build(targets)
            if optimizer.use_ema:
                # Keras fills the averages at its first update, of those that take part then.
                averages = keras_optimizers.moving_averages(optimizer)
                for average, target in zip(averages, targets, strict=True):
                    if average is not None:
                        average.assign(target)
        self.waiting = {path for path in unborn if any(map(_has_nan, self.slots(path).values()))}
        found = [self.counters(), *map(self.slots_of, self.cells)]
        known = {id(variable) for named in found for variable in named.values()}
        known.add(id(tf_variable(rate_of(optimizer))))
        lost = [v.name for v in optimizer.variables if id(tf_variable(v)) not in known]
        if lost:
            raise ValueError(
                f"`{_BUILD}` found state of {type(optimizer).__name__} that no path leads to: got "
                f"{listed(lost)}, expected lists with an entry per variable, or single variables. "
                "It could be neither saved nor kept when groups change. Make it in `build`: "
                "`self.momentums = self.add_optimizer_variables(variables, 'momentum')`."
            )

    def can_begin(self) -> bool:
        """Have variables that it waits for got their values meanwhile?"""
        return bool(self.waiting) and traces.eagerly(
            lambda: any(has_value(self.variables[path]) for path in self.waiting)
        )

    def slots(self, path: str) -> dict[str, Any]:
        """Slot -> variable or piece of one, for one path.

        The names are Keras' attributes without the underscore.
        """
        if path not in self._cell:
            return {}
        cell = self.cells[self._cell[path]]
        return {name: cell.slot(path, slot) for name, slot in self.slots_of(cell).items()}

    def slots_of(self, cell: Cell) -> dict[str, tf.Variable]:
        """Slot -> variable, from the lists that Keras keeps parallel to its variables."""
        index, count = self._cell[cell.paths[0]], len(self.cells)
        return keras_optimizers.slots_of(self.optimizer, cell.target, index, count)

    def counters(self) -> dict[str, tf.Variable]:
        """Counter -> variable: what stands alone on the optimizer, but for the rate."""
        return keras_optimizers.counters_of(self.optimizer)


@contextlib.contextmanager
def _lent_values(
    optimizer: Optimizer, targets: list[keras.Variable]
) -> Iterator[list[keras.Variable]]:
    """Lets an optimizer be built on variables of which some have no value: they get NaN for it."""
    unborn = [(target, tf_variable(target)) for target in targets if not has_value(target)]
    for target, _ in unborn:
        replace_tf_variable(target, tf.Variable(first_value(target), name=target.name))
    try:
        yield targets
    finally:
        for target, variable in unborn:
            replace_tf_variable(target, variable)
    if unborn:
        keras_optimizers.index_anew(optimizer, targets)


def _has_nan(slot: Any) -> bool:
    if not slot.dtype.is_floating:
        return False
    return bool(tf.reduce_any(tf.math.is_nan(tf.cast(slot, tf.float64))))


def _as_keras(path: str, variable: Variable) -> keras.Variable:
    """A `keras.Variable` around a raw `tf.Variable`: Muon asks for its `path`."""
    if isinstance(variable, keras.Variable):
        return variable
    target = around(variable, path.replace("/", "_") or "variable")
    target.constraint = variable.constraint
    target.overwrite_with_gradient = overwritten.overwrites(variable)
    return target


def _is_function(rate: Any) -> bool:
    return callable(rate) and not isinstance(rate, LearningRateSchedule)


def _takes_rows(optimizer: Optimizer) -> bool:
    """Is its rule right, also under XLA, for rows that occur once each?

    Those are that first mix the gradient with dense state. The others of Keras divide or add
    sparse tensors, in branches that XLA can't compile; a user's own is likely written for dense
    ones. They get the dense gradient. XLA takes half the time with a dense one where the rule moves
    all rows in any case.
    """
    if traces.is_for_xla() and _moves_all_rows(optimizer):
        return False
    return type(optimizer).update_step in _ROW_RULES


def _moves_all_rows(optimizer: Optimizer) -> bool:
    """Does it change rows that have no gradient, too, by their momentum?"""
    return not isinstance(optimizer, keras.optimizers.SGD) or bool(optimizer.momentum)


def _applies_alone(optimizer: Optimizer) -> bool:
    """Does a subclass do the update by itself, in a way that must not be taken apart?"""
    by_itself = keras_optimizers.applies_by_itself(optimizer)
    return by_itself or keras_optimizers.updates_by_itself(optimizer)


def _count(counter: tf.Variable, some: Any = None) -> None:
    """One update more, if the group took part."""
    counter.assign_add(1 if some is None else tf.cast(some, counter.dtype))
