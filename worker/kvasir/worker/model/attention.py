"""Attention over the paged KV cache: one interface, one place to put a faster kernel.

A step's rows are sorted: first the sequences with one new token (decode), grouped by
similar length and attended as batches; then those with several (prefill), one by one.
Query heads that share a KV head are folded into the query dimension, so K and V are never
repeated:

    decode   Q [B, kv_heads, group, head_dim]          K, V [B, kv_heads, tokens, head_dim]
    prefill  Q [1, kv_heads, group * new, head_dim]    K, V [1, kv_heads, tokens, head_dim]

Blocks are gathered to be read; the cost is one copy of the context that is read anyway.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvasir.worker.contracts import Chunk
from kvasir.worker.model.kv_cache import KvCache

_SHORT_BLOCKS = 16
"""Below this, padding costs less than one more batch."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows attended in one call; ``mask`` (added to the scores) has 0 or -inf.

    Decode: ``sequences`` of one row each, mask [B, 1, 1, tokens].
    Prefill: one sequence, mask [group * rows, tokens].
    """

    rows: slice
    sequences: int
    slab_rows: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the rows of one step read and write the cache."""

    token_rows: torch.Tensor
    spans: tuple[Span, ...]


def sorted_for_attention(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Decode chunks, longest context first, then prefill chunks: the order of rows."""
    return sorted(chunks, key=lambda chunk: (len(chunk.token_ids) > 1, -chunk.start))


def build_batch(chunks: Sequence[Chunk], group: int, cache: KvCache) -> AttentionBatch:
    """Plan one step.

    Args:
        chunks: as ``sorted_for_attention`` orders them.
        group: query heads per KV head.
        cache: whose rows are addressed.
    """
    spans = []
    row = 0
    for members in _spans(chunks, cache.block_size):
        end = row + sum(len(chunk.token_ids) for chunk in members)
        if len(members[0].token_ids) == 1:
            spans.append(_decode_span(members, slice(row, end), cache))
        else:
            spans.append(_prefill_span(members[0], slice(row, end), group, cache))
        row = end
    return AttentionBatch(token_rows=_token_rows(chunks, cache), spans=tuple(spans))


def attend(
    queries: torch.Tensor, layer: int, batch: AttentionBatch, cache: KvCache
) -> torch.Tensor:
    """Attention of every row to its own sequence up to itself, K and V already written.

    Args:
        queries: [N, kv_heads, group, head_dim], rotated.

    Returns:
        [N, kv_heads, group, head_dim]
    """
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    for span in batch.spans:
        keys, values = cache.gather(layer, span.slab_rows, span.sequences)
        part = queries[span.rows]
        if len(part) == span.sequences:
            output[span.rows] = scaled_dot_product_attention(part, keys, values, span.mask)
        else:
            rows, kv_heads, group, head_dim = part.shape
            folded = part.permute(1, 2, 0, 3).reshape(1, kv_heads, group * rows, head_dim)
            mixed = scaled_dot_product_attention(folded, keys, values, span.mask)
            output[span.rows] = mixed.view(kv_heads, group, rows, head_dim).permute(2, 0, 1, 3)
    return output


def _spans(chunks: Sequence[Chunk], block_size: int) -> Iterator[Sequence[Chunk]]:
    """Cut sorted chunks: decode ones where the length halves, prefill ones each alone."""
    first = 0
    for index, chunk in enumerate(chunks):
        longest = _num_blocks(chunks[first], block_size)
        blocks = max(_num_blocks(chunk, block_size), _SHORT_BLOCKS)
        if index > first and (len(chunk.token_ids) > 1 or 2 * blocks <= longest):
            yield chunks[first:index]
            first = index
    if chunks:
        yield chunks[first:]


def _decode_span(chunks: Sequence[Chunk], rows: slice, cache: KvCache) -> Span:
    counts = [_num_blocks(chunk, cache.block_size) for chunk in chunks]
    width = max(counts)
    # Padded with the sequence's own first block: masked, and nobody else's KV is touched.
    tables = np.array(
        [
            chunk.block_table[:count] + chunk.block_table[:1] * (width - count)
            for chunk, count in zip(chunks, counts, strict=True)
        ],
        dtype=np.int64,
    )
    lengths = np.array([chunk.start + 1 for chunk in chunks])
    hidden = np.arange(width * cache.block_size) >= lengths[:, None]
    mask = _additive(hidden, cache)[:, None, None, :]
    return Span(rows, len(chunks), cache.slab_rows(tables), mask)


def _prefill_span(chunk: Chunk, rows: slice, group: int, cache: KvCache) -> Span:
    count = _num_blocks(chunk, cache.block_size)
    table = np.array([chunk.block_table[:count]], dtype=np.int64)
    positions = chunk.start + np.arange(len(chunk.token_ids))
    hidden = np.arange(count * cache.block_size) > positions[:, None]
    mask = _additive(hidden, cache).repeat(group, 1)
    return Span(rows, 1, cache.slab_rows(table), mask)


def _additive(hidden: np.ndarray, cache: KvCache) -> torch.Tensor:
    where = torch.from_numpy(hidden).to(cache.device)
    scores = torch.zeros(hidden.shape, dtype=cache.dtype, device=cache.device)
    return scores.masked_fill_(where, float("-inf"))


def _token_rows(chunks: Sequence[Chunk], cache: KvCache) -> torch.Tensor:
    blocks, offsets = [], []
    for chunk in chunks:
        positions = np.arange(chunk.start, chunk.start + len(chunk.token_ids))
        first = chunk.start // cache.block_size
        table = np.array(
            chunk.block_table[first : _num_blocks(chunk, cache.block_size)], dtype=np.int64
        )
        blocks.append(table[positions // cache.block_size - first])
        offsets.append(positions % cache.block_size)
    return cache.token_rows(np.concatenate(blocks), np.concatenate(offsets))


def _num_blocks(chunk: Chunk, block_size: int) -> int:
    """Blocks that hold the chunk's sequence up to the chunk's end."""
    return -(-(chunk.start + len(chunk.token_ids)) // block_size)
