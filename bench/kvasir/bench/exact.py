"""`kvasir bench exact`: are greedy float32 tokens those of `transformers`, however served?"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from kvasir.bench.ask import Answer
from kvasir.bench.judge import Verdict, Vocabulary, judge
from kvasir.bench.reference import Reference
from kvasir.bench.scenarios import Outcome, Scenario, Setup
from kvasir.bench.stack import StackError
from kvasir.bench.workload import Question, WorkloadError, few_shot
from kvasir.router.text.tokenizer import ModelTokenizer

SHORTEST, LONGEST = 32, 1200
"""Range over which prompt lengths are spread, in tokens."""


class Encoder(Protocol):
    """Text to token ids; a Reference is one."""

    def encode(self, text: str) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Case:
    prompt_ids: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One scenario's verdicts. ``faults`` were injected; ``evidence`` is what they led to."""

    scenario: str
    prompts: int
    equal: int
    ties: int
    wrong: int
    faults: int
    evidence: dict[str, int]
    largest_tie: float
    mistakes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.wrong == 0 and all(self.evidence.values())


def build_prompts(
    questions: Sequence[Question], count: int, shots: int | None, seed: int, encoder: Encoder
) -> list[tuple[int, ...]]:
    """Token ids of ``count`` few-shot prompts on questions drawn by ``seed``.

    With ``shots`` None, prompt i gets as many worked examples as fit into a length that grows
    evenly from SHORTEST to LONGEST tokens. The examples are the questions not drawn, and there
    are at least as many of them as prompts.
    """
    check_enough(len(questions), count, shots)
    shuffled = random.Random(seed).sample(questions, len(questions))
    asked = sorted(shuffled[:count], key=lambda q: len(q.question))
    examples = shuffled[count:]
    prompts = []
    for index, row in enumerate(asked):
        if shots is not None:
            prompts.append(encoder.encode(few_shot(examples[:shots], row.question)))
            continue
        target = SHORTEST + (LONGEST - SHORTEST) * index // max(count - 1, 1)
        prompts.append(_longest_within(target, examples, row.question, encoder))
    return prompts


def check_enough(questions: int, count: int, shots: int | None) -> None:
    """No question may be asked and be a worked example as well; WorkloadError if too few."""
    examples = count if shots is None else shots
    if count + examples <= questions:
        return
    most = questions // 2 if shots is None else questions - shots
    if most > 0:
        fix = f"lower --count to {most}, or add questions"
    else:
        fix = "add questions, or ask without examples (--shots 0)"
    raise WorkloadError(
        f"{count} prompts and {examples} worked examples need {count + examples} questions, "
        f"there are {questions}: {fix}"
    )


def _longest_within(
    target: int, examples: Sequence[Question], question: str, encoder: Encoder
) -> tuple[int, ...]:
    """The prompt with the most examples that is at most ``target`` tokens; else with none."""
    best = encoder.encode(few_shot((), question))
    for shots in range(1, len(examples) + 1):
        longer = encoder.encode(few_shot(examples[:shots], question))
        if len(longer) > target:
            break
        best = longer
    return best


def build_cases(
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    reference: Reference,
    progress: Callable[[str], None],
) -> list[Case]:
    """What the reference answers to each prompt."""
    cases = []
    for number, prompt in enumerate(prompts, start=1):
        progress(f"reference {number} of {len(prompts)} ({len(prompt)} tokens)")
        cases.append(Case(prompt, tuple(reference.greedy(prompt, max_tokens))))
    return cases


class Judge(Protocol):
    """Says whether an answer is right."""

    def verdict(self, answer: Answer, case: Case) -> Verdict: ...


class Oracle:
    """Judges answers by the reference."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        # Token texts as the completions API shows them in logprobs.tokens.
        tokenizer = ModelTokenizer.from_files({"tokenizer.json": reference.tokenizer_json()})
        self._vocabulary = Vocabulary([_shown(raw) for raw in tokenizer.token_bytes])

    def verdict(self, answer: Answer, case: Case) -> Verdict:
        if answer.error is not None:
            return Verdict(answer.error)
        return judge(
            answer.tokens,
            case.expected,
            self._vocabulary,
            lambda ids: self._reference.next_logits(case.prompt_ids, ids),
        )


def _shown(raw: bytes) -> str:
    """A piece of a character is written as OpenAI writes it: ``bytes:\\xe2\\x98``."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


async def run_scenario(
    name: str,
    scenario: Scenario,
    setup: Setup,
    cases: Sequence[Case],
    oracle: Judge,
) -> Result:
    """Serve every case in this way and compare every token.

    A stack that breaks down, or leaks, fails this scenario and leaves the others their results.
    """
    try:
        outcome = await scenario(setup, [case.prompt_ids for case in cases])
    except (StackError, aiohttp.ClientError, ExceptionGroup) as error:
        mistake = f"{type(error).__name__}: {error}"
        return Result(name, len(cases), 0, 0, len(cases), 0, {}, 0.0, [mistake])
    verdicts = [
        oracle.verdict(answer, case) for answer, case in zip(outcome.answers, cases, strict=True)
    ]
    return _result(name, outcome, verdicts)


def _result(name: str, outcome: Outcome, verdicts: Sequence[Verdict]) -> Result:
    mistakes = [f"prompt {i}: {v.wrong}" for i, v in enumerate(verdicts) if v.wrong is not None]
    mistakes += [f"no {what}: nothing was tested" for what, n in outcome.evidence.items() if not n]
    return Result(
        scenario=name,
        prompts=len(verdicts),
        equal=sum(v.equal for v in verdicts),
        ties=sum(v.wrong is None and bool(v.ties) for v in verdicts),
        wrong=sum(v.wrong is not None for v in verdicts),
        faults=outcome.faults,
        evidence=dict(outcome.evidence),
        largest_tie=max((tie.gap for v in verdicts for tie in v.ties), default=0.0),
        mistakes=mistakes,
    )
