"""Which block holds which prefix: allocation, sharing and eviction over a BlockPool.

A full block whose KV is complete may be stored under its hash (kvasir.proto.blocks), which
covers everything before it. Sequences with an equal prefix then share the block. A stored block
that nobody references stays cached until its space is needed.

Invariants, verified by ``check``:

- One block per hash, one hash per block; no free block has a hash.
- The stored hashes are closed under "parent of". ``store`` gives a sequence the block that is
  stored already in place of its own copy, so whoever references a block also references its
  parent, and ``release`` makes children older than parents. Least recently used first is thus
  leaf first, and who follows the events never sees a child without its parent.

Must not: touch tokens or tensors; decide who runs or who is preempted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.worker.block_pool import BlockPool, InvariantError
from kvasir.worker.contracts import BlocksRemoved, BlocksStored, KvEvent


@dataclass(frozen=True, slots=True)
class _Stored:
    block: int
    parent: bytes  # empty at a root


class PrefixCache:
    """Allocates blocks from ``pool`` and remembers what they hold.

    With ``enabled`` false nothing is stored or hit; allocation works the same.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool = True) -> None:
        self._pool = pool
        self._enabled = enabled
        self._stored: dict[bytes, _Stored] = {}
        self._hash_of: dict[int, bytes] = {}
        self._events: list[KvEvent] = []

    @property
    def enabled(self) -> bool:
        return self._enabled

    def lookup(self, hashes: Sequence[bytes]) -> tuple[int, ...]:
        """The blocks of the longest stored prefix of a hash chain. Takes no reference."""
        blocks = []
        for block_hash in hashes:
            stored = self._stored.get(block_hash)
            if stored is None:
                break
            blocks.append(stored.block)
        return tuple(blocks)

    def can_allocate(self, count: int, *, shared: Sequence[int] = (), spare: int = 0) -> bool:
        """Whether ``allocate(count, shared)`` would leave ``spare`` blocks to allocate."""
        pool = self._pool
        revived = sum(pool.references(block) == 0 for block in shared)
        return count + spare <= pool.num_free + pool.num_cached - revived

    def allocate(self, count: int, shared: Sequence[int] = ()) -> tuple[int, ...] | None:
        """Reference the ``shared`` blocks of a lookup and ``count`` new ones after them.

        Evicts as many cached blocks as needed. None, with nothing changed, if all blocks
        together do not suffice.
        """
        if not self.can_allocate(count, shared=shared):
            return None
        for block in shared:
            self._pool.retain(block)
        self._evict(count - self._pool.num_free)
        fresh = self._pool.take(count)
        if fresh is None:
            raise InvariantError(f"{count} blocks were promised and are not there")
        return (*shared, *fresh)

    def is_writable(self, block: int) -> bool:
        """Whether a sequence that holds the block may write to it: no one else ever reads it."""
        return self._pool.references(block) == 1 and block not in self._hash_of

    def store(self, hashes: Sequence[bytes], blocks: Sequence[int], done: int) -> tuple[int, ...]:
        """Make a sequence's complete blocks available to others.

        Args:
            hashes: the chain from the root, for the leading complete blocks.
            blocks: the sequence's whole block table.
            done: how many leading blocks were hit, or stored by an earlier call.

        Returns:
            The sequence's block table from now on: where a hash was stored already, it has
            that block instead of the sequence's copy, which is freed.
        """
        if not self._enabled:
            return tuple(blocks)
        table = list(blocks)
        for i, canonical in enumerate(self.lookup(hashes[done:]), done):
            self._pool.retain(canonical)
            self._pool.release(table[i], keep=table[i] in self._hash_of)
            table[i] = canonical
            done = i + 1
        if done < len(hashes):
            parent = hashes[done - 1] if done else b""
            self._events.append(BlocksStored(parent, tuple(hashes[done:])))
            for block_hash, block in zip(hashes[done:], table[done:], strict=False):
                self._stored[block_hash] = _Stored(block, parent)
                self._hash_of[block] = block_hash
                parent = block_hash
        return tuple(table)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a sequence's references to its block table; stored blocks stay cached."""
        for block in reversed(blocks):
            self._pool.release(block, keep=block in self._hash_of)

    def hashes(self) -> list[bytes]:
        """Hashes of all blocks that can be hit, parents before children."""
        return list(self._stored)

    def take_events(self) -> list[KvEvent]:
        """What changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Raise InvariantError if the cache contradicts itself or the pool."""
        self._pool.check()
        if self._hash_of != {s.block: block_hash for block_hash, s in self._stored.items()}:
            raise InvariantError("hashes and blocks do not map one to one")
        for stored in self._stored.values():
            if stored.parent and stored.parent not in self._stored:
                raise InvariantError(f"block {stored.block} is stored without its parent")
        held = sum(self._pool.references(block) > 0 for block in self._hash_of)
        if len(self._hash_of) - held != self._pool.num_cached:
            raise InvariantError("a cached block has no hash, or a free one has")

    def _evict(self, count: int) -> None:
        removed = []
        for _ in range(count):
            block = self._pool.evict()
            if block is None:
                raise InvariantError(f"{count} cached blocks were promised and are not there")
            block_hash = self._hash_of.pop(block)
            del self._stored[block_hash]
            removed.append(block_hash)
        if removed:
            self._events.append(BlocksRemoved(tuple(removed)))
