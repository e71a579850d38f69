"""What the autoscaler is told, what it remembers and what it answers: frozen data.

Times are seconds of one clock, such as those since the Unix epoch.
Holds no decision: those are in the other modules here and in ``scale.py``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from kvasir.operator.modelservice import Objectives
from kvasir.operator.signals import RouterSample, WorkerSample

Role = Literal["prefill", "decode"]
LimitedBy = Literal["none", "min", "max", "stabilization", "bad_data", "pending"]
Input = float | int | str | None
"""A value of ``Decision.inputs``; a float is finite. None: not known, or not asked for."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How the autoscaler behaves; the defaults are those of the operator. Seconds."""

    target: float = 0.8
    """Part of a worker's KV blocks, and of its time for prefill, that should be in use."""
    tolerance: float = 0.1
    """A role grows only when it needs this part more than it has: noise adds no replica."""
    stabilization: float = 300.0
    """A role shrinks only to what was enough all this time."""
    max_stabilization: float = 3600.0
    """That time doubles, up to this, with each step down that had to be taken back within it."""
    down_interval: float = 60.0
    """Between two steps down, so that the signals show what the first one did."""
    stale_after: float = 30.0
    """Older data is not used."""
    gauge_window: float = 30.0
    """Queues and usages are averaged over this time."""
    rate_window: float = 60.0
    """Rates and latencies are measured over this time."""
    catch_up: float = 30.0
    """A backlog of prompts is to be worked off in this time, about that of a pod's start."""
    min_observations: int = 20
    """Fewer latencies in the window say nothing about a 95th percentile."""
    default_ttft: float = 1.0
    """For how long prompts may queue where no TTFT objective is set."""
    throughput_half_life: float = 300.0
    """Busy time in which what was measured about a worker's speed loses half its weight."""
    throughput_evidence: float = 10.0
    """Busy time after which a measured speed may add replicas."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name}: must be more than 0, got {value}")
        if self.target > 1:
            raise ValueError(f"target: must be at most 1, got {self.target}")


@dataclass(frozen=True, slots=True)
class Bounds:
    min: int
    max: int

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max:
            raise ValueError(f"bounds: 0 <= {self.min} <= {self.max} does not hold")

    def clamp(self, replicas: int) -> int:
        return min(max(replicas, self.min), self.max)


@dataclass(frozen=True, slots=True)
class Replicas:
    """The pods of a role, of all revisions together.

    ``wanted`` is what the WorkerPool asks for now. ``ready`` names the pods that take new
    requests: no draining one. ``pending`` ones are scheduled and start up; ``unschedulable``
    ones wait for a node; ``draining`` ones finish what they have and go.
    """

    wanted: int
    ready: tuple[str, ...] = ()
    pending: int = 0
    unschedulable: int = 0
    draining: int = 0


@dataclass(frozen=True, slots=True)
class RoleSignals:
    """All that a decision about one role is made from.

    ``workers`` and ``routers`` map a pod's name to its samples, oldest first, covering
    ``Settings.rate_window`` (see ``signals.remember``). ``answering`` are the decode workers,
    whatever the role: only they give tokens to clients, so only they know the TTFT.
    """

    role: Role
    bounds: Bounds
    replicas: Replicas
    objectives: Objectives
    workers: Mapping[str, tuple[WorkerSample, ...]]
    answering: Mapping[str, tuple[WorkerSample, ...]]
    routers: Mapping[str, tuple[RouterSample, ...]]


@dataclass(frozen=True, slots=True)
class Throughput:
    """How fast one worker computes prompts: tokens computed in so many seconds of being busy.

    Both sums fade together, so that their quotient follows a change of model or hardware.
    Intervals that end at or before ``until`` are in them.
    """

    tokens: float = 0.0
    busy: float = 0.0
    until: float = 0.0


@dataclass(frozen=True, slots=True)
class ScaleState:
    """What a decision about a role leaves for the next one.

    ``peaks`` are (time, replicas needed), each higher than all later ones: the first one that is
    young enough is the maximum of the stabilization window. ``since`` is when unbroken
    observation began, ``seen`` the latest decision, ``changed`` the latest change, ``lowered``
    whether that was a step down, ``retracted`` how many of those in a row had to be taken back.
    """

    peaks: tuple[tuple[float, int], ...] = ()
    since: float | None = None
    seen: float | None = None
    changed: float | None = None
    lowered: bool = False
    retracted: int = 0
    throughput: Throughput = Throughput()


@dataclass(frozen=True, slots=True)
class Decision:
    """How many replicas a role should have; becomes ``status.lastDecision``.

    ``reason`` is one sentence. ``limited_by`` is what kept ``desired`` from being what the
    signals alone ask for.
    """

    time: float
    role: Role
    desired: int
    reason: str
    limited_by: LimitedBy
    inputs: Mapping[str, Input]
