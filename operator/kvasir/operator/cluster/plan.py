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
    ROLLOUT_MINIMUM,
    Object,
    Observed,
    Reference,
    reference,
)
from kvasir.operator.cluster.rollout import PATIENCE, Rollout, rollout, takes_requests
from kvasir.operator.modelservice import ModelService, Role
from kvasir.operator.workerpool import WorkerRole

_SCALED = "scaling"
"""Value of the annotation APPLIED_REPLICAS of a pool that the autoscaler writes."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A Deployment that is not wanted any more gets so many replicas; nothing else changes."""

    key: Reference
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
    awaits_room: bool = False
    """Whether old workers go first unless there is room soon."""
    interrupted: tuple[WorkerRole, ...] = ()
    """Roles that then have no worker until a new one is ready."""
    router_revision: str = ""
    """The newest one, of the routers' pods."""

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
    service: ModelService,
    installation: Installation,
    observed: Observed,
    now: float,
    patience: float = PATIENCE,
) -> Plan:
    """What to do now.

    Args:
        service: the newest spec.
        installation: what is the same for all services.
        observed: what there is; with the fleet if ``needs_fleet``.
        now: seconds since the Unix epoch.
        patience: seconds without a place after which a new worker gets that of an old one.
    """
    newest = {
        role: objects.worker_revision(service, role, installation) for role in names.WORKER_ROLES
    }
    wanted = {role: wanted_replicas(service, role, observed) for role in names.WORKER_ROLES}
    newest_names = {role: newest[role].name for role in newest}
    course = rollout(newest_names, wanted, observed, unplaced_before=now - patience)
    drains = Drain()
    sizes: dict[str, int] = {}
    for deployment in observed.workers:
        deadline = service.spec.rollout.drain_deadline
        size, drain = shrink(deployment, course.targets[deployment.name], observed, now, deadline)
        sizes[deployment.name], drains = size, drains + drain
    account = _router_account(service, observed)
    routers = objects.router_deployment(
        service, installation, service.spec.router.initial_replicas, account
    )
    apply = (
        *objects.shared(service, installation),
        *([routers] if account else []),
        *_workers(newest.values(), wanted, sizes),
        *(_pool(service, role, wanted[role], course, observed) for role in newest),
    )
    names_now = newest_names.values()
    old_sizes = {name: size for name, size in sizes.items() if name not in names_now}
    return Plan(
        apply=apply,
        drains=drains,
        resize=tuple(_resized(old_sizes, observed)),
        delete=tuple(_unwanted((*apply, routers), observed, old_sizes)),
        progress={role: _progress(newest[role], wanted[role], observed) for role in newest},
        drain_first=course.drain_first,
        awaits_room=course.awaits_room,
        interrupted=course.interrupted,
        router_revision=routers["spec"]["template"]["metadata"]["labels"][names.POD_REVISION_LABEL],
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
        yield from revision.companions
        # What grows does so at once; what shrinks, as far as its workers are drained.
        yield revision.deployment(max(wanted[revision.role], sizes.get(revision.name, 0)))


def _pool(
    service: ModelService, role: WorkerRole, wanted: int, course: Rollout, observed: Observed
) -> Object:
    pool = objects.worker_pool(service, role, wanted)
    pool["metadata"]["annotations"] = {
        APPLIED_REPLICAS: _applied(_spec(service, role)),
        ROLLOUT_MINIMUM: str(course.minimum.get(role, 0)),
    }
    if seen := observed.objects.get(reference(pool)):
        # Whoever scales the pool at this very moment wins: the API server refuses this write.
        pool["metadata"]["resourceVersion"] = seen["metadata"]["resourceVersion"]
    return pool


# --- objects ----------------------------------------------------------------------------------


def _router_account(service: ModelService, observed: Observed) -> str:
    """Uid of the routers' ServiceAccount; empty if none was ever seen: routers wait for it."""
    name = names.router(service.name)
    if account := observed.objects.get(Reference("ServiceAccount", name)):
        return str(account["metadata"]["uid"])
    # It went, and is made anew in this step; routers roll when it is there.
    running = observed.objects.get(Reference("Deployment", name))
    template = running["spec"]["template"] if running else {}
    return str(
        (template.get("metadata", {}).get("annotations") or {}).get(names.ACCOUNT_ANNOTATION, "")
    )


def _resized(sizes: Mapping[str, int], observed: Observed) -> Iterator[Resize]:
    for deployment in observed.deployments:
        size = sizes.get(deployment.name, 0)
        if 0 < size < deployment.replicas:
            yield Resize(Reference(deployment.kind, deployment.name), size)


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
        ready=takes_requests(observed.pods_of(newest.role, newest.name)),
        draining=sum(pod.draining_since is not None for pod in alive),
        old=sum(pod.deployment != newest.name for pod in alive),
    )
