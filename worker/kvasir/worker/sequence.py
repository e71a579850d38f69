"""One request inside the engine: its tokens, its blocks, and when it is finished.

Owns the bookkeeping of a single sequence. Must not know of other sequences, of the block pool,
or of time.

    WAITING ──▶ RUNNING ──▶ finished          RUNNING: computes; prefill while it lacks KV of
       │  ◀──────┘  │                         more than its last token, else decode
       │  preempted └──▶ HOLDING (PREFILL)    HOLDING: computed, blocks leased to a receiver
       └──▶ RECEIVING ──▶ RUNNING             RECEIVING: blocks reserved, KV comes from outside
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import replace
from enum import Enum, auto

from kvasir.proto import blocks
from kvasir.proto.sampling import TokenLogprobs
from kvasir.worker.beam_search import BeamSearch
from kvasir.worker.contracts import (
    BeamParams,
    Chunk,
    Finish,
    Output,
    PrefillOutcome,
    PrefillReport,
    Request,
    Sampled,
    SampleSpec,
    Work,
)
from kvasir.worker.limits import SchedulerConfig


class BlockRangeError(ValueError):
    """Blocks were named that are not there to be filled or read: the caller's mistake."""


class State(Enum):
    WAITING = auto()
    RECEIVING = auto()
    RUNNING = auto()
    HOLDING = auto()


