"""Who is alive, waits and runs: the one place where sequences come, change places and go.

Owns every sequence, and with it all that keeps something of one: its blocks (KvBlocks), its
siblings, its beams, its drafts, and what is to be told of it. Each change of state that concerns
more than the sequence is one method here, so that all of these change together. Must not decide
whose turn it is: the scheduler's phases do.

Invariant: ``waiting`` and ``running`` are in the order of (priority, arrival). RUNNING and
RECEIVING sequences are running, WAITING ones wait, HOLDING ones are in neither list.
"""

from bisect import insort
from collections.abc import Iterable

from kvasir.worker.beams import Beams, Search
from kvasir.worker.block_pool import InvariantError
from kvasir.worker.contracts import Finish, Output, Request, Sampled, Work
from kvasir.worker.kv_blocks import KvBlocks
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.sequence import Sequence, State
from kvasir.worker.siblings import Siblings
from kvasir.worker.signals import Signal
from kvasir.worker.speculation.speculator import Speculator


class Roster:
    """Read by the scheduler's phases; ``waiting`` and ``running`` only its own methods change.

    ``outputs`` and ``signals`` collect news until the scheduler takes them away.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._sequences: dict[str, Sequence] = {}
        self.kv = KvBlocks(config)
        self.siblings = Siblings()
        self.beams = Beams()
        self.speculator = None if config.speculation is None else Speculator(config.speculation)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.outputs: list[Output] = []
        self.signals: list[Signal] = []
        self.num_arrivals = 0
        self.num_preemptions = 0

    # --- who there is ------------------------------------------------------------------------

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def request_ids(self) -> list[str]:
        return list(self._sequences)

    def get(self, request_id: str) -> Sequence | None:
        """The sequence of a request; of a beam search, its root."""
        return self._sequences.get(request_id)

    def member(self, request_id: str) -> Sequence:
        """A sequence by the id of its chunk."""
        return self._sequences.get(request_id) or self.beams.member(request_id)

    def everyone(self) -> list[Sequence]:
        return [*self._sequences.values(), *self.beams.others()]

    def spare_blocks(self) -> int:
        """Blocks to leave to those that run: one for each that may yet ask for one."""
        return sum(sequence.can_grow for sequence in self.running)

    # --- changes of state --------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request comes, under an id not in use; it waits, unless it is complete already."""
        if request.request_id in self._sequences:
            raise InvariantError(f"request {request.request_id} is queued twice")
        sequence = Sequence(request, self.num_arrivals, self._config)
        self.num_arrivals += 1
        if sequence.is_exhausted:
            self.outputs.append(Output(request.request_id, finish=Finish.LENGTH))
            return
        self._sequences[request.request_id] = sequence
        self.siblings.add(sequence)
        self.beams.add(sequence)
        insort(self.waiting, sequence, key=_key)

    def admit(self, sequence: Sequence, state: State) -> None:
        """WAITING to RUNNING or RECEIVING; its blocks are reserved."""
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_key)
        sequence.state = state

    def preempt(self, sequence: Sequence) -> None:
        """Back to its place in the queue; its tokens are kept and its KV computed again."""
        self.num_preemptions += 1
        search = self.beams.of(sequence)
        if search is not None:
            sequence = search.root
            self._part(self.beams.collapse(search))
        self.running.remove(sequence)
        self.kv.release(sequence)
        sequence.reset()
        insort(self.waiting, sequence, key=_key)

    def append(self, sequence: Sequence, drawn: Iterable[Sampled]) -> None:
        """A running sequence has drawn tokens: tell of them, and go on, hold or end."""
        search = self.beams.of(sequence)
        if search is not None:
            (search.drawn[sequence.request_id],) = drawn
            if len(search.drawn) == len(search.members):
                self._advance(search)
            return
        output = sequence.append(drawn)
        self.kv.computed(sequence, sequence.num_tokens - 1)  # of accepted drafts too
        self.outputs.append(output)
        if output.finish is None:
            return
        if sequence.request.work is Work.PREFILL:
            sequence.state = State.HOLDING
            self.running.remove(sequence)
        else:
            self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """A request goes, from whatever state, with its blocks and all that is kept of it."""
        search = self.beams.of(sequence)
        if search is not None:
            self.beams.remove(search)
            self._part(search.members[1:])
        self.kv.release(sequence)
        self.siblings.remove(sequence)
        if self.speculator is not None:
            self.speculator.forget(sequence.request_id)
        del self._sequences[sequence.request_id]
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is not State.HOLDING:
            self.running.remove(sequence)

    # --- beams -------------------------------------------------------------------------------

    def _advance(self, search: Search) -> None:
        """All beams of a request have drawn."""
        root, old = search.root, search.members
        beams = search.advance()
        if not beams:
            best = search.hypotheses
            self.outputs.append(
                Output(root.request_id, (), (), best[0].finish, None, root.report, (), best)
            )
            self.end(root)
            return
        for child, parent in self.beams.replace(search, beams):
            self.kv.share(child, parent)
            insort(self.running, child, key=_key)
        self._part(old)
        self._sequences[root.request_id] = search.root

    def _part(self, members: Iterable[Sequence]) -> None:
        """Of beams that nothing continues, or whose children have taken their place."""
        for member in members:
            self.kv.release(member)
            self.running.remove(member)


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key
