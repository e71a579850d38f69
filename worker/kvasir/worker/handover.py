"""Sequences whose KV other workers write or read: which blocks, and what it leads to.

Owns the RECEIVING state from the reservation on, and who may read the blocks of a prefill. Moves no
byte: the engine does, between asking here for blocks and telling here that they are written.
"""

from kvasir.worker.contracts import PrefillOutcome, Sampled, Work
from kvasir.worker.roster import Roster
from kvasir.worker.sequence import Sequence, State


class Handover:
    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def receivable(self, request_id: str, first_block: int, count: int) -> tuple[int, ...] | None:
        """Block ids that the KV of a receiving request's blocks is to be written to.

        None if the request is gone or no longer receives. Raises as Sequence.blocks_to_fill.
        """
        sequence = self._receiving(request_id)
        return None if sequence is None else sequence.blocks_to_fill(first_block, count)

    def committed(self, request_id: str, first_block: int, count: int) -> None:
        """The KV of blocks that ``receivable`` has just named is written."""
        self._roster.kv.committed(self._roster.member(request_id), first_block, count)

    def finish_receive(self, request_id: str, sampled: Sampled, holder_cached_tokens: int) -> None:
        """All KV has come, and the first token. With blocks missing, it is a failed receive."""
        sequence = self._receiving(request_id)
        if sequence is None:
            return
        if len(sequence.committed) < len(sequence.block_table):
            self.fail_receive(request_id)
            return
        sequence.state = State.RUNNING
        self._roster.kv.computed(sequence, sequence.num_tokens)
        own = sequence.report.cached_tokens if sequence.report else 0
        sequence.report_cached(own + holder_cached_tokens, PrefillOutcome.REMOTE)
        self._roster.append(sequence, (sampled,))

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
        sequence = self._roster.get(request_id)
        if sequence is None or sequence.request.work is not Work.PREFILL:
            return None
        return sequence.blocks_to_read(first_block, count)

    def _receiving(self, request_id: str) -> Sequence | None:
        sequence = self._roster.get(request_id)
        return sequence if sequence and sequence.state is State.RECEIVING else None
