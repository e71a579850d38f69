"""From the text of /metrics to samples, and from samples to means, increases and quantiles."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

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
from kvasir.operator.signals import (
    Histogram,
    Missing,
    RouterSample,
    Unreadable,
    Value,
    WorkerSample,
    parse_router,
    parse_worker,
    remember,
)
from kvasir.router.metrics import GenerationMetrics
from kvasir.worker.contracts import Load
from kvasir.worker.metrics import CacheConfig, Memory, WorkerMetrics

NOW = 1000.0
SETTINGS = Settings()


def worker_sample(text: str) -> WorkerSample:
    sample = parse_worker(text, NOW)
    assert isinstance(sample, WorkerSample)
    return sample


def router_sample(text: str) -> RouterSample:
    sample = parse_router(text, NOW)
    assert isinstance(sample, RouterSample)
    return sample


# --- text ------------------------------------------------------------------------------------


def test_what_a_worker_really_exports() -> None:
    load = Load(
        running=3,
        waiting=2,
        queued_prefill_tokens=700,
        kv_blocks_total=40,
        kv_blocks_used=10,
        prefix_query_tokens=9000,
        prefix_hit_tokens=4000,
        prefill_tokens=4800,
        busy_seconds=2.5,
    )
    cache = CacheConfig(16, 40, prefix_caching=True)
    metrics = WorkerMetrics("m", cache, Memory(weights=1000, kv=4000), lambda: load)
    metrics.first_output(0.3)
    metrics.next_output(0.02)
    metrics.next_output(0.04)
    metrics.generated(3)
    text = generate_latest(metrics.registry).decode()
    assert 'vllm:generation_tokens_total{model_name="m"} 3.0' in text
    assert 'kvasir_worker_memory_bytes{model_name="m",part="weights"} 1000.0' in text
    assert 'kvasir_worker_memory_bytes{model_name="m",part="kv"} 4000.0' in text
    sample = worker_sample(text)
    assert sample.ttft != Missing.ABSENT
    assert isinstance(sample.itl, Histogram)
    assert sample.itl.counts[-1] == 2
    assert sample.itl.counts[sample.itl.bounds.index(0.025)] == 1
    assert replace(sample, ttft=Missing.ABSENT, itl=Missing.ABSENT) == WorkerSample(
        time=NOW,
        running=3,
        waiting=2,
        kv_usage=0.25,
        queued_prefill_tokens=700,
        prompt_tokens=9000,
        cached_tokens=4000,
        prefill_tokens=4800,
        busy_seconds=2.5,
    )


def test_what_a_router_really_exports() -> None:
    registry = CollectorRegistry()
    metrics = GenerationMetrics(registry)
    text = generate_latest(registry).decode()
    assert router_sample(text) == RouterSample(NOW, 0.0, 0.0, 0.0)
    with metrics.held(("decode",)), metrics.held(("prefill", "decode")):
        held = router_sample(generate_latest(registry).decode())
    assert (held.held_for_decode, held.held_for_prefill) == (2.0, 1.0)
    metrics.disaggregated.labels("remote").inc(9)
    assert router_sample(generate_latest(registry).decode()).without_prefill == 0.0
    metrics.disaggregated.labels("local_no_worker").inc(2)
    assert router_sample(generate_latest(registry).decode()).without_prefill == 2.0


def test_nothing_exported_is_absent_and_not_zero() -> None:
    assert worker_sample("") == WorkerSample(NOW)
    assert router_sample("") == RouterSample(NOW)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4.0),
        ("4.5 1700000000000", 4.5),
        ("NaN", Missing.INVALID),
        ("+Inf", Missing.INVALID),
        ("-1", Missing.INVALID),
        ("1e19", Missing.INVALID),
        ("9" * 400, Missing.INVALID),
    ],
)
def test_values(text: str, value: Value) -> None:
    assert worker_sample(f"vllm:num_requests_running {text}\n").running == value


def test_one_bad_metric_leaves_the_others() -> None:
    sample = worker_sample("vllm:num_requests_running NaN\nvllm:num_requests_waiting 2\n")
    assert (sample.running, sample.waiting) == (Missing.INVALID, 2.0)


def test_several_engines_in_one_worker() -> None:
    lines = [
        f'{name}{{engine="{i}"}} {value}'
        for name, values in {
            "vllm:num_requests_running": (1, 4),
            "vllm:kv_cache_usage_perc": (0.25, 0.75),
        }.items()
        for i, value in enumerate(values)
    ]
    sample = worker_sample("\n".join(lines) + "\n")
    assert (sample.running, sample.kv_usage) == (5.0, 0.5)
    one_bad = "\n".join([*lines, 'vllm:num_requests_running{engine="2"} NaN']) + "\n"
    assert worker_sample(one_bad).running == Missing.INVALID


def test_kv_usage_is_a_part() -> None:
    assert worker_sample("vllm:kv_cache_usage_perc 55\n").kv_usage == Missing.INVALID


def buckets(*pairs: tuple[str, object]) -> str:
    name = "vllm:inter_token_latency_seconds"
    lines = [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in pairs]
    return f"# TYPE {name} histogram\n" + "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (buckets(("0.1", 1), ("+Inf", 3)), Histogram((0.1, math.inf), (1.0, 3.0))),
        (buckets(("+Inf", 3), ("0.1", 1)), Histogram((0.1, math.inf), (1.0, 3.0))),
        (
            buckets(("0.1", 1), ("0.1", 2), ("+Inf", 3), ("+Inf", 4)),
            Histogram((0.1, math.inf), (3.0, 7.0)),
        ),
        (buckets(("0.1", 1)), Missing.INVALID),
        (buckets(("0.1", 4), ("+Inf", 3)), Missing.INVALID),
        (buckets(("0.1", "NaN"), ("+Inf", 3)), Missing.INVALID),
        (buckets(("NaN", 1), ("+Inf", 3)), Missing.INVALID),
        (buckets(("fast", 1), ("+Inf", 3)), Missing.INVALID),
        ("vllm:inter_token_latency_seconds_count 3\n", Missing.ABSENT),
    ],
)
def test_histograms(text: str, expected: Histogram | Missing) -> None:
    assert worker_sample(text).itl == expected


@pytest.mark.parametrize("text", ["<html>", "a{b} 1", "a 1 2 3 x", "a one", '# TYPE "', "a{,,} 1"])
def test_other_text_is_unreadable(text: str) -> None:
    assert isinstance(parse_worker(text, NOW), Unreadable)
    assert isinstance(parse_router(text, NOW), Unreadable)


@given(
    st.one_of(
        st.text(max_size=80),
        st.text('vllm:kv_cahe{}"\\,=# \n\t+-Inf.0129TYPE counter', max_size=120),
    )
)
def test_no_text_is_too_broken(text: str) -> None:
    assert isinstance(parse_worker(text, NOW), WorkerSample | Unreadable)


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
