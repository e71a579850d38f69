"""Who is right about a token, and what the engine bench makes of token times."""

import re
from itertools import pairwise

import pytest
import torch

from kvasir.bench.ask import Answer
from kvasir.bench.exact import LONGEST, Case, Result, build_prompts, run_scenario
from kvasir.bench.judge import TIE, Tie, Verdict, Vocabulary, judge
from kvasir.bench.metrics import parse_metrics
from kvasir.bench.scenarios import Outcome, Prompts, Setup
from kvasir.bench.stack import StackError
from kvasir.bench.timeline import Timeline
from kvasir.bench.workload import Question, WorkloadError

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


# --- scenarios -------------------------------------------------------------------------------

SETUP = Setup("model", max_tokens=2, longest_prompt=40, kv_bytes_per_token=100)
CASES = [Case((1, 2), (0, 1)), Case((3, 4), (0, 1))]


class ByText:
    """An oracle that knows the only right tokens."""

    def verdict(self, answer: Answer, case: Case) -> Verdict:
        assert case in CASES
        return Verdict(answer.error or (None if answer.tokens == ["a", "b"] else "other tokens"))


async def run(outcome: Outcome | Exception) -> Result:
    async def scenario(_setup: Setup, prompts: Prompts) -> Outcome:
        assert prompts == [(1, 2), (3, 4)]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return await run_scenario("some", scenario, SETUP, CASES, ByText())


def answers(*tokens: list[str]) -> list[Answer]:
    return [Answer(tokens=each, finished=True) for each in tokens]


async def test_a_scenario_with_equal_answers_and_evidence_is_ok() -> None:
    result = await run(Outcome(answers(["a", "b"], ["a", "b"]), {"replays": 1}, faults=1))
    assert result.ok
    assert (result.equal, result.wrong, result.faults) == (2, 0, 1)


async def test_a_fault_without_effect_fails_its_scenario() -> None:
    result = await run(Outcome(answers(["a", "b"], ["a", "b"]), {"faults": 1, "replays": 0}))
    assert not result.ok
    assert result.mistakes == ["no replays: nothing was tested"]


async def test_a_wrong_or_failed_answer_fails_its_scenario() -> None:
    broken = Answer(error="http 503")
    result = await run(Outcome([*answers(["a", "c"]), broken], {"answers": 2}))
    assert not result.ok
    assert result.mistakes == ["prompt 0: other tokens", "prompt 1: http 503"]


@pytest.mark.parametrize(
    "error", [StackError("decode-0 ended with exit code 2"), ExceptionGroup("wave", [OSError()])]
)
async def test_a_stack_that_breaks_down_fails_its_scenario_alone(error: Exception) -> None:
    result = await run(error)
    assert not result.ok
    assert result.wrong == 2
    assert str(error) in result.mistakes[0]


# --- prompts ---------------------------------------------------------------------------------


class Words:
    """A tokenizer in place of the reference: one token per word."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(len(word) for word in text.split())


QUESTIONS = [Question(" ".join(["word"] * (5 + i % 20)), " ".join(["so"] * 30)) for i in range(200)]


def test_prompt_lengths_spread_over_the_range() -> None:
    prompts = build_prompts(QUESTIONS, 50, None, 0, Words())
    lengths = [len(prompt) for prompt in prompts]
    assert lengths == sorted(lengths)
    assert max(lengths[:5]) < 150
    assert LONGEST - 60 < lengths[-1] <= LONGEST
    assert all(b - a < 120 for a, b in pairwise(lengths)), "no gap in between"


def test_prompts_are_fixed_by_the_seed() -> None:
    first = build_prompts(QUESTIONS, 10, None, 0, Words())
    assert first == build_prompts(QUESTIONS, 10, None, 0, Words())
    assert first != build_prompts(QUESTIONS, 10, None, 1, Words())


def test_a_fixed_number_of_shots() -> None:
    for prompt in build_prompts(QUESTIONS, 10, 2, 0, Words()):
        assert prompt.count(len("Question:")) == 3


@pytest.mark.parametrize(
    ("questions", "count", "shots", "needed", "fix"),
    [
        (200, 101, None, 202, "lower --count to 100, or add questions"),
        (200, 199, 2, 201, "lower --count to 198, or add questions"),
        (200, 201, 0, 201, "lower --count to 200, or add questions"),
        (1, 1, None, 2, "add questions, or ask without examples (--shots 0)"),
        (1, 1, 1, 2, "add questions, or ask without examples (--shots 0)"),
    ],
)
def test_too_few_questions_are_refused(
    questions: int, count: int, shots: int | None, needed: int, fix: str
) -> None:
    why = f"need {needed} questions, there are {questions}: {fix}"
    with pytest.raises(WorkloadError, match=re.escape(why)):
        build_prompts(QUESTIONS[:questions], count, shots, 0, Words())


def test_without_examples_every_question_can_be_asked() -> None:
    (prompt,) = build_prompts(QUESTIONS[:1], 1, 0, 0, Words())
    assert prompt.count(len("Question:")) == 1
    assert len(build_prompts(QUESTIONS, 198, 2, 0, Words())) == 198


def test_metrics_are_summed_over_matching_labels() -> None:
    text = (
        "# TYPE moved counter\n"
        'moved_total{outcome="ok",worker="a"} 2\n'
        'moved_total{outcome="ok",worker="b"} 3\n'
        'moved_total{outcome="broken",worker="b"} 4\n'
    )
    samples = parse_metrics(text)
    assert samples.total("moved_total") == 9
    assert samples.total("moved_total", outcome="ok") == 5
    assert samples.total("moved_total", outcome="ok", worker="c") == 0
    assert samples.total("absent") == 0
