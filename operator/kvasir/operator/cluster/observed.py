"""What was seen of one ModelService: frozen data, and how it is read from API objects. Pure.

Owns the meaning of what other controllers write: when a pod is ready, and why one is not. Decides
nothing. Raw objects stay reachable by ``Reference``, for comparison with what is wanted.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from kvasir.operator.cluster import names
from kvasir.operator.cluster.faults import Fault, condition, pod_fault, unplaced_since
from kvasir.operator.cluster.names import (
    COMPONENT_LABEL,
    GROUP,
    GROUP_INDEX_LABEL,
    GROUP_KEY_LABEL,
    POD_REVISION_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
    SERVICE_LABEL,
    WORKER_ROLES,
)
from kvasir.operator.cluster.places import Needs, largest, needs
from kvasir.operator.workerpool import WorkerRole

Object = Mapping[str, Any]

APPLIED_REPLICAS = f"{GROUP}/applied-replicas"
"""On a WorkerPool: the ModelService's own number that was written to it last."""
ROLLOUT_MINIMUM = f"{GROUP}/rollout-minimum"
"""On a WorkerPool: how many workers serve at least while old ones give their places; else 0."""
DRAINING_SINCE = f"{GROUP}/draining-since"
"""On a worker's pod: when it was told to drain."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost"""


@dataclass(frozen=True, slots=True, order=True)
class Reference:
    """Names an object within the namespace of its ModelService."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Pod:
    """``deployment`` is the one that it belongs to; times are seconds since the Unix epoch.

    A worker that spans nodes is its leader: it is ready, and has a place, when all its pods are and
    have, and the faults of all are its own.
    """

    name: str
    role: str
    deployment: str
    revision: str = ""
    ready: bool = False
    terminating: bool = False
    scheduled: bool = True
    address: str = ""
    created: float = 0.0
    draining_since: float | None = None
    condemned: bool = False
    """Whether its deletion cost makes it the next one to go."""
    fault: Fault | None = None
    unplaced_since: float | None = None
    """Since when the scheduler finds no place for it; ``fault`` has its words."""
    needs: Needs = field(default_factory=Needs)
    """Of the largest of its pods, in each resource."""
    pod_revision: str = ""
    ordinal: int = 0
    """Its place in a LeaderWorkerSet."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """``replicas`` is what is asked of it now; of none of its pods it is known whether they are.

    Or a LeaderWorkerSet, whose replicas are workers that span nodes.
    """

    name: str
    role: str
    revision: str = ""
    replicas: int = 0
    fault: Fault | None = None
    """Why it cannot create pods."""
    kind: str = "Deployment"

    @property
    def ordered(self) -> bool:
        """Whether it always gives up the last of its replicas first."""
        return self.kind != "Deployment"


@dataclass(frozen=True, slots=True)
class Pool:
    """A WorkerPool. ``applied`` is what was written of the ModelService's own number last.

    ``minimum``: see ROLLOUT_MINIMUM.
    """

    role: WorkerRole
    replicas: int
    applied: str | None
    minimum: int = 0
    generation: int = 0
    status: Object = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What one worker says of itself."""

    running: int
    waiting: int
    draining: bool


