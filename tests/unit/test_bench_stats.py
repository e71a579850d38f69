"""Percentiles and sums of request records."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.bench.stats import (
    Objectives,
    Record,
    distribution,
    percentile,
    spread,
    summarize,
)

FINITE = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)


@given(st.lists(FINITE, min_size=1, max_size=50), st.floats(min_value=0, max_value=100))
def test_percentile_is_numpys_linear_one(values: list[float], p: float) -> None:
    assert percentile(values, p) == pytest.approx(float(np.percentile(values, p)), abs=1e-6)


def test_percentile_refuses_nothing_and_nonsense() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match=r"\[0, 100\]"):
        percentile([1.0], 101)


def test_a_distribution_of_nothing_is_none_and_not_zero() -> None:
    assert distribution([]) is None


def test_spread_is_median_and_range() -> None:
    measured = spread([3.0, 1.0, 2.0])
    assert (measured.median, measured.low, measured.high) == (2.0, 1.0, 3.0)
    assert measured.relative == 1.0


def record(due: float = 0.0, **fields: Any) -> Record:
    values: dict[str, Any] = {
        "sent": due,
        "end": due + 1.0,
        "token_times": (due + 0.5, due + 0.7, due + 1.0),
        "input_tokens": 10,
        "output_tokens": 3,
        **fields,
    }
    return Record(due=due, **values)


def test_latency_counts_from_when_a_request_was_due() -> None:
    late = record(due=2.0, sent=2.4, token_times=(2.9, 3.0), end=3.0, output_tokens=2)
    assert late.ttft == pytest.approx(0.9)
    assert late.e2e == pytest.approx(1.0)


def test_itl_is_between_chunks_and_tpot_per_token() -> None:
    two_chunks_of_five_tokens = record(token_times=(1.0, 2.0), output_tokens=5)
    assert two_chunks_of_five_tokens.itls == [1.0]
    assert two_chunks_of_five_tokens.tpot == pytest.approx(0.25)
    assert record(token_times=(1.0,), output_tokens=1).tpot is None


def test_failures_are_counted_by_kind_and_kept_out_of_latencies() -> None:
    slow_failure = record(end=100.0, failure="timeout", message="not complete after 99 s")
    summary = summarize([record(), slow_failure, record(failure="http 503"), slow_failure])
    assert summary.succeeded == 1
    assert summary.failures == {"timeout": 2, "http 503": 1}
    assert summary.failure_examples["timeout"] == "not complete after 99 s"
    assert summary.e2e is not None
    assert summary.e2e.max == 1.0
    assert summary.duration == 100.0, "but the time that they took is part of the run"


def test_rates_are_over_the_whole_run() -> None:
    summary = summarize([record(due=0.0), record(due=3.0)])
    assert summary.duration == 4.0
    assert summary.output_tokens_per_s == pytest.approx(6 / 4)
    assert summary.input_tokens_per_s == pytest.approx(20 / 4)
    assert summary.requests_per_s == pytest.approx(2 / 4)


def test_shares_and_cached_ratio() -> None:
    summary = summarize(
        [
            record(worker="a", cached_tokens=5),
            record(worker="a"),
            record(worker="b"),
            record(worker="b", failure="truncated"),
        ]
    )
    assert summary.worker_share == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    assert summary.cached_ratio == pytest.approx(5 / 30)


@pytest.mark.parametrize(
    ("objectives", "met"),
    [
        (Objectives(), True),
        (Objectives(ttft=0.5, itl=0.25), True),
        (Objectives(ttft=0.49), False),
        (Objectives(itl=0.24), False),
    ],
)
def test_goodput_counts_requests_within_objectives(objectives: Objectives, met: bool) -> None:
    assert objectives.met_by(record()) is met
    assert summarize([record()], objectives).goodput_per_s == float(met)


def test_a_failed_request_meets_no_objective() -> None:
    assert not Objectives().met_by(record(failure="truncated"))


def test_all_failed_is_a_summary_without_latencies() -> None:
    summary = summarize([record(failure="connect", token_times=())])
    assert (summary.ttft, summary.itl, summary.e2e) == (None, None, None)
    assert summary.output_tokens_per_s == 0.0
