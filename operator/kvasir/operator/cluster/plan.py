"""The next step of a ModelService in a cluster. Pure: no I/O, no clock, no state of its own.

    (ModelService, Installation, Observed, now) --next_step--> Plan

Called again after each change, it leads from anything that can be observed to what is wanted, so
that an operator may end at any point. Invariants:

- A worker takes no harm: one that may have requests is drained before its Deployment shrinks.
- Traffic keeps a complete revision: workers of an old one go only when each role of the new one
  has all its workers ready, and every router uses them. The exception is DrainFirst: new workers
  that find no place get that of old ones.
- A WorkerPool's replicas belong to whoever scales it, but for the moment when the ModelService's
  own number changes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvasir.operator.cluster import names, objects
from kvasir.operator.cluster.drain import Drain, shrink
from kvasir.operator.cluster.objects import Installation, WorkerRevision
from kvasir.operator.cluster.observed import (
    APPLIED_REPLICAS,
    Deployment,
    Object,
    Observed,
    Reference,
    reference,
)
from kvasir.operator.modelservice import ModelService, Role
from kvasir.operator.workerpool import WorkerRole

_SCALED = "scaling"
"""Value of the annotation APPLIED_REPLICAS of a pool that the autoscaler writes."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A Deployment that is not wanted any more gets so many replicas; nothing else changes."""

    deployment: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one role is; what the status is made from."""

    wanted: int
    deployment: str
    """Name of the newest one."""
    revision: str
    """Of its pods."""
    ready: int
    """Workers of the newest Deployment that take requests."""
    draining: int
    old: int
    """Workers of older ones."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done now, in this order."""

    drains: Drain
    apply: tuple[Object, ...]
    resize: tuple[Resize, ...] = ()
    delete: tuple[Reference, ...] = ()
    progress: Mapping[str, Progress] = field(default_factory=dict)
    drain_first: bool = False

    @property
    def undecided(self) -> bool:
        """Whether the next step waits for what only workers and routers know."""
        return bool(self.drains.waiting) or any(each.old for each in self.progress.values())


def needs_fleet(service: ModelService, installation: Installation, observed: Observed) -> bool:
    """Whether the next step depends on what workers and routers say of themselves."""
    return any(
        deployment.name != objects.worker_revision(service, role, installation).name
        or deployment.replicas > wanted_replicas(service, role, observed)
        for role in names.WORKER_ROLES
        for deployment in observed.of(role)
    ) or any(pod.draining_since is not None for pod in observed.pods if not pod.terminating)


def next_step(
    service: ModelService, installation: Installation, observed: Observed, now: float
) -> Plan:
    """What to do now.

    Args:
        service: the newest spec.
        installation: what is the same for all services.
        observed: what there is; with the fleet if ``needs_fleet``.
        now: seconds since the Unix epoch.
    """
    newest = {
        role: objects.worker_revision(service, role, installation) for role in names.WORKER_ROLES
    }
    wanted = {role: wanted_replicas(service, role, observed) for role in names.WORKER_ROLES}
    targets, drain_first = _targets({r: newest[r].name for r in newest}, wanted, observed)
    drains = Drain()
    sizes: dict[str, int] = {}
    for deployment in observed.workers:
        deadline = service.spec.rollout.drain_deadline
        size, drain = shrink(deployment, targets[deployment.name], observed, now, deadline)
        sizes[deployment.name], drains = size, drains + drain
    apply = (
        *objects.shared(service, installation),
        objects.router_deployment(service, installation, service.spec.router.initial_replicas),
        *_workers(newest.values(), wanted, sizes),
        *(_pool(service, role, wanted[role], observed) for role in newest),
    )
    names_now = {revision.name for revision in newest.values()}
    old_sizes = {name: size for name, size in sizes.items() if name not in names_now}
    return Plan(
        apply=apply,
        drains=drains,
        resize=tuple(_resized(old_sizes, observed)),
        delete=tuple(_unwanted(apply, observed, old_sizes)),
        progress={role: _progress(newest[role], wanted[role], observed) for role in newest},
        drain_first=drain_first,
    )


# --- replicas ---------------------------------------------------------------------------------


def wanted_replicas(service: ModelService, role: WorkerRole, observed: Observed) -> int:
    """What the role's pool says, or the ModelService where that has just changed."""
    spec, pool = _spec(service, role), observed.pool(role)
    if pool is None:
        return spec.initial_replicas
    if spec.scaling is not None:
        return min(max(pool.replicas, spec.scaling.min_replicas), spec.scaling.max_replicas)
    return pool.replicas if pool.applied == _applied(spec) else spec.initial_replicas


def _spec(service: ModelService, role: WorkerRole) -> Role:
    return service.spec.prefill if role == "prefill" else service.spec.decode


def _applied(spec: Role) -> str:
    return _SCALED if spec.scaling is not None else str(spec.initial_replicas)


def _workers(
    newest: Iterable[WorkerRevision], wanted: Mapping[WorkerRole, int], sizes: Mapping[str, int]
) -> Iterator[Object]:
    for revision in newest:
        yield revision.config_map
        # What grows does so at once; what shrinks, as far as its workers are drained.
        yield revision.deployment(max(wanted[revision.role], sizes.get(revision.name, 0)))


