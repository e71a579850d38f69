"""History of samples, and what windows of it say."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.scaled_pool import BUCKETS, EMPTY, observe
from kvasir.operator.scaling.contracts import Settings
from kvasir.operator.scaling.windows import (
    Increase,
    Problem,
    busy_intervals,
    fresh,
    histogram_increase,
    increase,
    mean,
    merged,
    quantile,
)
from kvasir.operator.signals import Histogram, Missing, Value, WorkerSample, remember

NOW = 1000.0
SETTINGS = Settings()


# --- history ---------------------------------------------------------------------------------


def at(time: float, **values: float | Missing) -> WorkerSample:
    return replace(WorkerSample(time), **values)  # type: ignore[arg-type]  # names differ in type


def test_remember() -> None:
    history = {"a": (at(1), at(5)), "gone": (at(5),)}
    assert remember(history, {"a": at(9), "b": at(9)}, ["a", "b", "never"], since=4) == {
        "a": (at(5), at(9)),
        "b": (at(9),),
    }


def test_a_failed_scrape_adds_nothing() -> None:
    assert remember({"a": (at(5),)}, {}, ["a"], since=0) == {"a": (at(5),)}


def test_a_late_answer_is_dropped() -> None:
    assert remember({"a": (at(5),)}, {"a": at(5)}, ["a"], since=0) == {"a": (at(5),)}


def test_a_pod_that_is_gone_leaves_nothing() -> None:
    assert remember({"a": (at(5),)}, {"a": at(9)}, [], since=0) == {}


# --- windows ---------------------------------------------------------------------------------


def test_fresh() -> None:
    assert fresh((), NOW, SETTINGS) == Problem("no data")
    assert fresh((at(NOW - 31),), NOW, SETTINGS) == Problem("no data for 31 s")
    assert fresh((at(NOW - 30),), NOW, SETTINGS) == (at(NOW - 30),)


def running(sample: WorkerSample) -> Value:
    return sample.running


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((2.0, 4.0), 3.0),
        ((Missing.INVALID, 4.0), 4.0),
        ((4.0, Missing.INVALID), Problem("running is not a usable number")),
        ((4.0, Missing.ABSENT), Problem("running is absent")),
    ],
)
def test_mean(values: tuple[float | Missing, ...], expected: float | Problem) -> None:
    samples = tuple(at(NOW - 10 + 5 * i, running=value) for i, value in enumerate(values))
    assert mean(samples, "running", running, NOW - 30) == expected


def test_mean_of_the_window_only() -> None:
    samples = (at(NOW - 40, running=100.0), at(NOW - 20, running=2.0))
    assert mean(samples, "running", running, NOW - 30) == 2.0
    assert mean(samples, "running", running, NOW) == 2.0  # at least of the latest


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((10.0, 30.0, 60.0), Increase(50.0, 10.0)),
        ((10.0, 30.0, 5.0), Increase(25.0, 10.0)),
        ((10.0, Missing.INVALID, 60.0), Increase(50.0, 10.0)),
        ((Missing.ABSENT, Missing.ABSENT, 60.0), Problem("too few samples yet", new=True)),
        ((10.0, 30.0, Missing.INVALID), Problem("running is not a usable number")),
    ],
)
def test_increase(values: tuple[float | Missing, ...], expected: Increase | Problem) -> None:
    samples = tuple(at(NOW - 10 + 5 * i, running=value) for i, value in enumerate(values))
    assert increase(samples, "running", running, NOW - 60) == expected


def test_histogram_increase() -> None:
    first = observe(EMPTY, 0.015, 40)
    second = observe(first, 0.3, 5)
    samples = (
        replace(at(NOW - 10), itl=first),
        replace(at(NOW - 5), itl=second),
        replace(at(NOW), itl=observe(EMPTY, 0.7, 2)),  # began anew
    )
    found = histogram_increase(samples, "itl", lambda s: s.itl, NOW - 60)
    assert found == (observe(observe(EMPTY, 0.3, 5), 0.7, 2), 10.0)


def test_merged_keeps_the_bounds_in_common() -> None:
    one = Histogram((0.1, 0.2, math.inf), (1.0, 2.0, 3.0))
    other = Histogram((0.2, 0.4, math.inf), (5.0, 6.0, 7.0))
    assert merged([one, other]) == Histogram((0.2, math.inf), (7.0, 10.0))


def test_no_observations_have_no_quantile() -> None:
    assert quantile(EMPTY, 0.95) is None


@pytest.mark.parametrize(
    ("observations", "expected"),
    [
        ([(0.015, 100)], 0.0195),  # interpolated within 0.01 to 0.02
        ([(0.015, 90), (0.7, 10)], 0.75),  # halfway from 0.5 to 1.0
        ([(0.005, 10)], 0.0095),  # the lowest bucket begins at 0
        ([(99.0, 10)], 10.0),  # beyond the highest finite bound
    ],
)
def test_quantile(observations: list[tuple[float, float]], expected: float) -> None:
    histogram = EMPTY
    for seconds, count in observations:
        histogram = observe(histogram, seconds, count)
    assert quantile(histogram, 0.95) == pytest.approx(expected)


@given(st.lists(st.floats(0.001, 9.9), min_size=1, max_size=60), st.floats(0.01, 1))
def test_quantile_is_in_the_bucket_of_the_true_one(values: list[float], part: float) -> None:
    histogram = EMPTY
    for value in values:
        histogram = observe(histogram, value, 1.0)
    true = sorted(values)[math.ceil(round(part * len(values), 9)) - 1]
    high = next(bound for bound in BUCKETS if true <= bound)
    low = max((bound for bound in BUCKETS if bound < high), default=0.0)
    found = quantile(histogram, part)
    assert found is not None
    assert low - 1e-9 <= found <= high + 1e-9


def test_busy_intervals() -> None:
    def sample(time: float, queued: float, prompts: float, cached: float) -> WorkerSample:
        return at(time, queued_prefill_tokens=queued, prompt_tokens=prompts, cached_tokens=cached)

    samples = (
        sample(0, 0, 0, 0),
        sample(10, 5, 300, 100),  # half busy
        sample(20, 5, 900, 100),  # busy
        sample(30, 0, 50, 20),  # began anew, half busy
        replace(sample(40, 0, 60, 20), cached_tokens=Missing.INVALID),  # not known
        sample(50, 0, 60, 20),  # neither is this
        sample(55, 0, 60, 20),  # idle
        sample(99, 0, 900, 20),  # too far apart
    )
    assert list(busy_intervals(samples, 0.0, SETTINGS)) == [
        (200.0, 5.0),
        (600.0, 10.0),
        (30.0, 5.0),
        (0.0, 0.0),
    ]
    assert list(busy_intervals(samples, 20.0, SETTINGS)) == [(30.0, 5.0), (0.0, 0.0)]


def test_busy_intervals_as_the_worker_counts_them() -> None:
    def sample(time: float, tokens: float, busy: float) -> WorkerSample:
        counted = at(time, prefill_tokens=tokens, busy_seconds=busy)
        estimated = {"queued_prefill_tokens": 5.0, "prompt_tokens": 9 * time, "cached_tokens": 0.0}
        return replace(counted, **estimated)  # type: ignore[arg-type]  # names differ in type

    samples = (
        sample(0, 1000, 3),
        sample(10, 1400, 5),
        sample(20, 100, 0.5),  # began anew
        replace(sample(30, 100, 0.5), busy_seconds=Missing.ABSENT),  # estimated instead
    )
    assert list(busy_intervals(samples, 0.0, SETTINGS)) == [(400, 2), (100, 0.5), (90, 10)]
