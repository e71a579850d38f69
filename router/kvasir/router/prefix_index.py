"""Which worker holds which prefix: block hash -> integer bit mask of workers.

Owns everything that the router believes about the workers' prefix caches. Pure: no I/O;
the clock is passed in. Imports nothing of gRPC.

Invariants
- A set bit of a live worker means: its events said so (``_masks``), or a request with that
  prefix was sent to it less than ``SPECULATION_SECONDS`` ago (``_guesses``); the sender
  may say so again while the request waits.
- Events are applied in sequence without gaps. At a gap the caller is asked exactly once
  for a snapshot; until that is complete, later events wait in a buffer.
- A worker that is removed, restarted or cleared loses its bit at once. A lost bit matches
  nothing, and is given to another worker only after it was swept out of every mask.
- ``bytes_used`` stays within ``max_bytes``; the least recently used blocks go first, and of
  one chain the last block before the first, because a chain is found from its root only.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

SPECULATION_SECONDS = 2.0

BLOCK_BYTES = 200
"""Estimate for one block without its mask: a 32-byte hash (65), its ordered-dict slot (135)."""

GUESS_BYTES = 250
"""Estimate for one speculative (block, worker): tuple, hash, float and two dict slots."""

_SWEEP_STEP = 512
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
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._worker_of_bit: dict[int, str] = {}
        self._live = 0
        """Mask of all bits in use."""
        self._masks: OrderedDict[bytes, int] = OrderedDict()
        self._mask_bytes = 0
        self._guesses: dict[bytes, int] = {}
        self._guess_until: dict[tuple[bytes, int], float] = {}
        self._guess_queue: deque[tuple[float, int, Sequence[bytes]]] = deque()
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._lost = 0
        """Mask of bits that wait for the next sweep."""
        self._sweeping = 0
        """Mask of bits that the sweep under way takes out."""
        self._sweep_keys: list[bytes] = []

    # --- what the router asks --------------------------------------------------------------

    def match(self, chain: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of ``chain`` each worker has; workers with none are absent."""
        found: dict[str, int] = {}
        alive = self._live
        depth = 0
        for block in chain:
            holders = alive & (self._masks.get(block, 0) | self._guesses.get(block, 0))
            if holders != alive:
                if depth:
                    self._note(found, alive ^ holders, depth)
                alive = holders
                if not alive:
                    break
            depth += 1
        if alive and depth:
            self._note(found, alive, depth)
        for block in reversed(chain[:depth]):
            if block in self._masks:
                self._masks.move_to_end(block)
        return found

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that some worker's events named."""
        return len(self._masks)

    @property
    def bytes_used(self) -> int:
        """Estimate of the memory held; bounded by ``max_bytes``."""
        confirmed = len(self._masks) * BLOCK_BYTES + self._mask_bytes
        return confirmed + len(self._guess_until) * GUESS_BYTES

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
        self._store(state.bit, blocks)
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
                self._store(state.bit, block_hashes)
            case Removed(block_hashes):
                self._remove(state.bit, block_hashes)
            case Cleared():
                self._replace_bit(worker, state)

    def _store(self, bit: int, blocks: Sequence[bytes]) -> None:
        flag = 1 << bit
        for block in reversed(blocks):
            old = self._masks.get(block, 0)
            self._set_mask(block, old, old | flag)
            self._masks.move_to_end(block)

    def _remove(self, bit: int, blocks: Sequence[bytes]) -> None:
        keep = ~(1 << bit)
        for block in blocks:
            old = self._masks.get(block)
            if old is not None:
                self._set_mask(block, old, old & keep)

    def _set_mask(self, block: bytes, old: int, new: int) -> None:
        """The one place where a mask changes, so that bytes are counted right."""
        if old:
            self._mask_bytes -= _int_bytes(old)
        if new:
            self._masks[block] = new
            self._mask_bytes += _int_bytes(new)
        else:
            self._masks.pop(block, None)

    # --- speculation -----------------------------------------------------------------------

    def speculate(self, worker: str, chain: Sequence[bytes]) -> None:
        """A request with this chain goes to ``worker``, which will soon hold its blocks.

        Dropped after SPECULATION_SECONDS; the worker's own events say it for good.
        """
        state = self._workers.get(worker)
        if state is None:
            return
        until = self._clock() + SPECULATION_SECONDS
        for block in chain:
            self._guesses[block] = self._guesses.get(block, 0) | 1 << state.bit
            self._guess_until[block, state.bit] = until
        self._guess_queue.append((until, state.bit, chain))
        self._shrink()

    def _forget_guess(self, block: bytes, bit: int) -> None:
        if self._guess_until.pop((block, bit), None) is None:
            return
        mask = self._guesses[block] & ~(1 << bit)
        if mask:
            self._guesses[block] = mask
        else:
            del self._guesses[block]

    def _drop_oldest_guesses(self) -> None:
        until, bit, chain = self._guess_queue.popleft()
        for block in chain:
            # A later request with the same prefix keeps the guess alive.
            if self._guess_until.get((block, bit), until + 1) <= until:
                self._forget_guess(block, bit)

    # --- bounds ----------------------------------------------------------------------------

    def tick(self) -> None:
        """Drop old speculation, go on with sweeping. Call it a few times a second."""
        now = self._clock()
        while self._guess_queue and self._guess_queue[0][0] <= now:
            self._drop_oldest_guesses()
        self._sweep(8 * _SWEEP_STEP)

    def _shrink(self) -> None:
        """Keep within the bound; speculation may take a quarter of it."""
        self._sweep(_SWEEP_STEP)
        while len(self._guess_until) * GUESS_BYTES > self._max_bytes // 4:
            self._drop_oldest_guesses()
        while self.bytes_used > self._max_bytes:
            _, mask = self._masks.popitem(last=False)
            self._mask_bytes -= _int_bytes(mask)

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
        """Take lost bits out of ``steps`` masks, so that no call ever walks the whole index."""
        if not self._sweeping:
            if not self._lost:
                return
            self._sweeping, self._lost = self._lost, 0
            self._sweep_keys = list(self._masks)
            for block, bit in [k for k in self._guess_until if self._sweeping >> k[1] & 1]:
                self._forget_guess(block, bit)
        while self._sweep_keys and steps > 0:
            block = self._sweep_keys.pop()
            mask = self._masks.get(block, 0)
            if mask & self._sweeping:
                self._set_mask(block, mask, mask & ~self._sweeping)
            steps -= 1
        if not self._sweep_keys:
            for bit in _bits(self._sweeping):
                heapq.heappush(self._free_bits, bit)
            self._sweeping = 0


def _int_bytes(value: int) -> int:
    """Memory of an int object: a header and 4 bytes for every 30 bits."""
    return 24 + 4 * -(-value.bit_length() // 30)


def _bits(mask: int) -> list[int]:
    """Positions of the set bits, lowest first."""
    return [i for i, digit in enumerate(bin(mask)[:1:-1]) if digit == "1"]