def _pool(service: ModelService, role: WorkerRole, wanted: int, observed: Observed) -> Object:
    pool = objects.worker_pool(service, role, wanted)
    pool["metadata"]["annotations"] = {APPLIED_REPLICAS: _applied(_spec(service, role))}
    if seen := observed.objects.get(reference(pool)):
        # Whoever scales the pool at this very moment wins: the API server refuses this write.
        pool["metadata"]["resourceVersion"] = seen["metadata"]["resourceVersion"]
    return pool


# --- rollout ----------------------------------------------------------------------------------


def _targets(
    newest: Mapping[WorkerRole, str], wanted: Mapping[WorkerRole, int], observed: Observed
) -> tuple[dict[str, int], bool]:
    """Deployment to the replicas that it should end with for now; whether old ones go first."""
    complete = all(_complete(role, newest[role], wanted[role], observed) for role in newest)
    targets: dict[str, int] = {}
    kept: dict[WorkerRole, Deployment] = {}
    for role, name in newest.items():
        old = [each for each in observed.of(role) if each.name != name]
        targets |= dict.fromkeys((each.name for each in old), 0)
        targets[name] = wanted[role]
        if old and not complete:
            kept[role] = max(old, key=lambda each: _worth(each, observed))
    homeless = {role: _homeless(role, newest[role], observed) for role in newest}
    for role, deployment in kept.items():
        targets[deployment.name] = max(0, deployment.replicas - homeless[role])
    # Where a role has no old worker left to give its place, those of the other one do, if new
    # ones already do their work.
    left = sum(
        max(0, count - (kept[role].replicas if role in kept else 0))
        for role, count in homeless.items()
    )
    for role, deployment in kept.items():
        if left and _ready(role, newest[role], observed):
            given = min(left, targets[deployment.name])
            targets[deployment.name] -= given
            left -= given
    return targets, bool(kept) and any(homeless.values())


def _ready(role: str, deployment: str, observed: Observed) -> int:
    return sum(
        pod.ready and not pod.terminating and pod.draining_since is None
        for pod in observed.pods_of(role, deployment)
    )


def _complete(role: str, deployment: str, wanted: int, observed: Observed) -> bool:
    """Whether a role's newest workers are all there, and every router uses them."""
    if deployment not in {each.name for each in observed.of(role)}:
        return False
    used = 0
    routers = [pod.name for pod in observed.pods_of("router") if pod.ready and not pod.terminating]
    for pod in observed.pods_of(role, deployment):
        known = all(
            observed.fleet.routers.get(router, {}).get(pod.name) == "ready" for router in routers
        )
        used += pod.ready and not pod.terminating and pod.draining_since is None and known
    return used >= wanted


def _homeless(role: str, deployment: str, observed: Observed) -> int:
    """New workers that find no place, but for what pods that are about to end leave to them."""
    pods = observed.pods_of(role)
    waiting = sum(
        pod.deployment == deployment
        and pod.fault is not None
        and pod.fault.reason == "Unschedulable"
        and not pod.terminating
        for pod in pods
    )
    return max(0, waiting - sum(pod.terminating for pod in pods))


def _worth(deployment: Deployment, observed: Observed) -> tuple[int, int, str, int, str]:
    """Which old Deployment to keep meanwhile: of the revision that serves best in all its roles.

    The revision decides before the Deployment does, so that no role keeps another one than the
    others: routers pair workers within one revision.
    """
    serving = [
        sum(
            _ready(role, each.name, observed)
            for each in observed.of(role)
            if each.revision == deployment.revision
        )
        for role in names.WORKER_ROLES
    ]
    ready = _ready(deployment.role, deployment.name, observed)
    return min(serving), sum(serving), deployment.revision, ready, deployment.name


def _resized(sizes: Mapping[str, int], observed: Observed) -> Iterator[Resize]:
    for deployment in observed.deployments:
        size = sizes.get(deployment.name, 0)
        if 0 < size < deployment.replicas:
            yield Resize(deployment.name, size)


def _unwanted(
    desired: Iterable[Object], observed: Observed, old_sizes: Mapping[str, int]
) -> Iterator[Reference]:
    """What was made for an older spec. Objects that share a Deployment's name go with it."""
    wanted = {reference(item) for item in desired}
    needed = {name for name, size in old_sizes.items() if size > 0}
    for key, item in observed.objects.items():
        owned = any(
            owner.get("controller") for owner in item["metadata"].get("ownerReferences", ())
        )
        if key not in wanted and key.name not in needed and owned:
            yield key


def _progress(newest: WorkerRevision, wanted: int, observed: Observed) -> Progress:
    alive = [pod for pod in observed.pods_of(newest.role) if not pod.terminating]
    return Progress(
        wanted=wanted,
        deployment=newest.name,
        revision=newest.pod_revision,
        ready=_ready(newest.role, newest.name, observed),
        draining=sum(pod.draining_since is not None for pod in alive),
        old=sum(pod.deployment != newest.name for pod in alive),
    )
