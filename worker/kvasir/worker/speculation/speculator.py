"""Drafts for the decoding sequences of a step, and what is learned from how they fared. Pure.

Owns each sequence's n-gram index and acceptance, the step's costs, and the counters. Knows no
blocks and no runner: the scheduler finds room for the drafts, and keeps what was accepted.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from kvasir.worker.contracts import Chunk, Computed
from kvasir.worker.sequence import Sequence
from kvasir.worker.speculation.acceptance import (
    Acceptance,
    OwnAcceptance,
    num_accepted,
    num_trials,
)
from kvasir.worker.speculation.config import Method, SpeculationConfig
from kvasir.worker.speculation.controller import Candidate, allot, telling
from kvasir.worker.speculation.costs import StepCosts
from kvasir.worker.speculation.ngram import NgramIndex

_DRAFT_PASS = 0.5
"""What one pass of a draft model costs, in steps of one row, until that is measured."""
_PROBE_STEPS = 100
"""After so many steps that could draft and did not, the likeliest sequence drafts: the world may be
another."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """``count`` tokens to draft for a sequence: ``token_ids``, or none if the runner drafts."""

    sequence: Sequence
    count: int
    token_ids: tuple[int, ...] = ()

    def put(self, chunk: Chunk, count: int) -> Chunk:
        """The sequence's chunk with the first ``count`` of them."""
        if not self.token_ids:
            return replace(chunk, num_to_draft=count)
        return chunk.with_drafts(self.token_ids[:count])


@dataclass(slots=True)
class _Record:
    """What is known of one sequence. ``proposed``: its n-gram drafts of this step, taken or not."""

    acceptance: OwnAcceptance
    index: NgramIndex = field(default_factory=NgramIndex)
    proposed: tuple[int, ...] = ()


class Speculator:
    """``counts`` of drafts, drafted tokens and accepted tokens only grow."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._acceptance = Acceptance()
        self._costs = StepCosts(0.0 if config.method is Method.NGRAM else _DRAFT_PASS)
        self._records: dict[str, _Record] = {}
        self._steps_without = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def propose(self, decoding: Seq[Sequence], tokens: int, rows: int, budget: int) -> list[Drafts]:
        """Drafts that pay, for some of the ``decoding`` sequences.

        Args:
            tokens: drawn by the step without drafts.
            rows: computed by the step without drafts.
            budget: the most drafts in all.
        """
        found = [(sequence, *self._available(sequence)) for sequence in decoding]
        found = [(sequence, count, ids) for sequence, count, ids in found if count]
        candidates = [
            Candidate(count, self._records[sequence.request_id].acceptance.probability)
            for sequence, count, _ in found
        ]
        counts = self._allot(candidates, tokens, rows, budget)
        return [
            Drafts(sequence, count, ids[:count])
            for (sequence, _, ids), count in zip(found, counts, strict=True)
            if count
        ]

    def observe(self, chunk: Chunk, computed: Computed) -> int:
        """What became of a chunk that draws; how many of its drafts are accepted."""
        drawn = [sampled.token_id for sampled in computed.sampled]
        drafts = computed.draft_ids
        accepted = num_accepted(drafts, drawn)
        if drafts:
            self.num_drafts += 1
            self.num_draft_tokens += len(drafts)
            self.num_accepted_tokens += accepted
        record = self._records.get(chunk.request_id)
        if record is not None:
            # Whether a proposal that was not taken was right is learned for nothing.
            tried = drafts or record.proposed[:1]
            record.proposed = ()
            right = num_accepted(tried, drawn)
            record.acceptance.observe(num_trials(len(tried), right), right)
        return accepted

    def observe_step(self, chunks: Seq[Chunk], seconds: float) -> None:
        """How long the runner took. Steps that prefill have their costs elsewhere."""
        known = [len(chunk.token_ids) - len(chunk.draft_ids) for chunk in chunks]
        if max(known) > 1:
            return
        passes = max(chunk.num_to_draft for chunk in chunks)
        rows = sum(len(chunk.token_ids) + chunk.num_to_draft for chunk in chunks)
        self._costs.observe(rows, passes, seconds)

    def forget(self, request_id: str) -> None:
        self._records.pop(request_id, None)

    def _available(self, sequence: Sequence) -> tuple[int, tuple[int, ...]]:
        """How many tokens can be drafted, and which, unless the runner drafts."""
        record = self._records.get(sequence.request_id)
        if record is None:
            record = _Record(OwnAcceptance(self._acceptance))
            self._records[sequence.request_id] = record
        most = min(self._config.num_tokens, sequence.most_drafts)
        if self._config.method is Method.DRAFT or most < 1:
            return max(most, 0), ()
        record.index.extend(sequence.tokens(len(record.index), sequence.num_tokens))
        record.proposed = record.index.propose(most)
        return len(record.proposed), record.proposed

    def _allot(self, candidates: Seq[Candidate], tokens: int, rows: int, budget: int) -> list[int]:
        if not self._config.adaptive:
            return _in_turn(candidates, budget)
        counts = allot(candidates, tokens, rows, self._costs.cost(), budget)
        if not candidates or not budget:  # such as a step that only prefills: nothing was declined
            return counts
        self._steps_without = 0 if any(counts) else self._steps_without + 1
        if self._steps_without >= _PROBE_STEPS:
            self._steps_without = 0
            likeliest = max(range(len(candidates)), key=lambda i: candidates[i].acceptance)
            counts[likeliest] = min(telling(candidates[likeliest]), budget)
        return counts


def _in_turn(candidates: Seq[Candidate], budget: int) -> list[int]:
    """All that there is, as far as the budget goes."""
    counts = []
    for candidate in candidates:
        counts.append(min(candidate.most, budget))
        budget -= counts[-1]
    return counts
