"""`tf.distribute` for the rest of the house: where state lives, and how replicas agree.

Gradients are reduced once per update; what changes variables runs once for all replicas. On one
device everything here is plain.
"""

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfloop._backend.keras_variables import is_seed
from tfloop._backend.tensorflow import is_default_strategy, replica_graph
from tfloop._model.paths import Variable, tf_variable
from tfloop._tensors import sparse
from tfloop._tensors.sparse import Gradient

# Variables that every replica holds and changes alike: what the first one has is the value.
ALIKE = {"trainable": False, "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}
# Variables in which each replica has its own part; read together they are the sum, or the first.
_APART = {"trainable": False, "synchronization": tf.VariableSynchronization.ON_READ}
SUMMED = _APART | {"aggregation": tf.VariableAggregation.SUM}
OF_THE_FIRST = _APART | {"aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA}


class Share(NamedTuple):
    """What a replica has of the batch that one call of a compiled step works on.

    Attributes:
      rows: Its own rows, a scalar.
      of: The rows of the batch, a scalar.
      replicas: Into how many parts the batch was cut.
    """

    rows: tf.Tensor
    of: tf.Tensor
    replicas: int


# Replicas run in threads of their own, which have contexts of their own.
_SHARE: contextvars.ContextVar[Share | None] = contextvars.ContextVar("share", default=None)
_IN_STEP: contextvars.ContextVar[bool] = contextvars.ContextVar("in_step", default=False)


@contextlib.contextmanager
def in_step(share: Share | None) -> Iterator[None]:
    """Says, while the block runs, that this is a replica of a compiled step of ours.

    Args:
      share: What it has of the batch; `None` where no batch was cut.
    """
    before, outside = _SHARE.set(share), _IN_STEP.set(True)
    try:
        yield
    finally:
        _SHARE.reset(before)
        _IN_STEP.reset(outside)


def share() -> Share | None:
    """What this replica has of the batch, where `compile` has cut one."""
    return _SHARE.get()


def is_in_step() -> bool:
    """Is this a replica of a step that `compile` runs, with a batch or without?"""
    return _IN_STEP.get()


def is_default(strategy: tf.distribute.Strategy | None) -> bool:
    """Is it TensorFlow's default strategy, one device without replicas, or none at all?"""
    return strategy is None or is_default_strategy(strategy)


def is_replica() -> bool:
    """Does this code run once per replica of a strategy?"""
    return tf.distribute.has_strategy() and tf.distribute.get_replica_context() is not None


def one_at_a_time(lock: AbstractContextManager) -> AbstractContextManager:
    """Lets threads take turns in a block, but not replicas, which wait in it for each other."""
    return contextlib.nullcontext() if is_replica() else lock


def count() -> int:
    """The replicas that work on one update."""
    return tf.distribute.get_strategy().num_replicas_in_sync if is_replica() else 1


def strategy_of(variables: Iterable[Variable]) -> tf.distribute.Strategy | None:
    """The strategy in which variables were made, or `None` for plain ones."""
    found = (getattr(tf_variable(v), "distribute_strategy", None) for v in variables)
    return next(filter(None, found), None)


def scope_of(variables: Iterable[Variable]) -> AbstractContextManager:
    """Where state for these variables is made: in their strategy, or on the device they share.

    State made elsewhere would drift apart between replicas without a word, or be copied between
    devices with each update, which XLA refuses.
    """
    variables = list(variables)
    strategy, device = strategy_of(variables), _device_of(variables)
    if strategy is not None:
        return strategy.scope()
    return contextlib.nullcontext() if device is None else tf.device(device)


def at_home(variable: tf.Variable, variables: Iterable[Variable], kind: dict) -> tf.Variable:
    """A counter where these variables are: itself where it is at home, else a new one.

    Args:
      variable: A plain variable, made before the model was known, or one that was moved.
      variables: Where home is.
      kind: `ALIKE`, `SUMMED` or `OF_THE_FIRST`.
    """
    variables = list(variables)
    home, ours = strategy_of(variables), strategy_of([variable])
    if home is None and ours is None:
        stays = _device_of(variables) in (None, variable.device)
    else:
        stays = home in (None, ours)
    if stays:
        return variable
    with scope_of(variables):
        name = variable.name.partition(":")[0]
        return tf.Variable(variable.numpy(), dtype=variable.dtype, name=name, **kind)


def _device_of(variables: Iterable[Variable]) -> str | None:
    """The one device that plain variables are on."""
    if strategy_of(variables) is not None:
        return None
    devices = {tf_variable(variable).device for variable in variables}
    return devices.pop() if len(devices) == 1 else None


# The seed states that `spread_seeds` has told apart; by identity, as variables can't be hashed.
_SPREAD: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_SEED_STRIDE = 1_000_003


def spread_seeds(variables: Iterable[Variable], *, again: bool = False) -> None:
    """Gives the random layers of each replica numbers of their own.

    Replicas begin with one seed, and would all drop the same units. The first one keeps it.

    Args:
      variables: Of a model; all but the states of Keras' seed generators are left alone.
      again: The states were assigned since, alike on all replicas.
    """
    for variable in map(tf_variable, variables):
        strategy = strategy_of([variable])
        if strategy is None or strategy.num_replicas_in_sync == 1 or not is_seed(variable):
            continue
        if again or _SPREAD.get(id(variable)) is not variable:
            components = strategy.experimental_local_results(variable)
            for component, place in zip(components, places(strategy), strict=True):
                seed, drawn = component.numpy()
                component.assign([(int(seed) + place * _SEED_STRIDE) % 2**31, drawn])
            _SPREAD[id(variable)] = variable


def places(strategy: tf.distribute.Strategy) -> list[int]:
    """The numbers of the replicas of this process among all."""
    found = []

    def note(context: Any) -> tf.Tensor:
        found.append(context.replica_id_in_sync_group)
        return tf.constant(0)

    strategy.experimental_distribute_values_from_function(note)
    return found


def is_spread(strategy: tf.distribute.Strategy | None) -> bool:
    """Does it work in several processes?"""
    return strategy is not None and len(places(strategy)) < strategy.num_replicas_in_sync


def gathered(strategy: tf.distribute.Strategy, number: int) -> list[int]:
    """A number of each worker, on every worker, the first worker's first; all have to call it.

    Also a meeting point: what workers did before, they have done on return.
    """
    ours = places(strategy)
    rows = tf.one_hot(ours[:1], strategy.num_replicas_in_sync, dtype=tf.int64)[0] * number
    shares = strategy.experimental_distribute_values_from_function(
        lambda context: rows if context.replica_id_in_sync_group == ours[0] else tf.zeros_like(rows)
    )
    found = strategy.reduce(tf.distribute.ReduceOp.SUM, shares, axis=None)
    return [int(each) for each in found.numpy()[:: len(ours)]]


def read_together(values: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the variables that have a part on each worker, for which all have to call it."""
    return {key: value.numpy() if _is_apart(value) else value for key, value in values.items()}


def _is_apart(value: Any) -> bool:
    return (
        isinstance(value, tf.Variable)
        and value.synchronization == tf.VariableSynchronization.ON_READ
        and strategy_of([value]) is not None
    )


def drifts(variable: Variable) -> bool:
    """Is it state of which every replica changes its own copy, and nobody puts them together?

    Parameters are updated alike; a variable with an aggregation is TensorFlow's business.
    """
    variable = tf_variable(variable)
    return (
        strategy_of([variable]) is not None
        and not variable.trainable
        and variable.aggregation == tf.VariableAggregation.NONE
        and not _is_apart(variable)
    )


def told_apart(variables: Mapping[str, Variable]) -> dict[str, list[np.ndarray]]:
    """Key -> what each replica has of a variable, for those of which they have different things.

    Over several workers all have to call it.
    """
    found = {}
    for key, variable in variables.items():
        variable = tf_variable(variable)
        strategy = strategy_of([variable])
        if strategy is None or not (drifts(variable) or _is_apart(variable)):
            continue
        parts = _parts_of(strategy, variable)
        if any(part.tobytes() != parts[0].tobytes() for part in parts):
            found[key] = parts
    return found


def _parts_of(strategy: tf.distribute.Strategy, variable: tf.Variable) -> list[np.ndarray]:
    parts = dict(zip(places(strategy), strategy.experimental_local_results(variable), strict=True))
    if len(parts) == strategy.num_replicas_in_sync:
        return [np.asarray(parts[place].numpy()) for place in sorted(parts)]
    kind = tf.int64 if variable.dtype.is_integer or variable.dtype.is_bool else variable.dtype
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: tf.cast(parts[context.replica_id_in_sync_group], kind)[None]
    )
    return [*tf.cast(strategy.gather(rows, 0), variable.dtype).numpy()]


def assign_parts(variable: tf.Variable, values: Sequence[Any]) -> None:
    """Gives every replica its own value, where there is one for each of them."""
    strategy = strategy_of([variable])
    if strategy is None or strategy.num_replicas_in_sync != len(values):
        return
    components = strategy.experimental_local_results(variable)
    for component, place in zip(components, places(strategy), strict=True):
        component.assign(values[place])
    if is_seed(variable):
        _SPREAD[id(variable)] = variable


def assign_whole(variable: tf.Variable, value: Any) -> None:
    """Gives a variable a value, of which the first replica holds all where they hold parts.

    TensorFlow would part a sum, by a division that rounds, or drops the rest of a whole number.
    """
    if not _is_apart(variable) or variable.aggregation != tf.VariableAggregation.SUM:
        variable.assign(value)
        return
    strategy = strategy_of([variable])
    assert strategy is not None  # or it would have no parts
    components = strategy.experimental_local_results(variable)
    for component, place in zip(components, places(strategy), strict=True):
        component.assign(value if place == 0 else tf.zeros_like(component))


def check_context(call: str, variables: Mapping[str, Variable]) -> None:
    """Refuses the places where gradients of replicas can't be told from one another.

    Args:
      call: The public call, for messages.
      variables: The root's, by path.

    Raises:
      RuntimeError: It is called outside of the replicas, or the model was made elsewhere.
    """
    theirs = strategy_of(variables.values())
    if not is_replica():
        replicas = 1 if theirs is None else theirs.num_replicas_in_sync
        if tf.distribute.has_strategy() or replicas > 1:
            name = type(theirs or tf.distribute.get_strategy()).__name__
            raise RuntimeError(
                f"`{call}` was called outside of the replicas: got {name}'s cross-replica context, "
                "expected a replica. The scope is for building models, and there is one gradient "
                "for each replica. Run the step in them: "
                "`tfloop.compile(step, strategy=strategy)`, or `strategy.run(step, args=(batch,))`."
            )
        return
    ours = tf.distribute.get_strategy()
    odd = [p for p, v in variables.items() if strategy_of([v]) is not ours]
    if odd and ours.num_replicas_in_sync > 1:
        raise RuntimeError(
            f"`{call}` got a model that wasn't made in this strategy: got {odd[0]!r} of "
            f"{type(theirs).__name__ if theirs else 'no strategy'}, expected a variable of "
            f"{type(ours).__name__}. Each replica needs its own copy. Build it in the scope: "
            "`with strategy.scope(): model = build_model()`."
        )


def reduce_sum(
    grads: Mapping[str, Gradient], riders: list[tf.Tensor]
) -> tuple[dict[str, Gradient], list[tf.Tensor]]:
    """Sums gradients over the replicas.

    One collective for the dense ones of each dtype, packed into one vector, which copies each of
    them twice; one for the sparse ones, whose rows are gathered.

    Args:
      grads: Path -> gradient, the same paths on every replica.
      riders: Float32 tensors that are summed in the same call as the float32 gradients.

    Returns:
      The sums, in the same order.
    """
    context = tf.distribute.get_replica_context()
    _check_unconditional()
    gathered = {path: grad for path, grad in grads.items() if sparse.is_sparse(grad)}
    kinds: dict[tf.DType, list[str]] = {tf.float32: []}
    for path, grad in grads.items():
        if path not in gathered:
            kinds.setdefault(grad.dtype, []).append(path)
    summed: dict[str, Gradient] = {}
    for dtype, paths in kinds.items():
        along = riders if dtype == tf.float32 else []
        tensors = [*(grads[path] for path in paths), *along]
        if tensors:
            sums = _packed_sum(context, tensors)
            summed.update(zip(paths, sums, strict=False))
            riders = sums[len(paths) :] if dtype == tf.float32 else riders
    if gathered:
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, list(gathered.values()))
        summed.update(zip(gathered, sums, strict=True))
    return {path: summed[path] for path in grads}, riders


def in_own_row(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor in this replica's row of zeros; a sum over the replicas has all of them as rows."""
    place = tf.distribute.get_replica_context().replica_id_in_sync_group
    return _in_row(tensor, place, count())


def largest(variable: tf.Variable) -> tf.Tensor:
    """The maximum of the parts that the replicas have of a variable; each worker has to ask."""
    strategy = strategy_of([variable])
    if strategy is None:
        return tf.convert_to_tensor(variable)
    parts = iter(strategy.experimental_local_results(variable))
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: _in_row(
            tf.convert_to_tensor(next(parts)),
            context.replica_id_in_sync_group,
            context.num_replicas_in_sync,
        )
    )
    return tf.reduce_max(strategy.reduce(tf.distribute.ReduceOp.SUM, rows, axis=None), 0)


def _in_row(tensor: tf.Tensor, place: Any, rows: int) -> tf.Tensor:
    ours = tf.reshape(tf.equal(tf.range(rows), place), [rows] + [1] * tensor.shape.rank)
    return tf.where(ours, tensor[tf.newaxis], tf.zeros([], tensor.dtype))


def _packed_sum(context: Any, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """One all-reduce for tensors of one dtype."""
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
    flat = context.all_reduce(tf.distribute.ReduceOp.SUM, flat)
    parts = tf.split(flat, [tf.size(tensor) for tensor in tensors])
    return [
        tf.ensure_shape(tf.reshape(part, tf.shape(tensor)), tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def once(fn: Callable[..., None], *values: Any) -> None:
    """Runs `fn(strategy, *values)` once for all replicas; on one device, here.

    Args:
      fn: Changes variables through `update` alone.
      *values: Structures of tensors; replica by replica inside.
    """
    if is_replica():
        context = tf.distribute.get_replica_context()
        _check_unconditional()
        context.merge_call(fn, args=values)
    else:
        fn(tf.distribute.get_strategy(), *values)


def update(strategy: Any, variable: Any, fn: Callable[..., None], *values: Any) -> None:
    """Runs `fn(component, *values)` on every device that holds a copy of the variable."""
    variable = tf_variable(variable)
    if strategy_of([variable]) is None and strategy.num_replicas_in_sync > 1:
        fn(variable, *tf.nest.map_structure(functools.partial(agreed, strategy), values))
        return
    strategy.extended.update(variable, fn, args=values, group=False)


def assign(strategy: Any, variable: Any, value: Any) -> None:
    """Gives every copy of a variable a value, inside `once`."""
    update(strategy, variable, lambda component, new: component.assign(new), value)


def agreed(strategy: Any, value: Any) -> Any:
    """What all replicas have alike, inside `once`."""
    return strategy.experimental_local_results(value)[0]


def _check_unconditional() -> None:
    """Refuses a graph within that of the replica: TensorFlow can't meet the others from there.

    Raises:
      RuntimeError: It is called in a `tf.cond`, a loop or a `tf.function` inside the replica.
    """
    theirs = replica_graph()
    here = tf.compat.v1.get_default_graph()
    if not tf.executing_eagerly() and theirs is not None and theirs is not here:
        raise RuntimeError(
            f"`ModuleOptimizer.step` was called in {getattr(here, 'name', 'a graph')!r} inside a "
            "replica, expected the replica's own code: in a `tf.cond`, a loop or a `tf.function` "
            "there, replicas can't wait for each other. Accumulate and step in two compiled "
            "functions, and decide between them in Python: `if (i + 1) % 4 == 0: update(lr)`."
        )
