"""Block hashes: chained, salted, and never equal for different prefixes."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.proto import blocks

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)


@given(TOKENS, st.integers(1, 20), st.binary(max_size=8))
def test_chain_equals_its_definition(tokens: list[int], size: int, salt: bytes) -> None:
    parent = hashlib.sha256(b"kvasir.block.v1" + struct.pack("<I", size) + salt).digest()
    expected = []
    for i in range(len(tokens) // size):
        data = b"".join(struct.pack("<I", t) for t in tokens[i * size : (i + 1) * size])
        parent = hashlib.sha256(parent + data).digest()
        expected.append(parent)
    assert blocks.block_hashes(tokens, size, salt) == expected
    if expected:
        first = blocks.block_hash(blocks.root_hash(size, salt), tokens[:size])
        assert first == expected[0]


@given(TOKENS, TOKENS)
def test_equal_hash_means_equal_prefix(a: list[int], b: list[int]) -> None:
    chains = zip(blocks.block_hashes(a, 4), blocks.block_hashes(b, 4), strict=False)
    for i, (left, right) in enumerate(chains):
        assert (left == right) == (a[: 4 * (i + 1)] == b[: 4 * (i + 1)])


def test_salt_and_block_size_separate() -> None:
    tokens = list(range(32))
    plain = set(blocks.block_hashes(tokens, 16))
    assert plain.isdisjoint(blocks.block_hashes(tokens, 16, b"tenant"))
    assert plain.isdisjoint(blocks.block_hashes(tokens, 8))


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1)])
def test_the_last_token_is_never_cached(tokens: int, expected: int) -> None:
    assert blocks.cacheable_blocks(tokens, 16) == expected


def test_block_size_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        blocks.root_hash(0)
