"""What the autoscaler reads of the metrics of workers and routers."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from kvasir.operator.signals import (
    Histogram,
    Missing,
    RouterSample,
    Unreadable,
    Value,
    WorkerSample,
    parse_router,
    parse_worker,
)
from kvasir.router.metrics import GenerationMetrics
from kvasir.worker.contracts import Load
from kvasir.worker.metrics import CacheConfig, Memory, WorkerMetrics

NOW = 1000.0


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
