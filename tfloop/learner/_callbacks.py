"""What Keras' callbacks see in the place of a compiled model.

They read and set `model.optimizer.learning_rate`, set `model.stop_training`, and use the model for
the rest. Knows rates and attributes, not loops.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from tfloop._model.paths import named_parameters
from tfloop._optimizer.optimizer import ModuleOptimizer
from tfloop.schedulers._module import ModuleLrScheduler
from tfloop.schedulers._rates import ModuleLearningRate, values_of


class ForCallbacks:
    """A model with what `fit` has beside it: an optimizer, a history, and two wishes to stop.

    The rest is the model's.

    Args:
      model: The model, which isn't changed by the additions.
      optimizer: What has `learning_rate` and `iterations`.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        own = {"optimizer": optimizer, "history": None}
        wishes = {"stop_training": False, "stop_evaluating": False}
        self.__dict__.update(own, **wishes, _model=model)

    def __getattr__(self, name: str) -> Any:
        """The model's."""
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets what is added here, else the model's."""
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self._model, name, value)


class Rate:
    """The rates of a loop, which callbacks may scale: `learning_rate` is the base.

    Args:
      lr: Rates; a scheduler, which counts its own steps and isn't scaled; or `None` for those of
        the optimizer.
      optim: The optimizer whose updates are counted.
      model: Its root.

    Attributes:
      factor: What the rates are multiplied with: state, a float64 scalar variable.
    """

    built = True

    def __init__(
        self,
        lr: ModuleLearningRate | ModuleLrScheduler | None,
        optim: ModuleOptimizer,
        model: Any,
    ) -> None:
        self._lr, self._optim = lr, optim
        self._own = optim.as_keras(model)
        self.factor = tf.Variable(1.0, dtype=tf.float64, trainable=False, name="rate_factor")

    def numbers(self) -> list[Any]:
        """The rates as an argument of a step: those of the groups, then the base.

        Plain numbers, which TensorFlow hands to replicas too; none where they come from elsewhere.
        """
        if not isinstance(self._lr, ModuleLearningRate):
            return []
        factor = float(self.factor.numpy())
        return [rate * factor for rate in values_of(self._lr)]

    def rates(self, numbers: list[Any]) -> ModuleLearningRate | None:
        """The rates of this update, in the step; a scheduler counts it."""
        if self._lr is None:
            return None
        if isinstance(self._lr, ModuleLrScheduler):
            return self._lr.step()
        rates = ModuleLearningRate(numbers[-1])
        for group, rate in zip(self._lr.groups, numbers, strict=False):
            rates.with_group(group, rate)
        return rates

    def take_over(self, other: "Rate") -> None:
        """Scales as another does."""
        self.factor.assign(other.factor)
        self._own.take_over(other._own)

    def finalize(self) -> None:
        """Puts moving averages into the variables, where an optimizer keeps them."""
        self._own.finalize_variable_values([*named_parameters(self._optim.root).values()])

    @property
    def iterations(self) -> tf.Variable:
        """The count of updates."""
        return self._optim.iterations

    @property
    def learning_rate(self) -> float:
        """The base rate of the next update."""
        if self._lr is None:
            return float(np.asarray(self._own.learning_rate))
        if isinstance(self._lr, ModuleLrScheduler):
            return float(self._lr.peek(self._lr.count).base)
        return float(self._lr.base) * float(self.factor.numpy())

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if self._lr is None:
            self._own.learning_rate = value
            return
        if isinstance(self._lr, ModuleLrScheduler) or float(self._lr.base) == 0.0:
            raise TypeError(
                f"A callback can't set the learning rate to {float(value)!r}: got lr={self._lr!r}, "
                "expected rates above 0 that aren't scheduled. Those of the groups follow the base "
                "rate in proportion. Give a number: `tfloop.Learner(..., lr=1e-3)`."
            )
        self.factor.assign(float(value) / float(self._lr.base))
