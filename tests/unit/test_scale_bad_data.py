"""The autoscaler where data is stale, absent or no number."""

from dataclasses import replace
from typing import Literal

import pytest

from helpers.scale_scenes import (
    FULL,
    IDLE,
    LOW,
    History,
    Scene,
    check_scene,
    objectives,
    pods,
    worker,
)
from kvasir.operator.scale import Bounds
from kvasir.operator.signals import Missing

STALE = worker(running=10, kv=0.1, age=31)
NAN = worker(running=10, kv=0.1, kv_usage=Missing.INVALID)
ABSENT = worker(running=10, kv=0.1, kv_usage=Missing.ABSENT)
QUICK = worker(running=9, kv=0.1, itl=0.02, observations=50)


def without(history: History, metric: Literal["ttft", "itl"]) -> History:
    """The latest sample lacks a histogram."""
    latest = history[-1]
    lacking = (
        replace(latest, ttft=Missing.ABSENT)
        if metric == "ttft"
        else replace(latest, itl=Missing.ABSENT)
    )
    return (*history[:-1], lacking)


BAD_DATA = [
    Scene(
        "nothing known", "decode", {}, 3, "bad_data", "w-0 (no data)", ready=("w-0", "w-1", "w-2")
    ),
    Scene("all stale", "decode", pods(2, STALE), 2, "bad_data", "w-0 (no data for 31 s)"),
    Scene("all kv nan", "decode", pods(2, NAN), 2, "bad_data", "nothing is known of the KV cache"),
    Scene(
        "all kv absent",
        "decode",
        pods(2, ABSENT),
        2,
        "bad_data",
        "w-1 (vllm:kv_cache_usage_perc is absent)",
    ),
    Scene(
        "kv nan, but requests wait",
        "decode",
        pods(2, worker(running=10, waiting=10, kv_usage=Missing.INVALID)),
        4,
        "none",
        "20.0 wait",
    ),
    Scene(
        "a missing pod counts as loaded at the target when shrinking",
        "decode",
        {"w-0": LOW, "w-1": STALE},
        2,
        "bad_data",
        "w-1 (no data for 31 s)",
    ),
    Scene(
        "two known idle pods of three: the third is kept",
        "decode",
        {"w-0": IDLE, "w-1": IDLE},
        2,
        "stabilization",
        "w-2 (no data)",
        ready=("w-0", "w-1", "w-2"),
    ),
    Scene(
        "a missing pod counts as the mean when growing",
        "decode",
        {"w-0": FULL, "w-1": NAN},
        3,
        "none",
        "vllm:kv_cache_usage_perc is not a usable number",
    ),
    Scene(
        "a new pod is not missing",
        "prefill",
        {"w-0": worker(running=1, rate=1500), "w-1": worker(span=0)},
        2,
        "none",
        "1500 prompt tokens/s arrive",
    ),
    Scene(
        "only new pods: too early to say",
        "prefill",
        pods(2, worker(span=0)),
        2,
        "bad_data",
        "nothing is known of the prompt tokens",
    ),
    Scene(
        "prefill nan in a counter",
        "prefill",
        {"w-0": worker(prompt_tokens=Missing.INVALID), "w-1": IDLE},
        1,
        "bad_data",
        "vllm:prompt_tokens_total is not a usable number",
        wanted=1,
    ),
    Scene(
        "ttft absent",
        "prefill",
        pods(2, worker(running=0.1, rate=10)),
        2,
        "bad_data",
        "nothing is known of the TTFT",
        objectives=objectives(ttft="1s"),
        answering={"d-0": without(IDLE, "ttft")},
    ),
    Scene(
        "itl of one pod absent",
        "decode",
        {"w-0": QUICK, "w-1": without(QUICK, "itl")},
        2,
        "bad_data",
        "w-1 (vllm:inter_token_latency_seconds is absent)",
        objectives=objectives(itl="50ms"),
    ),
    Scene(
        "no latencies at idle are no bad data",
        "decode",
        pods(2, IDLE),
        1,
        "stabilization",
        "Lower decode from 2 to 1: it is idle",
        objectives=objectives(itl="50ms"),
        bounds=Bounds(0, 10),
    ),
    Scene(
        "a pod that is gone is not missing",
        "decode",
        {"w-0": LOW, "gone": STALE},
        1,
        "none",
        "10% on average",
        ready=("w-0",),
    ),
    Scene(
        "many problems are cut short",
        "decode",
        {"w-0": FULL},
        7,
        "none",
        "w-1 (no data), w-2 (no data), w-3 (no data), 2 more",
        ready=("w-0", "w-1", "w-2", "w-3", "w-4", "w-5"),
        wanted=6,
    ),
]


@pytest.mark.parametrize("scene", BAD_DATA, ids=lambda scene: scene.name)
def test_scene(scene: Scene) -> None:
    check_scene(scene)
