"""What requests ask: prompts, and how many tokens they want back. Pure, but for reading files.

Lengths come from one seed and contents from another, so that every run of a benchmark has the
same lengths and its own tokens: a prefix cache is not warmed by the run before.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Shape = Literal["fixed", "uniform", "lognormal"]

FIRST_TOKEN_ID = 1000
"""Random prompts use ids from here on: below are special tokens and single bytes."""


class WorkloadError(ValueError):
    """A file or setting that makes no workload; says which one and why.

    ``option`` is the one at fault, where it is another one than the file's.
    """

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message)
        self.option = option


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
            raise WorkloadError(
                f"a vocabulary of {self.vocab_size} tokens is too small: random prompts use ids"
                f" from {FIRST_TOKEN_ID} on"
            )

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


def read_text(path: Path) -> str:
    """All of a text file; WorkloadError if it is none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not UTF-8 text ({error}); convert it") from None


def json_rows(path: Path, *fields: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a JSON-lines file; WorkloadError at the first without all of
    ``fields``. Empty lines are passed over."""
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield number, json_row(f"{path}:{number}", line, *fields)


def json_row(place: str, line: str, *fields: str) -> dict[str, Any]:
    """The object on one line; WorkloadError, naming ``place``, if it lacks one of ``fields``."""
    wanted = f"each line is a JSON object with {', '.join(fields)}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{place}: not JSON ({error}); {wanted}") from None
    if not isinstance(row, dict):
        raise WorkloadError(f"{place}: not a JSON object; {wanted}")
    if missing := [field for field in fields if field not in row]:
        raise WorkloadError(f"{place}: {', '.join(missing)} is missing; {wanted}")
    return row


def text_field(place: str, row: Mapping[str, Any], field: str) -> str:
    """A field that must be text with something in it."""
    value = row[field]
    if not isinstance(value, str) or not value:
        raise WorkloadError(f"{place}: {field} must be text, not {json.dumps(value)}")
    return value


def read_questions(path: Path) -> list[Question]:
    """Rows of a JSON-lines file with ``question`` and ``answer`` (the form of GSM8K)."""
    rows = []
    for number, row in json_rows(path, "question", "answer"):
        place = f"{path}:{number}"
        rows.append(Question(text_field(place, row, "question"), text_field(place, row, "answer")))
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
        raise WorkloadError(
            f"{shots} worked examples leave no question of {len(questions)} to ask; lower it, or"
            " add questions",
            "--shots",
        )
    return [
        RequestSpec(Prompt(text=few_shot(examples, asked[i % len(asked)].question)), max_tokens)
        for i in range(count)
    ]
