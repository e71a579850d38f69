"""What workers and routers say in their /metrics, as typed samples. Pure: no I/O, no clock.

Owns the names of the metrics that autoscaling reads, and what counts as a usable value. A metric
that is not there, and one that is there without a usable number, are two different values of
``Missing``; neither ever becomes 0. How old a sample may be is the reader's question
(``scaling/windows.py``): a sample only says when it was taken.

Format: Prometheus text exposition, https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

from prometheus_client.parser import text_string_to_metric_families

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
QUEUED_PREFILL_TOKENS = "kvasir_worker_queued_prefill_tokens"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
CACHED_TOKENS = "vllm:prefix_cache_hits_total"
PREFILL_TOKENS = "kvasir_worker_prefill_tokens_total"
BUSY_SECONDS = "kvasir_worker_busy_seconds_total"
TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"
HELD_REQUESTS = "kvasir_router_held_requests"
DISAGGREGATED = "kvasir_router_disaggregated_total"
_NO_PREFILL_WORKER = ("decision", "local_no_worker")


class Missing(Enum):
    """Why a value cannot be used; the text completes "METRIC is ..."."""

    ABSENT = "absent"
    INVALID = "not a usable number"


Value = float | Missing
"""From 0 to ``_LARGEST``, or missing."""

_LARGEST = 2.0**63
"""No count of anything here comes near it, and sums of such numbers stay finite."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """``counts[i]`` observations of at most ``bounds[i]`` seconds; the last bound is infinity."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """One scrape of one worker.

    ``time`` is when it was taken, in seconds of the caller's clock. ``kv_usage`` is the part of
    the KV blocks in use, 0 to 1. ``prompt_tokens`` and ``cached_tokens`` count since the worker
    began: tokens of admitted prompts, and those of them found in the prefix cache. So do
    ``prefill_tokens``, the prompt tokens that it computed, and ``busy_seconds``; other engines
    than our own lack these two.
    """

    time: float
    running: Value = Missing.ABSENT
    waiting: Value = Missing.ABSENT
    kv_usage: Value = Missing.ABSENT
    queued_prefill_tokens: Value = Missing.ABSENT
    prompt_tokens: Value = Missing.ABSENT
    cached_tokens: Value = Missing.ABSENT
    ttft: Histogram | Missing = Missing.ABSENT
    itl: Histogram | Missing = Missing.ABSENT
    prefill_tokens: Value = Missing.ABSENT
    busy_seconds: Value = Missing.ABSENT


@dataclass(frozen=True, slots=True)
class RouterSample:
    """One scrape of one router.

    ``held_for_decode`` are requests that wait because no worker can take them, and
    ``held_for_prefill`` those among them that a prefill worker would serve as well.
    ``without_prefill`` counts prompts that a decode worker computed because there was no prefill
    worker.
    """

    time: float
    held_for_decode: Value = Missing.ABSENT
    held_for_prefill: Value = Missing.ABSENT
    without_prefill: Value = Missing.ABSENT


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The text is not Prometheus exposition format."""

    why: str


class _Timed(Protocol):
    @property
    def time(self) -> float: ...


S = TypeVar("S", bound=_Timed)


def remember(
    history: Mapping[str, tuple[S, ...]],
    scraped: Mapping[str, S],
    existing: Collection[str],
    since: float,
) -> dict[str, tuple[S, ...]]:
    """The history after a round of scrapes: name -> samples, oldest first.

    Args:
        history: before the round.
        scraped: new samples; a pod whose scrape failed has none.
        existing: pods that exist. Nothing is kept of any other.
        since: samples taken earlier are dropped.
    """
    merged: dict[str, tuple[S, ...]] = {}
    for name in existing:
        samples = [sample for sample in history.get(name, ()) if sample.time >= since]
        new = scraped.get(name)
        # Order is what rates are computed from, so a late answer is of no use.
        if new is not None and (not samples or new.time > samples[-1].time):
            samples.append(new)
        if samples:
            merged[name] = tuple(samples)
    return merged


