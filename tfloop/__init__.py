"""Explicit primitives for hand-written TensorFlow and Keras training loops.

The front door: every public name, and nothing else.
"""

from importlib.metadata import version as _version

from tfloop import _backend as _backend  # first: it checks the versions
from tfloop import flags, schedulers
from tfloop._accumulation.accumulator import GradientsAccumulator
from tfloop._accumulation.microbatch import microbatch
from tfloop._checkpoint.checkpoint import Checkpoint
from tfloop._clipping.adaptive_clipping import AdaptiveGradientClipping
from tfloop._clipping.clipping import GradientClipping
from tfloop._compile.step import compile  # noqa: A004
from tfloop._gradients.gradients import Gradients
from tfloop._gradients.params import GradientsParams
from tfloop._gradients.scaling import LossScaler
from tfloop._gradients.tape import Tape, total_loss
from tfloop._groups.group import ParamGroup
from tfloop._model.copies import blend, to_device
from tfloop._model.modes import train, valid
from tfloop._model.paths import named_parameters, named_variables
from tfloop._optimizer.as_keras import GroupedOptimizer as _GroupedOptimizer  # noqa: F401
from tfloop._optimizer.optimizer import ModuleOptimizer
from tfloop.config import AdamConfig, Config, OptimizerConfig
from tfloop.data import DataLoader
from tfloop.learner import Learner
from tfloop.runtime import seed, strategy
from tfloop.schedulers._module import ModuleLrScheduler
from tfloop.schedulers._rates import ModuleLearningRate

__version__ = _version("tfloop-keras")

__all__ = [
    "AdamConfig",
    "AdaptiveGradientClipping",
    "Checkpoint",
    "Config",
    "DataLoader",
    "GradientClipping",
    "Gradients",
    "GradientsAccumulator",
    "GradientsParams",
    "Learner",
    "LossScaler",
    "ModuleLearningRate",
    "ModuleLrScheduler",
    "ModuleOptimizer",
    "OptimizerConfig",
    "ParamGroup",
    "Tape",
    "blend",
    "compile",
    "flags",
    "microbatch",
    "named_parameters",
    "named_variables",
    "schedulers",
    "seed",
    "strategy",
    "to_device",
    "total_loss",
    "train",
    "valid",
]