class Sequence:
    """A request's progress. Only the scheduler and its parts change it, between steps.

    ``tokens`` are prompt and output so far; ``num_computed`` of them, leading, have their KV in
    ``block_table``. ``num_stored`` leading blocks of it are shared through the prefix cache.
    """

    def __init__(self, request: Request, arrival: int, config: SchedulerConfig) -> None:
        self.request = request
        self.state = State.WAITING
        self.key = (request.priority, arrival)
        self.peak_blocks = config.peak_blocks(request)
        self.output_ids = list(request.output_ids)
        self.block_table: tuple[int, ...] = ()
        self.num_computed = 0
        self.num_stored = 0
        self.committed: set[int] = set()
        """RECEIVING: indices in the block table whose KV has been written."""
        self.report: PrefillReport | None = None
        """Set at the first admission; None tells that the request has never run."""
        self._reported = False
        self._block_size = config.block_size
        self._limit = min(
            request.sampling.max_tokens, config.max_model_len - len(request.prompt_ids)
        )
        eos = frozenset() if request.sampling.ignore_eos else config.eos_token_ids
        self._stop_ids = request.sampling.stop_token_ids | eos
        self._hashes: list[bytes] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether all that is left to compute is the last token."""
        return self.num_uncomputed == 1

    @property
    def can_grow(self) -> bool:
        """Whether the sequence may yet ask for more blocks than it holds."""
        return len(self.block_table) < self.peak_blocks

    @property
    def is_exhausted(self) -> bool:
        """Whether a replayed request already has all the output that it may have."""
        return len(self.output_ids) >= self._limit and self.request.work is not Work.PREFILL

    @property
    def most_drafts(self) -> int:
        """How many drafted tokens may be of use in its next step.

        None before the first output, nor where one token is all that is wanted, nor in a beam
        search. One more token than is drafted comes out of a step.
        """
        request = self.request
        if not (self.output_ids and self.is_decoding) or request.work is Work.PREFILL:
            return 0
        if request.beam is not None:
            return 0
        return self._limit - len(self.output_ids) - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether every prompt position must yet be computed for its logprobs."""
        return self.request.sampling.prompt_logprobs is not None and not self._reported

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def hashes(self, num_blocks: int) -> list[bytes]:
        """Hash chain of the first ``num_blocks`` blocks, all full of known tokens."""
        salt = self.request.cache_salt
        while len(self._hashes) < num_blocks:
            start = len(self._hashes) * self._block_size
            parent = self._hashes[-1] if self._hashes else blocks.root_hash(self._block_size, salt)
            block_tokens = self.tokens(start, start + self._block_size)
            self._hashes.append(blocks.block_hash(parent, block_tokens))
        return self._hashes[:num_blocks]

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens at positions [start, end)."""
        prompt = self.request.prompt_ids
        offset = len(prompt)
        if start >= offset:
            return tuple(self.output_ids[start - offset : end - offset])
        return (*prompt[start:end], *self.output_ids[: max(end - offset, 0)])

    def blocks_to_fill(self, first_block: int, count: int) -> tuple[int, ...]:
        """Block ids that received KV is to be written to.

        BlockRangeError if these blocks are not the request's to fill: beyond its end, from the
        cache, or filled before.
        """
        wanted = range(first_block, first_block + count)
        if count < 1 or first_block < 0 or wanted.stop > len(self.block_table):
            raise BlockRangeError(f"blocks {wanted} are not among {len(self.block_table)}")
        if not self.committed.isdisjoint(wanted):
            raise BlockRangeError(f"some of blocks {wanted} are filled already")
        return self.block_table[wanted.start : wanted.stop]

    def blocks_to_read(self, first_block: int, count: int) -> tuple[tuple[int, ...], int]:
        """Block ids of computed blocks, and how many tokens fill them together.

        BlockRangeError if any of the blocks is not begun yet.
        """
        begun = self.blocks_for(self.num_computed)
        if count < 1 or first_block < 0 or first_block + count > begun:
            raise BlockRangeError(
                f"blocks {first_block} + {count} are not among {begun} computed ones"
            )
        filled = min(self.num_computed - first_block * self._block_size, count * self._block_size)
        return self.block_table[first_block : first_block + count], filled

    def contiguous_blocks(self) -> int:
        """How many leading blocks have been committed without a gap."""
        count = self.num_computed // self._block_size
        while count in self.committed:
            count += 1
        return count

    def next_chunk(self, budget: int) -> Chunk:
        """The next at most ``budget`` tokens to compute; the block table has room for them."""
        start = self.num_computed
        end = min(self.num_tokens, start + budget)
        logprobs, following = None, None
        num_prompt = len(self.request.prompt_ids)
        if self.wants_prompt_logprobs and start < num_prompt:
            end = min(end, num_prompt)
            logprobs = self.request.sampling.prompt_logprobs
            following = self.request.prompt_ids[end] if end < num_prompt else None
        return Chunk(
            self.request_id,
            self.tokens(start, end),
            start,
            self.block_table,
            (self._sample_spec(),) if end == self.num_tokens else (),
            logprobs,
            following,
        )

    def given_tokens(self, chunk: Chunk) -> int:
        """How many tokens of the chunk came with the request, not from sampling here."""
        given = len(self.request.prompt_ids) + len(self.request.output_ids)
        return min(max(given - chunk.start, 0), len(chunk.token_ids))

    def collect(self, prompt_logprobs: Seq[TokenLogprobs]) -> None:
        """Keep the prompt logprobs of one computed chunk until the first output."""
        self._prompt_logprobs.extend(prompt_logprobs)

    def append(self, drawn: Iterable[Sampled]) -> Output:
        """Add drawn tokens, in order, up to the one that ends the sequence, if any does.

        The output that tells of them says whether the sequence is finished.
        """
        finish = None
        taken: list[Sampled] = []
        for sampled in drawn:
            taken.append(sampled)
            if (finish := self._append(sampled.token_id)) is not None:
                break
        first = not self._reported
        with_prompt = first and self.request.sampling.prompt_logprobs is not None
        self._reported = True
        return Output(
            self.request_id,
            tuple(sampled.token_id for sampled in taken),
            tuple(sampled.logprobs for sampled in taken if sampled.logprobs is not None),
            finish,
            prefill=self.report if first else None,
            prompt_logprobs=tuple(self._prompt_logprobs) if with_prompt else (),
        )

    def _append(self, token_id: int) -> Finish | None:
        stoppable = len(self.output_ids) >= self.request.sampling.min_tokens
        self.output_ids.append(token_id)
        if stoppable and token_id in self._stop_ids:
            return Finish.STOP
        if len(self.output_ids) >= self._limit or self.request.work is Work.PREFILL:
            return Finish.LENGTH
        return None

    def report_cached(
        self, tokens: int, outcome: PrefillOutcome, *, peer_fault: bool = False
    ) -> None:
        """Note how the prompt's KV came to be; replayed output is not counted as prompt."""
        cached = min(tokens, len(self.request.prompt_ids))
        self.report = PrefillReport(cached, outcome, peer_fault)

    def new_search(self, params: BeamParams) -> BeamSearch:
        """A beam search from the prompt, with this request's ends."""
        return BeamSearch(params, frozenset(self._stop_ids), self._limit)

    def fork(self, request_id: str, token_id: int) -> "Sequence":
        """The same sequence with one more token, under another id, and without blocks yet."""
        child = copy(self)
        child.request = replace(self.request, request_id=request_id)
        child.output_ids = [*self.output_ids, token_id]
        child.block_table = ()
        child.committed = set()
        child._hashes = list(self._hashes)
        return child

    def restart(self) -> None:
        """Forget all output."""
        self.output_ids.clear()
        del self._hashes[len(self.request.prompt_ids) // self._block_size :]

    def reset(self) -> None:
        """Forget all KV, as if only the tokens had ever been; the blocks are released already."""
        self.state = State.WAITING
        self.block_table = ()
        self.num_computed = 0
        self.num_stored = 0
        self.committed.clear()
        self._prompt_logprobs = [None]

    def _sample_spec(self) -> SampleSpec:
        params = self.request.sampling
        index = len(self.output_ids)
        return SampleSpec(
            params, index, self.request.prompt_ids, self.output_ids, index < params.min_tokens
        )
