"""TensorFlow's own log, about which is decided before it is imported.

Nobody wants to read it before the first line of one of our commands; in a user's program it is
the user's business.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence

FLAG = "--tf_log"
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def is_silent(command: Sequence[str]) -> bool:
    """Was Python started with a command of ours, `-m tfloop.examples.x`, without `--tf_log`?

    A level that the user has set is heeded, too.

    Args:
      command: Python's own arguments, as `sys.orig_argv`.
    """
    module = command[command.index("-m") + 1 :] if "-m" in command else []
    is_ours = bool(module) and module[0].startswith("tfloop.examples.")
    return is_ours and FLAG not in module and not os.environ.get(_LEVEL)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Sends what C++ writes to stderr nowhere; exceptions are raised as ever."""
    try:
        kept = os.dup(2)
    except OSError:  # It is closed.
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


if "tensorflow" not in sys.modules and is_silent(sys.orig_argv):
    os.environ[_LEVEL] = "3"
    # What is logged as it is loaded heeds no level.
    with _without_stderr():
        importlib.import_module("keras")
        importlib.import_module("tensorflow")
