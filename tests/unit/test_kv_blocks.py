"""Block tables of sequences against a model that keeps, for every slot, what was written to it.

In the model's memory a slot holds the whole text up to its token: KV depends on all of it. A
block that is written while someone else reads it, a copy that comes too late, or a wrong share
leaves another text in some slot.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvasir.proto.sampling import SamplingParams
from kvasir.worker.contracts import KvUsage, Request, Sampled
from kvasir.worker.kv_blocks import KvBlocks
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.sequence import Sequence

NUM_BLOCKS = 12
BLOCK_SIZE = 3
CONFIG = SchedulerConfig(NUM_BLOCKS, BLOCK_SIZE, max_model_len=100)

Text = tuple[int, ...]


class KvBlocksMachine(RuleBasedStateMachine):
    """``memory``: slot -> the text whose last token's KV it holds."""

    caching = True

    def __init__(self) -> None:
        super().__init__()
        config = SchedulerConfig(
            NUM_BLOCKS, BLOCK_SIZE, max_model_len=100, prefix_caching=self.caching
        )
        self.kv = KvBlocks(config)
        self.live: list[Sequence] = []
        self.memory: dict[tuple[int, int], Text] = {}
        self.count = 0

    # --- what the scheduler and the runner do ------------------------------------------------

    def compute(self, sequence: Sequence, count: int) -> None:
        """Make the copies, write the next ``count`` tokens' slots, and tell."""
        for copy in self.kv.take_copies():
            for offset in range(BLOCK_SIZE):
                text = self.memory.get((copy.source, offset), ())
                self.memory[copy.target, offset] = text
        start = sequence.num_computed
        end = min(start + count, sequence.num_tokens)
        for position in range(start, end):
            block = sequence.block_table[position // BLOCK_SIZE]
            self.memory[block, position % BLOCK_SIZE] = sequence.tokens(0, position + 1)
        self.kv.computed(sequence, end)

    def admit(self, sequence: Sequence, lender: Sequence | None) -> None:
        held = self.kv.pool.num_referenced
        if self.kv.reserve(sequence, 0, lender):
            self.live.append(sequence)
            assert sequence.num_computed < sequence.num_tokens
            if lender is not None:
                assert sequence.num_computed >= min(
                    len(lender.request.prompt_ids), sequence.num_tokens - 1
                )
            self.compute(sequence, 1)
        else:
            assert self.kv.pool.num_referenced == held
            assert (sequence.block_table, sequence.num_computed) == ((), 0)

    def sequence(self, prompt: Text, outputs: Text) -> Sequence:
        self.count += 1
        params = SamplingParams(max_tokens=50)
        return Sequence(Request(f"r{self.count}", prompt, params, outputs), self.count, CONFIG)

    # --- rules -------------------------------------------------------------------------------

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        outputs=st.lists(st.integers(0, 1), max_size=2),
    )
    def arrive(self, prompt: list[int], outputs: list[int]) -> None:
        self.admit(self.sequence(tuple(prompt), tuple(outputs)), None)

    @precondition(lambda self: self.lenders())
    @rule(data=st.data(), outputs=st.lists(st.integers(0, 1), max_size=4))
    def fork(self, data: st.DataObject, outputs: list[int]) -> None:
        lender = data.draw(st.sampled_from(self.lenders()))
        self.admit(self.sequence(lender.request.prompt_ids, tuple(outputs)), lender)

    def lenders(self) -> list[Sequence]:
        return [s for s in self.live if s.num_computed >= len(s.request.prompt_ids)]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 5))
    def go_on(self, data: st.DataObject, count: int) -> None:
        """A chunk of the rest, or the next token."""
        sequence = data.draw(st.sampled_from(self.live))
        if not sequence.num_uncomputed:
            sequence.append([Sampled(data.draw(st.integers(0, 1)))])
        if self.kv.grow(sequence):
            self.compute(sequence, count)
        else:
            self.kv.release(sequence)  # as a preempted one does
            sequence.reset()
            self.live.remove(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.kv.release(sequence)
        self.live.remove(sequence)

    # --- what must hold ----------------------------------------------------------------------

    @invariant()
    def every_table_holds_its_own_text(self) -> None:
        for sequence in self.live:
            for position in range(sequence.num_computed):
                block = sequence.block_table[position // BLOCK_SIZE]
                held = self.memory[block, position % BLOCK_SIZE]
                assert held == sequence.tokens(0, position + 1)

    @invariant()
    def blocks_are_counted(self) -> None:
        self.kv.check(self.live)
        held = {block for sequence in self.live for block in sequence.block_table}
        assert self.kv.pool.num_referenced == len(held)
        assert self.kv.take_copies() == ()

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        computed, known, all_slots = set(), set(), set()
        for sequence in self.live:
            for index, block in enumerate(sequence.block_table):
                for offset in range(BLOCK_SIZE):
                    position = index * BLOCK_SIZE + offset
                    all_slots.add((block, offset))
                    if position < sequence.num_computed:
                        computed.add((block, offset))
                    if position < sequence.num_tokens:
                        known.add((block, offset))
        assert self.kv.usage(self.live) == KvUsage(
            filled=len(computed),
            reserved=len(known - computed),
            internal=len(all_slots - known - computed),
            external=0,
            table_entries=sum(len(sequence.block_table) for sequence in self.live),
        )

    @invariant()
    def only_partial_blocks_can_be_shared_by_chance(self) -> None:
        """With prefix caching, two sequences never hold two copies of one full block."""
        if not self.caching:
            return
        holders: dict[Text, int] = {}
        for sequence in self.live:
            for index in range(sequence.num_computed // BLOCK_SIZE):
                text = sequence.tokens(0, (index + 1) * BLOCK_SIZE)
                assert (
                    holders.setdefault(text, sequence.block_table[index])
                    == (sequence.block_table[index])
                )


class WithoutPrefixCaching(KvBlocksMachine):
    caching = False


TestKvBlocks = KvBlocksMachine.TestCase
TestKvBlocks.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestWithoutPrefixCaching = WithoutPrefixCaching.TestCase
TestWithoutPrefixCaching.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_reserving_the_longest_sequence_wastes_what_is_never_filled() -> None:
    config = SchedulerConfig(10, 4, max_model_len=16, reserve_max_len=True)
    kv = KvBlocks(config)
    sequences: list[Sequence] = []
    for name in "abc":
        request = Request(name, (1, 2, 3, 4, 5), SamplingParams(max_tokens=3))
        assert config.refusal(request) is None
        sequences.append(Sequence(request, len(sequences), config))
    assert [kv.reserve(sequence, 0) for sequence in sequences] == [True, True, False]
    kv.computed(sequences[0], 5)
    # Two of ten blocks are free, and nobody takes fewer than four.
    expected = KvUsage(filled=5, reserved=5, internal=22, external=8, table_entries=8)
    assert kv.usage(sequences) == expected
    assert expected.waste == 30 / 40
    sequences[0].append([Sampled(9)])
    assert kv.grow(sequences[0])
    assert len(sequences[0].block_table) == 4
    kv.release(sequences[0])
    kv.release(sequences[1])
    kv.check([])
    assert KvUsage().waste == 0


def test_a_pool_smaller_than_a_reservation_serves_no_one() -> None:
    config = SchedulerConfig(3, 4, max_model_len=16, reserve_max_len=True)
    assert config.refusal(Request("a", (1,), SamplingParams(max_tokens=1))) is not None
