"""`kvasir bench prefix`: what the prefix cache costs where nothing hits, and brings where it does.

Cost, two ways. *Whole*: unrelated prompts through the engine, caching on and off in turn; noise
of the machine is in it. *Bookkeeping*: the same prompts through the scheduler alone, on a runner
that computes nothing, so that only hashing and looking up remain; its extra microseconds for a
token are set against the engine's time for a token.

Gain: prompts of one length that share a growing part, one at a time, caching on and off.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from kvasir.bench.instant import InstantRunner
from kvasir.bench.machine import memory_bandwidth
from kvasir.bench.stats import Spread, spread, summarize
from kvasir.bench.trial import Progress, in_turns, run_name, trial
from kvasir.bench.workload import Prompt, RequestSpec, TokenSource
from kvasir.proto.sampling import SamplingParams
from kvasir.worker.contracts import Request, Runner
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.scheduler import Scheduler

_MODES = ("on", "off")


@dataclass(frozen=True, slots=True)
class Workload:
    requests: int
    """Of one run, for the cost; each a prompt of its own."""
    input_len: int
    output_len: int
    shares: tuple[float, ...]
    """Of the prompt that all requests have in common, for the gain."""
    shared_requests: int
    """Of one run and share, after the one that fills the cache."""
    seed: int


@dataclass(frozen=True, slots=True)
class Cost:
    """At zero hits. Ratios are caching on to off: tokens (in and out) per second of a run."""

    whole: Spread
    tokens_per_s: dict[str, Spread]
    bookkeeping_us: Spread
    """Extra scheduler time for one token, in microseconds."""
    bookkeeping_share: Spread
    """The same, of the engine's time for one token with caching off."""
    memory_gb_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Gain:
    """For one share: TTFT in seconds, and how many times sooner it comes with caching."""

    share: float
    blocks: int
    """Whole blocks in the shared part: all that can be found."""
    hit_rate: Spread
    """Input tokens found in the cache, as the engine counts them."""
    ttft: dict[str, Spread]
    ratio: Spread
    memory_gb_s: tuple[float, ...]


def measure_cost(
    runner: Runner,
    config: SchedulerConfig,
    work: Workload,
    runs: int,
    vocab_size: int,
    say: Progress,
) -> Cost:
    """Caching on and off in turn, ``runs`` times after one unmeasured run.

    Raises:
        TrialError: the engine failed.
    """
    rates: dict[str, list[float]] = {mode: [] for mode in _MODES}
    extra, shares, bandwidth = [], [], []
    for run in range(-1, runs):
        tokens = TokenSource(f"{work.seed}/{run}", vocab_size)
        specs = [
            RequestSpec(Prompt(tokens.draw(i, work.input_len)), work.output_len)
            for i in range(work.requests)
        ]
        rate, alone = {}, {}
        speed = memory_bandwidth()
        for mode in in_turns(_MODES, run):
            say(f"no hits, caching {mode}, {run_name(run, runs)}")
            limits = replace(config, prefix_caching=mode == "on")
            alone[mode] = scheduler_seconds_per_token(limits, specs)
            with trial(runner, limits) as running:
                found = summarize(running.run(specs))
            rate[mode] = found.input_tokens_per_s + found.output_tokens_per_s
        if run < 0:
            continue
        for mode in _MODES:
            rates[mode].append(rate[mode])
        extra.append(alone["on"] - alone["off"])
        shares.append(extra[-1] * rate["off"])
        bandwidth.append(speed)
    return Cost(
        whole=spread([a / b for a, b in zip(rates["on"], rates["off"], strict=True)]),
        tokens_per_s={mode: spread(rates[mode]) for mode in _MODES},
        bookkeeping_us=spread([1e6 * seconds for seconds in extra]),
        bookkeeping_share=spread(shares),
        memory_gb_s=tuple(bandwidth),
    )


def scheduler_seconds_per_token(config: SchedulerConfig, specs: Sequence[RequestSpec]) -> float:
    """CPU time of this thread in the scheduler, for each token in and out."""
    scheduler, runner = Scheduler(config), InstantRunner()
    tokens = 0
    start = time.thread_time()
    for index, spec in enumerate(specs):
        params = SamplingParams(temperature=0.0, max_tokens=spec.max_tokens, ignore_eos=True)
        scheduler.add(Request(str(index), spec.prompt.token_ids, params))
        tokens += len(spec.prompt.token_ids) + spec.max_tokens
    while scheduler.request_ids():
        plan = scheduler.plan(now=0.0)
        scheduler.update(plan, runner.execute(plan))
        for _ in (scheduler.take_outputs(), scheduler.take_signals(), scheduler.take_events()):
            pass
    return (time.thread_time() - start) / tokens


def measure_gain(
    runner: Runner,
    config: SchedulerConfig,
    work: Workload,
    runs: int,
    vocab_size: int,
    say: Progress,
) -> list[Gain]:
    """Every share with caching on and off in turn.

    Raises:
        TrialError: the engine failed.
    """
    gains = []
    for share in work.shares:
        ttft: dict[str, list[float]] = {mode: [] for mode in _MODES}
        rates, bandwidth = [], []
        for run in range(runs):
            tokens = TokenSource(f"{work.seed}/{run}/{share}", vocab_size)
            first, *specs = _sharing(work, share, tokens)
            bandwidth.append(memory_bandwidth())
            for mode in in_turns(_MODES, run):
                say(f"{100 * share:.0f} % shared, caching {mode}, {run_name(run, runs)}")
                with trial(runner, replace(config, prefix_caching=mode == "on")) as running:
                    running.run([first])
                    records = running.run(specs, batch=1)
                ttft[mode].append(median(record.token_times[0] - record.sent for record in records))
                if mode == "on":
                    rates.append(summarize(records).cached_ratio)
        gains.append(
            Gain(
                share=share,
                blocks=common_tokens(work.input_len, share) // config.block_size,
                hit_rate=spread(rates),
                ttft={mode: spread(ttft[mode]) for mode in _MODES},
                ratio=spread([a / b for a, b in zip(ttft["off"], ttft["on"], strict=True)]),
                memory_gb_s=tuple(bandwidth),
            )
        )
    return gains


def common_tokens(input_len: int, share: float) -> int:
    """Tokens of the part that prompts share."""
    return round(share * input_len)


def _sharing(work: Workload, share: float, tokens: TokenSource) -> list[RequestSpec]:
    """One prompt to fill the cache, and others that begin as it does."""
    common = common_tokens(work.input_len, share)
    prefix = tokens.draw("common", common)
    return [
        RequestSpec(Prompt(prefix + tokens.draw(f"own {i}", work.input_len - common)), 1)
        for i in range(work.shared_requests + 1)
    ]
