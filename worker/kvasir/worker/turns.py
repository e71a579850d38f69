"""How long the engine thread works: its present turn, and all of them together.

A turn goes from one wait for commands to the next, a step at most. The engine thread begins and
ends turns; any thread may ask, at any time.
"""

import threading
from collections.abc import Callable


class Turns:
    """``stopwatch`` gives monotonic seconds."""

    def __init__(self, stopwatch: Callable[[], float]) -> None:
        self._stopwatch = stopwatch
        self._lock = threading.Lock()  # guards everything below
        self._began: float | None = None  # None while the thread has nothing to do
        self._over = 0.0  # seconds in turns that are over

    def begin(self) -> None:
        with self._lock:
            self._began = self._stopwatch()

    def end(self) -> None:
        """Nothing happens if no turn has begun."""
        with self._lock:
            self._over += self._present()
            self._began = None

    @property
    def seconds(self) -> float:
        """How long the present turn has taken so far; 0 between turns."""
        with self._lock:
            return self._present()

    @property
    def busy_seconds(self) -> float:
        """All turns so far, the present one among them."""
        with self._lock:
            return self._over + self._present()

    def _present(self) -> float:
        return 0.0 if self._began is None else self._stopwatch() - self._began
