"""What the parts of a worker say to each other: frozen data and narrow protocols.

    service (asyncio)  --Request, Abort-->  Engine (its own thread)
                       <--Output, KvEvent, Load--
    Engine: Scheduler.plan() -> StepPlan -> Runner.execute() -> StepResult -> Scheduler.update()

The scheduler and what it owns know nothing of torch; the runner knows nothing of requests,
queues or sharing: it computes the chunks that a plan names. Nothing here does I/O.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

from kvasir.proto.errors import Refusal
from kvasir.proto.sampling import SamplingParams, TokenLogprobs


class Work(Enum):
    """What a request wants of this worker."""

    GENERATE = auto()
    """Prefill here and decode here."""
    RECEIVE = auto()
    """Reserve blocks, wait for a prefill worker's KV, then decode here."""
    PREFILL = auto()
    """Prefill here, sample one token, hold the blocks until released."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search with ``width`` beams; a positive ``length_penalty`` favors long outputs."""

    width: int
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request (one child of an ``n > 1`` request), validated.

    ``output_ids`` are tokens that an earlier worker has already given to the client; they
    are computed like prompt tokens but count as output for sampling and limits.
    ``deadline`` is seconds since the Unix epoch; None for none. ``skip_tokens`` (PREFILL
    only) is how many leading tokens the receiver already has; a multiple of the block size.
    Requests of one ``group`` have the same prompt, which is computed once for all of them if
    they meet here; empty for a request without siblings. With ``beam``, tokens are not drawn but
    searched for, ``sampling.logprobs`` says how many continuations of a beam are looked at, and
    nothing is told before the end.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids: tuple[int, ...] = ()
    cache_salt: bytes = b""
    priority: int = 0
    deadline: float | None = None
    work: Work = Work.GENERATE
    skip_tokens: int = 0
    group: str = ""
    beam: BeamParams | None = None


# --- scheduler -> runner -------------------------------------------------------------------


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


# --- runner -> scheduler -------------------------------------------------------------------


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


# --- engine -> service ---------------------------------------------------------------------


class Finish(Enum):
    STOP = auto()
    LENGTH = auto()
    ABORTED = auto()
    REFUSED = auto()


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One result of a beam search; ``score`` is the sum of logprobs over length ** penalty."""

    token_ids: tuple[int, ...]
    finish: Finish
    score: float


class PrefillOutcome(Enum):
    LOCAL = auto()
    REMOTE = auto()
    RECOMPUTED = auto()


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """How the prompt's KV came to be; sent with the first output of a request.

    ``peer_fault`` (RECOMPUTED only): the prefill worker is at fault, not this one or the request.
    """

    cached_tokens: int
    outcome: PrefillOutcome
    peer_fault: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """News of one request after one step; ``finish`` is set exactly once, on the last."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    refusal: Refusal | None = None
    prefill: PrefillReport | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    hypotheses: tuple[Hypothesis, ...] = ()
    """Of a beam search, the best first; on the last output only, which has no other tokens."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A chain of blocks that can now be hit; ``parent_hash`` is empty at a root."""

    parent_hash: bytes
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    block_hashes: tuple[bytes, ...]


KvEvent = BlocksStored | BlocksRemoved


@dataclass(frozen=True, slots=True)
class KvUsage:
    """What the token slots of the KV blocks are good for at one moment.

    The first three are the slots of all blocks that sequences hold, a shared block counted once.
    After Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention" (SOSP 2023), section 3.1.
    """

    filled: int = 0
    reserved: int = 0
    """For tokens that are known and not computed yet."""
    internal: int = 0
    """Beyond all known tokens: internal fragmentation."""
    external: int = 0
    """Of blocks that are free and yet of no use, because no one takes so few of them."""
    table_entries: int = 0
    """Block ids in all block tables."""

    @property
    def waste(self) -> float:
        """Share of the slots taken out of use that is internal or external waste."""
        taken = self.filled + self.reserved + self.internal + self.external
        return (self.internal + self.external) / taken if taken else 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Gauges and counters of an engine at one moment; units as in LoadReport of engine.proto.

    Every request that was accepted and is not over counts as running or waiting: from its
    acceptance on, while its KV is received, and while its blocks are held for another worker.
    """

    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    active_kv_tokens: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    """Tokens of requests (prompts and, in replays, earlier output) that were computed here; again
    after a preemption. Those from the cache or from another worker are not."""
    busy_seconds: float = 0.0
    """Time in which the engine thread had work."""
    kv: KvUsage = KvUsage()
    drafts: int = 0
    """How often tokens were drafted for a sequence, counted once per step."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Drafted tokens that were right."""


class OutputSink(Protocol):
    """Where a request's outputs go. Called on the engine thread; must not block."""

    def deliver(self, outputs: Sequence[Output]) -> None:
        """All news of one step for the requests submitted with this sink, in one call."""
        ...


class ReceiveSink(OutputSink, Protocol):
    """Sink of Work.RECEIVE requests: told when blocks are reserved and KV may flow."""

    def reserved(self, request_id: str, num_cached_tokens: int) -> None:
        """Blocks for the whole prompt are reserved; the first ``num_cached_tokens`` (whole
        blocks) came from this worker's own cache. Answer with Engine.commit_blocks,
        then Engine.finish_receive or Engine.fail_receive."""
        ...


class HoldSink(OutputSink, Protocol):
    """Sink of Work.PREFILL requests: told as KV becomes ready to read."""

    def progress(self, request_id: str, computed_tokens: int) -> None:
        """KV of the first ``computed_tokens`` tokens is in the cache; told at admission too,
        when that may be none. Read it with Engine.read_blocks; Engine.release ends the
        hold."""
        ...


class EngineListener(Protocol):
    """Told after each step that changed something. On the engine thread; must not block."""

    def on_kv_events(self, first_sequence: int, events: Sequence[KvEvent]) -> None: ...

    def on_load(self, load: Load) -> None: ...
