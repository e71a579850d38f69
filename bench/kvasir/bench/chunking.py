"""`kvasir bench chunking`: what the token budget of a step trades: TTFT one way, ITL the other.

Some sequences decode all the time. Prompts come one after another, each when the one before has
its first token, so that at any moment exactly one is being computed. A large budget computes a
prompt in few, long steps: its first token comes soon, and every decoding sequence waits for
each of those steps. A small budget is the other way round.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvasir.bench.machine import memory_bandwidth
from kvasir.bench.stats import Spread, percentile, spread
from kvasir.bench.trial import Progress, Trial, TrialError, in_turns, run_name, trial
from kvasir.bench.workload import Prompt, RequestSpec, TokenSource
from kvasir.worker.contracts import Runner
from kvasir.worker.limits import SchedulerConfig

_SHORT_PROMPT = 16
"""Tokens of the prompts of the sequences that decode."""


@dataclass(frozen=True, slots=True)
class Workload:
    budgets: tuple[int, ...]
    """Values of maxBatchedTokens."""
    decoding: int
    """Sequences that decode while prompts come."""
    prompts: int
    input_len: int
    seed: int


@dataclass(frozen=True, slots=True)
class Observed:
    """One run: seconds. ``itls`` are the gaps of all decoding sequences while prompts came."""

    ttfts: tuple[float, ...]
    itls: tuple[float, ...]
    output_tokens_per_s: float
    input_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One budget; times in seconds, over the runs."""

    budget: int
    ttft_p50: Spread
    ttft_p95: Spread
    itl_p50: Spread
    itl_p99: Spread
    itl_max: Spread
    output_tokens_per_s: Spread
    input_tokens_per_s: Spread
    runs: tuple[Observed, ...]
    memory_gb_s: tuple[float, ...]


def decoding_room(max_model_len: int) -> int:
    """Tokens that a sequence can decode while prompts come."""
    return max_model_len - _SHORT_PROMPT


def steps(work: Workload, budget: int) -> int:
    """In which the prompts are computed, beside sequences that take a token of each step."""
    return work.prompts * math.ceil(work.input_len / (budget - work.decoding))


def measure(
    runner: Runner,
    config: SchedulerConfig,
    work: Workload,
    runs: int,
    vocab_size: int,
    say: Progress,
) -> list[Figure]:
    """All budgets, ``runs`` times in turn, after one unmeasured run.

    Raises:
        TrialError: the engine failed, refused a request as too long, or was done with a decoding
            sequence before the last prompt.
    """
    seen: dict[int, list[Observed]] = {budget: [] for budget in work.budgets}
    bandwidth: dict[int, list[float]] = {budget: [] for budget in work.budgets}
    for run in range(-1, runs):
        tokens = TokenSource(f"{work.seed}/{run}", vocab_size)
        for label in in_turns([str(budget) for budget in work.budgets], run):
            budget = int(label)
            say(f"budget {budget}, {run_name(run, runs)}")
            speed = memory_bandwidth()
            limits = replace(
                config, max_batched_tokens=budget, max_running_requests=work.decoding + 1
            )
            with trial(runner, limits) as running:
                observed = _observe(running, work, limits.max_model_len, tokens)
            if run >= 0:
                seen[budget].append(observed)
                bandwidth[budget].append(speed)
    return [_figure(budget, seen[budget], bandwidth[budget]) for budget in work.budgets]


def _observe(running: Trial, work: Workload, max_model_len: int, tokens: TokenSource) -> Observed:
    decoding = [
        running.submit(
            RequestSpec(
                Prompt(tokens.draw(f"decoding {i}", _SHORT_PROMPT)), decoding_room(max_model_len)
            )
        )
        for i in range(work.decoding)
    ]
    running.wait_first_token(decoding)
    records = []
    for i in range(work.prompts):
        prompt = RequestSpec(Prompt(tokens.draw(f"prompt {i}", work.input_len)), 1)
        records += running.wait([running.submit(prompt)])
    start, end = records[0].sent, records[-1].end
    times = [[at for at in running.token_times(i) if start <= at <= end] for i in decoding]
    if any(running.has_ended(request_id) for request_id in decoding):
        raise TrialError("a decoding sequence ended before the prompts; ask for fewer prompts")
    for request_id in decoding:
        running.abort(request_id)
    running.wait(decoding)
    return Observed(
        ttfts=tuple(record.token_times[0] - record.sent for record in records),
        itls=tuple(b - a for row in times for a, b in pairwise(row)),
        output_tokens_per_s=sum(map(len, times)) / (end - start),
        input_tokens_per_s=work.prompts * work.input_len / (end - start),
    )


def _figure(budget: int, runs: Sequence[Observed], bandwidth: Sequence[float]) -> Figure:
    return Figure(
        budget=budget,
        ttft_p50=spread([percentile(run.ttfts, 50) for run in runs]),
        ttft_p95=spread([percentile(run.ttfts, 95) for run in runs]),
        itl_p50=spread([percentile(run.itls, 50) for run in runs]),
        itl_p99=spread([percentile(run.itls, 99) for run in runs]),
        itl_max=spread([max(run.itls) for run in runs]),
        output_tokens_per_s=spread([run.output_tokens_per_s for run in runs]),
        input_tokens_per_s=spread([run.input_tokens_per_s for run in runs]),
        runs=tuple(runs),
        memory_gb_s=tuple(bandwidth),
    )
