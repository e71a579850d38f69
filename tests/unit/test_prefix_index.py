"""The prefix index against a plain dict of sets, and its bounds one by one."""

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvasir.router.block_masks import BLOCK_BYTES
from kvasir.router.prefix_index import CacheEvent, Cleared, PrefixIndex, Removed, Stored
from kvasir.router.speculation import SPECULATION_SECONDS

MIB = 1024**2


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def block(number: int) -> bytes:
    return number.to_bytes(32, "big")


def chain(*numbers: int) -> list[bytes]:
    return [block(n) for n in numbers]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(clock: Clock) -> PrefixIndex:
    index = PrefixIndex(MIB, clock)
    for worker in ("a", "b", "c"):
        index.reset_worker(worker)
    return index


def test_counts_leading_blocks_of_each_worker(index: PrefixIndex) -> None:
    index.apply("a", 1, [Stored(chain(1, 2, 3))])
    index.apply("b", 1, [Stored(chain(1))])
    index.apply("c", 1, [Stored(chain(2, 3))])  # not from the root: useless for this chain
    assert index.match(chain(1, 2, 3, 4)) == {"a": 3, "b": 1}
    assert index.match(chain(9)) == {}
    assert index.match([]) == {}


def test_a_hole_ends_the_prefix(index: PrefixIndex) -> None:
    index.apply("a", 1, [Stored(chain(1, 2, 3)), Removed(chain(2))])
    assert index.match(chain(1, 2, 3)) == {"a": 1}


def test_cleared_and_removed_workers_match_nothing(index: PrefixIndex) -> None:
    index.apply("a", 1, [Stored(chain(1))])
    index.apply("b", 1, [Stored(chain(1)), Cleared()])
    assert index.match(chain(1)) == {"a": 1}
    index.remove_worker("a")
    assert index.match(chain(1)) == {}


def test_new_epoch_forgets_the_old_one_and_counts_from_one(index: PrefixIndex) -> None:
    index.apply("a", 1, [Stored(chain(1))])
    index.apply("a", 2, [Stored(chain(2))])
    index.reset_worker("a")
    assert index.match(chain(1, 2)) == {}
    assert index.apply("a", 1, [Stored(chain(1))]) is False
    assert index.match(chain(1, 2)) == {"a": 1}


def test_removing_unknown_blocks_is_harmless(index: PrefixIndex) -> None:
    assert index.apply("a", 1, [Removed(chain(5)), Stored(chain(5))]) is False
    assert index.match(chain(5)) == {"a": 1}


def test_gap_asks_for_exactly_one_snapshot(index: PrefixIndex) -> None:
    index.apply("a", 1, [Stored(chain(1))])
    assert index.apply("a", 3, [Stored(chain(3))]) is True
    assert index.apply("a", 4, [Stored(chain(4))]) is False
    assert index.apply("a", 9, [Stored(chain(9))]) is False
    index.apply_snapshot("a", 9, chain(1, 2), last=False)
    assert index.match(chain(2)) == {}
    assert index.apply_snapshot("a", 9, chain(3), last=True) is False
    assert index.match(chain(1, 2, 3, 4)) == {"a": 3}
    assert index.apply("a", 10, [Stored(chain(4))]) is False
    assert index.match(chain(1, 2, 3, 4)) == {"a": 4}


def test_events_newer_than_the_snapshot_are_kept(index: PrefixIndex) -> None:
    index.await_snapshot("a")
    index.apply("a", 7, [Stored(chain(1)), Stored(chain(2)), Removed(chain(3))])
    index.apply_snapshot("a", 7, chain(1, 3), last=True)
    assert index.match(chain(1, 2)) == {"a": 2}
    assert index.match(chain(3)) == {}


def test_gap_behind_a_snapshot_asks_again(index: PrefixIndex) -> None:
    index.await_snapshot("a")
    index.apply("a", 9, [Stored(chain(9))])
    assert index.apply_snapshot("a", 7, chain(1), last=True) is True
    assert index.apply_snapshot("a", 9, chain(1, 9), last=True) is False
    assert index.match(chain(1, 9)) == {"a": 2}


def test_repeated_events_are_ignored(index: PrefixIndex) -> None:
    index.apply("a", 1, [Stored(chain(1)), Removed(chain(1))])
    assert index.apply("a", 1, [Stored(chain(1))]) is False
    assert index.match(chain(1)) == {}


