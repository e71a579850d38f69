"""How likely the next drafted token is right, learned from those before it. Pure.

A trial is one drafted token whose predecessors were all right; those after a wrong one tell
nothing. Both estimates are exponential moving averages of trials: one over all sequences, from
which each new one starts, and a faster one of each sequence, since copying comes in stretches.
"""

from collections.abc import Sequence

_PRIOR = 0.5
_OVERALL_WEIGHT = 0.02
_OWN_WEIGHT = 0.15


class Acceptance:
    """The estimate over all sequences."""

    def __init__(self) -> None:
        self.probability = _PRIOR

    def observe(self, num_trials: int, num_accepted: int) -> None:
        self.probability = _average(self.probability, _OVERALL_WEIGHT, num_trials, num_accepted)


class OwnAcceptance:
    """One sequence's estimate."""

    def __init__(self, overall: Acceptance) -> None:
        self._overall = overall
        self.probability = overall.probability

    def observe(self, num_trials: int, num_accepted: int) -> None:
        self.probability = _average(self.probability, _OWN_WEIGHT, num_trials, num_accepted)
        self._overall.observe(num_trials, num_accepted)


def num_accepted(draft_ids: Sequence[int], drawn_ids: Sequence[int]) -> int:
    """How many leading drafts are the tokens that were drawn in their places.

    A draft stands where token ``drawn_ids[i]`` was drawn, so it is right if it is that very token:
    what is drawn after it is then what would have been drawn without speculation.
    """
    count = 0
    for drafted, drawn in zip(draft_ids, drawn_ids, strict=False):
        if drafted != drawn:
            break
        count += 1
    return count


def num_trials(num_drafted: int, accepted: int) -> int:
    """The accepted ones, and the one that was not."""
    return min(accepted + 1, num_drafted)


def _average(estimate: float, weight: float, trials: int, accepted: int) -> float:
    """Accepted trials first, as they came."""
    for trial in range(trials):
        estimate += weight * ((trial < accepted) - estimate)
    return estimate
