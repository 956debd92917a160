"""Private of Keras' losses: their division by the number of replicas."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from tfloop._backend.versions import unsupported

_MODULE = "keras.src.losses.loss"
_SCALINGS = ("scale_loss_for_distribution", "unscale_loss_for_distribution")


def keep_whole(where: Callable[[], bool]) -> None:
    """Stops loss objects from dividing their mean by the replicas where `where()` says so.

    Keras divides it, and multiplies where it shows it. It asks the strategy, which must tell
    everybody else the truth, so there is no other way in.

    Raises:
      RuntimeError: Keras has another way to do so, and would train at a fraction of the rate.
    """
    try:
        losses = importlib.import_module(_MODULE)
        scalings = {name: getattr(losses, name) for name in _SCALINGS}
    except (ImportError, AttributeError) as error:
        name = getattr(error, "name", None) or " and ".join(_SCALINGS)
        meaning = "where a loss is divided by the number of replicas"
        raise unsupported(name, _MODULE, meaning) from error
    for name, scaling in scalings.items():
        if not hasattr(scaling, "__wrapped__"):
            setattr(losses, name, _unless(where, scaling))


def _unless(where: Callable[[], bool], scaling: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(scaling)
    def whole(value: Any) -> Any:
        return value if where() else scaling(value)

    return whole
