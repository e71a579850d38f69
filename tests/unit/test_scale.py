"""The autoscaler: whole scenarios as expected decisions, what holds for any input, and a loop."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.scaled_pool import BUCKETS, EMPTY, ScaledPool, observe
from kvasir.operator.modelservice import Objectives
from kvasir.operator.scale import (
    Bounds,
    Decision,
    Replicas,
    RoleSignals,
    ScaleState,
    Settings,
    decide,
)
from kvasir.operator.scaling.contracts import LimitedBy, Role, Throughput
from kvasir.operator.signals import Histogram, Missing, RouterSample, WorkerSample

NOW = 10_000.0
SPEED = 1000.0
"""Prompt tokens/s of a worker, as measured before."""

History = tuple[WorkerSample, ...]


def objectives(ttft: str | None = None, itl: str | None = None) -> Objectives:
    given = {"ttftP95": ttft, "itlP95": itl}
    return Objectives.model_validate({name: text for name, text in given.items() if text})


def worker(
    *,
    running: float = 0.0,
    waiting: float = 0.0,
    kv: float = 0.0,
    queued: float = 0.0,
    rate: float = 0.0,
    ttft: float = 0.1,
    itl: float = 0.01,
    observations: float = 0.0,
    age: float = 0.0,
    span: float = 60.0,
    **latest: Any,
) -> History:
    """Samples every 5 s of a worker under a constant load, the last one ``age`` ago.

    ``rate`` is uncached prompt tokens/s; as many again are cached. ``observations`` of each
    latency are made between two samples. ``latest`` replaces fields of the last sample.
    """
    steps = round(span / 5)
    samples = [
        WorkerSample(
            time=NOW - age - 5.0 * (steps - i),
            running=running,
            waiting=waiting,
            kv_usage=kv,
            queued_prefill_tokens=queued,
            prompt_tokens=7.0 + 10.0 * rate * i,
            cached_tokens=3.0 + 5.0 * rate * i,
            ttft=observe(EMPTY, ttft, observations * i),
            itl=observe(EMPTY, itl, observations * i),
        )
        for i in range(steps + 1)
    ]
    return (*samples[:-1], replace(samples[-1], **latest))


def router(
    held: float | Missing = 0.0,
    *,
    prompts: float = 0.0,
    without_prefill: float = 0.0,
    age: float = 0.0,
) -> tuple[RouterSample, ...]:
    """Samples of a router; ``prompts`` of the requests that it holds need a prefill worker, and
    ``without_prefill`` is by how much that counter has risen."""
    times = [NOW - age - 5.0 * i for i in range(12, -1, -1)]
    return tuple(
        RouterSample(time, held, prompts, 4.0 + without_prefill * i / 12)
        for i, time in enumerate(times)
    )


CALM = ScaleState(
    since=NOW - 2000,
    seen=NOW - 5,
    changed=NOW - 2000,
    throughput=Throughput(tokens=1000 * SPEED, busy=1000.0, until=NOW),
)
"""Watched for long, with nothing needed in the stabilization window."""


TEN = Bounds(1, 10)


@dataclass(frozen=True)
class Scene:
    name: str
    role: Role
    workers: Mapping[str, History]
    desired: int
    limited_by: LimitedBy
    says: str
    wanted: int | None = None
    ready: tuple[str, ...] | None = None
    pending: int = 0
    unschedulable: int = 0
    draining: int = 0
    bounds: Bounds = TEN
    objectives: Objectives = field(default_factory=objectives)
    answering: Mapping[str, History] = field(default_factory=dict)
    routers: Mapping[str, tuple[RouterSample, ...]] = field(
        default_factory=lambda: {"r-0": router()}
    )
    state: ScaleState = CALM

    def signals(self) -> RoleSignals:
        ready = tuple(self.workers) if self.ready is None else self.ready
        wanted = len(ready) if self.wanted is None else self.wanted
        return RoleSignals(
            role=self.role,
            bounds=self.bounds,
            replicas=Replicas(wanted, ready, self.pending, self.unschedulable, self.draining),
            objectives=self.objectives,
            workers=self.workers,
            answering=self.answering,
            routers=self.routers,
        )


def pods(count: int, history: History) -> dict[str, History]:
    return {f"w-{i}": history for i in range(count)}


IDLE = worker()
FULL = worker(running=10, kv=0.9)
HALF = worker(running=10, kv=0.5)

DECODE = [
    Scene("kv within target", "decode", pods(2, worker(running=9, kv=0.75)), 2, "none", "75%"),
    Scene("kv above target", "decode", pods(2, FULL), 3, "none", "from 2 to 3: KV cache"),
    Scene("kv within tolerance", "decode", pods(2, worker(running=9, kv=0.85)), 2, "none", "85%"),
    Scene(
        "waiting doubles at most",
        "decode",
        pods(2, worker(running=10, waiting=90, kv=0.2)),
        4,
        "none",
        "20.0 requests run and 180.0 wait",
    ),
    Scene(
        "one waits for the next step",
        "decode",
        pods(2, worker(running=12, waiting=1, kv=0.1)),
        1,
        "none",
        "Lower decode from 2 to 1",
    ),
    Scene(
        "itl above objective",
        "decode",
        pods(2, worker(running=10, kv=0.1, itl=0.055, observations=50)),
        3,
        "none",
        "ITL p95 is 60 ms (objective 50 ms)",
        objectives=objectives(itl="50ms"),
    ),
    Scene(
        "itl cannot be met by a request alone on its worker",
        "decode",
        pods(2, worker(running=1, kv=0.1, itl=0.4, observations=50)),
        2,
        "none",
        "Keep decode at 2: ITL p95",
        objectives=objectives(itl="50ms"),
    ),
    Scene(
        "few latencies say nothing",
        "decode",
        pods(1, worker(running=1, kv=0.1, itl=0.4, observations=1)),
        1,
        "none",
        "needs 1 replica.",
        objectives=objectives(itl="50ms"),
    ),
    Scene("idle", "decode", pods(3, IDLE), 2, "stabilization", "it is idle"),
    Scene("idle at min", "decode", pods(1, IDLE), 1, "min", "minReplicas is 1"),
    Scene(
        "a request in the last minute is not idle",
        "decode",
        {"w-0": worker(rate=0.5)},
        1,
        "none",
        "needs 1 replica",
        bounds=Bounds(0, 3),
    ),
    Scene(
        "limited by max", "decode", pods(2, FULL), 2, "max", "maxReplicas is 2", bounds=Bounds(1, 2)
    ),
    Scene("max lowered", "decode", pods(5, FULL), 3, "max", "from 5 to 3", bounds=Bounds(1, 3)),
    Scene("min raised", "decode", pods(1, IDLE), 4, "min", "from 1 to 4", bounds=Bounds(4, 9)),
]

PREFILL = [
    Scene(
        "arriving within speed",
        "prefill",
        pods(2, worker(running=1, rate=700)),
        2,
        "none",
        "1400 prompt tokens/s arrive",
    ),
    Scene(
        "arriving beyond speed",
        "prefill",
        pods(2, worker(running=1, rate=1000)),
        3,
        "none",
        "a worker computes 1000/s, which needs 3 replicas",
    ),
    Scene(
        "a backlog is worked off",
        "prefill",
        pods(2, worker(running=1, waiting=20, queued=15_000, rate=800)),
        3,
        "none",
        "30000 are queued",
    ),
    Scene(
        "one prompt longer than the objective cannot be shared",
        "prefill",
        pods(2, worker(running=0.5, queued=3000, rate=100)),
        1,
        "none",
        "6000 are queued",
    ),
    Scene(
        "the queue alone takes longer than the objective",
        "prefill",
        pods(2, worker(running=1, waiting=9, queued=600, rate=500)),
        3,
        "none",
        "1200 are queued",
        objectives=objectives(ttft="500ms"),
    ),
    Scene(
        "ttft above objective with a queue",
        "prefill",
        pods(2, worker(running=1, queued=100, rate=100)),
        3,
        "none",
        "TTFT p95",
        objectives=objectives(ttft="500ms"),
        answering=pods(1, worker(ttft=0.8, observations=30)),
    ),
    Scene(
        "ttft above objective without a queue",
        "prefill",
        pods(2, worker(running=1, rate=100)),
        2,
        "none",
        "no prompt is queued, so that more workers would not help",
        objectives=objectives(ttft="500ms"),
        answering=pods(1, worker(ttft=0.8, observations=30)),
    ),
    Scene(
        "speed not measured: nothing is added for it, nothing taken away",
        "prefill",
        pods(2, worker(running=1, queued=900, rate=5000)),
        2,
        "none",
        "not measured yet",
        state=replace(CALM, throughput=Throughput(until=NOW)),
    ),
    Scene("idle", "prefill", pods(2, IDLE), 1, "min", "it is idle"),
]

STALE = worker(running=10, kv=0.1, age=31)
NAN = worker(running=10, kv=0.1, kv_usage=Missing.INVALID)
ABSENT = worker(running=10, kv=0.1, kv_usage=Missing.ABSENT)
LOW = worker(running=1, kv=0.1)
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

PODS = [
    Scene(
        "new pods are on their way already",
        "decode",
        pods(2, FULL),
        3,
        "none",
        "Keep decode at 3",
        wanted=3,
        pending=1,
    ),
    Scene(
        "at most double what is ready",
        "prefill",
        pods(3, worker(running=9, waiting=90, queued=300_000, rate=1000)),
        6,
        "pending",
        "only 3 are ready, and it at most doubles",
        bounds=Bounds(1, 90),
    ),
    Scene(
        "no more while pods cannot be scheduled",
        "decode",
        pods(2, worker(running=10, waiting=10, kv=0.9)),
        3,
        "pending",
        "1 pod cannot be scheduled, so none is added",
        wanted=3,
        unschedulable=1,
    ),
    Scene(
        "unschedulable pods do not freeze the way down",
        "decode",
        pods(2, LOW),
        4,
        "stabilization",
        "Lower decode from 5 to 4",
        wanted=5,
        unschedulable=3,
    ),
    Scene(
        "scales up during a rollout",
        "decode",
        {**pods(2, FULL), "new-0": worker(running=10, kv=0.95)},
        4,
        "none",
        "Raise decode from 2 to 4",
        wanted=2,
        pending=1,
    ),
    Scene(
        "scales down during a rollout",
        "decode",
        {**pods(3, LOW), "new-0": LOW},
        2,
        "stabilization",
        "Lower decode from 3 to 2",
        wanted=3,
        pending=2,
    ),
    Scene(
        "one drain at a time",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "1 still drain",
        draining=1,
    ),
    Scene(
        "none ready, none wanted by anybody",
        "decode",
        {},
        2,
        "stabilization",
        "no worker is ready, and no request is held",
        wanted=3,
    ),
    Scene(
        "none ready, but requests are held",
        "decode",
        {},
        3,
        "none",
        "Keep decode at 3: routers hold 2 requests",
        wanted=3,
        routers={"r-0": router(2)},
    ),
]

ZERO = Bounds(0, 5)
ZERO_SCENES = [
    Scene("to zero", "decode", pods(1, IDLE), 0, "none", "from 1 to 0: it is idle", bounds=ZERO),
    Scene("stays at zero", "decode", {}, 0, "none", "Keep decode at 0", wanted=0, bounds=ZERO),
    Scene(
        "wakes for held requests",
        "decode",
        {},
        1,
        "none",
        "Raise decode from 0 to 1: routers hold 5 requests",
        wanted=0,
        bounds=ZERO,
        routers={"r-0": router(2), "r-1": router(3)},
    ),
    Scene(
        "one router that holds requests is enough",
        "decode",
        {},
        1,
        "none",
        "routers hold 3 requests",
        wanted=0,
        bounds=ZERO,
        routers={"r-0": router(age=40), "r-1": router(3)},
    ),
    Scene(
        "prefill wakes for prompts that had no prefill worker",
        "prefill",
        {},
        1,
        "none",
        "12 prompts found no prefill worker",
        wanted=0,
        bounds=ZERO,
        routers={"r-0": router(without_prefill=12)},
    ),
    Scene(
        "prefill wakes together with decode",
        "prefill",
        {},
        1,
        "none",
        "Raise prefill from 0 to 1: routers hold 1 request until a worker is ready",
        wanted=0,
        bounds=ZERO,
        routers={"r-0": router(3, prompts=1)},
    ),
    Scene(
        "prefill does not wake for requests with short prompts",
        "prefill",
        {},
        0,
        "none",
        "no request is held",
        wanted=0,
        bounds=ZERO,
        routers={"r-0": router(3)},
    ),
    Scene(
        "decode does not wake for those",
        "decode",
        {},
        0,
        "none",
        "no request is held",
        wanted=0,
        bounds=ZERO,
        routers={"r-0": router(without_prefill=12)},
    ),
    Scene(
        "not to zero while a router is silent",
        "decode",
        pods(1, IDLE),
        1,
        "bad_data",
        "r-1 (no data for 40 s)",
        bounds=ZERO,
        routers={"r-0": router(), "r-1": router(age=40)},
    ),
    Scene(
        "not to zero while routers do not say",
        "decode",
        pods(1, IDLE),
        1,
        "bad_data",
        "kvasir_router_held_requests is absent",
        bounds=ZERO,
        routers={"r-0": router(Missing.ABSENT)},
    ),
    Scene(
        "not to zero without routers",
        "decode",
        pods(1, IDLE),
        1,
        "bad_data",
        "what routers hold is not known",
        bounds=ZERO,
        routers={},
    ),
    Scene(
        "not to zero while requests are held",
        "decode",
        pods(1, IDLE),
        1,
        "none",
        "needs 1 replica",
        bounds=ZERO,
        routers={"r-0": router(1)},
    ),
    Scene(
        "a silent pod that is on its way out wakes nothing",
        "decode",
        {},
        0,
        "bad_data",
        "Keep decode at 0: nothing is known",
        wanted=0,
        ready=("w-0",),
        bounds=ZERO,
    ),
    Scene(
        "held requests wake, though a pod is still on its way out",
        "decode",
        pods(1, IDLE),
        1,
        "none",
        "Raise decode from 0 to 1: routers hold 2 requests",
        wanted=0,
        bounds=ZERO,
        routers={"r-0": router(2)},
    ),
    Scene(
        "held requests wake, though a silent pod is on its way out",
        "decode",
        {},
        1,
        "none",
        "Raise decode from 0 to 1: routers hold 2 requests",
        wanted=0,
        ready=("w-0",),
        bounds=ZERO,
        routers={"r-0": router(2)},
    ),
    Scene(
        "not to zero while a request runs",
        "decode",
        pods(1, worker(running=1)),
        1,
        "none",
        "needs 1 replica",
        bounds=ZERO,
    ),
]

TIME = [
    Scene(
        "more was needed in the window",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "up to 3 were needed in the last 300 s",
        state=replace(CALM, peaks=((NOW - 290, 3),)),
    ),
    Scene(
        "more was needed before the window",
        "decode",
        pods(3, LOW),
        2,
        "stabilization",
        "it goes down one by one",
        state=replace(CALM, peaks=((NOW - 301, 3),)),
    ),
    Scene(
        "not watched for long enough",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "watched for 299 s of 300 s",
        state=replace(CALM, since=NOW - 299),
    ),
    Scene(
        "a gap begins the watch anew",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "watched for 0 s of 300 s",
        state=replace(CALM, seen=NOW - 61),
    ),
    Scene(
        "a clock set back begins the watch anew",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "watched for 0 s of 300 s",
        state=replace(CALM, seen=NOW + 500, since=NOW - 500, peaks=((NOW + 400, 9),)),
    ),
    Scene(
        "first decision",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "watched for 0 s of 300 s",
        state=ScaleState(),
    ),
    Scene(
        "first decision may grow",
        "decode",
        pods(2, FULL),
        3,
        "none",
        "Raise decode from 2 to 3",
        state=ScaleState(),
    ),
    Scene(
        "steps down are apart",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "the last change was 59 s ago",
        state=replace(CALM, changed=NOW - 59, lowered=True),
    ),
    Scene(
        "steps down that were taken back make it wait longer",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "up to 3 were needed in the last 1200 s",
        state=replace(CALM, retracted=2, peaks=((NOW - 1100, 3),)),
    ),
]


@pytest.mark.parametrize(
    "scene", DECODE + PREFILL + BAD_DATA + PODS + ZERO_SCENES + TIME, ids=lambda scene: scene.name
)
def test_scene(scene: Scene) -> None:
    decision, _ = decide(scene.state, scene.signals(), NOW)
    assert (decision.desired, decision.limited_by) == (scene.desired, scene.limited_by), decision
    assert scene.says in decision.reason
    check_form(decision)


def check_form(decision: Decision) -> None:
    """One sentence, and inputs that any JSON reader takes."""
    assert decision.reason.endswith(".")
    assert not any(text in decision.reason for text in ("\n", "  ", "..", "nan", "None", "; ;"))
    json.dumps(dict(decision.inputs), allow_nan=False)


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


# --- memory ----------------------------------------------------------------------------------


def test_speed_is_tokens_per_busy_time() -> None:
    """Busy half of the time at 300 tokens/s on average: 600 tokens/s when busy."""
    samples = tuple(
        WorkerSample(
            NOW - 60 + 5 * i,
            running=1.0,
            waiting=0.0,
            queued_prefill_tokens=float(i % 2),
            prompt_tokens=2000.0 * i,
            cached_tokens=500.0 * i,
        )
        for i in range(13)
    )
    scene = Scene("", "prefill", {"w-0": samples}, 1, "none", "")
    _, state = decide(ScaleState(), scene.signals(), NOW)
    assert state.throughput.tokens / state.throughput.busy == pytest.approx(600.0, rel=0.02)
    _, again = decide(state, scene.signals(), NOW + 5)
    assert again.throughput.tokens == state.throughput.tokens  # each interval counts once


def test_speed_follows_a_change() -> None:
    state = CALM
    fast = worker(running=1, queued=1, rate=5 * SPEED)
    scene = Scene("", "prefill", {"w-0": fast}, 1, "none", "")
    for i in range(50):
        later = tuple(replace(sample, time=sample.time + 60 * i) for sample in fast)
        signals = replace(scene.signals(), workers={"w-0": later})
        state = replace(state, throughput=replace(state.throughput, until=NOW + 60 * (i - 1)))
        _, state = decide(state, signals, NOW + 60 * i)
    assert state.throughput.tokens / state.throughput.busy == pytest.approx(5 * SPEED, rel=0.05)


def test_a_step_down_that_is_taken_back_doubles_the_window() -> None:
    down = Scene("", "decode", pods(3, LOW), 2, "none", "").signals()
    up = Scene("", "decode", pods(2, FULL), 3, "none", "").signals()
    lowered, state = decide(CALM, down, NOW)
    assert (lowered.desired, state.lowered, state.retracted) == (2, True, 0)
    soon = {name: shifted(history, 30) for name, history in up.workers.items()}
    raised, state = decide(state, replace(up, workers=soon), NOW + 30)
    assert (raised.desired, state.lowered, state.retracted) == (3, False, 1)


def test_a_step_down_that_lasts_resets_it() -> None:
    state = replace(CALM, lowered=True, retracted=3, changed=NOW - 301)
    up = Scene("", "decode", pods(2, FULL), 3, "none", "").signals()
    _, state = decide(state, up, NOW)
    assert state.retracted == 0


def shifted(history: History, seconds: float) -> History:
    return tuple(replace(sample, time=sample.time + seconds) for sample in history)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_settings_are_checked(value: float) -> None:
    with pytest.raises(ValueError, match="stale_after: must be more than 0"):
        Settings(stale_after=value)


def test_bounds_and_target_are_checked() -> None:
    with pytest.raises(ValueError, match="bounds: 0 <= 3 <= 2"):
        Bounds(3, 2)
    with pytest.raises(ValueError, match="target: must be at most 1"):
        Settings(target=1.5)


# --- for any input ---------------------------------------------------------------------------

any_number = st.one_of(
    st.floats(0, 2.0**63), st.floats(0, 100), st.just(0.0), st.sampled_from(list(Missing))
)
any_part = st.one_of(st.floats(0, 1), st.sampled_from(list(Missing)))


@st.composite
def histograms(draw: st.DrawFn) -> Histogram | Missing:
    if draw(st.booleans()):
        return draw(st.sampled_from(list(Missing)))
    counts = sorted(draw(st.lists(st.integers(0, 2**40), min_size=15, max_size=15)))
    return Histogram(BUCKETS, tuple(float(count) for count in counts))


@st.composite
def histories(draw: st.DrawFn) -> History:
    times = sorted(draw(st.sets(st.integers(0, 100), max_size=5)))
    return tuple(
        WorkerSample(
            NOW - 90 + time,
            draw(any_number),
            draw(any_number),
            draw(any_part),
            draw(any_number),
            draw(any_number),
            draw(any_number),
            draw(histograms()),
            draw(histograms()),
            draw(any_number),
            draw(any_number),
        )
        for time in times
    )


@st.composite
def any_signals(draw: st.DrawFn) -> RoleSignals:
    low = draw(st.integers(0, 5))
    names = st.sampled_from(["a", "b", "c", "d"])
    some = st.dictionaries(names, histories(), max_size=4)
    times = st.floats(NOW - 50, NOW)
    router_sample = st.builds(RouterSample, times, any_number, any_number, any_number).map(
        lambda sample: (sample,)
    )
    return RoleSignals(
        role=draw(st.sampled_from(["prefill", "decode"])),
        bounds=Bounds(low, low + draw(st.integers(0, 5))),
        replicas=Replicas(
            draw(st.integers(0, 12)),
            tuple(draw(st.sets(names))),
            *(draw(st.integers(0, 3)) for _ in range(3)),
        ),
        objectives=draw(st.sampled_from([objectives(), objectives("500ms", "50ms")])),
        workers=draw(some),
        answering=draw(some),
        routers=draw(st.dictionaries(st.sampled_from(["r", "s"]), router_sample)),
    )


any_state = st.builds(
    ScaleState,
    peaks=st.lists(st.tuples(st.floats(0, NOW), st.integers(0, 20)), max_size=4).map(tuple),
    since=st.one_of(st.none(), st.floats(0, NOW)),
    seen=st.one_of(st.none(), st.floats(NOW - 50, NOW)),
    changed=st.one_of(st.none(), st.floats(0, NOW)),
    lowered=st.booleans(),
    retracted=st.integers(0, 2000),
    throughput=st.builds(Throughput, st.floats(0, 1e300), st.floats(0, 1e6), st.floats(0, NOW)),
)


@settings(max_examples=120, deadline=None)
@given(any_state, any_signals())
def test_always_within_bounds_and_sound(state: ScaleState, signals: RoleSignals) -> None:
    decision, _ = decide(state, signals, NOW)
    bounds, wanted = signals.bounds, signals.replicas.wanted
    assert bounds.min <= decision.desired <= bounds.max
    # Down one by one, except into the bounds.
    assert decision.desired >= min(wanted - 1, bounds.max)
    check_form(decision)


@settings(max_examples=120, deadline=None)
@given(any_signals())
def test_a_restart_takes_no_worker_away(signals: RoleSignals) -> None:
    decision, _ = decide(ScaleState(), signals, NOW)
    assert decision.desired >= signals.bounds.clamp(signals.replicas.wanted)


@settings(max_examples=120, deadline=None)
@given(any_state, any_signals())
def test_silent_workers_are_never_taken_away(state: ScaleState, signals: RoleSignals) -> None:
    silent = replace(signals, workers={}, routers={})
    decision, _ = decide(state, silent, NOW)
    assert decision.desired == signals.bounds.clamp(signals.replicas.wanted)


@settings(max_examples=120, deadline=None)
@given(
    role=st.sampled_from(["prefill", "decode"]),
    field_name=st.sampled_from(["queued", "kv", "waiting", "itl", "rate", "ttft"]),
    base=st.tuples(*(st.floats(0, 1) for _ in range(6))),
    more=st.floats(0, 1),
    count=st.integers(1, 6),
)
def test_more_load_never_asks_for_less(
    role: Role, field_name: str, base: tuple[float, ...], more: float, count: int
) -> None:
    scales = {"queued": 9e4, "kv": 1.0, "waiting": 40.0, "itl": 0.2, "rate": 3000.0, "ttft": 2.0}
    low = {name: scale * part for (name, scale), part in zip(scales.items(), base, strict=True)}
    high = low | {field_name: low[field_name] + more * (scales[field_name] - low[field_name])}

    def desired(load: Mapping[str, float]) -> int:
        workers = pods(count, worker(running=20, observations=50, **load))
        scene = Scene("", role, workers, 0, "none", "", objectives=objectives("1s", "50ms"))
        signals = replace(scene.signals(), answering=workers)
        return decide(CALM, signals, NOW)[0].desired

    assert desired(high) >= desired(low)


# --- in a loop -------------------------------------------------------------------------------


def changes(replicas: list[int]) -> int:
    return sum(before != after for before, after in pairwise(replicas))


@settings(max_examples=6, deadline=None)
@given(
    role=st.sampled_from(["prefill", "decode"]),
    load=st.floats(0.02, 7.5),
)
def test_a_constant_load_ends_in_a_fixed_size(role: Role, load: float) -> None:
    """``load`` in workers at the target: never too few of them, and no flapping."""
    total = load * 0.8 * (ScaledPool.speed if role == "prefill" else ScaledPool.slots)
    pool = ScaledPool(role, lambda _: total, Bounds(1, 12))
    pool.run(1800)
    settled = pool.run(1800)
    assert changes(settled) <= 2
    assert settled[-1] >= load / 1.1
    assert settled[-1] <= math.ceil(load * 1.15) + 1


def test_a_burst_is_met_within_two_starts_of_a_pod() -> None:
    pool = ScaledPool(
        "prefill",
        lambda t: 18_000.0 if 2000 <= t < 2300 else 2000.0,
        Bounds(1, 10),
        objectives=objectives(ttft="500ms"),
    )
    assert pool.run(900)[-1] == 1
    during = pool.run(100 + 90)
    assert during[-1] >= 5  # 18,000 / (0.8 * 5,000) = 4.5
    pool.run(110)
    after = pool.run(1500)
    assert max(after) <= 10
    assert after[-1] == 1
    assert all(later >= sooner - 1 for sooner, later in pairwise(after))


def test_a_ramp_is_followed_up_and_down() -> None:
    pool = ScaledPool(
        "decode",
        lambda t: 240.0 - abs(t - 3400.0) / 10.0,
        Bounds(1, 12),
        objectives=objectives(itl="60ms"),
    )
    up = pool.run(2400)
    assert 5 <= up[-1] <= 8  # 240 / 50 / 0.8 = 6
    assert pool.run(2000)[-1] <= 3 + 1


def test_to_zero_and_back() -> None:
    pool = ScaledPool("decode", lambda t: 0.0 if t < 1900 else 20.0, Bounds(0, 3))
    asleep = pool.run(800)
    assert asleep[-1] == 0
    awake = pool.run(600)
    assert set(awake[20:]) == {1}


def test_a_cluster_that_is_full() -> None:
    pool = ScaledPool("prefill", lambda t: 18_000.0 if t < 1600 else 2000.0, Bounds(1, 10), nodes=3)
    busy = pool.run(600)
    assert max(busy) <= 6  # what is asked for before it is known that no node has room
    calm = pool.run(2500)
    assert calm[-1] == 1


def test_a_restarted_operator_watches_a_whole_window_before_a_step_down() -> None:
    """Restarted when it was about to go down; then it ends like one that has never gone."""

    def pool() -> ScaledPool:
        return ScaledPool("decode", lambda t: 150.0 if t < 1200 else 20.0, Bounds(1, 12))

    steady, restarted = pool(), pool()
    most = steady.run(450)[-1]
    assert restarted.run(450)[-1] == most > 1
    restarted.restart_operator()
    assert steady.run(290)[-1] < most
    assert set(restarted.run(290)) == {most}
    steady.run(900)
    restarted.run(900)
    assert steady.wanted == restarted.wanted == 1


def test_an_operator_that_starts_meets_a_burst_at_once() -> None:
    pool = ScaledPool("decode", lambda t: 20.0 if t < 1100 else 200.0, Bounds(1, 12))
    pool.run(100)
    pool.restart_operator()
    assert pool.run(60)[-1] > 1
