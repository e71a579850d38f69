"""Which tokens are computed next: continuous batching, chunked prefill, preemption, receiving.

Owns every sequence and, through KvBlocks, every block. Pure: no clock, thread, tensor
or I/O. ``plan`` says what to compute, ``update`` takes what came of it; between the two, nothing
else may be called. News collects in an outbox that the engine empties.

A step is made in five phases, each in the order of (priority, arrival):

    expire    refuse requests that have waited past their deadline
    decode    one token for each sequence that lacks only its last token's KV; when no block
              is left for it, preempt the last preemptible sequence
    prefill   the rest of the token budget, in chunks, to running sequences
    admit     waiting requests, strictly in order, while blocks for all their tokens are there;
              but whose sibling is computing the same prompt is passed over until it has
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

from bisect import insort
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

from kvasir.proto.errors import Reason, Refusal
from kvasir.worker.beams import Beams, Search
from kvasir.worker.block_pool import InvariantError
from kvasir.worker.contracts import (
    Chunk,
    Computed,
    Finish,
    KvEvent,
    Load,
    Output,
    PrefillOutcome,
    Request,
    Sampled,
    StepPlan,
    StepResult,
    Work,
)
from kvasir.worker.kv_blocks import KvBlocks
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.sequence import Sequence, State
from kvasir.worker.siblings import Siblings
from kvasir.worker.signals import Progress, Reserved, Signal
from kvasir.worker.speculation.speculator import Speculator

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._kv = KvBlocks(config)
        self._speculator = None if config.speculation is None else Speculator(config.speculation)
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # both lists in the order of Sequence.key
        self._running: list[Sequence] = []  # RUNNING and RECEIVING; HOLDING ones are in neither
        self._siblings = Siblings()
        self._beams = Beams()
        self._arrivals = 0
        self._query_tokens = 0
        self._hit_tokens = 0
        self._preemptions = 0
        self._prefill_tokens = 0
        self._outputs: list[Output] = []
        self._signals: list[Signal] = []

    # --- between steps -----------------------------------------------------------------------

    @property
    def config(self) -> SchedulerConfig:
        return self._config

    def add(self, request: Request) -> None:
        """Queue a request that ``config.refusal`` does not refuse, under an id not in use."""
        if request.request_id in self._sequences:
            raise InvariantError(f"request {request.request_id} is queued twice")
        sequence = Sequence(request, self._arrivals, self._config)
        self._arrivals += 1
        if sequence.is_exhausted:
            self._outputs.append(Output(request.request_id, finish=Finish.LENGTH))
            return
        self._sequences[request.request_id] = sequence
        self._siblings.add(sequence)
        self._beams.add(sequence)
        insort(self._waiting, sequence, key=_key)

    def abort(self, request_id: str) -> bool:
        """End a request at any stage and free its blocks; an unknown one is none of ours.

        True if this has ended a hold: its finish was told before, so that no output follows.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        held = sequence.state is State.HOLDING
        if not held:
            self._outputs.append(Output(request_id, finish=Finish.ABORTED))
        self._end(sequence)
        return held

    def receivable(self, request_id: str, first_block: int, count: int) -> tuple[int, ...] | None:
        """Block ids that the KV of a receiving request's blocks is to be written to.

        None if the request is gone or no longer receives. Raises as Sequence.blocks_to_fill.
        """
        sequence = self._receiving(request_id)
        return None if sequence is None else sequence.blocks_to_fill(first_block, count)

    def committed(self, request_id: str, first_block: int, count: int) -> None:
        """The KV of blocks that ``receivable`` has just named is written."""
        self._kv.committed(self._sequences[request_id], first_block, count)

    def finish_receive(self, request_id: str, sampled: Sampled, holder_cached_tokens: int) -> None:
        """All KV has come, and the first token. With blocks missing, it is a failed receive."""
        sequence = self._receiving(request_id)
        if sequence is None:
            return
        if len(sequence.committed) < len(sequence.block_table):
            self.fail_receive(request_id)
            return
        sequence.state = State.RUNNING
        self._kv.computed(sequence, sequence.num_tokens)
        own = sequence.report.cached_tokens if sequence.report else 0
        sequence.report_cached(own + holder_cached_tokens, PrefillOutcome.REMOTE)
        self._append(sequence, (sampled,))

    def fail_receive(self, request_id: str, *, peer_fault: bool = False) -> None:
        """Go on from the contiguous committed blocks and compute the rest here."""
        sequence = self._receiving(request_id)
        if sequence is None:
            return
        sequence.state = State.RUNNING
        own = sequence.report.cached_tokens if sequence.report else 0
        sequence.report_cached(own, PrefillOutcome.RECOMPUTED, peer_fault=peer_fault)

    def readable(
        self, request_id: str, first_block: int, count: int
    ) -> tuple[tuple[int, ...], int] | None:
        """Block ids of a prefill's blocks, and how many tokens fill them.

        None if the request is gone. Raises as Sequence.blocks_to_read.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.request.work is not Work.PREFILL:
            return None
        return sequence.blocks_to_read(first_block, count)

    # --- one step ----------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """What to compute next; empty if nothing can go on until some request changes.

        Args:
            now: seconds since the Unix epoch, for deadlines.
        """
        self._expire(now)
        preemptions = self._preemptions
        chunks = self._decode()
        budget = self._config.max_batched_tokens - len(chunks)
        for sequence in self._running:
            if sequence.state is State.RUNNING and not sequence.is_decoding and budget:
                chunks.append(sequence.next_chunk(budget))
                budget -= len(chunks[-1].token_ids)
        # Blocks that a preemption has just won are for the running ones, if there are any left.
        if not chunks or self._preemptions == preemptions:
            chunks.extend(self._admit(budget))
        if self._speculator is not None and chunks:
            chunks = self._draft(chunks, self._speculator)
        return StepPlan(tuple(chunks), self._kv.take_copies())

    def update(self, plan: StepPlan, result: StepResult, seconds: float = 0.0) -> None:
        """Take what the runner made of ``plan``, the latest one, and how long it took."""
        if self._speculator is not None and plan.chunks:
            self._speculator.observe_step(plan.chunks, seconds)
        for chunk in plan.chunks:
            sequence, computed = self._member(chunk.request_id), result[chunk.request_id]
            sequence.collect(computed.prompt_logprobs)
            self._prefill_tokens += sequence.given_tokens(chunk)
            known = len(chunk.token_ids) - len(chunk.draft_ids)
            self._kv.computed(sequence, chunk.start + known)
            if sequence.request.work is Work.PREFILL:
                self._signals.append(Progress(sequence.request_id, sequence.num_computed))
            if chunk.samples:
                self._append(sequence, self._accepted(chunk, computed))

    # --- the outbox and the gauges -----------------------------------------------------------

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_signals(self) -> list[Signal]:
        signals, self._signals = self._signals, []
        return signals

    def take_events(self) -> list[KvEvent]:
        return self._kv.cache.take_events()

    def cached_hashes(self) -> list[bytes]:
        """Hashes of all blocks that can be hit, parents first."""
        return self._kv.cache.hashes()

    @property
    def num_arrivals(self) -> int:
        """How many requests were ever added."""
        return self._arrivals

    def request_ids(self) -> list[str]:
        """Requests that wait, run, receive or hold blocks."""
        return list(self._sequences)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def next_deadline(self) -> float | None:
        """When ``plan`` has a waiting request to refuse, if nothing else happens."""
        return min((deadline for _, deadline in self._deadlines()), default=None)

    def load(self) -> Load:
        admitted = [s for s in self._all() if s.state is not State.WAITING]
        speculator = self._speculator
        return Load(
            running=len(admitted),
            kv=self._kv.usage(admitted),
            waiting=len(self._waiting),
            queued_prefill_tokens=sum(self._to_compute(s) for s in self._waiting)
            + sum(
                s.num_uncomputed for s in admitted if s.state is State.RUNNING and not s.is_decoding
            ),
            active_kv_tokens=sum(s.num_computed for s in admitted),
            kv_blocks_total=self._kv.pool.num_blocks,
            kv_blocks_used=self._kv.pool.num_referenced,
            kv_blocks_cached=self._kv.pool.num_cached,
            prefix_query_tokens=self._query_tokens,
            prefix_hit_tokens=self._hit_tokens,
            preemptions=self._preemptions,
            prefill_tokens=self._prefill_tokens,
            drafts=speculator.num_drafts if speculator else 0,
            draft_tokens=speculator.num_draft_tokens if speculator else 0,
            accepted_tokens=speculator.num_accepted_tokens if speculator else 0,
        )

    def check(self) -> None:
        """Raise InvariantError if blocks are lost, leaked or counted wrongly."""
        self._kv.check(self._all())

    # --- phases ------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for sequence, deadline in list(self._deadlines()):
            if deadline <= now:
                refusal = Refusal(
                    Reason.DEADLINE_EXCEEDED,
                    "The request's deadline passed while it waited for a free worker; retry "
                    "later or allow more time.",
                )
                self._outputs.append(
                    Output(sequence.request_id, finish=Finish.REFUSED, refusal=refusal)
                )
                self._end(sequence)

    def _deadlines(self) -> Iterator[tuple[Sequence, float]]:
        """Of requests that have never run: a preempted one is owed the rest of its answer."""
        for sequence in self._waiting:
            if sequence.request.deadline is not None and sequence.report is None:
                yield sequence, sequence.request.deadline

    def _decode(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in list(self._running):
            # A sequence that this loop has preempted is WAITING by now.
            if sequence.state is not State.RUNNING or not sequence.is_decoding:
                continue
            together = self._beams.steps_with(sequence)
            if len(chunks) + len(together) > self._config.max_batched_tokens:
                break
            if all(map(self._grow, together)):
                chunks.extend(member.next_chunk(1) for member in together)
        return chunks

    def _grow(self, sequence: Sequence) -> bool:
        """Give the sequence room for its last token, or preempt it if it is itself the last."""
        while not self._kv.grow(sequence):
            victim = next(s for s in reversed(self._running) if _is_preemptible(s))
            self._preempt(victim)
            if sequence.state is State.WAITING:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to its place in the queue; its tokens are kept and its KV computed again."""
        self._preemptions += 1
        search = self._beams.of(sequence)
        if search is not None:
            sequence = search.root
            self._part(self._beams.collapse(search))
        self._running.remove(sequence)
        self._kv.release(sequence)
        sequence.reset()
        insort(self._waiting, sequence, key=_key)

    def _admit(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        index = 0
        limit = self._config.max_running_requests
        while index < len(self._waiting) and len(self._running) < limit:
            sequence = self._waiting[index]
            lender = self._siblings.lender(sequence)
            if lender is None and self._siblings.is_awaited(sequence):
                index += 1
                continue
            receives = lender is None and _receives(sequence)
            if not (budget or receives) or not self._reserve(sequence, lender):
                break
            del self._waiting[index]
            insort(self._running, sequence, key=_key)
            if receives:
                sequence.state = State.RECEIVING
                sequence.committed.update(range(sequence.num_stored))
                self._signals.append(Reserved(sequence.request_id, sequence.num_computed))
                continue
            sequence.state = State.RUNNING
            if sequence.request.work is Work.PREFILL:
                self._signals.append(Progress(sequence.request_id, sequence.num_computed))
            chunks.append(sequence.next_chunk(budget))
            budget -= len(chunks[-1].token_ids)
        return chunks

    def _reserve(self, sequence: Sequence, lender: Sequence | None) -> bool:
        """Blocks for an admission, or False.

        One block for each running sequence that still grows is left over. Without it, a newcomer
        in a full pool would be preempted again before its prefill is of use.
        """
        spare = sum(s.can_grow for s in self._running)
        if not self._kv.reserve(sequence, spare, lender):
            return False
        if sequence.report is None:
            sequence.report_cached(sequence.num_computed, PrefillOutcome.LOCAL)
            self._query_tokens += sequence.num_tokens
            self._hit_tokens += sequence.num_computed
        return True

    def _draft(self, chunks: list[Chunk], speculator: Speculator) -> list[Chunk]:
        """The same chunks, some of them with drafts; nobody's block is taken for a guess."""
        rows = sum(len(chunk.token_ids) for chunk in chunks)
        drawing = {chunk.request_id: i for i, chunk in enumerate(chunks) if chunk.samples}
        decoding = [s for i in drawing if (s := self._member(i)).most_drafts > 0]
        budget = self._config.max_batched_tokens - rows
        spare = sum(s.can_grow for s in self._running)
        for drafts in speculator.propose(decoding, len(drawing), rows, budget):
            count = self._kv.grow_for_drafts(drafts.sequence, drafts.count, spare)
            if count:
                index = drawing[drafts.sequence.request_id]
                chunk = replace(chunks[index], block_table=drafts.sequence.block_table)
                chunks[index] = drafts.put(chunk, count)
        return chunks

    # --- small steps -------------------------------------------------------------------------

    def _to_compute(self, sequence: Sequence) -> int:
        """Tokens that a waiting sequence is going to compute; its siblings' prompt counts once."""
        if self._siblings.follows(sequence):
            return max(1, len(sequence.output_ids))
        return sequence.num_tokens

    def _receiving(self, request_id: str) -> Sequence | None:
        sequence = self._sequences.get(request_id)
        return sequence if sequence and sequence.state is State.RECEIVING else None

    def _accepted(self, chunk: Chunk, computed: Computed) -> Seq[Sampled]:
        """Drawn tokens up to the one that replaces the first wrong draft, or follows the last."""
        if self._speculator is None:
            return computed.sampled
        return computed.sampled[: 1 + self._speculator.observe(chunk, computed)]

    def _all(self) -> list[Sequence]:
        return [*self._sequences.values(), *self._beams.others()]

    def _member(self, request_id: str) -> Sequence:
        """A sequence by the id of its chunk."""
        return self._sequences.get(request_id) or self._beams.member(request_id)

    def _advance(self, search: Search) -> None:
        """All beams of a request have drawn."""
        root, old = search.root, search.members
        beams = search.advance()
        if not beams:
            best = search.hypotheses
            self._outputs.append(
                Output(root.request_id, (), (), best[0].finish, None, root.report, (), best)
            )
            self._end(root)
            return
        for child, parent in self._beams.replace(search, beams):
            self._kv.share(child, parent)
            insort(self._running, child, key=_key)
        self._part(old)
        self._sequences[root.request_id] = search.root

    def _part(self, members: Iterable[Sequence]) -> None:
        """Of beams that nothing continues, or whose children have taken their place."""
        for member in members:
            self._kv.release(member)
            self._running.remove(member)

    def _append(self, sequence: Sequence, drawn: Iterable[Sampled]) -> None:
        search = self._beams.of(sequence)
        if search is not None:
            (search.drawn[sequence.request_id],) = drawn
            if len(search.drawn) == len(search.members):
                self._advance(search)
            return
        output = sequence.append(drawn)
        self._kv.computed(sequence, sequence.num_tokens - 1)  # of accepted drafts too
        self._outputs.append(output)
        if output.finish is None:
            return
        if sequence.request.work is Work.PREFILL:
            sequence.state = State.HOLDING
            self._running.remove(sequence)
        else:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        search = self._beams.of(sequence)
        if search is not None:
            self._beams.remove(search)
            self._part(search.members[1:])
        self._kv.release(sequence)
        self._siblings.remove(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence.request_id)
        del self._sequences[sequence.request_id]
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        elif sequence.state is not State.HOLDING:
            self._running.remove(sequence)


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key


def _receives(sequence: Sequence) -> bool:
    """Whether KV is to come from outside: once, and never where logprobs need every position."""
    return (
        sequence.request.work is Work.RECEIVE
        and sequence.report is None
        and not sequence.wants_prompt_logprobs
    )


def _is_preemptible(sequence: Sequence) -> bool:
    return sequence.state is State.RUNNING and sequence.request.work is not Work.PREFILL
