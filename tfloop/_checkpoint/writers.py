"""Who writes in a directory, and when: one process, one write at a time, in front or behind.

Knows threads and locks, not what is written.
"""

import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator

import tensorflow as tf

from tfloop._checkpoint import files

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class Folder:
    """A directory that this process writes in, for as long as the object is held.

    Two runs in one would remove each other's checkpoints as the oldest. On a file system that
    can't lock a directory (NFS, an object store) nothing is refused.

    Args:
      directory: Made if it isn't there.
      call: The public call, for messages.

    Raises:
      RuntimeError: Another process writes there.
    """

    def __init__(self, directory: str, call: str) -> None:
        self.directory = directory
        self._writing = threading.Lock()
        self._newest = 0
        tf.io.gfile.makedirs(directory)
        if fcntl is None or not os.path.isdir(directory):
            return
        handle = os.open(directory, os.O_RDONLY)
        weakref.finalize(self, os.close, handle)  # which lets go of the lock; so does a kill
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(
                f"`{call}` can't write in {directory!r}: got a folder in which another process "
                "writes checkpoints, expected one of this run alone. The other run is still alive, "
                "or was started twice. End it, or give each its own: "
                "`tfloop.Checkpoint('runs/2', ...)`."
            ) from error
        except OSError:
            pass

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Lets the objects of this process that write here take turns."""
        with self._writing:
            yield

    def next_path(self) -> str:
        """Where the next checkpoint goes; never given twice. Killed saves leave nothing."""
        with self._writing:
            files.sweep(self.directory)
            self._newest = max(self._newest + 1, files.next_number(self.directory))
            return os.path.join(self.directory, f"tfloop-{self._newest}")


_FOLDERS: weakref.WeakValueDictionary[str, Folder] = weakref.WeakValueDictionary()
_OPENING = threading.Lock()


def folder(directory: str, call: str) -> Folder:
    """The one object that stands for a directory in this process; see `Folder`."""
    local = os.path.isdir(directory)
    key = os.path.realpath(directory) if local or "://" not in directory else directory
    with _OPENING:
        found = _FOLDERS.get(key)
        if found is None:
            found = _FOLDERS[key] = Folder(directory, call)
        return found


class Behind:
    """One task at a time in a thread of its own; what it raises is kept until it is asked for.

    The process doesn't end before the task has. An error that nobody has asked for by then, or
    by the end of this object, is printed.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failed: list[BaseException] = []
        weakref.finalize(self, _show, self._failed)

    def run(self, task: Callable[[], None]) -> None:
        """Begins a task; `wait` must have ended the one before."""
        args = task, self._failed
        self._thread = threading.Thread(target=_keeping, args=args, name="tfloop-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Waits for the end of the task, and raises what it raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed:
            raise self._failed.pop()


def _keeping(task: Callable[[], None], failed: list[BaseException]) -> None:
    try:
        task()
    except BaseException as error:  # noqa: BLE001 - raised by `wait`
        traceback.clear_frames(error.__traceback__)  # which hold the whole state
        failed.append(error)
    del task


def _show(failed: list[BaseException]) -> None:
    for error in failed:
        print("tfloop: a checkpoint was not written:", file=sys.stderr)
        traceback.print_exception(error)
