"""How the engine's thread hands news to the event loop, in order, without waiting.

All news goes through one queue, so what the engine says in some order arrives in that
order: the outputs of a step before its KV events, both before its load. The loop is woken
once for any number of postings that it has not seen yet. The queue needs no bound: the
loop empties it whenever it runs, and what it hands on to is bounded (``outbound.py``).
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import ParamSpec

_P = ParamSpec("_P")


class LoopBridge:
    """Runs callables on the loop that it was made on. The loop must outlive the engine."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._posted: deque[Callable[[], None]] = deque()
        self._awake = False

    def post(self, callback: Callable[_P, None], *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Run ``callback`` on the loop soon. May be called on any thread; never waits."""
        with self._lock:
            self._posted.append(lambda: callback(*args, **kwargs))
            if self._awake:
                return
            self._awake = True
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        with self._lock:
            batch, self._posted = self._posted, deque()
            self._awake = False
        for callback in batch:
            self._loop.call_soon(callback)  # one that fails takes no other one with it
