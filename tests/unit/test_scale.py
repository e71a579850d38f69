"""The autoscaler: a whole decision, what it counts as arriving, and its settings."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from helpers.scale_scenes import CALM, FULL, NOW, History, Scene, pods, worker
from kvasir.operator.scale import Bounds, Decision, Settings, decide
from kvasir.operator.signals import Missing


def test_the_whole_decision() -> None:
    scene = Scene("", "decode", pods(2, FULL), 3, "none", "", pending=1, draining=1)
    decision, _ = decide(scene.state, scene.signals(), NOW)
    assert decision == Decision(
        time=NOW,
        role="decode",
        desired=3,
        reason=(
            "Raise decode from 2 to 3: KV cache usage is 90% on average (target 80%), "
            "which needs 3 replicas."
        ),
        limited_by="none",
        inputs={
            "wanted": 2,
            "ready": 2,
            "pending": 1,
            "unschedulable": 0,
            "draining": 1,
            "needed": 3,
            "kv_usage": 0.9,
            "running": 20.0,
            "waiting": 0.0,
            "held_requests": 0.0,
        },
    )


def arriving(workers: Mapping[str, History]) -> object:
    scene = Scene("", "prefill", workers, 0, "none", "")
    return decide(CALM, scene.signals(), NOW)[0].inputs["arriving_tokens_per_second"]


def test_what_has_queued_up_has_arrived() -> None:
    growing = tuple(
        replace(sample, queued_prefill_tokens=1000.0 * i)
        for i, sample in enumerate(worker(running=1, rate=500))
    )
    assert arriving({"w-0": growing}) == 500 + 12 * 1000 / 60


def test_what_a_worker_computes_counts_rather_than_what_it_admits() -> None:
    """It has admitted 1000 tokens/s and computed 400, so that its queue is the longer."""
    counting = tuple(
        replace(sample, prefill_tokens=2000.0 * i, queued_prefill_tokens=3000.0 * i)
        for i, sample in enumerate(worker(running=1, rate=1000))
    )
    assert arriving({"w-0": counting}) == 400 + 600
    unknown = (*counting[:-1], replace(counting[-1], prefill_tokens=Missing.INVALID))
    assert arriving({"w-0": unknown}) is None


def test_what_a_new_pod_has_taken_over_counts_once() -> None:
    """1500 tokens/s all the time: 30 s by one worker, then 30 s by two."""
    assert arriving({"w-0": worker(rate=1125), "w-1": worker(rate=750, span=30)}) == 1500


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_settings_are_checked(value: float) -> None:
    with pytest.raises(ValueError, match="stale_after: must be more than 0"):
        Settings(stale_after=value)


def test_bounds_and_target_are_checked() -> None:
    with pytest.raises(ValueError, match="bounds: 0 <= 3 <= 2"):
        Bounds(3, 2)
    with pytest.raises(ValueError, match="target: must be at most 1"):
        Settings(target=1.5)