def test_speculation_ends_unless_confirmed(index: PrefixIndex, clock: Clock) -> None:
    index.speculate("a", chain(1, 2))
    index.speculate("b", chain(1, 2))
    index.apply("b", 1, [Stored(chain(1, 2))])
    assert index.match(chain(1, 2)) == {"a": 2, "b": 2}
    clock.now += SPECULATION_SECONDS
    index.tick()
    assert index.match(chain(1, 2)) == {"b": 2}


def test_later_speculation_keeps_the_shared_prefix(index: PrefixIndex, clock: Clock) -> None:
    index.speculate("a", chain(1, 2))
    clock.now += SPECULATION_SECONDS / 2
    index.speculate("a", chain(1, 3))
    clock.now += SPECULATION_SECONDS / 2
    index.tick()
    assert index.match(chain(1, 2)) == {"a": 1}
    clock.now += SPECULATION_SECONDS / 2
    index.tick()
    assert index.match(chain(1, 3)) == {}
    assert index.bytes_used == 0


def test_speculation_dies_with_the_epoch_and_ignores_unknown_workers(index: PrefixIndex) -> None:
    index.speculate("a", chain(1))
    index.reset_worker("a")
    index.speculate("nobody", chain(1))
    assert index.match(chain(1)) == {}


def test_a_new_worker_does_not_inherit_the_guesses_of_a_lost_one(
    index: PrefixIndex, clock: Clock
) -> None:
    for name in ("d", "e", "f"):
        index.speculate("a", chain(1))
        index.remove_worker("a")
        index.tick()
        index.reset_worker(name)
        assert index.match(chain(1)) == {}
        index.reset_worker("a")
    clock.now += SPECULATION_SECONDS
    index.tick()
    assert index.bytes_used == 0


def test_no_call_walks_the_whole_index(clock: Clock) -> None:
    """What is left of a worker that has gone is taken out in steps."""
    index = PrefixIndex(64 * MIB, clock)
    index.reset_worker("a")
    index.apply("a", 1, [Stored(chain(*range(20_000)))])
    index.remove_worker("a")
    ticks = 0
    while index.num_blocks:
        before = index.num_blocks
        index.tick()
        ticks += 1
        assert before - index.num_blocks <= 2000
    assert ticks >= 10


def test_unique_prompts_do_not_grow_it_beyond_its_bound(clock: Clock) -> None:
    limit = 100 * BLOCK_BYTES
    index = PrefixIndex(limit, clock)
    index.reset_worker("a")
    for i in range(1000):
        index.apply("a", i + 1, [Stored(chain(i))])
        index.speculate("a", chain(10_000 + i))
        assert index.bytes_used <= limit
    assert index.match(chain(999)) == {"a": 1}
    assert index.match(chain(0)) == {}


def test_speculation_alone_is_bounded_too(clock: Clock) -> None:
    index = PrefixIndex(100 * BLOCK_BYTES, clock)
    index.reset_worker("a")
    for i in range(1000):
        index.speculate("a", chain(i))
        assert index.bytes_used <= 100 * BLOCK_BYTES


def test_used_prefixes_stay_and_chains_shrink_from_their_end(clock: Clock) -> None:
    index = PrefixIndex(20 * (BLOCK_BYTES + 32), clock)
    index.reset_worker("a")
    index.apply("a", 1, [Stored(chain(*range(10)))])
    for i in range(100):
        index.apply("a", i + 2, [Stored(chain(1000 + i))])
        assert index.match(chain(*range(5))) == {"a": 5}
    assert index.match(chain(*range(10))) == {"a": 5}


def test_lost_bits_are_reused_without_inheriting_blocks(clock: Clock) -> None:
    index = PrefixIndex(MIB, clock)
    for round_number in range(300):
        worker = f"w{round_number}"
        index.reset_worker(worker)
        assert index.match(chain(1)) == {}
        index.apply(worker, 1, [Stored(chain(1, 2))])
        assert index.match(chain(1, 2)) == {worker: 2}
        index.remove_worker(worker)
        index.tick()
    assert index.num_blocks == 0
    assert index.bytes_used == 0


WORKERS = st.sampled_from(["a", "b", "c", "d"])
BLOCKS = st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True)


