"""A fault of TensorFlow that tests of whole processes meet.

TensorFlow 2.21 aborts now and then on a busy machine, in its own code (`free(): invalid next size`
below `IteratorGetNext`), in a plain `tf.function` loop too. A process that died so says nothing
about ours, and is run again, twice at most.
"""

import functools
import signal

_ABORTS = {-signal.SIGABRT, -signal.SIGSEGV}


class NativeAbortError(Exception):
    """A child process died in native code."""


def check_not_aborted(returncode: int) -> None:
    """Raises for the exit code of a process that died in native code."""
    if returncode in _ABORTS:
        raise NativeAbortError(returncode)


def again_after_native_abort(test):
    """Runs a test again if a child process died in native code, each time in an empty folder."""

    @functools.wraps(test)
    def repeated(*args, **kwargs):
        folder = kwargs.get("tmp_path")
        for attempt in range(3):
            if folder is not None:
                kwargs["tmp_path"] = folder / str(attempt)
                kwargs["tmp_path"].mkdir()
            try:
                return test(*args, **kwargs)
            except NativeAbortError:
                if attempt == 2:
                    raise

    return repeated
