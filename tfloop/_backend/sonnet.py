"""Private of Sonnet, which may not be installed: what its modules take in a call."""

import inspect
import sys
from typing import Any

from tfloop._backend.versions import required, unsupported


def refuses_flag(module: Any) -> bool:
    """Is it an MLP without dropout, which names the flag `is_training`, but refuses it?"""
    sonnet = sys.modules.get("sonnet")
    if sonnet is None or not isinstance(module, sonnet.nets.MLP):
        return False
    return not required(module, "_dropout_rate", "sonnet.nets.MLP", "its rate of dropout")


def undecorated(method: Any) -> Any:
    """The method behind the one in which Sonnet wraps every method, forgetting its signature."""
    while _is_wrapper(method):
        inner = inspect.getclosurevars(method).nonlocals
        if "f" not in inner:
            raise unsupported("f", f"sonnet.{method.__qualname__}", "the method that it wraps")
        method = inner["f"]
    return method


def _is_wrapper(method: Any) -> bool:
    if not inspect.isfunction(method) or method.__module__.partition(".")[0] != "sonnet":
        return False
    _, *rest = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
    return rest == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]
