"""Masks in order of use, while bits are swept out of them step by step."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvasir.router.block_masks import BlockMasks


def block(number: int) -> bytes:
    return number.to_bytes(32, "big")


def chain(*numbers: int) -> list[bytes]:
    return [block(n) for n in numbers]


def live(masks: BlockMasks) -> list[tuple[bytes, int]]:
    """The least recently used first, without the bits that are being swept."""
    both = [*masks.old.items(), *masks.young.items()]
    return [(b, mask & ~masks.sweeping) for b, mask in both if mask & ~masks.sweeping]


def test_a_sweep_goes_in_steps_and_keeps_the_order_of_use() -> None:
    masks = BlockMasks()
    for number in range(10):
        masks.add(chain(number), 0b11 if number % 2 else 0b01)
    masks.begin_sweep(0b01)
    assert masks.sweep(4) == 0
    assert len(masks.old) == 6
    masks.use(chain(1))
    assert masks.sweep(4) == 0
    assert len(masks.old) == 1
    assert masks.sweep(4) == 0b01
    assert live(masks) == [(block(n), 0b10) for n in (3, 5, 7, 9, 1)]
    assert masks.sweep(4) == 0
    masks.drop_stalest()
    assert [b for b, _ in live(masks)] == chain(5, 7, 9, 1)


BLOCKS = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(lambda n: chain(*n))
BITS = st.integers(1, 7)


class MasksMachine(RuleBasedStateMachine):
    """Beside a plain dict in order of use, which a sweep changes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = BlockMasks()
        self.model: dict[bytes, int] = {}

    @rule(blocks=BLOCKS, bits=BITS)
    def add(self, blocks: list[bytes], bits: int) -> None:
        bits = bits & ~self.masks.sweeping or 8
        self.masks.add(blocks, bits)
        for b in reversed(blocks):
            self.model[b] = self.model.pop(b, 0) | bits

    @rule(blocks=BLOCKS, bits=BITS)
    def remove(self, blocks: list[bytes], bits: int) -> None:
        self.masks.remove(blocks, bits)
        self.strip(blocks, bits)

    @rule(blocks=BLOCKS)
    def use(self, blocks: list[bytes]) -> None:
        self.masks.use(blocks)
        for b in blocks:
            if b in self.model:
                self.model[b] = self.model.pop(b)

    @precondition(lambda self: len(self.masks) > 0)
    @rule()
    def drop(self) -> None:
        stalest, mask = next(iter((self.masks.old or self.masks.young).items()))
        if mask & ~self.masks.sweeping:
            assert stalest == next(iter(self.model))
            del self.model[stalest]
        self.masks.drop_stalest()

    @precondition(lambda self: not self.masks.sweeping)
    @rule(bits=BITS)
    def begin(self, bits: int) -> None:
        self.masks.begin_sweep(bits)
        self.strip(list(self.model), bits)

    @rule()
    def sweep(self) -> None:
        sweeping = self.masks.sweeping
        swept = self.masks.sweep(2)
        assert swept == (0 if self.masks.old else sweeping)

    def strip(self, blocks: list[bytes], bits: int) -> None:
        changed = {b: self.model[b] & ~bits for b in blocks if b in self.model}
        self.model = {b: mask for b, mask in (self.model | changed).items() if mask}

    @invariant()
    def same(self) -> None:
        assert live(self.masks) == list(self.model.items())

    def teardown(self) -> None:
        while self.masks.sweeping:
            self.masks.sweep(2)
        self.masks.remove(list(self.model), 15)
        assert self.masks.bytes_used == len(self.masks) == 0


TestMasksMachine = MasksMachine.TestCase
TestMasksMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
