"""What workers are expected to hold soon: blocks of requests that were just sent to them.

Pure; the clock is passed in. A guess ends SPECULATION_SECONDS after it was last made, and no
sooner unless memory runs short: what the worker's own events say is kept elsewhere.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence

SPECULATION_SECONDS = 2.0

GUESS_BYTES = 250
"""Estimate for one guess (block, worker): tuple, hash, float and two dict slots."""


class Guesses:
    """Block hash -> bit mask of workers (``masks``). ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.masks: dict[bytes, int] = {}
        self.bits = 0
        """Mask of the bits that are set in any of ``masks``."""
        self._clock = clock
        self._until: dict[tuple[bytes, int], float] = {}
        self._queue: deque[tuple[float, int, Sequence[bytes]]] = deque()
        self._count: Counter[int] = Counter()
        """Guesses of each bit."""

    @property
    def bytes_used(self) -> int:
        """Estimate of the memory held."""
        return len(self._until) * GUESS_BYTES

    def add(self, bit: int, chain: Sequence[bytes]) -> None:
        """The worker of this bit will soon hold these blocks."""
        until = self._clock() + SPECULATION_SECONDS
        for block in chain:
            self.masks[block] = self.masks.get(block, 0) | 1 << bit
            if (block, bit) not in self._until:
                self._count[bit] += 1
            self._until[block, bit] = until
        if self._count[bit]:
            self.bits |= 1 << bit
        self._queue.append((until, bit, chain))

    def expire(self) -> None:
        """Drop those whose time is over."""
        now = self._clock()
        while self._queue and self._queue[0][0] <= now:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Drop the chain that was added first."""
        until, bit, chain = self._queue.popleft()
        for block in chain:
            # A later request with the same prefix keeps the guess alive.
            if self._until.get((block, bit), until + 1) <= until:
                self._forget(block, bit)

    def _forget(self, block: bytes, bit: int) -> None:
        del self._until[block, bit]
        self._count[bit] -= 1
        if not self._count[bit]:
            del self._count[bit]
            self.bits &= ~(1 << bit)
        mask = self.masks[block] & ~(1 << bit)
        if mask:
            self.masks[block] = mask
        else:
            del self.masks[block]