@dataclass(frozen=True, slots=True)
class Fleet:
    """What workers and routers answered; whoever did not answer is absent.

    ``routers``: router pod -> worker pod -> the worker's state as that router sees it.
    """

    loads: Mapping[str, WorkerLoad] = field(default_factory=dict)
    routers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything in the cluster that belongs to one ModelService."""

    objects: Mapping[Reference, Object]
    deployments: tuple[Deployment, ...] = ()
    pods: tuple[Pod, ...] = ()
    pools: tuple[Pool, ...] = ()
    fleet: Fleet = Fleet()

    def of(self, role: str) -> tuple[Deployment, ...]:
        return tuple(each for each in self.deployments if each.role == role)

    @property
    def workers(self) -> tuple[Deployment, ...]:
        return tuple(each for each in self.deployments if each.role in WORKER_ROLES)

    def pods_of(self, role: str, deployment: str | None = None) -> tuple[Pod, ...]:
        """Pods of a role, or of one of its Deployments; the terminating ones too."""
        return tuple(
            pod
            for pod in self.pods
            if pod.role == role and (deployment is None or pod.deployment == deployment)
        )

    def pool(self, role: str) -> Pool | None:
        return next((pool for pool in self.pools if pool.role == role), None)


def observe(items: Iterable[Object], uid: str) -> Observed:
    """Reads API objects with the labels of one ModelService, of every kind.

    ``uid``: the ModelService's. Whatever its labels say, an object that it does not control is none
    of them; but for pods, which belong to its Deployments.
    """
    objects = {
        reference(item): item for item in items if item["kind"] == "Pod" or controls(uid, item)
    }
    by_kind: dict[str, list[Object]] = {}
    for key, item in sorted(objects.items()):
        by_kind.setdefault(key.kind, []).append(item)
    return Observed(
        objects={key: item for key, item in objects.items() if key.kind != "Pod"},
        deployments=tuple(
            _deployment(item)
            for kind in ("Deployment", "LeaderWorkerSet")
            for item in by_kind.get(kind, ())
        ),
        pods=tuple(_workers_and_routers(by_kind.get("Pod", ()))),
        pools=tuple(_pool(item) for item in by_kind.get("WorkerPool", ())),
    )


def controller(item: Object) -> Object | None:
    """The owner reference of whoever controls an object."""
    owners = item["metadata"].get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def controls(uid: str, item: Object) -> bool:
    """Whether the ModelService with the uid controls an object."""
    owner = controller(item)
    return owner is not None and owner["uid"] == uid


def reference(item: Object) -> Reference:
    return Reference(item["kind"], item["metadata"]["name"])


def seconds(time: str) -> float:
    """Seconds since the Unix epoch of an RFC 3339 time."""
    return datetime.fromisoformat(time).timestamp()


def _labels(item: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = item["metadata"].get("labels") or {}
    return found


def _annotations(item: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = item["metadata"].get("annotations") or {}
    return found


def _deployment(item: Object) -> Deployment:
    failure = condition(item, "ReplicaFailure")
    refused = failure.get("status") == "True"
    return Deployment(
        name=item["metadata"]["name"],
        role=_labels(item).get(ROLE_LABEL, ""),
        revision=_labels(item).get(REVISION_LABEL, ""),
        replicas=item["spec"].get("replicas", 1),
        fault=Fault("PodsRefused", failure.get("message", "")) if refused else None,
        kind=item["kind"],
    )


def _pool(item: Object) -> Pool:
    return Pool(
        role=item["spec"]["role"],
        replicas=item["spec"]["replicas"],
        applied=_annotations(item).get(APPLIED_REPLICAS),
        minimum=_number(_annotations(item).get(ROLLOUT_MINIMUM, "")),
        generation=item["metadata"].get("generation", 0),
        status=item.get("status") or {},
    )


def _workers_and_routers(items: Iterable[Object]) -> Iterator[Pod]:
    """Followers are told of by their leaders alone."""
    followers: dict[str, list[Pod]] = {}
    leading = []
    for item in items:
        if _labels(item).get(COMPONENT_LABEL) == "follower":
            followers.setdefault(_labels(item).get(GROUP_KEY_LABEL, ""), []).append(_pod(item))
        else:
            leading.append(item)
    for item in leading:
        key = _labels(item).get(GROUP_KEY_LABEL, "")
        pod, rest = _pod(item), followers.get(key, []) if key else []
        troubled = next(
            (each for each in (pod, *rest) if each.fault and not each.terminating), None
        )
        yield replace(
            pod,
            ready=all(each.ready for each in (pod, *rest)),
            scheduled=all(each.scheduled for each in (pod, *rest)),
            fault=troubled.fault if troubled else None,
            unplaced_since=troubled.unplaced_since if troubled else None,
            needs=replace(
                pod.needs, requests=largest(each.needs.requests for each in (pod, *rest))
            ),
        )


def _pod(item: Object) -> Pod:
    metadata, status = item["metadata"], item.get("status", {})
    since, unplaced = _annotations(item).get(DRAINING_SINCE), unplaced_since(item)
    over = status.get("phase") in ("Succeeded", "Failed")
    return Pod(
        name=metadata["name"],
        role=_labels(item).get(ROLE_LABEL, ""),
        deployment=_deployment_of(_labels(item)),
        revision=_labels(item).get(REVISION_LABEL, ""),
        ready=condition(item, "Ready").get("status") == "True",
        terminating="deletionTimestamp" in metadata or over,
        scheduled=bool(item["spec"].get("nodeName")),
        address=status.get("podIP", ""),
        created=seconds(metadata["creationTimestamp"]),
        draining_since=_draining_since(since),
        condemned=_annotations(item).get(DELETION_COST, "0").startswith("-"),
        fault=pod_fault(item),
        unplaced_since=None if unplaced is None else seconds(unplaced),
        needs=needs(item),
        pod_revision=_labels(item).get(POD_REVISION_LABEL, ""),
        ordinal=_number(_labels(item).get(GROUP_INDEX_LABEL, "")),
    )


def _deployment_of(labels: Mapping[str, str]) -> str:
    service, revision = labels.get(SERVICE_LABEL, ""), labels.get(POD_REVISION_LABEL, "")
    match labels.get(ROLE_LABEL):
        case "prefill" | "decode" as role:
            return names.deployment(service, role, revision)
        case _:
            return names.router(service)


def _number(text: str) -> int:
    """What is no count of workers, since someone edited it, counts as none."""
    return int(text) if text.isdecimal() and len(text) < _TOO_LONG else 0


_TOO_LONG = 10
"""Digits of a number that is more than any replicas."""


def _draining_since(text: str | None) -> float | None:
    """A time that cannot be read, since someone edited it, counts as none: the drain restarts."""
    try:
        return None if text is None else seconds(text)
    except ValueError:
        return None
