"""The blocks of the KV cache: which are free, which hold a reusable prefix, which are in use.

Owns the reference counts. Knows nothing of tokens, hashes or tensors. Invariants, verified by
``check``: every block is in exactly one of three states, and the three counts add up.

    take            release(keep=False)
    free  ────────▶  referenced  ────────▶  free
      ▲                │      ▲
      │ evict          ▼      │ retain
      └────────────  cached ──┘
                 release(keep=True)

"Cannot allocate" is None; a call that no correct caller makes raises ``InvariantError``.
"""

from collections import OrderedDict


class InvariantError(RuntimeError):
    """The bookkeeping contradicts itself; nothing computed from here on can be trusted."""


class BlockPool:
    """Block ids ``0 .. num_blocks - 1`` with reference counts and an LRU order of the cached."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self._references = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))  # a stack: reuse the warmest block first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    def references(self, block: int) -> int:
        """How many sequences hold the block."""
        return self._references[block]

    def take(self, count: int) -> tuple[int, ...] | None:
        """Turn ``count`` free blocks into referenced ones, or None if so many are not free."""
        if count > len(self._free):
            return None
        blocks = tuple(self._free.pop() for _ in range(count))
        for block in blocks:
            self._references[block] = 1
        return blocks

    def retain(self, block: int) -> None:
        """Add a reference to a cached or referenced block."""
        if self._references[block] == 0:
            if block not in self._cached:
                raise InvariantError(f"block {block} is free and cannot be shared")
            del self._cached[block]
        self._references[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """Drop a reference; the last one leaves the block cached (``keep``) or free."""
        if self._references[block] == 0:
            raise InvariantError(f"block {block} is released more often than it was taken")
        self._references[block] -= 1
        if self._references[block] == 0:
            if keep:
                self._cached[block] = None
            else:
                self._free.append(block)

    def evict(self) -> int | None:
        """Free the least recently used cached block and name it; None if there is none."""
        if not self._cached:
            return None
        block, _ = self._cached.popitem(last=False)
        self._free.append(block)
        return block

    def check(self) -> None:
        """Raise InvariantError unless every block is in exactly one state."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, count in enumerate(self._references) if count > 0}
        if min(self._references) < 0:
            raise InvariantError("a block has a negative reference count")
        if len(free) != len(self._free):
            raise InvariantError("a block is in the free list twice")
        if len(free) + len(cached) + len(held) != self.num_blocks:
            raise InvariantError(
                f"{len(free)} free, {len(cached)} cached and {len(held)} referenced blocks "
                f"do not add up to {self.num_blocks}"
            )
        if free & cached or free & held or cached & held:
            raise InvariantError("a block is in two states")
