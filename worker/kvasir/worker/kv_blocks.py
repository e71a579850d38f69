"""The blocks of sequences: reserving, growing, sharing what is computed, giving back.

Owns the block pool and its prefix cache, and with them the ``block_table``, ``num_computed`` and
``num_stored`` of every sequence. Must not decide which sequence gets blocks.
"""

from collections.abc import Iterable

from kvasir.proto.blocks import cacheable_blocks
from kvasir.worker.block_pool import BlockPool, InvariantError
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.prefix_cache import PrefixCache
from kvasir.worker.sequence import Sequence


class KvBlocks:
    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.cache = PrefixCache(self.pool, enabled=config.prefix_caching)

    def reserve(self, sequence: Sequence, spare: int) -> bool:
        """Blocks for all known tokens, the cached prefix among them.

        False, with nothing changed, if that would leave fewer than ``spare`` blocks to allocate.
        """
        hits: tuple[int, ...] = ()
        if self.cache.enabled and not sequence.wants_prompt_logprobs:
            hits = self.cache.lookup(sequence.hashes(self.cacheable(sequence)))
        fresh = sequence.blocks_for(sequence.num_tokens) - len(hits)
        if not self.cache.can_allocate(fresh, shared=hits, spare=spare):
            return False
        table = self.cache.allocate(fresh, hits)
        if table is None:
            raise InvariantError(f"{fresh} blocks were promised and are not there")
        sequence.block_table = table
        sequence.num_stored = len(hits)
        sequence.num_computed = len(hits) * self._block_size
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Make room for all known tokens; False if the blocks are not there."""
        missing = sequence.blocks_for(sequence.num_tokens) - len(sequence.block_table)
        fresh = self.cache.allocate(missing)
        if fresh is None:
            return False
        sequence.block_table += fresh
        return True

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
