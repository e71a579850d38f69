"""The prefix cache against a model that keeps plain lists and searches them."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvasir.proto.blocks import block_hashes
from kvasir.worker.block_pool import BlockPool, InvariantError
from kvasir.worker.contracts import BlocksRemoved, BlocksStored, KvEvent
from kvasir.worker.prefix_cache import PrefixCache

NUM_BLOCKS = 8


def chain(path: Sequence[int]) -> list[bytes]:
    """Hashes of the prefix tree's path: one block with one token for each step."""
    return block_hashes(path, 1)


@dataclass
class Holder:
    """A sequence as the model sees it: its blocks, and how many of them are shared."""

    path: tuple[int, ...]
    blocks: tuple[int, ...]
    stored: int


class PrefixCacheMachine(RuleBasedStateMachine):
    """Compares allocation, sharing, eviction order and events with a brute-force model.

    The model stores ``uses``: for each stored path, the time of its last release.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool)
        self.holders: list[Holder] = []
        self.uses: dict[tuple[int, ...], int] = {}
        self.block_of: dict[tuple[int, ...], int] = {}
        self.followed: set[bytes] = set()
        self.time = 0

    def held(self, path: tuple[int, ...]) -> bool:
        return any(self.block_of[path] in holder.blocks for holder in self.holders)

    @rule(path=st.lists(st.integers(0, 1), min_size=1, max_size=5), extra=st.integers(0, 3))
    def reserve(self, path: list[int], extra: int) -> None:
        hits = self.cache.lookup(chain(path))
        longest = 0
        while longest < len(path) and tuple(path[: longest + 1]) in self.uses:
            longest += 1
        assert hits == tuple(self.block_of[tuple(path[: i + 1])] for i in range(longest))

        fresh = len(path) - longest + extra
        in_use = {block for holder in self.holders for block in holder.blocks}
        fits = len(in_use.union(hits)) + fresh <= NUM_BLOCKS
        assert self.cache.can_allocate(fresh, shared=hits) == fits
        blocks = self.cache.allocate(fresh, hits)
        assert (blocks is not None) == fits
        if blocks is None:
            return
        assert blocks[:longest] == hits
        assert len(set(blocks)) == len(blocks)
        assert in_use.isdisjoint(blocks[longest:])
        idle = [p for p in self.uses if not self.held(p) and self.block_of[p] not in hits]
        never_cached = NUM_BLOCKS - len(in_use.union(hits)) - len(idle)
        idle.sort(key=self.uses.__getitem__)
        for evicted in idle[: max(fresh - never_cached, 0)]:
            del self.uses[evicted]
            del self.block_of[evicted]
        assert set(blocks[longest:]).isdisjoint(self.block_of.values())
        self.holders.append(Holder(tuple(path), blocks, longest))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        upto = data.draw(st.integers(holder.stored, len(holder.path)))
        table = self.cache.store(chain(holder.path[:upto]), holder.blocks, holder.stored)
        for i in range(holder.stored, upto):
            path = holder.path[: i + 1]
            if path in self.uses:
                assert table[i] == self.block_of[path], "the stored block replaces the copy"
            else:
                assert table[i] == holder.blocks[i]
                self.block_of[path] = table[i]
                self.uses[path] = self.time
        assert table[upto:] == holder.blocks[upto:]
        holder.blocks, holder.stored = table, upto

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.cache.release(holder.blocks)
        for depth in range(holder.stored, 0, -1):
            self.time += 1
            self.uses[holder.path[:depth]] = self.time

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.cache.check()
        in_use = {block for holder in self.holders for block in holder.blocks}
        assert self.pool.num_referenced == len(in_use)
        assert self.pool.num_cached == sum(not self.held(path) for path in self.uses)
        assert set(self.cache.hashes()) == {chain(path)[-1] for path in self.uses}

    @invariant()
    def events_tell_what_is_stored(self) -> None:
        for event in self.cache.take_events():
            follow(self.followed, event)
        assert self.followed == set(self.cache.hashes())


def follow(known: set[bytes], event: KvEvent) -> None:
    """What a listener does; it must never hear of a child without its parent."""
    match event:
        case BlocksStored(parent, hashes):
            assert not parent or parent in known
            assert known.isdisjoint(hashes)
            known.update(hashes)
        case BlocksRemoved(hashes):
            assert known.issuperset(hashes)
            known.difference_update(hashes)


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def stored_chain(cache: PrefixCache, path: Sequence[int]) -> tuple[int, ...]:
    blocks = cache.allocate(len(path))
    assert blocks is not None
    return cache.store(chain(path), blocks, 0)


def test_events_name_the_parent() -> None:
    cache = PrefixCache(BlockPool(5))
    stored_chain(cache, [1, 2])
    stored_chain(cache, [1, 2, 3])
    one, two, three = chain([1, 2, 3])
    assert cache.take_events() == [BlocksStored(b"", (one, two)), BlocksStored(two, (three,))]
    assert cache.take_events() == []
    assert cache.hashes() == [one, two, three]


def test_the_leaf_is_evicted_first() -> None:
    cache = PrefixCache(BlockPool(3))
    cache.release(stored_chain(cache, [1, 2, 3]))
    one, two, three = chain([1, 2, 3])
    cache.take_events()
    assert cache.allocate(1) is not None
    assert cache.allocate(1) is not None
    assert cache.take_events() == [BlocksRemoved((three,)), BlocksRemoved((two,))]
    assert len(cache.lookup([one, two, three])) == 1


def test_free_blocks_are_used_before_cached_ones() -> None:
    cache = PrefixCache(BlockPool(4))
    cache.release(stored_chain(cache, [1, 2]))
    assert cache.allocate(2) is not None
    assert len(cache.lookup(chain([1, 2]))) == 2


def test_hits_are_not_counted_as_allocatable() -> None:
    cache = PrefixCache(BlockPool(2))
    cache.release(stored_chain(cache, [1, 2]))
    hits = cache.lookup(chain([1, 2]))
    assert cache.can_allocate(0, shared=hits)
    assert not cache.can_allocate(1, shared=hits)
    assert not cache.can_allocate(0, shared=hits, spare=1)
    assert cache.allocate(1, hits) is None
    cache.check()


def test_disabled_stores_nothing() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool, enabled=False)
    blocks = stored_chain(cache, [1, 2])
    cache.release(blocks)
    assert (cache.lookup(chain([1, 2])), cache.take_events(), pool.num_free) == ((), [], 2)


def test_check_finds_a_child_without_its_parent() -> None:
    cache = PrefixCache(BlockPool(2))
    stored_chain(cache, [1, 2])
    parent = chain([1])[0]
    block = cache._stored.pop(parent).block
    with pytest.raises(InvariantError, match="one to one"):
        cache.check()
    del cache._hash_of[block]
    with pytest.raises(InvariantError, match="without its parent"):
        cache.check()
