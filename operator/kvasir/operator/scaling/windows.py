"""What a history of samples says about the last seconds: means, increases, quantiles. Pure.

Every question is answered for one worker by a value or by a Problem that says in words why
there is none, never by a stand-in number. A counter that goes down has begun anew.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from kvasir.operator.scaling.contracts import Settings
from kvasir.operator.signals import Histogram, Missing, RouterSample, Value, WorkerSample

S = TypeVar("S", WorkerSample, RouterSample)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why something is not known of a pod, in words.

    ``new``: only because it has not been watched for long enough, so that nothing is wrong.
    """

    text: str
    new: bool = False


_NEW = Problem("too few samples yet", new=True)


@dataclass(frozen=True, slots=True)
class Increase:
    """By how much a counter rose in how many seconds."""

    amount: float
    seconds: float


def fresh(samples: tuple[S, ...], now: float, settings: Settings) -> tuple[S, ...] | Problem:
    """``samples``, unless there are none or the latest is stale."""
    if not samples:
        return Problem("no data")
    age = now - samples[-1].time
    return Problem(f"no data for {age:.0f} s") if age > settings.stale_after else samples


def mean(
    samples: tuple[S, ...], name: str, pick: Callable[[S], Value], since: float
) -> float | Problem:
    """Mean of a gauge over the samples since then; at least of the latest, which must be usable.

    ``name`` is the metric's, for the Problem.
    """
    latest = pick(samples[-1])
    if isinstance(latest, Missing):
        return Problem(f"{name} is {latest.value}")
    picked = [pick(sample) for sample in samples if sample.time >= since]
    values = [value for value in picked if not isinstance(value, Missing)] or [latest]
    return sum(values) / len(values)


def increase(
    samples: tuple[S, ...], name: str, pick: Callable[[S], Value], since: float
) -> Increase | Problem:
    """How far a counter rose between the first and the last usable sample since then."""
    latest = pick(samples[-1])
    if isinstance(latest, Missing):
        return Problem(f"{name} is {latest.value}")
    points = [
        (s.time, v) for s in samples if s.time >= since and not isinstance(v := pick(s), Missing)
    ]
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return _NEW
    seconds = points[-1][0] - points[0][0]
    amount = sum(risen(before, after) for (_, before), (_, after) in pairwise(points))
    return Increase(amount, seconds)


def change(samples: tuple[S, ...], pick: Callable[[S], Value], since: float) -> float:
    """By how much a gauge has grown since then; 0 if too little is known of it."""
    values = [v for s in samples if s.time >= since and not isinstance(v := pick(s), Missing)]
    return values[-1] - values[0] if values else 0.0


def risen(before: float, after: float) -> float:
    return after - before if after >= before else after


def histogram_increase(
    samples: tuple[WorkerSample, ...],
    name: str,
    pick: Callable[[WorkerSample], Histogram | Missing],
    since: float,
) -> tuple[Histogram, float] | Problem:
    """The observations between the first and the last usable sample since then, and the seconds
    between these two."""
    latest = pick(samples[-1])
    if isinstance(latest, Missing):
        return Problem(f"{name} is {latest.value}")
    picked = [(sample.time, pick(sample)) for sample in samples if sample.time >= since]
    points = [(time, value) for time, value in picked if isinstance(value, Histogram)]
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return _NEW
    steps = (_risen_histogram(before, after) for (_, before), (_, after) in pairwise(points))
    return merged(steps), points[-1][0] - points[0][0]


def _risen_histogram(before: Histogram, after: Histogram) -> Histogram:
    if before.bounds != after.bounds:
        return after
    counts = [b - a for a, b in zip(before.counts, after.counts, strict=True)]
    if min(counts) < 0:
        return after
    return Histogram(after.bounds, tuple(accumulate(counts, max)))


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """All observations together; at least one histogram.

    Cumulative counts are exact at the bounds that all have in common, infinity among them, so
    that workers of two revisions may have different buckets.
    """
    every = list(histograms)
    common = set(every[0].bounds).intersection(*(one.bounds for one in every[1:]))
    bounds = tuple(sorted(common))
    by_bound = [dict(zip(one.bounds, one.counts, strict=True)) for one in every]
    return Histogram(bounds, tuple(sum(one[bound] for one in by_bound) for bound in bounds))


def quantile(histogram: Histogram, part: float) -> float | None:
    """Seconds that ``part`` of the observations do not exceed; None without observations.

    Interpolates linearly within a bucket. Above the highest finite bound nothing is known, and
    that bound is given: the same as Prometheus' histogram_quantile.
    """
    total = histogram.counts[-1]
    if total <= 0:
        return None
    rank = part * total
    low, below = 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        if count >= rank and count > below:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low


def busy_intervals(
    samples: tuple[WorkerSample, ...], after: float, settings: Settings
) -> Iterator[tuple[float, float]]:
    """(prompt tokens computed, seconds busy) of each interval that ends later than ``after``.

    As the worker counts them, or else estimated from what it admitted and had queued.
    """
    for start, end in pairwise(samples):
        if end.time > after and end.time - start.time <= settings.stale_after:
            interval = _counted_interval(start, end) or _estimated_interval(start, end)
            if interval is not None:
                yield interval


def _counted_interval(start: WorkerSample, end: WorkerSample) -> tuple[float, float] | None:
    tokens = _rise(start.prefill_tokens, end.prefill_tokens)
    seconds = _rise(start.busy_seconds, end.busy_seconds)
    return None if tokens is None or seconds is None else (tokens, seconds)


def _estimated_interval(start: WorkerSample, end: WorkerSample) -> tuple[float, float] | None:
    """Uncached tokens of the prompts admitted in between, which are computed from then on.

    A worker is busy while prompt tokens are queued. What it was at both ends of the interval
    stands for the time between, which is right on average.
    """
    prompts = _rise(start.prompt_tokens, end.prompt_tokens)
    cached = _rise(start.cached_tokens, end.cached_tokens)
    queues = (start.queued_prefill_tokens, end.queued_prefill_tokens)
    if prompts is None or cached is None or any(isinstance(queue, Missing) for queue in queues):
        return None
    busy = (end.time - start.time) * sum(queue != 0 for queue in queues) / 2
    return max(0.0, prompts - cached), busy


def _rise(before: Value, after: Value) -> float | None:
    if isinstance(before, Missing) or isinstance(after, Missing):
        return None
    return risen(before, after)
