"""`kvasir bench quality`: what fewer bits cost, on a text and on questions.

All forms of the model are in memory at once and see the same windows of text. The reference is
float32: the divergence from it tells more than perplexity does, which may even fall by chance.
"""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import torch
from torch import Tensor

from kvasir.bench.stats import Spread, spread
from kvasir.bench.trial import Progress, TrialError
from kvasir.bench.workload import Question, WorkloadError, few_shot
from kvasir.proto.sampling import SamplingParams
from kvasir.worker.contracts import Finish, KvEvent, Load, Output, Request
from kvasir.worker.engine import Engine
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.runner import TorchRunner
from kvasir.worker.scheduler import Scheduler

REFERENCE = "float32"
_TIMEOUT_S = 1800.0
_ROWS = 128
"""Rows whose distributions are compared at once: each takes memory for the whole vocabulary."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_ANSWER = re.compile(rf"####\s*\$?\s*({_NUMBER.pattern})")
_END = "\n\nQuestion:"
"""Where the next example would begin: the answer has ended."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to hold the model: settings of a worker."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantization: Literal["none", "int8", "int4"] = "none"
    activation_quantization: Literal["none", "int8"] = "none"


FORMS: Mapping[str, Form] = {
    REFERENCE: Form(dtype="float32"),
    "bfloat16": Form(dtype="bfloat16"),
    "int8": Form(quantization="int8"),
    "int8, int8 activations": Form(quantization="int8", activation_quantization="int8"),
    "int4": Form(quantization="int4"),
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A form in memory. ``seconds`` is how long it took to load."""

    runner: TorchRunner
    scheduler: SchedulerConfig
    seconds: float


@dataclass(frozen=True, slots=True)
class Questions:
    """What is asked, after ``shots`` worked examples, and how many tokens an answer may have."""

    rows: Sequence[Question]
    shots: int
    count: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One form. Spreads are over runs, each with windows of its own.

    ``divergence`` is the mean KL divergence from the reference, in nats; ``agreement`` the part
    of positions at which both think the same token the likeliest.
    """

    form: str
    weight_bytes: int
    load_s: float
    perplexity: Spread
    divergence: Spread
    agreement: Spread
    right: int
    asked: int
    failures: int


@dataclass(slots=True)
class _Sums:
    tokens: int = 0
    surprise: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0

    def add(self, logits: Tensor, reference: Tensor, following: Tensor) -> None:
        """Rows of both, and the token that really follows each."""
        for first in range(0, len(logits), _ROWS):
            rows = slice(first, first + _ROWS)
            found, exact = logits[rows].log_softmax(-1), reference[rows].log_softmax(-1)
            self.tokens += len(found)
            self.surprise -= found.gather(1, following[rows, None]).sum().item()
            self.divergence += (exact.exp() * (exact - found)).sum().item()
            self.agreeing += int((found.argmax(-1) == exact.argmax(-1)).sum())


def draw_windows(tokens: Sequence[int], count: int, size: int, random: Random) -> list[list[int]]:
    """Windows of ``size`` tokens that do not overlap; WorkloadError if there are too few."""
    if len(tokens) < count * size:
        raise WorkloadError(
            f"the text has {len(tokens)} tokens, fewer than {count} windows of {size}; "
            "give a longer one, or lower --windows or --window"
        )
    places = random.sample(range(len(tokens) // size), count)
    return [list(tokens[place * size : (place + 1) * size]) for place in places]


def final_number(answer: str) -> str | None:
    """What an answer in GSM8K's form comes to: after ``####``, or else its last number."""
    answer = answer.partition(_END)[0]
    marked = _ANSWER.search(answer)
    numbers = [marked[1]] if marked else _NUMBER.findall(answer)
    if not numbers:
        return None
    plain = numbers[-1].replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def measure(
    forms: Mapping[str, Loaded],
    runs: Sequence[Sequence[Sequence[int]]],
    questions: Questions | None,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    progress: Progress,
) -> list[Figure]:
    """Every form on all windows of each of ``runs``, and on the questions.

    Raises:
        TrialError: an engine failed.
    """
    sums = {name: [_Sums() for _ in runs] for name in forms}
    for run, windows in enumerate(runs):
        for place, window in enumerate(windows):
            progress(f"run {run + 1} of {len(runs)}, window {place + 1} of {len(windows)}")
            following = torch.tensor(window[1:])
            reference = forms[REFERENCE].runner.logits(window)[:-1]
            for name, form in forms.items():
                found = reference if name == REFERENCE else form.runner.logits(window)[:-1]
                sums[name][run].add(found, reference, following)
    figures = []
    for name, form in forms.items():
        progress(f"asking {name}")
        right, failures = (0, 0) if questions is None else _ask(form, questions, encode, decode)
        asked = 0 if questions is None else questions.count
        figures.append(_figure(name, form, sums[name], (right, asked, failures)))
    return figures


def _figure(name: str, form: Loaded, runs: Sequence[_Sums], asked: tuple[int, int, int]) -> Figure:
    return Figure(
        name,
        form.runner.weight_bytes,
        form.seconds,
        spread([float(torch.tensor(run.surprise / run.tokens).exp()) for run in runs]),
        spread([run.divergence / run.tokens for run in runs]),
        spread([run.agreeing / run.tokens for run in runs]),
        *asked,
    )


# --- questions -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Answers:
    """Collects tokens until every request has ended. Called on the engine's thread."""

    open: int
    tokens: dict[str, list[int]] = field(default_factory=dict)
    failures: int = 0
    fatal: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish is not None:
                self.failures += output.finish not in (Finish.STOP, Finish.LENGTH)
                self.open -= 1
        if self.open == 0:
            self.done.set()

    def on_kv_events(self, first_sequence: int, events: Sequence[KvEvent]) -> None:
        pass

    def on_load(self, load: Load) -> None:
        pass

    def on_fatal(self, error: BaseException) -> None:
        self.fatal = error
        self.done.set()


def _ask(
    form: Loaded,
    questions: Questions,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> tuple[int, int]:
    """How many greedy answers are right, and how many requests failed."""
    examples = questions.rows[: questions.shots]
    asked = questions.rows[questions.shots : questions.shots + questions.count]
    answers = _Answers(len(asked))
    engine = Engine(Scheduler(form.scheduler), form.runner, answers, on_fatal=answers.on_fatal)
    params = SamplingParams(temperature=0.0, max_tokens=questions.max_tokens)
    engine.start()
    try:
        for place, row in enumerate(asked):
            prompt = tuple(encode(few_shot(examples, row.question)))
            refusal = engine.submit(Request(str(place), prompt, params), answers)
            if refusal is not None:
                raise TrialError(refusal.message)
        if not answers.done.wait(_TIMEOUT_S):
            raise TrialError(f"waited {_TIMEOUT_S:g} s for the answers")
    finally:
        engine.stop()
    if answers.fatal is not None:
        raise TrialError(f"the engine failed: {answers.fatal!r}")
    right = sum(
        final_number(decode(answers.tokens[str(place)])) == final_number(row.answer)
        for place, row in enumerate(asked)
    )
    return right, answers.failures