def parse_worker(text: str, time: float) -> WorkerSample | Unreadable:
    """The sample in a worker's /metrics; ``time`` is when it was scraped."""
    series = _read(text)
    if isinstance(series, Unreadable):
        return series
    return WorkerSample(
        time=time,
        running=_total(series.get(RUNNING)),
        waiting=_total(series.get(WAITING)),
        kv_usage=_mean_part(series.get(KV_USAGE)),
        queued_prefill_tokens=_total(series.get(QUEUED_PREFILL_TOKENS)),
        prompt_tokens=_total(series.get(PROMPT_TOKENS)),
        cached_tokens=_total(series.get(CACHED_TOKENS)),
        ttft=_histogram(series.get(f"{TTFT}_bucket")),
        itl=_histogram(series.get(f"{ITL}_bucket")),
        prefill_tokens=_total(series.get(PREFILL_TOKENS)),
        busy_seconds=_total(series.get(BUSY_SECONDS)),
    )


def parse_router(text: str, time: float) -> RouterSample | Unreadable:
    """The sample in a router's /metrics; ``time`` is when it was scraped."""
    series = _read(text)
    if isinstance(series, Unreadable):
        return series
    choices = series.get(DISAGGREGATED)
    without: Value = Missing.ABSENT
    if choices is not None:
        # A decision that was never made has no series yet, which does mean 0.
        made = _having(choices, *_NO_PREFILL_WORKER)
        without = _total(made) if made else 0.0
    held = series.get(HELD_REQUESTS, ())
    return RouterSample(
        time=time,
        held_for_decode=_total(_having(held, "role", "decode")),
        held_for_prefill=_total(_having(held, "role", "prefill")),
        without_prefill=without,
    )


@dataclass(frozen=True, slots=True)
class _Series:
    labels: Mapping[str, str]
    value: Value


def _read(text: str) -> dict[str, list[_Series]] | Unreadable:
    """Every series by its name."""
    series: dict[str, list[_Series]] = {}
    try:
        for family in text_string_to_metric_families(text):
            if family.type == "counter":  # one with labels may have no series yet
                series.setdefault(f"{family.name}_total", [])
            for sample in family.samples:
                one = _Series(sample.labels, _usable(sample.value))
                series.setdefault(sample.name, []).append(one)
    # The parser checks less than it relies on: some malformed lines end in an IndexError.
    except (ValueError, IndexError) as error:
        return Unreadable(f"not Prometheus text: {error}")
    return series


def _having(series: Iterable[_Series], label: str, value: str) -> list[_Series]:
    return [one for one in series if one.labels.get(label) == value]


def _usable(value: float) -> Value:
    try:
        number = float(value)
    except OverflowError:  # the parser gives integers of any size
        return Missing.INVALID
    return number if 0 <= number <= _LARGEST else Missing.INVALID


def _numbers(series: Iterable[_Series]) -> list[float] | Missing:
    values = [one.value for one in series]
    numbers = [value for value in values if not isinstance(value, Missing)]
    return numbers if len(numbers) == len(values) else Missing.INVALID


def _total(series: Collection[_Series] | None) -> Value:
    """The sum over all label sets: a worker may have one for each of its engines."""
    if not series:
        return Missing.ABSENT
    numbers = _numbers(series)
    if isinstance(numbers, Missing):
        return numbers
    return _usable(sum(numbers))


def _mean_part(series: Collection[_Series] | None) -> Value:
    """The mean over all label sets of a value from 0 to 1."""
    total = _total(series)
    if not series or isinstance(total, Missing):
        return total
    mean = total / len(series)
    return mean if mean <= 1 else Missing.INVALID


def _histogram(series: Collection[_Series] | None) -> Histogram | Missing:
    if not series:
        return Missing.ABSENT
    counts: dict[float, float] = {}
    for one in series:
        try:
            bound = float(one.labels.get("le", ""))
        except ValueError:
            return Missing.INVALID
        if math.isnan(bound) or isinstance(one.value, Missing):
            return Missing.INVALID
        counts[bound] = counts.get(bound, 0.0) + one.value
    ordered = sorted(counts.items())
    bounds = tuple(bound for bound, _ in ordered)
    cumulative = tuple(count for _, count in ordered)
    if bounds[-1] != math.inf or list(cumulative) != sorted(cumulative):
        return Missing.INVALID
    return Histogram(bounds, cumulative)
