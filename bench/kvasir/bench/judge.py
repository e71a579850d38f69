"""Whether an answer is the reference's greedy answer, token by token. Pure, given the logits.

A token that differs is accepted only with a proof: the reference itself must rate both tokens
within ``TIE`` of each other at that position. After a proven tie every later token is
held to the same rule, given the answer's own tokens before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

TIE = 1e-4
"""Largest difference of two float32 logits that another order of summation can explain."""

NextLogits = Callable[[Sequence[int]], torch.Tensor]
"""Output token ids to the logits [len, vocabulary] that each was drawn from."""


@dataclass(frozen=True, slots=True)
class Tie:
    """At output token ``index`` the reference's two tokens are ``gap`` apart."""

    index: int
    gap: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """``wrong`` is None for an accepted answer, else what is wrong with it."""

    wrong: str | None = None
    ties: tuple[Tie, ...] = ()

    @property
    def equal(self) -> bool:
        return self.wrong is None and not self.ties


class Vocabulary:
    """Token ids by the text that the API shows for each of them."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self._ids: dict[str, list[int]] = {}
        for token_id, text in enumerate(texts):
            self._ids.setdefault(text, []).append(token_id)

    def text(self, token_id: int) -> str:
        return self._texts[token_id]

    def ids(self, text: str) -> list[int]:
        """All tokens that look like this; more than one for pieces of a character."""
        return self._ids.get(text, [])


def judge(
    tokens: Sequence[str], expected: Sequence[int], vocabulary: Vocabulary, logits: NextLogits
) -> Verdict:
    """Compare an answer, as token texts, with the expected token ids."""
    if len(tokens) != len(expected):
        return Verdict(f"{len(tokens)} tokens instead of {len(expected)}")
    if all(shown == vocabulary.text(i) for shown, i in zip(tokens, expected, strict=True)):
        return Verdict()
    ids, unknown = _resolve(tokens, expected, vocabulary)
    if unknown is not None:
        return Verdict(f"{unknown!r} is no token of the model")
    return _judge_by_logits(ids, expected, logits(ids), vocabulary)


def _resolve(
    tokens: Sequence[str], expected: Sequence[int], vocabulary: Vocabulary
) -> tuple[list[int], str | None]:
    """Ids of the shown tokens; the expected id where it is one of several that fit."""
    ids: list[int] = []
    for shown, wanted in zip(tokens, expected, strict=True):
        candidates = vocabulary.ids(shown)
        if not candidates:
            return ids, shown
        ids.append(wanted if wanted in candidates else candidates[0])
    return ids, None


def _judge_by_logits(
    ids: Sequence[int], expected: Sequence[int], logits: torch.Tensor, vocabulary: Vocabulary
) -> Verdict:
    first = next(i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b)
    ties: list[Tie] = []
    for index in range(first, len(ids)):
        token_id, row = ids[index], logits[index]
        rival = expected[index] if index == first else int(row.argmax())
        gap = float(max(row.max() - row[token_id], (row[rival] - row[token_id]).abs()))
        if gap >= TIE:
            return Verdict(
                f"token {index} is {vocabulary.text(token_id)!r}, but the reference prefers"
                f" {vocabulary.text(rival)!r} by {gap:.2g}",
                tuple(ties),
            )
        if token_id != rival:
            ties.append(Tie(index, gap))
    return Verdict(ties=tuple(ties))
