"""What requests ask: prompts, and how many tokens they want back. Pure, but for reading files.

Lengths come from one seed and contents from another, so that every run of a benchmark has the
same lengths and its own tokens: a prefix cache is not warmed by the run before.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Shape = Literal["fixed", "uniform", "lognormal"]

FIRST_TOKEN_ID = 1000
"""Random prompts use ids from here on: below are special tokens and single bytes."""


class WorkloadError(ValueError):
    """A file or setting that makes no workload; says which one and why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to send: either token ids or text, never both."""

    token_ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request: its prompt, how many tokens it wants, and when it is due.

    ``due`` is seconds from the start of an open-loop run; 0 in a closed loop, where the
    order alone counts.
    """

    prompt: Prompt
    max_tokens: int
    due: float = 0.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts with a given mean.

    fixed: always ``mean``. uniform: from ``mean * (1 - spread)`` to ``mean * (1 + spread)``.
    lognormal: mean ``mean``, standard deviation ``spread * mean``; a long tail, as real
    traffic has. Never below 1.
    """

    shape: Shape
    mean: int
    spread: float = 0.5

    def draw(self, count: int, rng: random.Random) -> list[int]:
        return [max(1, round(self._one(rng))) for _ in range(count)]

    def _one(self, rng: random.Random) -> float:
        if self.shape == "fixed":
            return float(self.mean)
        if self.shape == "uniform":
            return rng.uniform(self.mean * (1 - self.spread), self.mean * (1 + self.spread))
        variance = math.log1p(self.spread**2)
        return rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Random token ids in [FIRST_TOKEN_ID, vocab_size), fixed by seed and label."""

    seed: str
    vocab_size: int

    def __post_init__(self) -> None:
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise WorkloadError(f"vocabulary must be larger than {FIRST_TOKEN_ID} tokens")

    def draw(self, label: object, count: int) -> tuple[int, ...]:
        """The same label gives the same tokens; other labels give unrelated ones."""
        rng = random.Random(f"{self.seed} {label}")
        span = self.vocab_size - FIRST_TOKEN_ID
        return tuple(FIRST_TOKEN_ID + int(rng.random() * span) for _ in range(count))


def random_lengths(
    count: int, inputs: Lengths, outputs: Lengths, *, seed: int
) -> list[tuple[int, int]]:
    """Input and output tokens of each request."""
    rng = random.Random(f"lengths {seed}")
    input_lengths = inputs.draw(count, rng)
    return list(zip(input_lengths, outputs.draw(count, rng), strict=True))


def random_requests(
    count: int, inputs: Lengths, outputs: Lengths, *, seed: int, tokens: TokenSource
) -> list[RequestSpec]:
    """Unrelated prompts with exact token counts."""
    lengths = random_lengths(count, inputs, outputs, seed=seed)
    return [RequestSpec(Prompt(token_ids=tokens.draw(i, n)), m) for i, (n, m) in enumerate(lengths)]


@dataclass(frozen=True, slots=True)
class Question:
    """One row of a question file."""

    question: str
    answer: str


def read_questions(path: Path) -> list[Question]:
    """Rows of a JSON-lines file with ``question`` and ``answer`` (the form of GSM8K)."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            question, answer = row["question"], row["answer"]
        except (ValueError, KeyError, TypeError) as error:
            raise WorkloadError(
                f"{path}:{number}: expected a JSON object with question and answer ({error!r})"
            ) from None
        if not isinstance(question, str) or not isinstance(answer, str):
            raise WorkloadError(f"{path}:{number}: question and answer must be strings")
        rows.append(Question(question, answer))
    if not rows:
        raise WorkloadError(f"{path}: no questions in this file")
    return rows


def few_shot(examples: Sequence[Question], question: str) -> str:
    """Worked examples, then the question; prompts with the same examples share a prefix."""
    shown = [f"Question: {e.question}\nAnswer: {e.answer}\n\n" for e in examples]
    return "".join(shown) + f"Question: {question}\nAnswer:"


def question_requests(
    questions: Sequence[Question], count: int, max_tokens: int, shots: int = 0
) -> list[RequestSpec]:
    """``count`` questions, in order and over again if there are fewer; the first ``shots``
    rows are the worked examples of all of them and are not asked."""
    examples, asked = questions[:shots], questions[shots:]
    if not asked:
        raise WorkloadError(f"{shots} shots leave no question of {len(questions)} to ask")
    return [
        RequestSpec(Prompt(text=few_shot(examples, asked[i % len(asked)].question)), max_tokens)
        for i in range(count)
    ]
