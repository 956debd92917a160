"""Compiled steps on one side, what reads or replaces the state of a whole run on the other.

Steps of several threads overlap, as those of plain functions do. A save beside one of them would
find some variables before the update and some after it.
"""

import contextlib
import threading
from collections.abc import Iterator

_PATIENCE = 60.0  # seconds, for a step that waits for what the saving thread was to do


class Turns:
    """Lets steps run together, and one other thing alone between them.

    Entering and leaving a step takes no lock: each side says what it is about to do, and then looks
    at the other one. Operations on a dict are atomic in CPython.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps: dict[int, int] = {}  # thread -> how many it is inside of
        self._alone: int | None = None

    def __enter__(self) -> None:
        """A step begins: at once, unless another thread wants to be alone."""
        me = threading.get_ident()
        self._steps[me] = self._steps.get(me, 0) + 1
        if self._alone is not None and self._steps[me] == 1:
            self._wait(me)

    def __exit__(self, *error: object) -> None:
        """It ends."""
        me = threading.get_ident()
        left = self._steps[me] - 1
        if left:
            self._steps[me] = left
            return
        del self._steps[me]
        if self._alone is not None:
            with self._changed:
                self._changed.notify_all()

    def _wait(self, me: int) -> None:
        """Steps back until nobody wants to be alone."""
        with self._changed:
            while self._alone not in (None, me):
                del self._steps[me]
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._alone in (None, me))
                self._steps[me] = 1

    @contextlib.contextmanager
    def alone(self, call: str) -> Iterator[None]:
        """Waits until no step runs, and keeps new ones out of the block.

        Args:
          call: The public call, for messages.

        Raises:
          RuntimeError: It is called inside of a step, or of itself, or one doesn't end.
        """
        me = threading.get_ident()
        with self._changed:
            if me in self._steps or self._alone == me:
                raise RuntimeError(
                    f"`{call}` was called in the middle of a step or of another save: got half a "
                    "state, expected the pause between two steps. A signal handler runs wherever "
                    "the loop is. Let it set a flag, `signal.signal(signal.SIGTERM, lambda *_: "
                    "stop.set())`, and save where the loop reads it."
                )
            self._changed.wait_for(lambda: self._alone is None)
            self._alone = me
            if not self._changed.wait_for(lambda: not self._steps, _PATIENCE):
                self._leave()
                raise RuntimeError(
                    f"`{call}` waited for the steps of other threads: got one that has run for "
                    f"{_PATIENCE:.0f} s, expected its end. It may wait for this thread. Call it "
                    "in the thread that steps: `checkpoint.save(step)`."
                )
        try:
            yield
        finally:
            with self._changed:
                self._leave()

    def _leave(self) -> None:
        self._alone = None
        self._changed.notify_all()


STEPS = Turns()
"""Those of the process: which state a step changes is known to its graph alone."""
