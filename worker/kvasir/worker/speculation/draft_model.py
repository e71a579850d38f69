"""Drafting with a model: a cheaper decoder guesses token after token.

The draft decoder has the layers of the model it drafts for, or the first of them, and reads the KV
that the model itself has written. It writes its own KV of the drafted positions to the same
slots, which the model overwrites when it verifies the drafts in the same step. Drafts are
drawn with the random numbers of the tokens that they guess, so they are right whenever
both models agree on the token that these numbers choose.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvasir.worker.contracts import Chunk, SampleSpec
from kvasir.worker.model.attention import sorted_for_attention
from kvasir.worker.model.backend import Decoder, draw
from kvasir.worker.model.kv_cache import KvCache


class DraftModel:
    def __init__(self, decoder: Decoder, eos_token_ids: frozenset[int]) -> None:
        self._decoder = decoder
        self._eos_token_ids = eos_token_ids

    def extend(self, chunks: Sequence[Chunk], cache: KvCache) -> list[Chunk]:
        """The same chunks, with the drafts that they ask for. One pass for each depth."""
        drafts: dict[str, list[int]] = {chunk.request_id: [] for chunk in chunks}
        for depth in range(max((chunk.num_to_draft for chunk in chunks), default=0)):
            drafting = sorted_for_attention(
                [
                    _at_depth(chunk, drafts[chunk.request_id])
                    for chunk in chunks
                    if chunk.num_to_draft > depth
                ]
            )
            hidden = self._decoder.forward(drafting, cache)
            specs = [chunk.samples[0] for chunk in drafting]
            drawn = draw(self._decoder, hidden, specs, self._eos_token_ids)
            for chunk, token in zip(drafting, drawn, strict=True):
                drafts[chunk.request_id].append(token.token_id)
        return [
            chunk.with_drafts(drafts[chunk.request_id]) if chunk.num_to_draft else chunk
            for chunk in chunks
        ]


def _at_depth(chunk: Chunk, drafts: Sequence[int]) -> Chunk:
    """One row: the last token known or drafted so far, and the spec of the next."""
    last = drafts[-1] if drafts else chunk.token_ids[-1]
    spec = chunk.samples[0].after(drafts)
    return replace(
        chunk,
        token_ids=(last,),
        start=chunk.start + len(drafts),
        samples=(_without_logprobs(spec),),
        num_to_draft=0,
    )


def _without_logprobs(spec: SampleSpec) -> SampleSpec:
    return replace(spec, params=replace(spec.params, logprobs=None))
