"""The order of one update: contribution, reduction, finite, clipping, rate, update.

Gradients walk through these one way, by path; each stage has a room of its own and gives what the
next one takes. All checks come before the first change: what is known now raises, and all changes
wait for what a trace asserts.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfloop._optimizer import nonfinite
from tfloop._optimizer.assembly import Assembly
from tfloop._optimizer.checks import STEP, assert_born, assert_current
from tfloop._optimizer.contribution import Source, checks_of, contribution_of, use_up
from tfloop._optimizer.rates import Rated, Rates, assert_sound
from tfloop._optimizer.routing import Group
from tfloop._replicas import contexts, synchronized
from tfloop._replicas.reduction import Contribution, Total, total
from tfloop._tensors import sparse
from tfloop._tensors.sparse import Gradient
from tfloop._update.update import Work


class _Bounded(NamedTuple):
    """What a group takes part with.

    Attributes:
      group: The group.
      grads: Its gradients by path, clipped.
      remembered: What its clipping is to remember.
      finite: Scalar bools: is what its clipping gave finite? None where nobody asks.
    """

    group: Group
    grads: dict[str, Gradient]
    remembered: list[tf.Tensor]
    finite: list[tf.Tensor]


def take_step(optim: Assembly, rates: Rates, model: Any, source: Source, weight: Any) -> None:
    """One update of everything; nothing is changed if it raises.

    Args:
      optim: What is stepped.
      rates: Those of all groups.
      model: The root.
      source: Gradients, or a window of them; it is used up.
      weight: As in `ModuleOptimizer.step`.
    """
    book = optim.prepare(model, STEP)
    optim.is_new_copy = False
    contexts.check_context(STEP, book.variables)
    optim.check_groups_of_rates(rates.groups, book)

    contribution = contribution_of(source, model, book, weight, optim.reduction, optim.served)
    reduced = total(contribution, optim.reduction)
    finite = nonfinite.flags_of(reduced.grads) if optim.skips else {}
    bounded = [_bounded(optim, *share) for share in optim.shares(reduced.grads)]
    rated = [rates.split(share.grads, share.group, book) for share in bounded]

    sound = [_all(finite, bounded)] if optim.skips else []
    met = _met(optim, contribution, finite)
    checks = _checks(optim, bounded, rated) + checks_of(source, contribution, reduced)
    if optim.alarm is not None and met:
        checks += optim.alarm.asserted(*sound, *met)
    # Nothing raises from here on, but what is asserted in the graph; all changes wait for that.
    with tf.control_dependencies(checks):
        works = _works(bounded, rated, reduced.present)
        use_up(source)
        synchronized.once(
            functools.partial(_apply, optim, [work.run for work in works]),
            [(work.inputs, work.some) for work in works],
            _takes_part(bounded, reduced),
            sound,
            met,
            reduced.statistics,
        )


def _bounded(optim: Assembly, group: Group, grads: dict[str, Gradient]) -> _Bounded:
    """The clipping of one group."""
    assert optim.book is not None  # `prepare` has found it
    clipped, remembered = group.clipped(grads, optim.book.variables)
    # Of finite gradients the norm may be infinite, which makes them NaN.
    made = clipped.values() if optim.skips and group.clipping is not None else ()
    return _Bounded(group, clipped, remembered, [sparse.all_finite(grad) for grad in made])


def _met(
    optim: Assembly, contribution: Contribution, finite: dict[str, tf.Tensor]
) -> list[tf.Tensor]:
    """What this replica can say of its own gradients, where it is to."""
    if optim.alarm is None or not finite:
        return []
    if contexts.is_replica():
        finite = nonfinite.flags_of({path: contribution.grads[path] for path in finite})
    assert optim.book is not None  # `prepare` has found it
    return [optim.alarm.findings(finite, optim.book.parameters(), optim.iterations)]


def _all(finite: dict[str, tf.Tensor], bounded: list[_Bounded]) -> tf.Tensor:
    """Was everything finite, and is it still? A scalar bool."""
    flags = [*finite.values()] + [flag for share in bounded for flag in share.finite]
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)


def _checks(
    optim: Assembly, bounded: list[_Bounded], rated: list[list[Rated]]
) -> list[tf.Operation]:
    """What can only be known when the step runs."""
    rates = {id(part.rate): part.rate for parts in rated for part in parts}
    sound = [check for rate in rates.values() for check in assert_sound(rate)]
    updates = [share.group.update for share in bounded]
    unborn = [path for update in updates if update for path in update.state.waiting]
    return [*assert_current(optim.version, optim.routing), *assert_born(unborn), *sound]


def _works(
    bounded: list[_Bounded],
    rated: list[list[Rated]],
    present: Mapping[str, tf.Tensor] | None,
) -> list[Work]:
    """All that is to be run: the update of each group, and what its clipping remembers."""
    works = []
    for (group, _, remembered, _), parts in zip(bounded, rated, strict=True):
        assert group.update is not None  # a frozen group gets no gradients
        works.append(group.update.prepared([*parts], present))
        if group.clipper and remembered:
            works.append(Work(group.clipper.remember, remembered, works[-1].some))
    return works


def _takes_part(bounded: list[_Bounded], reduced: Total) -> tf.Tensor:
    """Is anything updated, a scalar bool?"""
    if reduced.present is None or not bounded:
        return tf.constant(bool(bounded))
    return tf.reduce_any(tf.stack(list(reduced.present.values())))


def _apply(
    optim: Assembly,
    runs: list[Callable[..., None]],
    strategy: Any,
    inputs: list[Any],
    updated: tf.Tensor,
    sound: list[tf.Tensor],
    met: list[tf.Tensor],
    statistics: dict[str, tf.Tensor],
) -> None:
    """All changes of one step, once for all replicas; `sound` alone where it may be skipped."""
    assert optim.book is not None  # `prepare` has found it

    def change() -> tf.Tensor:
        for run, (values, some) in zip(runs, inputs, strict=True):
            run(strategy, values, some)
        synchronized.update(strategy, optim.iterations, _add, updated)
        return tf.constant(0)

    with optim.lock:  # a trace, too, sets a rate on the Keras optimizer for a while
        if sound:
            runs_now = synchronized.agreed(strategy, sound[0])
            tf.cond(runs_now, change, lambda: tf.constant(0))
            synchronized.update(strategy, optim.skipped, _add, tf.logical_not(runs_now))
            if optim.scaler is not None:
                optim.scaler.adapt(strategy, runs_now)
            if optim.alarm is not None:
                for found in met:
                    optim.alarm.note(strategy, runs_now, synchronized.agreed(strategy, found))
        else:
            change()
        for path, mean in statistics.items():
            synchronized.assign(strategy, optim.book.variables[path], mean)


def _add(counter: tf.Variable, one: tf.Tensor) -> None:
    counter.assign_add(tf.cast(one, counter.dtype))
