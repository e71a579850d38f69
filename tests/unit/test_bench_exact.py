"""Who is right about a token, and what the engine bench makes of token times."""

import pytest
import torch

from kvasir.bench.judge import TIE, Tie, Vocabulary, judge
from kvasir.bench.timeline import Timeline

VOCABULARY = Vocabulary(["a", "b", "c", "a"])


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values)


def forbidden(ids: object) -> torch.Tensor:
    raise AssertionError("equal answers need no logits")


def test_equal_tokens_need_no_logits() -> None:
    assert judge(["a", "b"], [0, 1], VOCABULARY, forbidden).equal


def test_tokens_that_look_alike_are_equal() -> None:
    assert judge(["a", "b"], [3, 1], VOCABULARY, forbidden).equal


def test_a_clear_difference_is_wrong() -> None:
    verdict = judge(["a", "c"], [0, 1], VOCABULARY, lambda _: rows([1, 0, 0, 0], [0, 1, 0.9, 0]))
    assert verdict.wrong is not None
    assert "token 1 is 'c', but the reference prefers 'b' by 0.1" in verdict.wrong


def test_a_proven_tie_is_accepted_and_reported() -> None:
    gap = TIE / 2
    logits = rows([1, 0, 0, 0], [0, 1, 1 - gap, 0], [0, 1, 0, 0])
    verdict = judge(["a", "c", "b"], [0, 1, 2], VOCABULARY, lambda _: logits)
    assert verdict.wrong is None
    assert not verdict.equal
    (tie,) = verdict.ties
    assert tie.index == 1
    assert tie.gap == pytest.approx(gap, rel=0.01)


def test_an_exact_tie_is_still_a_tie() -> None:
    verdict = judge(["b"], [0], VOCABULARY, lambda _: rows([1, 1, 0, 0]))
    assert verdict.ties == (Tie(0, 0.0),)


def test_a_mistake_after_a_proven_tie_is_wrong() -> None:
    logits = rows([1, 1, 0, 0], [0, 1, 0, 0])
    verdict = judge(["b", "c"], [0, 1], VOCABULARY, lambda _: logits)
    assert verdict.wrong is not None
    assert "token 1" in verdict.wrong


def test_two_tokens_that_both_lose_are_no_tie() -> None:
    verdict = judge(["b"], [0], VOCABULARY, lambda _: rows([1, 1, 5, 0]))
    assert verdict.wrong is not None


def test_missing_and_unknown_tokens_are_wrong() -> None:
    assert judge(["a"], [0, 1], VOCABULARY, forbidden).wrong == "1 tokens instead of 2"
    assert judge(["?"], [0], VOCABULARY, forbidden).wrong == "'?' is no token of the model"


def test_decode_rate_counts_only_while_the_batch_is_whole() -> None:
    # Request two starts at 2 s; request one ends at 4 s. Between: 2 + 2 tokens in 2 s.
    timeline = Timeline(((1.0, 2.0, 3.0, 4.0), (2.0, 3.0, 4.0, 5.0, 6.0)))
    assert timeline.first_token == 2.0
    assert timeline.decode_rate() == pytest.approx(2.0)


def test_a_batch_that_never_was_whole_has_no_rate() -> None:
    with pytest.raises(ValueError, match="never whole"):
        Timeline(((1.0,), (2.0,))).decode_rate()


def test_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Timeline(((1.0,), ()))