class IndexMachine(RuleBasedStateMachine):
    """Workers with true caches send events, lose some, answer snapshots late; one router."""

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.index = PrefixIndex(64 * MIB, self.clock)
        self.truth: defaultdict[str, set[bytes]] = defaultdict(set)
        self.sequence: dict[str, int] = {}
        self.snapshot_due: set[str] = set()
        self.lost_events: set[str] = set()
        self.guesses: dict[tuple[str, bytes], float] = {}

    def send(self, worker: str, event: CacheEvent, lose: bool) -> None:
        if worker not in self.sequence:
            return
        self.sequence[worker] += 1
        match event:
            case Stored(hashes):
                self.truth[worker].update(hashes)
            case Removed(hashes):
                self.truth[worker].difference_update(hashes)
            case Cleared():
                self.truth[worker].clear()
        if lose:
            self.lost_events.add(worker)
            return
        asked = self.index.apply(worker, self.sequence[worker], [event])
        expected = worker in self.lost_events and worker not in self.snapshot_due
        assert asked is expected
        if asked:
            self.snapshot_due.add(worker)
        if isinstance(event, Cleared) and worker not in self.snapshot_due:
            self.drop_guesses(worker)

    def drop_guesses(self, worker: str) -> None:
        self.guesses = {k: v for k, v in self.guesses.items() if k[0] != worker}

    @rule(worker=WORKERS)
    def restart(self, worker: str) -> None:
        self.index.reset_worker(worker)
        self.truth[worker].clear()
        self.sequence[worker] = 0
        self.snapshot_due.discard(worker)
        self.lost_events.discard(worker)
        self.drop_guesses(worker)

    @rule(worker=WORKERS)
    def leave(self, worker: str) -> None:
        self.index.remove_worker(worker)
        self.truth[worker].clear()
        self.sequence.pop(worker, None)
        self.snapshot_due.discard(worker)
        self.lost_events.discard(worker)
        self.drop_guesses(worker)

    @rule(worker=WORKERS, blocks=BLOCKS, lose=st.booleans())
    def store(self, worker: str, blocks: list[int], lose: bool) -> None:
        self.send(worker, Stored(chain(*blocks)), lose)

    @rule(worker=WORKERS, blocks=BLOCKS)
    def evict(self, worker: str, blocks: list[int]) -> None:
        self.send(worker, Removed(chain(*blocks)), lose=False)

    @rule(worker=WORKERS)
    def clear(self, worker: str) -> None:
        self.send(worker, Cleared(), lose=False)

    @precondition(lambda self: self.snapshot_due)
    @rule(cut=st.integers(0, 12))
    def answer_snapshot(self, cut: int) -> None:
        worker = min(self.snapshot_due)
        blocks = sorted(self.truth[worker])
        sequence = self.sequence[worker]
        self.index.apply_snapshot(worker, sequence, blocks[:cut], last=False)
        assert self.index.apply_snapshot(worker, sequence, blocks[cut:], last=True) is False
        self.snapshot_due.discard(worker)
        self.lost_events.discard(worker)
        self.drop_guesses(worker)

    @rule(worker=WORKERS, blocks=BLOCKS)
    def speculate(self, worker: str, blocks: list[int]) -> None:
        self.index.speculate(worker, chain(*blocks))
        if worker in self.sequence:
            until = self.clock.now + SPECULATION_SECONDS
            self.guesses.update({(worker, b): until for b in chain(*blocks)})

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.index.tick()
        self.guesses = {k: v for k, v in self.guesses.items() if v > self.clock.now}

    @rule(blocks=BLOCKS)
    def matches_the_model(self, blocks: list[int]) -> None:
        wanted = chain(*blocks)
        found = self.index.match(wanted)
        for worker in self.sequence:
            if worker in self.lost_events:
                continue  # nothing true can be said until its snapshot is here
            depth = 0
            for b in wanted:
                if b not in self.truth[worker] and (worker, b) not in self.guesses:
                    break
                depth += 1
            assert found.get(worker, 0) == depth
        assert set(found) <= set(self.sequence)

    @invariant()
    def confirmed_blocks_are_counted(self) -> None:
        if not self.lost_events:
            known = set().union(*(self.truth[w] for w in self.sequence), set())
            assert self.index.num_blocks >= len(known)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
