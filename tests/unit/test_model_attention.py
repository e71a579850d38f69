"""Paged attention and the KV cache against plain code, over random shapes."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.worker.contracts import Chunk
from kvasir.worker.model.attention import attend, build_batch, sorted_for_attention
from kvasir.worker.model.config import ModelConfig
from kvasir.worker.model.kv_cache import KvCache

CPU = torch.device("cpu")


def config(kv_heads: int, group: int, head_dim: int, layers: int = 2) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_layers=layers,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context=4096,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
    )


def plain_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int
) -> torch.Tensor:
    """One sequence, one row and head at a time, in float64.

    queries [new, kv_heads, group, head_dim]; keys, values [tokens, kv_heads, head_dim].
    """
    output = torch.empty_like(queries)
    for row, head in np.ndindex(queries.shape[:2]):
        seen = start + row + 1
        scores = queries[row, head].double() @ keys[:seen, head].double().T
        weights = (scores / queries.shape[-1] ** 0.5).softmax(-1)
        output[row, head] = (weights @ values[:seen, head].double()).to(queries.dtype)
    return output


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 9, 33])),
        min_size=1,
        max_size=7,
    ),
    block_size=st.sampled_from([1, 4, 16]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_paged_attention_equals_plain_attention(
    lengths: list[tuple[int, int]], block_size: int, kv_heads: int, group: int, seed: int
) -> None:
    """``lengths``: (cached tokens, new tokens) of each sequence of one mixed batch."""
    generator = torch.Generator().manual_seed(seed)
    shape = config(kv_heads, group, head_dim=8)
    needed = [-(-(start + new) // block_size) for start, new in lengths]
    cache = KvCache(shape, sum(needed) + 2, block_size, torch.float32, CPU)
    free = list(range(cache.num_blocks))
    random.Random(seed).shuffle(free)
    chunks = []
    for index, ((start, new), blocks) in enumerate(zip(lengths, needed, strict=True)):
        table, free = tuple(free[:blocks]), free[blocks:]
        chunks.append(Chunk(str(index), (0,) * new, start, table))
    chunks = sorted_for_attention(chunks)
    layer = 1
    rows, kv = [], []
    for chunk in chunks:
        new = len(chunk.token_ids)
        both = torch.randn(2, chunk.start + new, kv_heads, 8, generator=generator)
        if chunk.start:
            cached = Chunk("x", (0,) * chunk.start, 0, chunk.block_table)
            past = both[:, : chunk.start]
            cache.write(layer, build_batch([cached], group, cache).token_rows, past[0], past[1])
        rows.append(torch.randn(new, kv_heads, group, 8, generator=generator))
        kv.append(both)
    batch = build_batch(chunks, group, cache)
    fresh = torch.cat([both[:, c.start :] for both, c in zip(kv, chunks, strict=True)], 1)
    cache.write(layer, batch.token_rows, fresh[0], fresh[1])
    found = attend(torch.cat(rows), layer, batch, cache)
    expected = [
        plain_attention(queries, both[0], both[1], chunk.start)
        for queries, both, chunk in zip(rows, kv, chunks, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-5, rtol=1e-5)


def test_another_sequences_broken_kv_never_leaks_through_padding() -> None:
    """Block 0 is full of NaN; neighbours in the batch pad their tables."""
    cache = KvCache(config(1, 1, 8), 50, 4, torch.float32, CPU)
    nan = torch.full((4, 1, 8), float("nan"))
    chunks = [
        Chunk("long", (1,), 120, tuple(range(1, 32))),
        Chunk("short", (1,), 90, (*range(32, 50), 1, 2, 3, 4, 5)),
    ]
    broken = build_batch([Chunk("x", (0,) * 4, 0, (0,))], 1, cache)
    for layer in range(2):
        cache.write(layer, broken.token_rows, nan, nan)
    batch = build_batch(sorted_for_attention(chunks), 1, cache)
    assert len(batch.spans) == 1
    assert attend(torch.randn(2, 1, 1, 8), 0, batch, cache).isfinite().all()


def test_very_different_lengths_are_not_padded_together() -> None:
    cache = KvCache(config(1, 1, 8), 600, 16, torch.float32, CPU)
    table = tuple(range(600))
    chunks = [Chunk(str(s), (1,), s, table) for s in (9000, 8000, 300, 20, 10)]
    sizes = [span.sequences for span in build_batch(chunks, 1, cache).spans]
    assert sizes == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_travel_and_hide_what_is_beyond_the_filled_tokens(dtype: torch.dtype) -> None:
    shape = config(2, 1, 8, layers=3)
    cache = KvCache(shape, 10, 4, dtype, CPU)
    batch = build_batch([Chunk("a", (0,) * 12, 0, (7, 2, 5))], 1, cache)
    values = torch.randn(12, 2, 8).to(dtype)
    for layer in range(3):
        cache.write(layer, batch.token_rows, values + layer, -values)
    payload = cache.read_blocks([7, 2, 5], filled_tokens=6)
    assert payload.nbytes == 3 * cache.block_bytes
    slabs = torch.frombuffer(bytearray(payload), dtype=dtype).view(3, 3, 2, 4, 2, 8)
    assert torch.equal(slabs[0, 1, 0], values[:4] + 1)
    assert torch.equal(slabs[1, 2, 1, :2], -values[4:6])
    assert not slabs[1, :, :, 2:].any()
    assert not slabs[2].any()
    cache.write_blocks([1, 9, 0], payload)
    assert bytes(cache.read_blocks([1, 9, 0], 12)) == bytes(payload)
    assert bytes(cache.read_blocks([7, 2, 5], 12)) != bytes(payload)


def test_a_payload_of_the_wrong_length_is_refused() -> None:
    cache = KvCache(config(1, 1, 8), 4, 4, torch.float32, CPU)
    with pytest.raises(ValueError, match="2 blocks take"):
        cache.write_blocks([0, 1], memoryview(bytes(cache.block_bytes)))
    with pytest.raises(ValueError, match="cannot hold"):
        cache.read_blocks([0], 5)
