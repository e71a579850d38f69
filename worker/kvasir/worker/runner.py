"""Runs step plans on one device: tensors in, tokens out.

Owns the decoder and the KV cache. Knows nothing of requests beyond the chunks of the plan
in hand: two plans with the same chunks give the same result.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from kvasir.proto.sampling import TokenLogprobs
from kvasir.worker.contracts import Chunk, Computed, Sampled, StepPlan, StepResult
from kvasir.worker.model.attention import sorted_for_attention
from kvasir.worker.model.backend import Decoder, draw
from kvasir.worker.model.kv_cache import KvCache
from kvasir.worker.sampling.logprobs import token_logprobs
from kvasir.worker.speculation.draft_model import DraftModel

_LOGITS_ROWS = 64
"""Rows of prompt logits in memory at once: a whole chunk's would be 100 MB or more."""


class TorchRunner:
    """The Runner of contracts/step.py, on CPU or CUDA."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KvCache,
        eos_token_ids: frozenset[int],
        draft_model: DraftModel | None = None,
    ) -> None:
        """Without a ``draft_model``, no chunk may ask for drafts."""
        self._decoder = decoder
        self._draft_model = draft_model
        self._cache = cache
        self._eos_token_ids = eos_token_ids

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def block_bytes(self) -> int:
        return self._cache.block_bytes

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Float32 [tokens, vocab_size] after each token of one sequence, for measurements.

        Overwrites the first blocks of the cache: not while an engine uses them.
        """
        table = tuple(range(-(-len(token_ids) // self._cache.block_size)))
        with torch.inference_mode():
            chunk = Chunk("logits", tuple(token_ids), 0, table)
            return self._decoder.logits(self._decoder.forward([chunk], self._cache))

    def execute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, then compute every chunk: write its KV, and sample where asked."""
        if not plan.chunks:
            return {}
        if len({chunk.request_id for chunk in plan.chunks}) != len(plan.chunks):
            raise ValueError("a plan names a request twice")
        with torch.inference_mode():
            self._cache.copy_blocks(plan.copies)
            chunks = sorted_for_attention(self._drafted(plan.chunks))
            hidden = self._decoder.forward(chunks, self._cache)
            sampled = self._sample(hidden, chunks)
            return {
                chunk.request_id: Computed(
                    drawn, self._prompt_logprobs(hidden[first:end], chunk), chunk.draft_ids
                )
                for chunk, drawn, (first, end) in zip(chunks, sampled, _rows(chunks), strict=True)
            }

    def read_blocks(self, block_ids: Sequence[int], filled_tokens: int) -> memoryview:
        """Copy blocks out, in order, as bytes; zero beyond ``filled_tokens``."""
        with torch.inference_mode():
            return self._cache.read_blocks(block_ids, filled_tokens)

    def write_blocks(self, block_ids: Sequence[int], payload: memoryview) -> None:
        """Copy verified bytes in; ValueError if the length is not that of the blocks."""
        with torch.inference_mode():
            self._cache.write_blocks(block_ids, payload)

    def _drafted(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        if not any(chunk.num_to_draft for chunk in chunks):
            return chunks
        if self._draft_model is None:
            raise ValueError("a chunk asks for drafts, but there is no draft model")
        return self._draft_model.extend(chunks, self._cache)

    def _sample(self, hidden: Tensor, chunks: Sequence[Chunk]) -> list[tuple[Sampled, ...]]:
        """For each chunk, a token after each of its last ``len(chunk.samples)`` rows."""
        specs = [spec for chunk in chunks for spec in chunk.samples]
        if not specs:
            return [()] * len(chunks)
        ends = zip(_rows(chunks), chunks, strict=True)
        rows = [row for (_, end), chunk in ends for row in range(end - len(chunk.samples), end)]
        wanted = hidden if len(rows) == len(hidden) else hidden[rows]
        drawn = iter(draw(self._decoder, wanted, specs, self._eos_token_ids))
        return [tuple(islice(drawn, len(chunk.samples))) for chunk in chunks]

    def _prompt_logprobs(self, hidden: Tensor, chunk: Chunk) -> tuple[TokenLogprobs, ...]:
        """Of the token that follows each position; the last one's may be unknown."""
        if chunk.prompt_logprobs is None:
            return ()
        following = list(chunk.token_ids[1:])
        if chunk.next_token_id is not None:
            following.append(chunk.next_token_id)
        found: list[TokenLogprobs] = []
        for first in range(0, len(following), _LOGITS_ROWS):
            targets = following[first : first + _LOGITS_ROWS]
            logits = self._decoder.logits(hidden[first : first + len(targets)])
            found += token_logprobs(logits, targets, [chunk.prompt_logprobs] * len(targets))
        return tuple(found)


def _rows(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """First row and end of each chunk in the flat batch."""
    bounds = []
    end = 0
    for chunk in chunks:
        first, end = end, end + len(chunk.token_ids)
        bounds.append((first, end))
    return bounds
