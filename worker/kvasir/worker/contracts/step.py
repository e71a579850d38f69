"""Scheduler -> runner -> scheduler: one engine step as plain data, and who computes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvasir.proto.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """Draw one token after one position of a chunk.

    ``index`` is the number of the output token to draw, from 0: with the seed it alone
    fixes the random number. ``prompt_ids`` and ``output_ids`` feed the penalties.
    ``forbid_stop`` holds until ``min_tokens`` tokens are out: end and stop tokens cannot
    be drawn.
    """

    params: SamplingParams
    index: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    forbid_stop: bool = False

    def after(self, draft_ids: Sequence[int]) -> "SampleSpec":
        """The spec of a later token, if ``draft_ids`` are the output tokens before it."""
        index = self.index + len(draft_ids)
        history = [*self.output_ids, *draft_ids]
        forbid_stop = index < self.params.min_tokens
        return SampleSpec(self.params, index, self.prompt_ids, history, forbid_stop)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to compute in one step.

    ``start`` tokens of the sequence are already in the KV cache, in the blocks of
    ``block_table``, which also has room for the new ones: token at position p lives in
    block ``block_table[p // block_size]`` at offset ``p % block_size``.
    ``samples`` is set when the chunk ends the known tokens: a token is drawn after each of the
    last ``len(samples)`` positions. All but the first of these hold drafted tokens: guesses, right
    if they are what is drawn there. ``num_to_draft`` asks the runner to draft that many itself,
    after the last known token, and to treat them in the same way. ``prompt_logprobs`` k asks
    for the logprob of each *following* prompt token at every position of this chunk.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    samples: tuple[SampleSpec, ...] = ()
    prompt_logprobs: int | None = None
    next_token_id: int | None = None
    """The prompt token after the chunk, for ``prompt_logprobs``; None at the prompt's end."""
    num_to_draft: int = 0

    @property
    def draft_ids(self) -> tuple[int, ...]:
        """Those of ``token_ids`` that are guesses."""
        return self.token_ids[len(self.token_ids) - len(self.samples) + 1 :] if self.samples else ()

    def with_drafts(self, draft_ids: Sequence[int]) -> "Chunk":
        """This chunk, which draws one token, followed by guesses at that and later ones."""
        (first,) = self.samples
        later = (first.after(draft_ids[:count]) for count in range(1, len(draft_ids) + 1))
        return replace(
            self,
            token_ids=(*self.token_ids, *draft_ids),
            samples=(first, *later),
            num_to_draft=0,
        )


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: block ``target`` gets all the bytes of block ``source``."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step: chunks keyed by request; decode chunks have one known token.

    ``copies`` are made in their order, and before any chunk is computed.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.chunks)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token as it was drawn, and its logprobs if asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Computed:
    """What one chunk gave: one drawn token for each of its samples, and prompt logprobs.

    ``draft_ids`` are the chunk's drafts, whoever made them; ``sampled`` has one more entry.
    """

    sampled: tuple[Sampled, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    draft_ids: tuple[int, ...] = ()


StepResult = Mapping[str, Computed]
"""By request id; an entry for every chunk of the plan."""


class Runner(Protocol):
    """Owns the model's weights and the KV cache tensor. Called from the engine thread only.

    Cache layout, block-major so that one block is one contiguous slab:

        [num_blocks, layers, 2 (K, V), block_size, kv_heads, head_dim]
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Copy blocks, then compute every chunk: write its KV, and sample where asked."""
        ...

    def read_blocks(self, block_ids: Sequence[int], filled_tokens: int) -> memoryview:
        """Copy blocks out, in order, as bytes.

        ``filled_tokens`` counts the tokens in all these blocks together; what lies beyond
        is zeroed, so that no other request's KV ever leaves in a partial block.
        """
        ...

    def write_blocks(self, block_ids: Sequence[int], payload: memoryview) -> None:
        """Copy verified bytes in. The length must be ``len(block_ids) * block_bytes``."""
        ...
