"""ModuleLrScheduler: schedules for a base rate and for groups, and the count of their steps."""

import copy
import dataclasses
from typing import Any

import tensorflow as tf

from tfloop._checks.arguments import is_number, whole_number
from tfloop._groups.group import ParamGroup, as_group
from tfloop._tracing import traces
from tfloop.schedulers._base import ONE_AT_A_TIME, as_step
from tfloop.schedulers._kinds import as_schedule, checked_rate, rate_of
from tfloop.schedulers._rates import ModuleLearningRate, as_tensors

_BASE = "base"


@dataclasses.dataclass(frozen=True)
class _Route:
    """A group, where its schedule is kept (`None`: the base rate), and its multiplier."""

    group: ParamGroup
    key: str | None
    multiplier: Any


class ModuleLrScheduler(tf.Module):
    """Gives the learning rates of step after step: `rates = scheduler.step()`.

    All schedules are asked at one count of steps, which begins at 0. Of the groups that match a
    parameter the last one wins; the parameters of no group have the base schedule's rate.

    `tf.train.Checkpoint` finds the count, and the state of schedules that have one (`Plateau`),
    under the group's text: the order in which groups were added doesn't matter. (Groups of
    variables or functions that read the same are numbered in order.)

    Args:
      schedule: The base: a float, a Keras schedule or one of `tfloop.schedulers`.

    Raises:
      TypeError: It is none of these.
      ValueError: It is a number that is NaN, infinite or negative.

    Example:
      >>> import keras, tfloop
      >>> linear = keras.optimizers.schedules.PolynomialDecay(1.0, 4, 0.0)
      >>> scheduler = tfloop.ModuleLrScheduler(linear)
      >>> [float(scheduler.step().base) for _ in range(3)]
      [1.0, 0.75, 0.5]
    """

    def __init__(self, schedule: Any):
        super().__init__()
        self._schedules = {_BASE: as_schedule("ModuleLrScheduler(schedule)", schedule)}
        self._routes: list[_Route] = []
        self.count = traces.eagerly(
            lambda: tf.Variable(0, dtype=tf.int64, trainable=False, name="count")
        )

    def with_group(
        self, group: ParamGroup, schedule: Any = None, *, multiplier: Any = 1.0
    ) -> "ModuleLrScheduler":
        """Adds a group with a schedule of its own, or with a multiple of the base rate.

        Args:
          group: Its parameters.
          schedule: As for the class; `None` for the base schedule.
          multiplier: What the rate is multiplied with: a number or a scalar tensor or variable.

        Returns:
          This object.
        Mutates: self; the count stays.
        Graph mode: call it outside. `tfloop.compile` traces anew; a plain `tf.function` that was
          traced before keeps the groups it had.

        Raises:
          TypeError: An argument has the wrong kind.
          ValueError: A number is NaN, infinite or negative.
        """
        call = "ModuleLrScheduler.with_group(group, schedule, multiplier=...)"
        group, key = as_group(call, group), None
        multiplier = checked_rate(call, "multiplier", multiplier)
        if schedule is not None:
            schedule = as_schedule(call, schedule)
            key = self._new_key(group)
            self._schedules[key] = schedule
        self._routes.append(_Route(group, key, multiplier))
        return self

    def _new_key(self, group: ParamGroup) -> str:
        key, number = str(group), 1
        while key in self._schedules:
            number += 1
            key = f"{group} {number}"
        return key

    @traces.not_converted
    def step(self) -> ModuleLearningRate:
        """Gives the rates at the present count, the initial ones first, and counts one more.

        Returns:
          The rates, as float32 scalars.
        Mutates: `count`.
        Graph mode: works in a `tf.function`, with `jit_compile=True` too. In a replica context
          all replicas together count one step and get the same rates; as every cross-replica
          operation, it can't be inside a `tf.cond` or an inner `tf.function` there.
        """
        replica = tf.distribute.get_replica_context()
        if replica is not None and replica.num_replicas_in_sync > 1:
            return self.peek(replica.merge_call(lambda strategy: self._advanced()))
        return self.peek(self._advanced())

    def _advanced(self) -> tf.Tensor:
        traces.depends_on(self)  # here too: replicas are threads, whose `peek` nobody watches
        with ONE_AT_A_TIME:
            before = tf.identity(self.count)
            self.count.assign_add(1)
        return before

    @traces.not_converted
    def peek(self, step: Any) -> ModuleLearningRate:
        """Gives the rates that `step()` would give at a count of `step`, without counting.

        Args:
          step: Scalar, counted from 0: a number, a tensor or a variable.

        Returns:
          The rates, as float32 scalars.
        Mutates: nothing.
        Graph mode: works in a `tf.function`, with `jit_compile=True` too.

        Raises:
          TypeError: It is a number that isn't whole.
          ValueError: It is negative.
        """
        if is_number(step):
            step = whole_number("ModuleLrScheduler.peek(step)", "step", step, least=0, fix="0")
        traces.depends_on(self)
        at = as_step(step)
        own = {key: rate_of(schedule, at) for key, schedule in self._schedules.items()}
        rates = ModuleLearningRate(own[_BASE])
        for route in self._routes:
            lr = None if route.key is None else own[route.key]
            rates.with_group(route.group, lr, multiplier=route.multiplier)
        return as_tensors(rates)  # products taken once, here

    def fingerprint(self) -> object:
        """What a trace bakes in: which groups there are."""
        return len(self._routes)

    def __copy__(self) -> "ModuleLrScheduler":
        """As `copy.deepcopy`: two schedulers can't share a count."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        """The base schedule and the groups."""
        base = self._schedules[_BASE]
        base = repr(base) if is_number(base) else type(base).__name__
        groups = (f".with_group({route.group!r}, ...)" for route in self._routes)
        return f"ModuleLrScheduler({base}){''.join(groups)}"
