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
from kvasir.worker.contracts import BlockCopy, KvUsage
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.prefix_cache import PrefixCache
from kvasir.worker.sequence import Sequence


class KvBlocks:
    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.cache = PrefixCache(self.pool, enabled=config.prefix_caching)
        self._copies: list[BlockCopy] = []
        self._reserve_max_len = config.reserve_max_len
        self._unit = -(-config.max_model_len // config.block_size) if self._reserve_max_len else 1

    def reserve(self, sequence: Sequence, spare: int, lender: Sequence | None = None) -> bool:
        """Blocks for all known tokens: shared ones for what is computed already, others to write.

        ``lender`` has computed the same prompt. False, with nothing changed, if that would leave
        fewer than ``spare`` blocks to allocate.
        """
        shared, num_computed = self._computed_prefix(sequence, lender)
        copied = len(shared) - num_computed // self._block_size
        fresh = self._wanted(sequence) - len(shared) + copied
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
        table = sequence.block_table
        first = sequence.num_computed // self._block_size
        shared = first < len(table) and not self.cache.is_writable(table[first])
        missing = max(self._wanted(sequence) - len(table), 0)
        if not (missing or shared):
            return True
        fresh = self.cache.allocate(missing + shared)
        if fresh is None:
            return False
        if shared:
            target, fresh = fresh[0], fresh[1:]
            self._copies.append(BlockCopy(table[first], target))
            self.cache.release((table[first],))
            table = (*table[:first], target, *table[first + 1 :])
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

    def _wanted(self, sequence: Sequence) -> int:
        if self._reserve_max_len:
            return sequence.peak_blocks
        return sequence.blocks_for(sequence.num_tokens)

    def share(self, sequence: Sequence, parent: Sequence) -> None:
        """Give a sequence that continues another one all of its blocks."""
        table = self.cache.allocate(0, parent.block_table)
        if table is None:
            raise InvariantError(f"the blocks of {parent.request_id} cannot be shared")
        sequence.block_table = table

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

    def usage(self, sequences: Iterable[Sequence]) -> KvUsage:
        """Of these sequences, which are all that hold blocks.

        Only the blocks from the first uncomputed token on are looked at; what is before it is
        full. One of them can be shared: the first, by those that have not copied it yet.
        """
        reserved = internal = entries = 0
        seen: set[int] = set()
        for sequence in sequences:
            table, computed = sequence.block_table, sequence.num_computed
            entries += len(table)
            first = computed // self._block_size
            if first == len(table):
                continue
            start, end = computed, len(table) * self._block_size
            if self.pool.references(table[first]) > 1:
                if table[first] in seen:
                    start = (first + 1) * self._block_size
                seen.add(table[first])
            known = min(max(sequence.num_tokens, start), end)
            reserved += known - start
            internal += end - known
        used = self.pool.num_referenced * self._block_size
        left_over = (self.pool.num_free + self.pool.num_cached) % self._unit
        return KvUsage(
            filled=used - reserved - internal,
            reserved=reserved,
            internal=internal,
            external=left_over * self._block_size,
            table_entries=entries,
        )

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
