"""`kvasir bench engine`: the engine inside this process, without network, and beside a rival.

The same work goes to both engines, row by row in turn, so that both see the same weather on a
shared machine. Every prompt is new random tokens, so no prefix cache helps except in the row
that measures it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from kvasir.bench.machine import memory_bandwidth
from kvasir.bench.stats import Spread, spread
from kvasir.bench.timeline import Timeline
from kvasir.bench.trial import Trial, TrialError, trial
from kvasir.bench.workload import Prompt, RequestSpec, TokenSource
from kvasir.worker.config import WorkerConfig
from kvasir.worker.limits import scheduler_config
from kvasir.worker.loader import LoadedModel, load_model

_SETTLE_S = 0.3
"""Pause before a measurement: the other engine's threads stop spinning."""
CACHED_TOKENS = 1024
NEW_TOKENS = 16


class Generator(Protocol):
    """An engine under test."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        """Greedy output of exactly ``max_tokens`` tokens for each prompt, all at once."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``better`` says which way is better, so that a ratio above 1 is a win."""

    name: str
    unit: str
    better: Literal["higher", "lower"]
    measure: Callable[[Generator, TokenSource], float]


def _decode(batch: int, length: int, outputs: int) -> Callable[[Generator, TokenSource], float]:
    def measure(engine: Generator, tokens: TokenSource) -> float:
        prompts = [tokens.draw(f"decode {batch} {i}", length) for i in range(batch)]
        return engine.generate(prompts, outputs).decode_rate()

    return measure


def _prefill(engine: Generator, tokens: TokenSource) -> float:
    prompt = tokens.draw("prefill", CACHED_TOKENS)
    return CACHED_TOKENS / engine.generate([prompt], 1).first_token


def _cached_ttft(engine: Generator, tokens: TokenSource) -> float:
    prefix = tokens.draw("prefix", CACHED_TOKENS)
    engine.generate([prefix + tokens.draw("first tail", NEW_TOKENS)], 1)
    second = prefix + tokens.draw("second tail", NEW_TOKENS)
    return 1000 * engine.generate([second], 1).first_token


ROWS = (
    Row("decode, batch 1 (128 in, 128 out)", "tokens/s", "higher", _decode(1, 128, 128)),
    Row("decode, batch 16 (128 in, 128 out)", "tokens/s", "higher", _decode(16, 128, 128)),
    Row("prefill of 1,024 tokens", "tokens/s", "higher", _prefill),
    Row("TTFT, 1,024 cached + 16 new tokens", "ms", "lower", _cached_ttft),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One row's values over runs, by engine, with the memory bandwidth (GB/s) just before each."""

    row: str
    unit: str
    values: dict[str, list[float]]
    memory_gb_s: dict[str, list[float]]
    ratios: dict[str, Spread]
    """By rival: how many times better the first engine is; above 1 is a win."""


def measure_rows(
    engines: Mapping[str, Generator],
    runs: int,
    seed: int,
    vocab_size: int,
    progress: Callable[[str], None],
) -> list[Figure]:
    """All rows, ``runs`` times, the engines in turn; one unmeasured run before."""
    values: dict[tuple[str, str], list[float]] = {}
    bandwidth: dict[tuple[str, str], list[float]] = {}
    for run in range(-1, runs):
        progress("warming up" if run < 0 else f"run {run + 1} of {runs}")
        tokens = TokenSource(f"{seed}/{run}", vocab_size)
        # Who goes first changes from run to run.
        order = list(engines)[:: 1 if run % 2 == 0 else -1]
        for row in ROWS:
            for name in order:
                time.sleep(_SETTLE_S)
                speed = memory_bandwidth()
                value = row.measure(engines[name], tokens)
                if run >= 0:
                    values.setdefault((row.name, name), []).append(value)
                    bandwidth.setdefault((row.name, name), []).append(speed)
    return [_figure(row, list(engines), values, bandwidth) for row in ROWS]


def _figure(
    row: Row,
    engines: list[str],
    values: Mapping[tuple[str, str], list[float]],
    bandwidth: Mapping[tuple[str, str], list[float]],
) -> Figure:
    first, *others = engines
    ours = values[row.name, first]
    ratios = {}
    for other in others:
        pairs = zip(ours, values[row.name, other], strict=True)
        ratios[other] = spread([a / b if row.better == "higher" else b / a for a, b in pairs])
    return Figure(
        row=row.name,
        unit=row.unit,
        values={name: values[row.name, name] for name in engines},
        memory_gb_s={name: bandwidth[row.name, name] for name in engines},
        ratios=ratios,
    )


# --- our own engine --------------------------------------------------------------------------


class KvasirEngine:
    """Our engine as a Generator, on the scheduler and runner that a worker would use."""

    def __init__(self, running: Trial) -> None:
        self._running = running

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        specs = [RequestSpec(Prompt(tuple(prompt)), max_tokens) for prompt in prompts]
        records = self._running.run(specs)
        for record in records:
            if record.failure is not None:
                raise TrialError(f"a request ended as {record.failure}")
        start = records[0].sent
        return Timeline(tuple(tuple(at - start for at in each.token_times) for each in records))


@contextmanager
def kvasir_engine(
    config: WorkerConfig, progress: Callable[[str], None]
) -> Iterator[tuple[KvasirEngine, LoadedModel]]:
    """Our engine, running on the configured model."""
    loaded = load_model(config, progress)
    settings = scheduler_config(
        config,
        num_blocks=loaded.runner.num_blocks,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
    )
    with trial(loaded.runner, settings) as running:
        yield KvasirEngine(running), loaded
