"""`kvasir bench engine`: the engine inside this process, without network, and beside a rival.

The same work goes to both engines, row by row in turn, so that both see the same weather on a
shared machine. Every prompt is new random tokens, so no prefix cache helps except in the row
that measures it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from kvasir.bench.machine import memory_bandwidth
from kvasir.bench.stats import Spread, spread
from kvasir.bench.timeline import Timeline
from kvasir.bench.workload import TokenSource
from kvasir.proto.sampling import SamplingParams
from kvasir.worker.config import WorkerConfig
from kvasir.worker.contracts import KvEvent, Load, Output, Request, Runner
from kvasir.worker.engine import Engine
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.loader import LoadedModel, load_model
from kvasir.worker.scheduler import Scheduler

_SETTLE_S = 0.3
"""Pause before a measurement: the other engine's threads stop spinning."""
_TIMEOUT_S = 600.0
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


class _Silent:
    """Nobody listens to this engine's events."""

    def on_kv_events(self, first_sequence: int, events: Sequence[KvEvent]) -> None:
        pass

    def on_load(self, load: Load) -> None:
        pass


class _Stopwatch:
    """An OutputSink that notes when each token came. Read it after ``done``."""

    def __init__(self, request_ids: Sequence[str], clock: Callable[[], float]) -> None:
        self.times: dict[str, list[float]] = {request_id: [] for request_id in request_ids}
        self.done = threading.Event()
        self.failure: str | None = None
        self._open = len(request_ids)
        self._clock = clock

    def deliver(self, outputs: Sequence[Output]) -> None:
        now = self._clock()
        for output in outputs:
            self.times[output.request_id].extend([now] * len(output.token_ids))
            if output.refusal is not None:
                self.failure = output.refusal.message
            self._open -= output.finish is not None
        if self._open == 0:
            self.done.set()

    def fail(self, reason: str) -> None:
        self.failure = reason
        self.done.set()


class KvasirEngine:
    """Our engine as a Generator, on the scheduler and runner that a worker would use."""

    def __init__(self, runner: Runner, config: SchedulerConfig) -> None:
        self._engine = Engine(Scheduler(config), runner, _Silent(), on_fatal=self._on_fatal)
        self._watch: _Stopwatch | None = None
        self._calls = 0

    def start(self) -> None:
        self._engine.start()

    def stop(self) -> None:
        self._engine.stop()

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        self._calls += 1
        ids = [f"{self._calls}-{i}" for i in range(len(prompts))]
        watch = self._watch = _Stopwatch(ids, time.perf_counter)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        for request_id, prompt in zip(ids, prompts, strict=True):
            refusal = self._engine.submit(Request(request_id, tuple(prompt), params), watch)
            if refusal is not None:
                raise RuntimeError(refusal.message)
        if not watch.done.wait(_TIMEOUT_S):
            raise RuntimeError(f"the engine did not finish within {_TIMEOUT_S:g} s")
        if watch.failure is not None:
            raise RuntimeError(watch.failure)
        return Timeline(tuple(tuple(at - start for at in times) for times in watch.times.values()))

    def _on_fatal(self, error: BaseException) -> None:
        if self._watch is not None:
            self._watch.fail(f"the engine failed: {error!r}")


@contextmanager
def kvasir_engine(
    config: WorkerConfig, progress: Callable[[str], None]
) -> Iterator[tuple[KvasirEngine, LoadedModel]]:
    """Our engine, running on the configured model."""
    loaded = load_model(config, progress)
    scheduler = SchedulerConfig(
        num_blocks=loaded.runner.num_blocks,
        block_size=config.block_size,
        max_model_len=loaded.max_model_len,
        max_batched_tokens=config.max_batched_tokens,
        max_running_requests=config.max_running_requests,
        eos_token_ids=loaded.eos_token_ids,
    )
    engine = KvasirEngine(loaded.runner, scheduler)
    engine.start()
    try:
        yield engine, loaded
    finally:
        engine.stop()
