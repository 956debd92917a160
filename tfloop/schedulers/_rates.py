"""ModuleLearningRate: the rates of one update, a base and one for each group."""

from typing import Any

import tensorflow as tf

from tfloop._checks.arguments import TENSORS
from tfloop._groups.group import ParamGroup, as_group
from tfloop._model.paths import Variable
from tfloop._tracing import traces
from tfloop.schedulers._kinds import checked_rate

_CALL = "ModuleLearningRate(base)"
_CALL_GROUP = "ModuleLearningRate.with_group(group, lr, multiplier=...)"


class ModuleLearningRate:
    """The learning rates of one step: a base rate, and rates for groups of parameters.

    Of the groups that match a parameter the last one wins; the parameters of no group have the
    base rate. A group's rate is

        (lr or base) * multiplier

    It goes where a rate goes, `optim.step(rates, model, grads)`, and through a `tf.function` as an
    argument or result: the numbers are float32 tensors there, so that new ones don't retrace; the
    groups belong to the trace. (TensorFlow can't hand such an object to `strategy.run` inside a
    `tf.function`: make it in the replica function, or close over it.)

    Args:
      base: A number or a scalar tensor or variable.

    Raises:
      TypeError: It isn't a scalar number by kind.
      ValueError: It is a number that is NaN, infinite or negative, or a tensor with axes.

    Example:
      >>> import tfloop
      >>> rates = tfloop.ModuleLearningRate(0.1)
      >>> rates = rates.with_group(tfloop.ParamGroup.from_name("encoder"), multiplier=0.5)
      >>> rates.rate_of(("encoder.kernel",)), rates.rate_of(("head.kernel",))
      (0.05, 0.1)
    """

    __slots__ = ("_base", "_groups", "_own")

    def __init__(self, base: Any):
        self._base = checked_rate(_CALL, "base", base)
        self._groups: tuple[ParamGroup, ...] = ()
        self._own: tuple[tuple[Any, Any], ...] = ()  # not changed in place: copies share it

    def with_group(
        self, group: ParamGroup, lr: Any = None, *, multiplier: Any = 1.0
    ) -> "ModuleLearningRate":
        """Adds a group with a rate of its own, or with a multiple of the base rate.

        Args:
          group: Its parameters.
          lr: A number or a scalar tensor or variable; `None` for the base rate.
          multiplier: What the rate is multiplied with, likewise.

        Returns:
          This object.
        Mutates: self.
        Graph mode: a new group is a new trace of the functions that take this as an argument.

        Raises:
          TypeError: An argument has the wrong kind.
          ValueError: A number is NaN, infinite or negative, or a tensor has axes.
        """
        group = as_group(_CALL_GROUP, group)
        lr = None if lr is None else checked_rate(_CALL_GROUP, "lr", lr)
        self._own += ((lr, checked_rate(_CALL_GROUP, "multiplier", multiplier)),)
        self._groups += (group,)
        return self

    @property
    def base(self) -> float | tf.Tensor:
        """The rate of the parameters in no group: a float, or a float32 scalar."""
        return _read(self._base)

    @property
    def groups(self) -> tuple[ParamGroup, ...]:
        """The groups in the order in which they were added."""
        return self._groups

    def rate_of(self, paths: tuple[str, ...], variable: Variable | None = None) -> Any:
        """The rate of one parameter.

        Args:
          paths: All paths to the parameter.
          variable: The parameter itself, for groups of variables and layers.

        Returns:
          A float, or a float32 scalar.
        """
        return values_of(self)[bucket_of(self, paths, variable)]

    def fingerprint(self) -> object:
        """What a trace bakes in: which groups there are."""
        return self._groups

    def __tf_flatten__(self) -> tuple[tuple[ParamGroup, ...], tuple[tf.Tensor, ...]]:
        """The groups as what a trace is made for, the rates as what may change."""
        rates = values_of(self)
        return self._groups, tuple(tf.constant(r) if isinstance(r, float) else r for r in rates)

    @classmethod
    def __tf_unflatten__(
        cls, metadata: tuple[ParamGroup, ...], components: tuple[Any, ...]
    ) -> "ModuleLearningRate":
        """Puts rates, or what stands for them while tracing, back into their places."""
        *own, base = components
        rates = object.__new__(cls)
        rates._base, rates._groups = base, metadata
        rates._own = tuple((rate, 1.0) for rate in own)
        return rates

    def __repr__(self) -> str:
        """The calls that make it."""
        groups = (
            f".with_group({group!r}, {_shown(rate)})"
            for group, rate in zip(self._groups, values_of(self), strict=False)
        )
        return f"ModuleLearningRate({_shown(self.base)}){''.join(groups)}"


def bucket_of(
    rates: ModuleLearningRate, paths: tuple[str, ...], variable: Variable | None = None
) -> int:
    """The index in `values_of` of a parameter's rate: its group's, or -1 for the base.

    Args:
      rates: The rates of a step.
      paths: All paths to the parameter.
      variable: The parameter itself, for groups of variables and layers.
    """
    traces.depends_on(rates)
    for index in reversed(range(len(rates.groups))):
        if rates.groups[index].matches_any(paths, variable):
            return index
    return -1


def values_of(rates: ModuleLearningRate) -> list[float | tf.Tensor]:
    """The rate of each group in order, then the base: floats, or float32 scalars."""
    base = rates.base
    own = [_times(base if lr is None else _read(lr), factor) for lr, factor in rates._own]
    return [*own, base]


def as_tensors(rates: ModuleLearningRate) -> ModuleLearningRate:
    """The same rates as float32 scalars: what they are inside a `tf.function`."""
    return ModuleLearningRate.__tf_unflatten__(*rates.__tf_flatten__())


def _read(rate: Any) -> Any:
    """A tensor or a variable's value as float32; numbers, and specs while tracing, as they are."""
    if not isinstance(rate, TENSORS):
        return rate
    return tf.cast(tf.convert_to_tensor(rate), tf.float32)  # tf.cast alone may keep a variable


def _times(rate: Any, factor: Any) -> Any:
    """The product; a factor of 1 keeps the very tensor, which tf.function compares by identity."""
    return rate if isinstance(factor, float) and factor == 1.0 else rate * _read(factor)


def _shown(rate: Any) -> str:
    if isinstance(rate, float):
        return repr(rate)
    return repr(float(rate)) if hasattr(rate, "numpy") else "<tensor>"
