"""Percentiles, spreads and what a set of request records adds up to. Pure.

Percentile p of n sorted values is linear interpolation between the two values around rank
``p / 100 * (n - 1)`` (definition 7 of Hyndman & Fan, 1996; numpy's default), so p50 is the
median and p100 the maximum. Times are seconds.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median


def percentile(values: Sequence[float], p: float) -> float:
    """Percentile ``p`` in [0, 100] of a non-empty sequence, in any order."""
    if not values:
        raise ValueError("no values to take a percentile of")
    if not 0 <= p <= 100:
        raise ValueError(f"percentile must be in [0, 100], not {p}")
    ordered = sorted(values)
    rank = p / 100 * (len(ordered) - 1)
    low = math.floor(rank)
    high = math.ceil(rank)
    below, above = ordered[low], ordered[high]
    return below if below == above else below + (above - below) * (rank - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """How a quantity is distributed over requests (or tokens)."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


def distribution(values: Sequence[float]) -> Distribution | None:
    """None for no values: a percentile of nothing is not 0."""
    if not values:
        return None
    return Distribution(
        count=len(values),
        mean=math.fsum(values) / len(values),
        p50=percentile(values, 50),
        p95=percentile(values, 95),
        p99=percentile(values, 99),
        max=max(values),
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over several runs: the median is the figure, the rest says how far to trust it."""

    median: float
    low: float
    high: float

    @property
    def relative(self) -> float:
        """(high - low) / median; 0 for a median of 0."""
        return (self.high - self.low) / self.median if self.median else 0.0


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def spread_of_known(values: Iterable[float | None]) -> Spread | None:
    """Over the runs that have a value; None if no run has one."""
    known = _present(values)
    return spread(known) if known else None


@dataclass(frozen=True, slots=True)
class Record:
    """What became of one request. Instants are seconds on one clock.

    ``due`` is when it should have been sent, ``sent`` when it was. In an open loop latencies
    count from ``due``, so that a late generator makes them longer and never hides a wait.
    ``token_times`` are the instants of the stream's chunks that carried text. ``failure`` is
    None for a complete answer, else its kind: ``timeout``, ``connect``, ``http 503``, ….
    """

    due: float
    sent: float
    end: float
    token_times: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    worker: str = ""
    failure: str | None = None
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.due if self.token_times else None

    @property
    def e2e(self) -> float:
        return self.end - self.due

    @property
    def itls(self) -> list[float]:
        """Gaps between the stream's chunks. A chunk can hold several tokens; see ``tpot``."""
        return [b - a for a, b in pairwise(self.token_times)]

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None for fewer than two tokens."""
        if len(self.token_times) < 2 or self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Objectives:
    """Bounds in seconds; None for no bound."""

    ttft: float | None = None
    itl: float | None = None

    def met_by(self, record: Record) -> bool:
        """Complete, first token in time, and mean inter-token latency (TPOT) within bounds."""
        if not record.ok or record.ttft is None:
            return False
        in_time = self.ttft is None or record.ttft <= self.ttft
        tpot = record.tpot
        fluent = self.itl is None or tpot is None or tpot <= self.itl
        return in_time and fluent


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run. Latencies are over complete answers only; failures are counted beside them."""

    requests: int
    succeeded: int
    failures: dict[str, int]
    failure_examples: dict[str, str]
    duration: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float | None
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    input_length: Distribution | None
    output_length: Distribution | None
    lateness: Distribution | None
    worker_share: dict[str, float] = field(default_factory=dict)

    @property
    def cached_ratio(self) -> float:
        """Share of input tokens that a prefix cache saved."""
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0


def summarize(records: Sequence[Record], objectives: Objectives | None = None) -> RunSummary:
    """Add up one run; its duration runs from the first due request to the last end."""
    if not records:
        raise ValueError("a run without requests has no summary")
    good = [record for record in records if record.ok]
    failed = [record for record in records if not record.ok]
    duration = max(r.end for r in records) - min(r.due for r in records)
    per_s = 1 / duration if duration > 0 else 0.0
    input_tokens = sum(r.input_tokens for r in good)
    output_tokens = sum(r.output_tokens for r in good)
    examples: dict[str, str] = {}
    for record in failed:
        examples.setdefault(record.failure or "", record.message)
    met = None if objectives is None else sum(map(objectives.met_by, records)) * per_s
    return RunSummary(
        requests=len(records),
        succeeded=len(good),
        failures=dict(Counter(record.failure or "" for record in failed).most_common()),
        failure_examples=examples,
        duration=duration,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(r.cached_tokens for r in good),
        input_tokens_per_s=input_tokens * per_s,
        output_tokens_per_s=output_tokens * per_s,
        requests_per_s=len(good) * per_s,
        goodput_per_s=met,
        ttft=distribution(_present(r.ttft for r in good)),
        itl=distribution([gap for r in good for gap in r.itls]),
        tpot=distribution(_present(r.tpot for r in good)),
        e2e=distribution([r.e2e for r in good]),
        input_length=distribution([float(r.input_tokens) for r in good]),
        output_length=distribution([float(r.output_tokens) for r in good]),
        lateness=distribution([r.sent - r.due for r in records]),
        worker_share=_shares(r.worker for r in good),
    )


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _shares(workers: Iterable[str]) -> dict[str, float]:
    counts = Counter(worker for worker in workers if worker)
    total = counts.total()
    return {worker: count / total for worker, count in sorted(counts.items())}
