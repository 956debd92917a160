"""Explicit primitives for hand-written TensorFlow and Keras training loops.

The front door: every public name, and nothing else.
"""

from importlib.metadata import version as _version

from tfloop import schedulers
from tfloop._accumulate import GradientsAccumulator
from tfloop._checkpoint import Checkpoint
from tfloop._clipping import GradientClipping
from tfloop._compile import compile  # noqa: A004
from tfloop._gradients import Gradients, GradientsParams
from tfloop._groups import ParamGroup
from tfloop._microbatch import microbatch
from tfloop._modes import blend, to_device, train, valid
from tfloop._optimizer import ModuleOptimizer
from tfloop._paths import named_parameters, named_variables
from tfloop._tape import Tape, total_loss
from tfloop.schedulers._module import ModuleLrScheduler
from tfloop.schedulers._rates import ModuleLearningRate

__version__ = _version("tfloop-keras")
