"""How many tokens to draft for which sequence. Pure.

A draft is worth its place in the step if it raises the expected tokens per second. With
``t`` tokens expected of a step of ``s`` seconds, one more row raises ``t / s`` exactly if

    chance that the draft and all before it are right  >  t / s * seconds of a row

Alone, a sequence has a small ``t`` and rows that cost next to nothing beside the weights, so
nearly every draft pays. In a large batch ``t / s`` comes near to one token per row's
time, and only the surest drafts do: this is how speculation turns itself off.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.worker.speculation.costs import Cost


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence for which up to ``most`` tokens can be drafted.

    ``acceptance``: the chance that a draft is right if all before it are.
    """

    most: int
    acceptance: float


def telling(candidate: Candidate) -> int:
    """How many drafts in a row are worth trying only to learn: those that rather follow right ones
    than a wrong one, after which a draft tells nothing."""
    count = 1
    while count < candidate.most and candidate.acceptance**count > 0.5:
        count += 1
    return count


def allot(
    candidates: Sequence[Candidate], tokens: int, rows: int, cost: Cost, budget: int
) -> list[int]:
    """Number of drafts for each candidate, so that the step gives the most tokens per second.

    Goes depth by depth, the likeliest first: the chance of a draft only falls with depth, so
    when one depth does not pay, no deeper one does.

    Args:
        tokens, rows: of the step without any draft; the tokens are certain.
        budget: the most drafts in all.
    """
    counts = [0] * len(candidates)
    expected, seconds = float(tokens), cost.step(rows)
    for depth in range(1, max((c.most for c in candidates), default=0) + 1):
        chances = sorted(
            (
                (candidate.acceptance**depth, -index)
                for index, candidate in enumerate(candidates)
                if counts[index] == depth - 1 and candidate.most >= depth
            ),
            reverse=True,
        )[: budget - sum(counts)]
        taken = _worthwhile([chance for chance, _ in chances], expected, seconds, cost)
        if not taken:
            break
        expected += sum(chance for chance, _ in chances[:taken])
        seconds += cost.per_pass + taken * cost.per_row
        for _, index in chances[:taken]:
            counts[-index] = depth
    return counts


def _worthwhile(chances: Sequence[float], expected: float, seconds: float, cost: Cost) -> int:
    """How many of these drafts of one depth, in falling order, give the highest rate."""
    best, best_rate = 0, expected / seconds
    seconds += cost.per_pass
    for count, chance in enumerate(chances, start=1):
        expected += chance
        seconds += cost.per_row
        if expected / seconds > best_rate:
            best, best_rate = count, expected / seconds
    return best
