"""Which tokens are computed next: continuous batching, chunked prefill, preemption, receiving.

Owns the roster, and through it every sequence and every block. Pure: no clock, thread, tensor
or I/O. ``plan`` says what to compute, ``update`` takes what came of it; between the two, nothing
else may be called. News collects in an outbox that the engine empties.

A step is made in five phases, each in the order of (priority, arrival):

    expire    refuse requests that have waited past their deadline (admission.py)
    decode    one token for each sequence that lacks only its last token's KV; when no block
              is left for it, preempt the last preemptible sequence
    prefill   the rest of the token budget, in chunks, to running sequences
    admit     waiting requests, strictly in order, while blocks for all their tokens are there;
              but whose sibling is computing the same prompt is passed over until it has
              (admission.py)
    draft     guesses at what decoding sequences draw next, where they pay, in what is left of the
              budget and of the blocks (speculation/)

Invariants:

- Only decoding needs new blocks: an admitted sequence has blocks for all its known tokens.
  The first sequence in order can thus always go on, and no two can starve each other.
- Blocks that another worker reads (HOLDING, or a prefill on its way there) or writes
  (RECEIVING) are never preempted.
- A block that is stored in the prefix cache, or that two sequences hold, is never written.
- With no sequence alive, no block is referenced (``check``).
"""

from collections.abc import Sequence as Seq
from dataclasses import replace

