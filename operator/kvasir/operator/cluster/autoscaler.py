"""The built-in autoscaler at work: scrapes pods, remembers samples, and asks ``scale.decide``.

What it remembers is in memory alone. After a restart, or a change of leader, it has seen nothing
yet, and what is not known never takes a worker away: replicas stay, or grow, until a whole
stabilization window has been watched anew.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pydantic.alias_generators import to_camel

from kvasir.operator.cluster import names
from kvasir.operator.cluster.observed import Observed
from kvasir.operator.cluster.queue import Key
from kvasir.operator.cluster.workers import Workers
from kvasir.operator.modelservice import ModelService, Scaling
from kvasir.operator.resource_status import LastDecision
from kvasir.operator.scale import (
    Bounds,
    Decision,
    Replicas,
    RoleSignals,
    ScaleState,
    Settings,
    decide,
)
from kvasir.operator.scaling.contracts import LimitedBy
from kvasir.operator.signals import RouterSample, WorkerSample, remember
from kvasir.operator.workerpool import WorkerRole

PERIOD = 5.0
"""Seconds between two decisions about a service."""
_LASTING = 30.0
"""Seconds for which something has hindered a role before users are told."""
_HINDRANCES: frozenset[LimitedBy] = frozenset({"max", "pending", "bad_data"})
"""What users may want to do something about."""
_DEFAULTS = Settings()


@dataclass
class _Limit:
    """What keeps a role from another size, since when, and whether users know."""

    by: LimitedBy
    since: float
    told: bool = False


@dataclass
class _Memory:
    time: float = 0.0
    """Of the latest decision."""
    limits: dict[WorkerRole, _Limit] = field(default_factory=dict)
    workers: dict[str, tuple[WorkerSample, ...]] = field(default_factory=dict)
    routers: dict[str, tuple[RouterSample, ...]] = field(default_factory=dict)
    states: dict[WorkerRole, ScaleState] = field(default_factory=dict)


class Autoscaler:
    """Decides for the services that have ``scaling``; one decision for a service at a time."""

    def __init__(self, workers: Workers, clock: Callable[[], float]) -> None:
        """``clock``: seconds since the Unix epoch."""
        self._workers = workers
        self._clock = clock
        self._memories: dict[Key, _Memory] = {}

    def forget(self, key: Key) -> None:
        """A service that is gone."""
        self._memories.pop(key, None)

    async def decisions(
        self, key: Key, service: ModelService, observed: Observed
    ) -> list[Decision]:
        """Decisions to carry out, and to tell; none before the period is over.

        Those that change a pool's replicas, and those that for a while could not.
        """
        scaled = {role: scaling for role in names.WORKER_ROLES if (scaling := _of(service, role))}
        if not scaled:
            self.forget(key)
            return []
        memory = self._memories.setdefault(key, _Memory())
        if self._clock() - memory.time < PERIOD:
            return []
        await self._scrape(memory, observed)
        now = memory.time = self._clock()
        found = []
        for role, scaling in scaled.items():
            pool = observed.pool(role)
            if pool is None:
                continue
            signals = _signals(role, scaling, pool.replicas, service, observed, memory)
            state = memory.states.get(role, ScaleState())
            decision, memory.states[role] = decide(state, signals, now, _settings(scaling))
            if _is_news(decision, pool.replicas, memory.limits):
                found.append(decision)
        return found

    async def _scrape(self, memory: _Memory, observed: Observed) -> None:
        workers, routers = await self._workers.scrape(observed.pods)
        since = self._clock() - 2 * _DEFAULTS.rate_window
        alive = [pod for pod in observed.pods if not pod.terminating]
        worker_names = [pod.name for pod in alive if pod.role != "router"]
        router_names = [pod.name for pod in alive if pod.role == "router"]
        memory.workers = remember(memory.workers, workers, worker_names, since)
        memory.routers = remember(memory.routers, routers, router_names, since)


def _is_news(decision: Decision, wanted: int, limits: dict[WorkerRole, _Limit]) -> bool:
    """Whether users are to know of a decision; remembers what they are told."""
    role, by = decision.role, decision.limited_by
    limit = limits.get(role)
    if limit is None or limit.by != by:
        limit = limits[role] = _Limit(by, decision.time)
    if decision.desired != wanted:
        limit.told = True
        return True
    if limit.told or by not in _HINDRANCES or decision.time - limit.since < _LASTING:
        return False
    limit.told = True
    return True


def held_to_bounds(service: ModelService, observed: Observed) -> Iterator[str]:
    """What whoever scales a pool beyond its bounds is to know; one sentence for each pool."""
    for pool in observed.pools:
        scaling = _of(service, pool.role)
        if scaling is None or scaling.min_replicas <= pool.replicas <= scaling.max_replicas:
            continue
        if pool.replicas > scaling.max_replicas:
            limit = f"maxReplicas is {scaling.max_replicas}"
        else:
            limit = f"minReplicas is {scaling.min_replicas}"
        name = names.pool(service.name, pool.role)
        yield f"wpool/{name} asked for {pool.replicas}, but spec.{pool.role}.scaling.{limit}."


def last_decision(decision: Decision) -> LastDecision:
    """As the status has it."""
    return LastDecision(
        time=datetime.fromtimestamp(int(decision.time), UTC),
        role=decision.role,
        desired=decision.desired,
        reason=decision.reason[:1024],
        limited_by=None if decision.limited_by == "none" else to_camel(decision.limited_by),
        inputs={
            to_camel(key): "unknown" if value is None else str(value)[:256]
            for key, value in sorted(decision.inputs.items())[:32]
        },
    )


def _of(service: ModelService, role: WorkerRole) -> Scaling | None:
    return (service.spec.prefill if role == "prefill" else service.spec.decode).scaling


def _settings(scaling: Scaling) -> Settings:
    window = scaling.stabilization_window
    return Settings(
        stabilization=window,
        max_stabilization=max(_DEFAULTS.max_stabilization, window),
        down_interval=min(_DEFAULTS.down_interval, window),
    )


def _signals(
    role: WorkerRole,
    scaling: Scaling,
    wanted: int,
    service: ModelService,
    observed: Observed,
    memory: _Memory,
) -> RoleSignals:
    alive = [pod for pod in observed.pods_of(role) if not pod.terminating]
    staying = [pod for pod in alive if pod.draining_since is None]
    waiting = [pod for pod in staying if not pod.ready]
    homeless = sum(pod.fault is not None and pod.fault.reason == "Unschedulable" for pod in waiting)
    decoding = {pod.name for pod in observed.pods_of("decode")}
    own = {pod.name for pod in alive}
    return RoleSignals(
        role=role,
        bounds=Bounds(scaling.min_replicas, scaling.max_replicas),
        replicas=Replicas(
            wanted=wanted,
            ready=tuple(pod.name for pod in staying if pod.ready),
            pending=len(waiting) - homeless,
            unschedulable=homeless,
            draining=len(alive) - len(staying),
        ),
        objectives=service.spec.objectives,
        workers={name: samples for name, samples in memory.workers.items() if name in own},
        answering={name: samples for name, samples in memory.workers.items() if name in decoding},
        routers=memory.routers,
    )
