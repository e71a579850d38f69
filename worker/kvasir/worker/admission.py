"""Which waiting requests may begin: strictly in order, while blocks for all their tokens are there.

Decides who enters the batch, with how many cached tokens, and who has waited too long. Never takes
a block from a running sequence, and never lets a later request pass an earlier one, but for
those whose sibling is computing the same prompt: they are passed over until it has.
"""

from collections.abc import Iterator

from kvasir.proto.errors import Reason, Refusal
from kvasir.worker.contracts import Chunk, Finish, Output, PrefillOutcome, Work
from kvasir.worker.roster import Roster
from kvasir.worker.sequence import Sequence, State
from kvasir.worker.signals import Progress, Reserved


class Admission:
    """``num_query_tokens`` were looked up in the prefix cache, ``num_hit_tokens`` found there."""

    def __init__(self, roster: Roster, max_running_requests: int) -> None:
        self._roster = roster
        self._max_running_requests = max_running_requests
        self.num_query_tokens = 0
        self.num_hit_tokens = 0

    def next_deadline(self) -> float | None:
        """When ``expire`` has a request to refuse, if nothing else happens."""
        return min((deadline for _, deadline in self._deadlines()), default=None)

    def expire(self, now: float) -> None:
        """Refuse requests that have waited past their deadline."""
        for sequence, deadline in list(self._deadlines()):
            if deadline <= now:
                refusal = Refusal(
                    Reason.DEADLINE_EXCEEDED,
                    "The request's deadline passed while it waited for a free worker; retry "
                    "later or allow more time.",
                )
                self._roster.outputs.append(
                    Output(sequence.request_id, finish=Finish.REFUSED, refusal=refusal)
                )
                self._roster.end(sequence)

    def admit(self, budget: int) -> list[Chunk]:
        """First chunks, of ``budget`` tokens at most, of those that begin to compute."""
        chunks: list[Chunk] = []
        index = 0
        waiting, running = self._roster.waiting, self._roster.running
        while index < len(waiting) and len(running) < self._max_running_requests:
            sequence = waiting[index]
            lender = self._roster.siblings.lender(sequence)
            if lender is None and self._roster.siblings.is_awaited(sequence):
                index += 1
                continue
            receives = lender is None and _receives(sequence)
            if not (budget or receives) or not self._reserve(sequence, lender):
                break
            if receives:
                self._receive(sequence)
                continue
            self._roster.admit(sequence, State.RUNNING)
            if sequence.request.work is Work.PREFILL:
                self._roster.signals.append(Progress(sequence.request_id, sequence.num_computed))
            chunks.append(sequence.next_chunk(budget))
            budget -= len(chunks[-1].token_ids)
        return chunks

    def tokens_to_compute(self, sequence: Sequence) -> int:
        """Tokens that a waiting sequence is going to compute; its siblings' prompt counts once."""
        if self._roster.siblings.follows(sequence):
            return max(1, len(sequence.output_ids))
        return sequence.num_tokens

    def _deadlines(self) -> Iterator[tuple[Sequence, float]]:
        """Of requests that have never run: a preempted one is owed the rest of its answer."""
        for sequence in self._roster.waiting:
            if sequence.request.deadline is not None and sequence.report is None:
                yield sequence, sequence.request.deadline

    def _reserve(self, sequence: Sequence, lender: Sequence | None) -> bool:
        """Blocks for an admission, or False.

        One block for each running sequence that still grows is left over. Without it, a newcomer
        in a full pool would be preempted again before its prefill is of use.
        """
        if not self._roster.kv.reserve(sequence, self._roster.spare_blocks(), lender):
            return False
        if sequence.report is None:
            sequence.report_cached(sequence.num_computed, PrefillOutcome.LOCAL)
            self.num_query_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed
        return True

    def _receive(self, sequence: Sequence) -> None:
        self._roster.admit(sequence, State.RECEIVING)
        sequence.committed.update(range(sequence.num_stored))
        self._roster.signals.append(Reserved(sequence.request_id, sequence.num_computed))


def _receives(sequence: Sequence) -> bool:
    """Whether KV is to come from outside: once, and never where logprobs need every position."""
    return (
        sequence.request.work is Work.RECEIVE
        and sequence.report is None
        and not sequence.wants_prompt_logprobs
    )
