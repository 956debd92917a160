"""TensorFlow's own log, about which it decides once, when it is imported.

Nobody wants to read it before the first line of one of our commands; in a user's program it is
the user's business.
"""

import os
import sys
from collections.abc import Sequence

FLAG = "--tf_log"
_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def quieten(command: Sequence[str]) -> None:
    """Silences the log where Python was started with a command of ours, `-m tfloop.examples.x`.

    Unless `--tf_log` is among its arguments, or the user has set a level. What fails is raised,
    logged or not.

    Args:
      command: Python's own arguments, as `sys.orig_argv`.
    """
    module = command[command.index("-m") + 1 :] if "-m" in command else []
    is_ours = bool(module) and module[0].startswith("tfloop.examples.")
    if is_ours and FLAG not in module and not os.environ.get(_LEVEL):
        os.environ[_LEVEL] = "3"


if "tensorflow" not in sys.modules:
    quieten(sys.orig_argv)
