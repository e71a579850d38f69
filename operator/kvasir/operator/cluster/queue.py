"""When each ModelService is reconciled: soon after something changed, never twice at a time.

Changes come in bursts, so a reconciliation waits a moment for the rest of one. One that fails is
tried again after 1 s, 2 s, 4 s … one minute. One that succeeds says when it wants to be called
again, changes or not.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_log = logging.getLogger("kvasir.operator")


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Names a ModelService."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class StepError(Exception):
    """A step failed as steps may, such as when nobody answers: told in one line."""


Reconcile = Callable[[Key], Awaitable[float | None]]
"""Makes one step; returns the seconds after which to call it again, None if there is nothing."""


class Queue:
    """``add`` from the event loop that ``run`` runs in."""

    def __init__(
        self, reconcile: Reconcile, *, settle: float = 0.1, at_once: int = 8, longest: float = 60.0
    ) -> None:
        """``settle``: seconds that a burst of changes takes; ``longest``: between two tries."""
        self._reconcile = reconcile
        self._settle = settle
        self._longest = longest
        self._slots = asyncio.Semaphore(at_once)
        self._due: dict[Key, float] = {}
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due) + len(self._busy)

    def add(self, key: Key, delay: float | None = None) -> None:
        """Something about ``key`` changed."""
        moment = self._now() + (self._settle if delay is None else delay)
        self._due[key] = min(moment, self._due.get(key, moment))
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                ready = [
                    key
                    for key, moment in self._due.items()
                    if moment <= self._now() and key not in self._busy
                ]
                for key in ready:
                    del self._due[key]
                    self._busy.add(key)
                    group.create_task(self._handle(key), name=f"reconcile {key}")
                await self._wait()

    async def _wait(self) -> None:
        moments = [moment for key, moment in self._due.items() if key not in self._busy]
        self._changed.clear()
        try:
            async with asyncio.timeout_at(min(moments, default=None)):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _handle(self, key: Key) -> None:
        try:
            async with self._slots:
                again = await self._reconcile(key)
            self._failures.pop(key, None)
        except StepError as error:
            again = self._after_failure(key)
            _log.warning("step failed service=%s retry=%.0fs error=%s", key, again, error)
        except Exception:  # noqa: BLE001 - one service's trouble is not the others'
            again = self._after_failure(key)
            _log.exception("step failed service=%s retry=%.0fs", key, again)
        finally:
            self._busy.discard(key)
        if again is not None:
            self.add(key, again)
        self._changed.set()

    def _after_failure(self, key: Key) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        return float(min(self._longest, 2.0 ** min(failures - 1, 16)))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
