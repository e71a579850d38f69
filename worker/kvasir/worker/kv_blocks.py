"""The blocks of sequences: reserving, growing, sharing what is computed, giving back.

Owns the block pool and its prefix cache, and with them the ``block_table``, ``num_computed`` and
``num_stored`` of every sequence. Must not decide which sequence gets blocks.

A block that others hold too, or that the prefix cache may lend, is never written. A sequence
that is about to write to such a block gets a copy of it (copy-on-write). That can only be the
block of its first uncomputed token: the blocks after it hold nothing that anyone could share.
"""

from collections.abc import Iterable

from kvasir.proto.blocks import cacheable_blocks
from kvasir.worker.block_pool import BlockPool, InvariantError
from kvasir.worker.contracts import BlockCopy
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.prefix_cache import PrefixCache
from kvasir.worker.sequence import Sequence


class KvBlocks:
    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.cache = PrefixCache(self.pool, enabled=config.prefix_caching)
        self._copies: list[BlockCopy] = []

    def reserve(self, sequence: Sequence, spare: int, lender: Sequence | None = None) -> bool:
        """Blocks for all known tokens: shared ones for what is computed already, others to write.

        ``lender`` has computed the same prompt. False, with nothing changed, if that would leave
        fewer than ``spare`` blocks to allocate.
        """
        shared, num_computed = self._computed_prefix(sequence, lender)
        copied = len(shared) - num_computed // self._block_size
        fresh = sequence.blocks_for(sequence.num_tokens) - len(shared) + copied
        if not self.cache.can_allocate(fresh, shared=shared, spare=spare):
            return False
        table = self.cache.allocate(0, shared)
        if table is None:
            raise InvariantError(f"{len(shared)} blocks cannot be shared")
        sequence.block_table = table
        sequence.num_computed = num_computed
        sequence.num_stored = num_computed // self._block_size if self.cache.enabled else 0
        if not self.grow(sequence):
            raise InvariantError(f"{fresh} blocks were promised and are not there")
        return True

    def _computed_prefix(
        self, sequence: Sequence, lender: Sequence | None
    ) -> tuple[tuple[int, ...], int]:
        """Blocks with KV of leading tokens, and how many tokens: never the last one."""
        hits: tuple[int, ...] = ()
        if self.cache.enabled and not sequence.wants_prompt_logprobs:
            hits = self.cache.lookup(sequence.hashes(self.cacheable(sequence)))
        num_hit = len(hits) * self._block_size
        if lender is not None:
            num_lent = min(len(sequence.request.prompt_ids), sequence.num_tokens - 1)
            if num_lent > num_hit:
                return lender.block_table[: sequence.blocks_for(num_lent)], num_lent
        return hits, num_hit

    def grow(self, sequence: Sequence) -> bool:
        """Room for all known tokens that can be written to; False if the blocks are not there."""
        table = list(sequence.block_table)
        first = sequence.num_computed // self._block_size
        shared = first < len(table) and not self.cache.is_writable(table[first])
        missing = sequence.blocks_for(sequence.num_tokens) - len(table)
        fresh = self.cache.allocate(missing + shared)
        if fresh is None:
            return False
        if shared:
            source, table[first], fresh = table[first], fresh[0], fresh[1:]
            self._copies.append(BlockCopy(source, table[first]))
            self.cache.release((source,))
        sequence.block_table = (*table, *fresh)
        return True

    def grow_for_drafts(self, sequence: Sequence, count: int, spare: int) -> int:
        """Room for drafted tokens after the known ones; for how many of ``count`` there is.

        It takes no block that would leave fewer than ``spare`` to allocate.
        """
        wanted = sequence.blocks_for(sequence.num_tokens + count) - len(sequence.block_table)
        while wanted > 0 and not self.cache.can_allocate(wanted, spare=spare):
            wanted -= 1
        sequence.block_table += self.cache.allocate(max(wanted, 0)) or ()
        room = len(sequence.block_table) * self._block_size - sequence.num_tokens
        return min(count, room)

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Copies to make, in order, before any block is written."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of the first ``num_tokens`` tokens is there; share the blocks that are full."""
        sequence.num_computed = num_tokens
        full = num_tokens // self._block_size
        if self.cache.enabled and full > sequence.num_stored:
            sequence.block_table = self.cache.store(
                sequence.hashes(full), sequence.block_table, sequence.num_stored
            )
            sequence.num_stored = full

    def committed(self, sequence: Sequence, first_block: int, count: int) -> None:
        """The KV of blocks of a receiving sequence has been written.

        The block of the last token is not shared before the receive is complete: if it fails,
        that token is computed again, and a shared block is never written.
        """
        sequence.committed.update(range(first_block, first_block + count))
        usable = min(sequence.contiguous_blocks(), self.cacheable(sequence))
        self.computed(sequence, usable * self._block_size)

    def release(self, sequence: Sequence) -> None:
        self.cache.release(sequence.block_table)
        sequence.block_table = ()

    def cacheable(self, sequence: Sequence) -> int:
        """How many leading blocks need not be computed: all but the last token's."""
        return cacheable_blocks(sequence.num_tokens, self._block_size)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise InvariantError unless exactly the blocks that these sequences hold are in use."""
        self.cache.check()
        held = [0] * self.pool.num_blocks
        for sequence in sequences:
            for block in sequence.block_table:
                held[block] += 1
        for block, count in enumerate(held):
            if self.pool.references(block) != count:
                raise InvariantError(
                    f"block {block} has {self.pool.references(block)} references, but "
                    f"{count} sequences hold it"
                )