from kvasir.worker.admission import Admission
from kvasir.worker.contracts import (
    Chunk,
    Computed,
    Finish,
    KvEvent,
    Load,
    Output,
    Request,
    Sampled,
    StepPlan,
    StepResult,
    Work,
)
from kvasir.worker.handover import Handover
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.roster import Roster
from kvasir.worker.sequence import Sequence, State
from kvasir.worker.signals import Progress, Signal
from kvasir.worker.speculation.speculator import Speculator

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """``handover`` is for requests whose KV another worker writes or reads, between steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._roster = Roster(config)
        self._admission = Admission(self._roster, config.max_running_requests)
        self._prefill_tokens = 0
        self.handover = Handover(self._roster)

    # --- between steps -----------------------------------------------------------------------

    @property
    def config(self) -> SchedulerConfig:
        return self._config

    def add(self, request: Request) -> None:
        """Queue a request that ``config.refusal`` does not refuse, under an id not in use."""
        self._roster.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request at any stage and free its blocks; an unknown one is none of ours.

        True if this has ended a hold: its finish was told before, so that no output follows.
        """
        sequence = self._roster.get(request_id)
        if sequence is None:
            return False
        held = sequence.state is State.HOLDING
        if not held:
            self._roster.outputs.append(Output(request_id, finish=Finish.ABORTED))
        self._roster.end(sequence)
        return held

    # --- one step ----------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """What to compute next; empty if nothing can go on until some request changes.

        Args:
            now: seconds since the Unix epoch, for deadlines.
        """
        self._admission.expire(now)
        preemptions = self._roster.num_preemptions
        chunks = self._decode()
        budget = self._config.max_batched_tokens - len(chunks)
        for sequence in self._roster.running:
            if sequence.state is State.RUNNING and not sequence.is_decoding and budget:
                chunks.append(sequence.next_chunk(budget))
                budget -= len(chunks[-1].token_ids)
        # Blocks that a preemption has just won are for the running ones, if there are any left.
        if not chunks or self._roster.num_preemptions == preemptions:
            chunks.extend(self._admission.admit(budget))
        if self._roster.speculator is not None and chunks:
            chunks = self._draft(chunks, self._roster.speculator)
        return StepPlan(tuple(chunks), self._roster.kv.take_copies())

    def update(self, plan: StepPlan, result: StepResult, seconds: float = 0.0) -> None:
        """Take what the runner made of ``plan``, the latest one, and how long it took."""
        roster = self._roster
        if roster.speculator is not None and plan.chunks:
            roster.speculator.observe_step(plan.chunks, seconds)
        for chunk in plan.chunks:
            sequence, computed = roster.member(chunk.request_id), result[chunk.request_id]
            sequence.collect(computed.prompt_logprobs)
            self._prefill_tokens += sequence.given_tokens(chunk)
            known = len(chunk.token_ids) - len(chunk.draft_ids)
            roster.kv.computed(sequence, chunk.start + known)
            if sequence.request.work is Work.PREFILL:
                roster.signals.append(Progress(sequence.request_id, sequence.num_computed))
            if chunk.samples:
                roster.append(sequence, self._accepted(chunk, computed))

    # --- the outbox and the gauges -----------------------------------------------------------

    def take_outputs(self) -> list[Output]:
        outputs, self._roster.outputs = self._roster.outputs, []
        return outputs

    def take_signals(self) -> list[Signal]:
        signals, self._roster.signals = self._roster.signals, []
        return signals

    def take_events(self) -> list[KvEvent]:
        return self._roster.kv.cache.take_events()

    def cached_hashes(self) -> list[bytes]:
        """Hashes of all blocks that can be hit, parents first."""
        return self._roster.kv.cache.hashes()

    @property
    def num_arrivals(self) -> int:
        """How many requests were ever added."""
        return self._roster.num_arrivals

    def request_ids(self) -> list[str]:
        """Requests that wait, run, receive or hold blocks."""
        return self._roster.request_ids()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._roster

    def next_deadline(self) -> float | None:
        """When ``plan`` has a waiting request to refuse, if nothing else happens."""
        return self._admission.next_deadline()

    def load(self) -> Load:
        roster, admission = self._roster, self._admission
        pool, speculator = roster.kv.pool, roster.speculator
        admitted = [s for s in roster.everyone() if s.state is not State.WAITING]
        prefilling = (s for s in admitted if s.state is State.RUNNING and not s.is_decoding)
        return Load(
            running=len(admitted),
            kv=roster.kv.usage(admitted),
            waiting=len(roster.waiting),
            queued_prefill_tokens=sum(map(admission.tokens_to_compute, roster.waiting))
            + sum(s.num_uncomputed for s in prefilling),
            active_kv_tokens=sum(s.num_computed for s in admitted),
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_referenced,
            kv_blocks_cached=pool.num_cached,
            prefix_query_tokens=admission.num_query_tokens,
            prefix_hit_tokens=admission.num_hit_tokens,
            preemptions=roster.num_preemptions,
            prefill_tokens=self._prefill_tokens,
            drafts=speculator.num_drafts if speculator else 0,
            draft_tokens=speculator.num_draft_tokens if speculator else 0,
            accepted_tokens=speculator.num_accepted_tokens if speculator else 0,
        )

    def check(self) -> None:
        """Raise InvariantError if blocks are lost, leaked or counted wrongly."""
        self._roster.kv.check(self._roster.everyone())

    # --- phases ------------------------------------------------------------------------------

    def _decode(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in list(self._roster.running):
            # A sequence that this loop has preempted is WAITING by now.
            if sequence.state is not State.RUNNING or not sequence.is_decoding:
                continue
            together = self._roster.beams.steps_with(sequence)
            if len(chunks) + len(together) > self._config.max_batched_tokens:
                break
            if all(map(self._grow, together)):
                chunks.extend(member.next_chunk(1) for member in together)
        return chunks

    def _grow(self, sequence: Sequence) -> bool:
        """Give the sequence room for its last token, or preempt it if it is itself the last."""
        while not self._roster.kv.grow(sequence):
            victim = next(s for s in reversed(self._roster.running) if _is_preemptible(s))
            self._roster.preempt(victim)
            if sequence.state is State.WAITING:
                return False
        return True

    def _draft(self, chunks: list[Chunk], speculator: Speculator) -> list[Chunk]:
        """The same chunks, some of them with drafts; nobody's block is taken for a guess."""
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        drawing = {chunk.request_id: i for i, chunk in enumerate(chunks) if chunk.samples}
        decoding = [s for i in drawing if (s := self._roster.member(i)).most_drafts > 0]
        budget = self._config.max_batched_tokens - rows
        spare = self._roster.spare_blocks()
        for drafts in speculator.propose(decoding, len(drawing), rows, budget):
            count = self._roster.kv.grow_for_drafts(drafts.sequence, drafts.count, spare)
            if count:
                index = drawing[drafts.sequence.request_id]
                chunk = replace(chunks[index], block_table=drafts.sequence.block_table)
                chunks[index] = drafts.put(chunk, count)
        return chunks

    def _accepted(self, chunk: Chunk, computed: Computed) -> Seq[Sampled]:
        """Drawn tokens up to the one that replaces the first wrong draft, or follows the last."""
        if self._roster.speculator is None:
            return computed.sampled
        return computed.sampled[: 1 + self._roster.speculator.observe(chunk, computed)]


def _is_preemptible(sequence: Sequence) -> bool:
    return sequence.state is State.RUNNING and sequence.request.work is not Work.PREFILL
