"""Scenes for the autoscaler: what is known of a role, and the decision that it must give."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from helpers.scaled_pool import EMPTY, observe
from kvasir.operator.modelservice import Objectives
from kvasir.operator.scale import Bounds, Decision, Replicas, RoleSignals, ScaleState, decide
from kvasir.operator.scaling.contracts import LimitedBy, Role, Throughput
from kvasir.operator.signals import Missing, RouterSample, WorkerSample

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
LOW = worker(running=1, kv=0.1)


def check_scene(scene: Scene) -> None:
    """The decision in it, and the form of that."""
    decision, _ = decide(scene.state, scene.signals(), NOW)
    assert (decision.desired, decision.limited_by) == (scene.desired, scene.limited_by), decision
    assert scene.says in decision.reason
    check_form(decision)


def check_form(decision: Decision) -> None:
    """One sentence, and inputs that any JSON reader takes."""
    assert decision.reason.endswith(".")
    assert not any(text in decision.reason for text in ("\n", "  ", "..", "nan", "None", "; ;"))
    json.dumps(dict(decision.inputs), allow_nan=False)
