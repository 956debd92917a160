"""The Keras optimizer that a user gives: what is accepted, what is taken over, how it is copied.

Every check of its arguments is made here, at construction, so that the steps need none.
"""

import copy
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfloop._backend import keras_optimizers
from tfloop._checks.messages import described, did_you_mean, listed
from tfloop._clipping.clipping import GradientClipping

CLIP_ARGUMENTS = {
    "clipvalue": GradientClipping.by_value,
    "clipnorm": GradientClipping.by_norm,
    "global_clipnorm": GradientClipping.by_global_norm,
}


def as_keras_optimizer(optimizer: Any, call: str) -> Optimizer:
    """An optimizer from what `keras.Model.compile` accepts: an instance, a name or a config.

    Raises:
      TypeError: It is none of these.
      ValueError: No optimizer has this name or config.
    """
    if isinstance(optimizer, (str, dict)):
        try:
            return keras.optimizers.get(optimizer)
        except Exception as error:
            known = {n.lower(): n for n, kind in vars(keras.optimizers).items() if _is_kind(kind)}
            name = optimizer if isinstance(optimizer, str) else ""
            # Keras has one or two that it doesn't find by their names.
            made = known.pop(name.lower(), "Adam")
            hint = did_you_mean(name, list(known)) if name and made == "Adam" else ""
            raise ValueError(
                f"`{call}` can't make an optimizer: got {optimizer!r}, expected a name such as "
                f"'adam', or a config from `keras.optimizers.serialize`.{hint} A class of your own "
                "must be registered with Keras, or given as an instance. "
                f"Write `keras.optimizers.{made}()`."
            ) from error
    if isinstance(optimizer, Optimizer):
        return optimizer
    if _is_kind(optimizer):
        raise TypeError(
            f"`{call}` needs an optimizer: got the class {optimizer.__name__}, expected an "
            f"instance. Make one: `keras.optimizers.{optimizer.__name__}()`."
        )
    raise TypeError(
        f"`{call}` needs an optimizer: got {described(optimizer)}, expected a "
        "keras.optimizers.Optimizer, its name or its config. "
        "Make one: `keras.optimizers.Adam()`."
    )


def check_arguments(given: Optimizer, call: str) -> None:
    """Refuses what would be applied twice or at the wrong time, and names what does it here.

    Raises:
      ValueError: It accumulates, scales losses, holds several optimizers, or has been used.
    """
    name = type(given).__name__
    if isinstance(given, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"`{call}` got a LossScaleOptimizer, expected the optimizer inside it: one scale must "
            f"serve all groups. Give the inner one: `{type(given.inner_optimizer).__name__}(...)`."
        )
    if isinstance(given, keras_optimizers.kinds("MultiOptimizer")):
        raise ValueError(
            f"`{call}` got a MultiOptimizer, expected one optimizer: groups are declared here. "
            "Write `.with_group(tfloop.ParamGroup.from_regex(pattern), optimizer)` for each."
        )
    if given.gradient_accumulation_steps:
        raise ValueError(
            f"`{call}` got {name}(gradient_accumulation_steps="
            f"{given.gradient_accumulation_steps}), expected none: it would count micro-batches as "
            "updates. Accumulate before the step: `tfloop.GradientsAccumulator()`."
        )
    if given.loss_scale_factor:
        raise ValueError(
            f"`{call}` got {name}(loss_scale_factor={given.loss_scale_factor}), expected none: "
            "gradients reach the step unscaled. Undo a scale of your own: `grads.scale(1 / s)`."
        )
    if given.use_ema and keras_optimizers.applies_by_itself(given):
        raise ValueError(
            f"`{call}` got {name}(use_ema=True) with an `apply` of its own, expected one of the "
            "two: Keras would average parameters without gradient too. Leave the average to the "
            f"loop: `{name}(use_ema=False)` and `tfloop.blend(average, model, 0.01)`."
        )
    steps = int(given.iterations.numpy()) if tf.executing_eagerly() else 0
    if steps:
        raise ValueError(
            f"`{call}` got an optimizer that has already made {steps} steps elsewhere, expected a "
            "fresh one: each group works on a copy, and the state would be lost. "
            f"Make a new one: `keras.optimizers.{name}(...)`."
        )


def clipping_of(given: Optimizer) -> GradientClipping | None:
    """The optimizer's own clipping as ours, which means the same."""
    for argument, make in CLIP_ARGUMENTS.items():
        limit = getattr(given, argument)
        if limit:
            return make(limit)
    return None


def copy_of(given: Optimizer, call: str) -> Optimizer:
    """A fresh optimizer of the same configuration, without clipping and with a rate of 0.

    The rate is a variable that each update sets.

    Raises:
      ValueError: Its config can't make it again.
    """
    try:
        config = keras_optimizers.config_without_rate(given)
        config.update({argument: None for argument in CLIP_ARGUMENTS}, learning_rate=0.0)
        optimizer = type(given).from_config(config)
    except Exception as error:
        if not tf.executing_eagerly():
            raise ValueError(
                f"`{call}` was called in a tf.function: got {type(given).__name__} in a trace, "
                "expected it before. State has to outlive the step. Make the optimizer once, above "
                "the step: `optim = tfloop.ModuleOptimizer(optimizer)`."
            ) from error
        raise ValueError(
            f"`{call}` can't copy {type(given).__name__}: got {type(error).__name__} ({error}), "
            "expected a config that makes it again. Each group works on its own copy. "
            "Write `get_config` so that `type(opt).from_config(opt.get_config())` works."
        ) from error
    keras_optimizers.copy_exclusions(given, optimizer)
    return optimizer


def twin_of(given: Optimizer, memo: dict) -> Optimizer:
    """A fresh optimizer with the rate of the given one too; one for all who were given that.

    Keras' own copies lose schedules, functions and what is excluded from weight decay.
    """
    if id(given) not in memo:
        twin, rate = copy_of(given, "copy.deepcopy(optim)"), keras_optimizers.rate_of(given)
        twin.learning_rate = copy.deepcopy(rate, memo) if callable(rate) else float(rate.numpy())
        memo[id(given)] = twin
    return memo[id(given)]


def check_copy(given: Optimizer, optimizer: Optimizer, call: str) -> None:
    """Refuses a copy that has lost an argument, as it does where `get_config` leaves it out.

    Raises:
      ValueError: A plain public attribute has another value in the copy.
    """
    plain = {
        name: value
        for name, value in vars(given).items()
        if isinstance(value, (bool, int, float, str))
        and not name.startswith("_")
        and name not in (*CLIP_ARGUMENTS, "built")
    }
    lost = [name for name, value in plain.items() if getattr(optimizer, name, None) != value]
    if lost:
        kind = type(given).__name__
        raise ValueError(
            f"`{call}` can't copy {kind}: its config loses {listed(lost)}, expected all arguments "
            "in it. Each group works on a copy made from the config. Add them to it: "
            f"`def get_config(self): return super().get_config() | {{{lost[0]!r}: "
            f"self.{lost[0]}}}`."
        )


def _is_kind(thing: Any) -> bool:
    return isinstance(thing, type) and issubclass(thing, Optimizer)
