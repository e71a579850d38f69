"""Beam search: which continuations of which beams live on, and which are finished. Pure.

The rules are those of transformers' ``generate(num_beams=width, early_stopping=False)``. Each
step ranks all continuations of all beams by the sum of their logprobs:

- of the best ``width``, those that end (a stop token, or the longest allowed output) become
  hypotheses, scored by sum / length ** length_penalty; the best ``width`` of these are kept;
- the best ``width`` of those that do not end are the next beams;
- it is over when there are ``width`` hypotheses and the best beam, scored at its present length,
  is not better than the worst of them; or when nothing is left to continue.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.worker.contracts import BeamParams, Finish, Hypothesis

Candidates = Sequence[tuple[int, float]]
"""Token ids with their logprobs, the most likely first."""


@dataclass(frozen=True, slots=True)
class Beam:
    """A live beam: which of the beams before it continues, and with what token."""

    parent: int
    token_id: int
    total: float
    """Sum of the logprobs of its output tokens."""


def num_candidates(params: BeamParams, num_stop_ids: int) -> int:
    """How many of the most likely tokens of each beam a step must know.

    At most ``num_stop_ids`` of them end the beam, so that one beam alone can fill the width.
    """
    return params.width + num_stop_ids


class BeamSearch:
    """One search, from the first token on. ``limit`` is the longest output in tokens."""

    def __init__(self, params: BeamParams, stop_ids: frozenset[int], limit: int) -> None:
        self._params = params
        self._stop_ids = stop_ids
        self._limit = limit
        self._outputs: list[tuple[int, ...]] = [()]
        self._totals = [0.0]
        self._found: list[Hypothesis] = []

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The best ones so far, the best first."""
        return tuple(self._found)

    def advance(self, candidates: Sequence[Candidates]) -> tuple[Beam, ...]:
        """The next beams; none if the search is over.

        Args:
            candidates: for each live beam, in order, its ``num_candidates`` most likely tokens.
        """
        width = self._params.width
        ranked = sorted(
            (
                Beam(parent, token_id, total + logprob)
                for parent, (total, ours) in enumerate(zip(self._totals, candidates, strict=True))
                for token_id, logprob in ours
            ),
            key=lambda beam: -beam.total,
        )
        length = len(self._outputs[0]) + 1
        for beam in ranked[:width]:
            if self._ends(beam, length):
                self._keep(beam, length)
        live = [beam for beam in ranked if not self._ends(beam, length)][:width]
        if not live or self._is_over(live[0].total, length):
            return ()
        self._outputs = [(*self._outputs[beam.parent], beam.token_id) for beam in live]
        self._totals = [beam.total for beam in live]
        return tuple(live)

    def _ends(self, beam: Beam, length: int) -> bool:
        return beam.token_id in self._stop_ids or length == self._limit

    def _keep(self, beam: Beam, length: int) -> None:
        hypothesis = Hypothesis(
            token_ids=(*self._outputs[beam.parent], beam.token_id),
            finish=Finish.STOP if beam.token_id in self._stop_ids else Finish.LENGTH,
            score=self._score(beam.total, length),
        )
        found = (*self._found, hypothesis)
        self._found = heapq.nlargest(self._params.width, found, key=lambda one: one.score)

    def _is_over(self, best_total: float, length: int) -> bool:
        if len(self._found) < self._params.width:
            return False
        return self._score(best_total, length) <= self._found[-1].score

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self._params.length_penalty)
