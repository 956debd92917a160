"""Explicit primitives for hand-written TensorFlow and Keras training loops.

The front door: every public name, and nothing else.
"""

from importlib.metadata import version as _version

from tfloop import _as_keras as _as_keras  # registers with Keras, for `load_model`
from tfloop import flags, schedulers
from tfloop._accumulate import GradientsAccumulator
from tfloop._backward import Gradients
from tfloop._checkpoint import Checkpoint
from tfloop._clipping import GradientClipping
from tfloop._compile import compile  # noqa: A004
from tfloop._copies import blend, to_device
from tfloop._gradients import GradientsParams
from tfloop._groups import ParamGroup
from tfloop._microbatch import microbatch
from tfloop._modes import train, valid
from tfloop._optimizer import ModuleOptimizer
from tfloop._paths import named_parameters, named_variables
from tfloop._scaling import LossScaler
from tfloop._tape import Tape, total_loss
from tfloop.config import AdamConfig, Config, OptimizerConfig
from tfloop.data import DataLoader
from tfloop.learner import Learner
from tfloop.runtime import seed, strategy
from tfloop.schedulers._module import ModuleLrScheduler
from tfloop.schedulers._rates import ModuleLearningRate

__version__ = _version("tfloop-keras")

__all__ = [
    "AdamConfig",
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
