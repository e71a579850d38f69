"""Which worker holds which prefix: block hash -> integer bit mask of workers.

Owns everything that the router believes about the workers' prefix caches. Pure: no I/O;
the clock is passed in. Imports nothing of gRPC.

Invariants
- A set bit of a live worker means: its events said so (block_masks), or a request with that
  prefix was sent to it less than ``SPECULATION_SECONDS`` ago (speculation); the sender may
  say so again while the request waits.
- Events are applied in sequence without gaps. At a gap the caller is asked exactly once
  for a snapshot; until that is complete, later events wait in a buffer.
- A worker that is removed, restarted or cleared loses its bit at once. A lost bit matches
  nothing, and is given to another worker only after it was swept out of every mask, and
  its guesses have ended.
- A call's work is bounded by what it is given, whatever the index holds: sweeping goes in
  steps. Only a dict that grows copies itself, as dicts do.
- ``bytes_used`` stays within ``max_bytes``; the least recently used blocks go first, and of
  one chain the last block before the first, because a chain is found from its root only.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvasir.router.block_masks import BlockMasks
from kvasir.router.speculation import Guesses

_SWEEP_STEP = 512
"""Masks that are swept at each change of the index; twice as many at each tick. A step takes
about half a millisecond."""
_BUFFER_LIMIT = 65_536


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks became available on a worker."""

    block_hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks were evicted from a worker."""

    block_hashes: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Cleared:
    """A worker dropped its whole cache."""


CacheEvent = Stored | Removed | Cleared


@dataclass(slots=True)
class _Worker:
    bit: int
    next_sequence: int = 1
    resyncing: bool = False
    snapshot: list[bytes] = field(default_factory=list)
    """Blocks of the snapshot parts received so far."""
    buffer: deque[tuple[int, CacheEvent]] = field(default_factory=deque)
    """Events that came while a snapshot is awaited."""


class PrefixIndex:
    """The index over all workers of a router. ``clock`` gives monotonic seconds."""

    def __init__(self, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._workers: dict[str, _Worker] = {}
        self._worker_of_bit: dict[int, str] = {}
        self._live = 0
        """Mask of all bits in use."""
        self._masks = BlockMasks()
        self._guesses = Guesses(clock)
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._lost = 0
        """Mask of bits that wait for the next sweep."""
        self._swept = 0
        """Mask of bits that are in no mask, but in guesses that have not ended."""

    # --- what the router asks --------------------------------------------------------------

    def match(self, chain: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of ``chain`` each worker has; workers with none are absent."""
        found: dict[str, int] = {}
        young, old, guesses = self._masks.young, self._masks.old, self._guesses.masks
        alive = self._live
        depth = 0
        for block in chain:
            told = young.get(block) or old.get(block, 0)
            holders = alive & (told | guesses.get(block, 0))
            if holders != alive:
                if depth:
                    self._note(found, alive ^ holders, depth)
                alive = holders
                if not alive:
                    break
            depth += 1
        if alive and depth:
            self._note(found, alive, depth)
        self._masks.use(reversed(chain[:depth]))
        return found

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that some worker's events named."""
        return len(self._masks)

    @property
    def bytes_used(self) -> int:
        """Estimate of the memory held; bounded by ``max_bytes``."""
        return self._masks.bytes_used + self._guesses.bytes_used

    def _note(self, found: dict[str, int], mask: int, depth: int) -> None:
        for bit in _bits(mask):
            found[self._worker_of_bit[bit]] = depth

    # --- workers ---------------------------------------------------------------------------

    def reset_worker(self, worker: str) -> None:
        """A worker is new, or has a new epoch: nothing is known of it; its events start at 1."""
        self.remove_worker(worker)
        self._workers[worker] = _Worker(self._take_bit(worker))

    def remove_worker(self, worker: str) -> None:
        """Forget a worker. Unknown ones are fine."""
        known = self._workers.pop(worker, None)
        if known is not None:
            self._lose_bit(known.bit)

    # --- events ----------------------------------------------------------------------------

    def apply(self, worker: str, first_sequence: int, events: Sequence[CacheEvent]) -> bool:
        """Apply consecutive events. True: events are missing; ask the worker for a snapshot.

        True is returned once per gap; the answer comes through ``apply_snapshot``.
        """
        state = self._workers[worker]
        for sequence, event in enumerate(events, first_sequence):
            if state.resyncing:
                state.buffer.append((sequence, event))
                if len(state.buffer) > _BUFFER_LIMIT:
                    state.buffer.popleft()  # the gap is seen when the snapshot is complete
            elif sequence > state.next_sequence:
                self.await_snapshot(worker)
                state.buffer.append((sequence, event))
                self._apply_rest(state, events, sequence + 1, first_sequence)
                return True
            elif sequence == state.next_sequence:
                self._apply_one(worker, state, event)
        self._shrink()
        return False

    def await_snapshot(self, worker: str) -> None:
        """A snapshot has been asked for: hold further events back until it is complete."""
        state = self._workers[worker]
        state.resyncing = True
        state.snapshot = []
        state.buffer.clear()

    def apply_snapshot(
        self, worker: str, sequence: int, block_hashes: Iterable[bytes], last: bool
    ) -> bool:
        """One part of a snapshot, which replaces all that is known when ``last`` has come.

        ``sequence`` is the number of the last event that the snapshot contains. True: events
        after it are missing; ask for another snapshot. A snapshot nobody asked for counts too.
        """
        state = self._workers[worker]
        state.snapshot.extend(block_hashes)
        if not last:
            return False
        blocks, buffered = state.snapshot, list(state.buffer)
        state.snapshot, state.resyncing = [], False
        state.buffer.clear()
        state.next_sequence = sequence + 1
        self._replace_bit(worker, state)
        self._masks.add(blocks, 1 << state.bit)
        missing = False
        for number, event in buffered:
            missing = self.apply(worker, number, (event,)) or missing
        self._shrink()
        return missing

    @staticmethod
    def _apply_rest(
        state: _Worker, events: Sequence[CacheEvent], sequence: int, first_sequence: int
    ) -> None:
        state.buffer.extend(enumerate(events[sequence - first_sequence :], sequence))

    def _apply_one(self, worker: str, state: _Worker, event: CacheEvent) -> None:
        state.next_sequence += 1
        match event:
            case Stored(block_hashes):
                self._masks.add(block_hashes, 1 << state.bit)
            case Removed(block_hashes):
                self._masks.remove(block_hashes, 1 << state.bit)
            case Cleared():
                self._replace_bit(worker, state)

    # --- speculation -----------------------------------------------------------------------

    def speculate(self, worker: str, chain: Sequence[bytes]) -> None:
        """A request with this chain goes to ``worker``, which will soon hold its blocks.

        Dropped after SPECULATION_SECONDS; the worker's own events say it for good.
        """
        state = self._workers.get(worker)
        if state is None:
            return
        self._guesses.add(state.bit, chain)
        self._shrink()

    # --- bounds ----------------------------------------------------------------------------

    def tick(self) -> None:
        """Drop speculation whose time is over, go on with sweeping. Call it often."""
        self._guesses.expire()
        self._sweep(2 * _SWEEP_STEP)

    def _shrink(self) -> None:
        """Keep within the bound; speculation may take a quarter of it."""
        self._sweep(_SWEEP_STEP)
        while self._guesses.bytes_used > self._max_bytes // 4:
            self._guesses.drop_oldest()
        while self.bytes_used > self._max_bytes:
            self._masks.drop_stalest()

    # --- bits ------------------------------------------------------------------------------

    def _take_bit(self, worker: str) -> int:
        if self._free_bits:
            bit = heapq.heappop(self._free_bits)
        else:
            bit = self._num_bits
            self._num_bits += 1
        self._worker_of_bit[bit] = worker
        self._live |= 1 << bit
        return bit

    def _lose_bit(self, bit: int) -> None:
        del self._worker_of_bit[bit]
        self._live ^= 1 << bit
        self._lost |= 1 << bit

    def _replace_bit(self, worker: str, state: _Worker) -> None:
        """Forget all blocks of a worker at once, whatever their number."""
        self._lose_bit(state.bit)
        state.bit = self._take_bit(worker)

    def _sweep(self, steps: int) -> None:
        """Take lost bits out of ``steps`` masks; those that are out of all may be used again."""
        if self._lost and not self._masks.sweeping:
            self._masks.begin_sweep(self._lost)
            self._lost = 0
        self._swept |= self._masks.sweep(steps)
        unused = self._swept & ~self._guesses.bits
        self._swept ^= unused
        for bit in _bits(unused):
            heapq.heappush(self._free_bits, bit)


def _bits(mask: int) -> list[int]:
    """Positions of the set bits, lowest first."""
    return [i for i, digit in enumerate(bin(mask)[:1:-1]) if digit == "1"]
