"""Requests of one group, such as the choices of an ``n > 1`` request: who lends whom its prompt.

Members have the same prompt, so that one of them computes it (or receives it) and the others
wait and then share its blocks. Any member can run by itself: one whose siblings are gone or have
lost their KV is like a request without a group. Knows no blocks.
"""

from kvasir.worker.sequence import Sequence, State


class Siblings:
    """The live sequences of each group, in the order in which they came."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Sequence]] = {}
        self._group_of: dict[str, list[Sequence]] = {}  # by request id

    def add(self, sequence: Sequence) -> None:
        """A sequence whose prompt is not its group's is treated as one without a group."""
        request = sequence.request
        if not request.group or request.beam is not None or sequence.wants_prompt_logprobs:
            return
        members = self._groups.setdefault(request.group, [])
        if members:
            other = members[0].request
            if (request.cache_salt, request.prompt_ids) != (other.cache_salt, other.prompt_ids):
                return
        members.append(sequence)
        self._group_of[request.request_id] = members

    def remove(self, sequence: Sequence) -> None:
        members = self._group_of.pop(sequence.request_id, None)
        if members is not None:
            members.remove(sequence)
            if not members:
                del self._groups[sequence.request.group]

    def lender(self, sequence: Sequence) -> Sequence | None:
        """A sibling that holds the KV of the whole prompt."""
        for other in self._others(sequence):
            if other.num_computed >= len(other.request.prompt_ids):
                return other
        return None

    def is_awaited(self, sequence: Sequence) -> bool:
        """Whether a sibling is about to hold the KV of the whole prompt.

        It comes before the sequence in the scheduler's order, so that no one waits for a
        sequence that may itself have to wait for him.
        """
        return any(
            other.key < sequence.key and other.state in (State.RUNNING, State.RECEIVING)
            for other in self._others(sequence)
        )

    def follows(self, sequence: Sequence) -> bool:
        """Whether a sibling came before: it is the one to compute the prompt."""
        members = self._group_of.get(sequence.request_id)
        return members is not None and members[0] is not sequence

    def _others(self, sequence: Sequence) -> list[Sequence]:
        members = self._group_of.get(sequence.request_id, [])
        return [member for member in members if member is not sequence]
