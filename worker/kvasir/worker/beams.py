"""Requests that search with beams: their live sequences, which always decode in the same step.

The first beam of a request goes by the request's own id, the others by ids made from it. Between
two steps all beams of a request are equally long, and they share every block that they have in
common. A request that is preempted gives up its beams and searches anew from its prompt:
nothing of it was told before the end. Owns which sequences are beams of which request; the
blocks are moved by KvBlocks.
"""

from dataclasses import dataclass, field

from kvasir.worker.beam_search import Beam, BeamSearch
from kvasir.worker.block_pool import InvariantError
from kvasir.worker.contracts import BeamParams, Hypothesis, Sampled
from kvasir.worker.sequence import Sequence, State


@dataclass(slots=True)
class Search:
    """One request: its search, its live sequences in the order of the search's beams."""

    params: BeamParams
    search: BeamSearch
    members: list[Sequence]
    drawn: dict[str, Sampled] = field(default_factory=dict)

    @property
    def root(self) -> Sequence:
        return self.members[0]

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        return self.search.hypotheses

    def advance(self) -> tuple[Beam, ...]:
        """The next beams from what all members have drawn; none if the search is over."""
        candidates = []
        for member in self.members:
            logprobs = self.drawn[member.request_id].logprobs
            if logprobs is None:
                raise InvariantError(f"{member.request_id} was drawn without its alternatives")
            candidates.append(logprobs.top)
        self.drawn.clear()
        return self.search.advance(candidates)


class Beams:
    """The searches of a scheduler."""

    def __init__(self) -> None:
        self._searches: dict[str, Search] = {}  # by the id of every member

    def add(self, root: Sequence) -> None:
        """A new request; nothing happens for one that does not search."""
        params = root.request.beam
        if params is not None:
            self._searches[root.request_id] = Search(params, root.new_search(params), [root])

    def of(self, sequence: Sequence) -> Search | None:
        return self._searches.get(sequence.request_id)

    def steps_with(self, sequence: Sequence) -> list[Sequence]:
        """All that must decode in one step with the sequence; none if another one stands for it."""
        search = self.of(sequence)
        if search is None:
            return [sequence]
        return search.members if search.root is sequence else []

    def member(self, request_id: str) -> Sequence:
        members = self._searches[request_id].members
        return next(member for member in members if member.request_id == request_id)

    def others(self) -> list[Sequence]:
        """Members that do not go by their request's id."""
        return [
            member
            for request_id, search in self._searches.items()
            if request_id == search.root.request_id
            for member in search.members[1:]
        ]

    def replace(self, search: Search, beams: tuple[Beam, ...]) -> list[tuple[Sequence, Sequence]]:
        """Make the next beams the members: each with the member that it continues."""
        root_id = search.root.request_id
        pairs = []
        for index, beam in enumerate(beams):
            parent = search.members[beam.parent]
            request_id = f"{root_id}/beam-{index}" if index else root_id
            pairs.append((parent.fork(request_id, beam.token_id), parent))
        self._set_members(search, [child for child, _ in pairs])
        return pairs

    def collapse(self, search: Search) -> list[Sequence]:
        """Back to the prompt, with the root alone; returns the members that are gone."""
        root, *gone = search.members
        self._set_members(search, [root])
        search.search = root.new_search(search.params)
        search.drawn.clear()
        root.restart()
        for member in gone:
            member.state = State.WAITING
        return gone

    def remove(self, search: Search) -> None:
        for member in search.members:
            del self._searches[member.request_id]

    def _set_members(self, search: Search, members: list[Sequence]) -> None:
        self.remove(search)
        search.members = members
        self._searches.update((member.request_id, search) for member in members)
