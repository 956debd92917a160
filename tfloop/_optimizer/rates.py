"""What `step` takes as a rate, and which rate each gradient of a group gets by it.

`rates_of` tells the kinds apart; another one is another `Rates` here. What a group's own optimizer
was given as its rate is `update`'s business, schedules are `tfloop.schedulers`'.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfloop._checks.arguments import is_number, wrong_scalar
from tfloop._checks.messages import described
from tfloop._groups.group import ParamGroup
from tfloop._model.paths import AddressBook, is_model
from tfloop._optimizer.checks import STEP
from tfloop._optimizer.routing import Group
from tfloop._tensors.sparse import Gradient
from tfloop.schedulers._kinds import is_schedule
from tfloop.schedulers._rates import ModuleLearningRate, bucket_of, values_of


class Rated(NamedTuple):
    """Gradients of one group by path, and the rate of all of them, a scalar tensor."""

    rate: tf.Tensor
    grads: dict[str, Gradient]


class Rates(abc.ABC):
    """What a step was given as its rate.

    Attributes:
      groups: The parameter groups that it speaks of.
    """

    groups: Sequence[ParamGroup] = ()

    @abc.abstractmethod
    def split(self, grads: dict[str, Gradient], group: Group, book: AddressBook) -> list[Rated]:
        """The gradients of one group, split by the rate they get.

        Raises:
          TypeError, ValueError: One of the rates isn't one, as in `as_rate`.
        """


class OneRate(Rates):
    """A number or a scalar tensor, for all."""

    def __init__(self, rate: Any) -> None:
        self._rate = as_rate(rate)

    def split(self, grads: dict[str, Gradient], group: Group, book: AddressBook) -> list[Rated]:
        """All together."""
        return [Rated(self._rate, grads)]


class OwnRates(Rates):
    """`None`: each group has the rate of the optimizer that it was given."""

    def split(self, grads: dict[str, Gradient], group: Group, book: AddressBook) -> list[Rated]:
        """All together."""
        assert group.update is not None  # a frozen group gets no gradients
        return [Rated(as_rate(group.update.own_rate(), f"the rate of {group.group}"), grads)]


class RatesByGroup(Rates):
    """A `ModuleLearningRate`, the groups of which need not be those of the optimizer."""

    def __init__(self, rates: ModuleLearningRate) -> None:
        self._rates = rates
        self.groups = rates.groups

    def split(self, grads: dict[str, Gradient], group: Group, book: AddressBook) -> list[Rated]:
        """By the group of rates that each is in.

        Raises:
          ValueError: There are several, and the group's optimizer takes one.
        """
        parts: dict[int, dict[str, Gradient]] = {}
        for path, grad in grads.items():
            bucket = bucket_of(self._rates, book.paths_of(path), book.variables[path])
            parts.setdefault(bucket, {})[path] = grad
        update = group.update
        assert update is not None  # a frozen group gets no gradients
        if len(parts) > 1 and not update.takes_several_rates():
            raise ValueError(
                f"`{STEP}` got {len(parts)} rates for the group {group.group}, expected one: "
                f"{update.name} moves state that its variables share, once per update. "
                "Give each rate a group of its own: `optim.with_group(group, optimizer)`."
            )
        rates = values_of(self._rates)
        return [Rated(as_rate(rates[bucket]), part) for bucket, part in parts.items()]


def rates_of(lr: Any) -> Rates:
    """The kind of rate that a user means.

    Raises:
      TypeError, ValueError: As in `as_rate`.
    """
    if lr is None:
        return OwnRates()
    return RatesByGroup(lr) if isinstance(lr, ModuleLearningRate) else OneRate(lr)


def as_rate(rate: Any, what: str = "the rate") -> tf.Tensor:
    """A rate as a scalar tensor, which `assert_sound` may still have to look at.

    Args:
      rate: A number, or a scalar tensor or variable.
      what: Whose rate it is, for messages.

    Raises:
      ValueError: It is known to be negative or not finite.
      TypeError: It isn't a number by kind, or has axes.
    """
    if is_schedule(rate):
        raise TypeError(
            f"`{STEP}` got the schedule {described(rate)} as rate, expected a number. A schedule "
            "needs a count of steps. Give it to the optimizer (`keras.optimizers.Adam(schedule)` "
            "and `step(model, grads)`) or step it: `tfloop.ModuleLrScheduler(schedule).step()`."
        )
    _check_kind(rate, what)
    if is_number(rate):
        tensor = tf.constant(float(rate), tf.float64)
    else:
        tensor = tf.convert_to_tensor(rate)
        tensor = tensor if tensor.shape.rank == 0 else tf.ensure_shape(tensor, ())
    value = tf.get_static_value(tensor)
    if value is not None and not (np.isfinite(value) and value >= 0):
        raise ValueError(
            f"`{STEP}` got {float(value)} as {what}, expected a finite number of at least 0. "
            "A schedule or a division went wrong, or a loss wasn't finite. Check it: `print(lr)`."
        )
    return tensor


def _check_kind(rate: Any, what: str) -> None:
    wrong = wrong_scalar(rate)
    if wrong is None:
        return
    if hasattr(rate, "peek"):
        cause, fix = "A scheduler gives the rates of each step", "scheduler.step()"
    elif is_model(rate):
        cause, fix = "The rate comes first", "optim.step(lr, model, grads)"
    elif isinstance(rate, str):
        cause, fix = "A text is no number", "float(lr)"
    else:
        cause = "Several rates belong to several groups"
        fix = "tfloop.ModuleLearningRate(base).with_group(group, lr)"
    raise TypeError(
        f"`{STEP}` got {wrong.got} as {what}, expected a number, a scalar tensor or variable, "
        f"a ModuleLearningRate, or None. {cause}. Write `{fix}`."
    )


def assert_sound(rate: tf.Tensor) -> list[tf.Operation]:
    """An assertion that a rate is finite and not negative, where that isn't known yet."""
    if tf.get_static_value(rate) is not None:
        return []
    message = (
        f"`{STEP}` got a rate that is not sound, expected a finite number of at least 0. A "
        "schedule or a division went wrong, or a loss was not finite. Check it: `tf.print(lr)`. "
        "The rate was:"
    )
    number = rate if rate.dtype.is_floating else tf.cast(rate, tf.float64)
    # The root of a negative number is NaN; small steps feel each operation.
    sound = tf.math.is_finite(tf.sqrt(number))
    return [tf.raw_ops.Assert(condition=sound, data=[message, number])]
