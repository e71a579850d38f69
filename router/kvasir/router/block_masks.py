"""Block hash -> bit mask of workers, in order of use. Pure.

Taking a bit out of a million masks at once would hold up the event loop for most of a
second, and a dict cannot be walked in steps while it changes. So a sweep has two of them:
``old`` is what there was when it began, and its blocks move to ``young`` a few at a time,
the most recently used first, each to the stale end. A block that is used moves at once.

Invariants
- Every block of ``old`` was used before every block of ``young``; each is in order of use.
- No mask of ``young`` has a bit that is being swept. ``old`` is empty between sweeps.
- No mask is zero: a block that nobody holds is not kept.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

BLOCK_BYTES = 200
"""Estimate for one block without its mask: a 32-byte hash (65), its ordered-dict slot (135)."""


class BlockMasks:
    """``young`` and ``old`` are for reading; they are replaced when a sweep begins."""

    def __init__(self) -> None:
        self.young: OrderedDict[bytes, int] = OrderedDict()
        self.old: OrderedDict[bytes, int] = OrderedDict()
        self.sweeping = 0
        """Mask of the bits that the sweep under way takes out."""
        self._mask_bytes = 0

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    @property
    def bytes_used(self) -> int:
        """Estimate of the memory held."""
        return len(self) * BLOCK_BYTES + self._mask_bytes

    def use(self, blocks: Iterable[bytes]) -> None:
        """Mark as just used, the last one most recently. Unknown blocks are fine."""
        for block in blocks:
            if block in self.young:
                self.young.move_to_end(block)
            elif block in self.old:
                self._move(block)

    def add(self, blocks: Sequence[bytes], bits: int) -> None:
        """Set ``bits`` in the masks of a chain's blocks, its first one most recently used."""
        for block in reversed(blocks):
            if block in self.old:
                self._move(block)
            before = self.young.get(block, 0)
            self._set(self.young, block, before, before | bits)
            self.young.move_to_end(block)

    def remove(self, blocks: Iterable[bytes], bits: int) -> None:
        """Clear ``bits`` in the masks of these blocks. Unknown blocks are fine."""
        for block in blocks:
            tier = self.young if block in self.young else self.old
            before = tier.get(block, 0)
            self._set(tier, block, before, before & ~bits)

    def drop_stalest(self) -> None:
        """Forget the least recently used block."""
        _, mask = (self.old or self.young).popitem(last=False)
        self._mask_bytes -= _int_bytes(mask)

    def begin_sweep(self, bits: int) -> None:
        """Take these bits out of every mask, by calls of ``sweep``. They must not be set anew."""
        self.sweeping = bits
        self.old, self.young = self.young, OrderedDict()

    def sweep(self, steps: int) -> int:
        """Sweep at most ``steps`` masks. The bits that are out of all masks; 0 till then."""
        for _ in range(min(steps, len(self.old))):
            block = next(reversed(self.old))
            self._move(block)
            if block in self.young:
                self.young.move_to_end(block, last=False)
        if self.old:
            return 0
        swept, self.sweeping = self.sweeping, 0
        return swept

    def _move(self, block: bytes) -> None:
        """From ``old`` to the recent end of ``young``."""
        mask = self.old[block]
        self._set(self.old, block, mask, 0)
        self._set(self.young, block, 0, mask & ~self.sweeping)

    def _set(self, tier: OrderedDict[bytes, int], block: bytes, before: int, after: int) -> None:
        """The one place where a mask changes, so that bytes are counted right."""
        if before:
            self._mask_bytes -= _int_bytes(before)
        if after:
            tier[block] = after
            self._mask_bytes += _int_bytes(after)
        else:
            tier.pop(block, None)


def _int_bytes(value: int) -> int:
    """Memory of an int object: a header and 4 bytes for every 30 bits."""
    return 24 + 4 * -(-value.bit_length() // 30)
