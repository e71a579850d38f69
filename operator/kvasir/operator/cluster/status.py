"""What the operator says of a ModelService and its WorkerPools. Pure: no I/O, no clock.

Conditions:

- Available: requests are answered now, by whatever revision. Also where the autoscaler took the
  last decode worker of an idle service (ScaledToZero): routers hold what comes, and a worker starts
  for it. While that worker starts it is False, since nobody knows yet whether it will work.
- Progressing: something is on its way to what the spec wants.
- Degraded: something hinders that, and will not mend itself; the reason names it.
- Ready: all of the newest spec is there and works; it sums up the others. A pool that is scaled to
  zero is all there; without prefill workers, decode workers compute prompts themselves.

A condition's time of transition is that of its last change of status. Events tell of transitions
only, by comparison with the status that is stored: a restarted operator repeats none.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from kvasir.operator.cluster import names
from kvasir.operator.cluster.faults import Fault
from kvasir.operator.cluster.observed import Object, Observed, Pod
from kvasir.operator.cluster.plan import Plan
from kvasir.operator.cluster.reach import WORKERS_NOT_REACHED, unreached
from kvasir.operator.modelservice import ModelService, Role
from kvasir.operator.refusal import in_terms_of_the_spec
from kvasir.operator.resource_status import (
    Condition,
    LastDecision,
    ModelServiceStatus,
    Roles,
    RoleStatus,
    WorkerPoolStatus,
)
from kvasir.operator.workerpool import WorkerRole

_LONGEST_MESSAGE = 1024
_ROLES: tuple[names.Role, ...] = ("prefill", "decode", "router")

Status = Literal["True", "False"]
Kind = Literal["Ready", "Available", "Progressing", "Degraded"]


@dataclass(frozen=True, slots=True)
class Event:
    """One line of ``kubectl events``, about the ModelService."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Seen:
    """Which ModelService a status is about, and when. ``now``: seconds since the Unix epoch."""

    namespace: str
    generation: int
    stored: Object
    """The status that is there."""
    now: float


@dataclass(frozen=True, slots=True)
class _Verdict:
    status: Status
    reason: str
    message: str


def service_status(
    service: ModelService, observed: Observed, plan: Plan, seen: Seen, refused: Fault | None = None
) -> ModelServiceStatus:
    """The status after a step. ``refused``: what the API server said against an object."""
    roles = Roles(**{role: _role(role, service, observed, plan) for role in _ROLES})
    degraded = _degraded(observed, refused)
    progressing = _progressing(service, roles, observed, plan)
    available = _available(service, observed, plan, degraded)
    verdicts: dict[Kind, _Verdict] = {
        "Ready": _ready(available, progressing, degraded),
        "Available": available,
        "Progressing": progressing,
        "Degraded": degraded,
    }
    return ModelServiceStatus(
        observed_generation=seen.generation,
        conditions=[_condition(kind, verdict, seen) for kind, verdict in verdicts.items()],
        roles=roles,
        last_decision=_stored_decision(seen.stored),
        url=names.url(service.name, seen.namespace),
    )


def refused_status(reason: str, problems: Sequence[str], seen: Seen) -> ModelServiceStatus:
    """The status of a spec that cannot be honored; what runs is left alone."""
    verdict = _Verdict("False", reason, _short("; ".join(problems)))
    return ModelServiceStatus(
        observed_generation=seen.generation,
        conditions=[_condition("Ready", verdict, seen)],
        roles=Roles.model_validate(seen.stored.get("roles") or {}),
        url=seen.stored.get("url"),
    )


def _stored_decision(stored: Object) -> LastDecision | None:
    found = stored.get("lastDecision")
    return None if found is None else LastDecision.model_validate_json(json.dumps(found))


def pool_status(
    role: WorkerRole, service: str, status: RoleStatus, generation: int
) -> WorkerPoolStatus:
    """The status of a role's WorkerPool; an HPA reads its replicas and its selector."""
    return WorkerPoolStatus(
        observed_generation=generation,
        replicas=status.replicas,
        ready_replicas=status.ready_replicas,
        updated_replicas=status.updated_replicas,
        draining_replicas=status.draining_replicas,
        selector=names.as_query(names.role_selector(service, role)),
    )


def transitions(stored: Object, status: ModelServiceStatus) -> Iterator[Event]:
    """Events for conditions whose status or reason changed; one for each new reason."""
    told: set[str] = set()
    before = {each["type"]: each for each in stored.get("conditions") or ()}
    for condition in status.conditions:
        was = before.get(condition.type)
        if was and (was["status"], was["reason"]) == (condition.status, condition.reason):
            continue
        if was is None and condition.type == "Degraded" and condition.status == "False":
            continue
        if condition.reason in told:
            continue
        told.add(condition.reason)
        bad = condition.status == ("True" if condition.type == "Degraded" else "False")
        calm = condition.type == "Progressing" or condition.reason in _ON_THE_WAY
        yield Event(
            "Warning" if bad and not calm else "Normal", condition.reason, condition.message
        )


_ON_THE_WAY = frozenset(
    {"Starting", "StartingFromZero", "Scaling", "RollingOut", "Draining", WORKERS_NOT_REACHED}
)


# --- roles ------------------------------------------------------------------------------------


def _role(role: names.Role, service: ModelService, observed: Observed, plan: Plan) -> RoleStatus:
    alive = [pod for pod in observed.pods_of(role) if not pod.terminating]
    progress = plan.progress.get(role)
    newest = progress.deployment if progress else names.router(service.name)
    return RoleStatus(
        replicas=len(alive),
        ready_replicas=sum(_takes_requests(pod) for pod in alive),
        updated_replicas=sum(pod.deployment == newest for pod in alive),
        draining_replicas=sum(pod.draining_since is not None for pod in alive),
        revision=progress.revision if progress else None,
    )


def _takes_requests(pod: Pod) -> bool:
    return pod.ready and not pod.terminating and pod.draining_since is None


# --- conditions -------------------------------------------------------------------------------


def _degraded(observed: Observed, refused: Fault | None) -> _Verdict:
    if refused is not None:
        return _Verdict("True", refused.reason, _short(refused.message))
    faults = [
        (f"Deployment {each.name}", each.fault)
        for each in observed.deployments
        if each.fault is not None
    ]
    faults += [
        (f"Pod {pod.name}", pod.fault)
        for pod in observed.pods
        if pod.fault is not None and not pod.terminating and not pod.ready
    ]
    if not faults:
        return _Verdict("False", "AsExpected", "Nothing hinders what the spec wants.")
    where, fault = min(faults, key=lambda each: (_RANKS.get(each[1].reason, 9), each[0]))
    same = sum(other.reason == fault.reason for _, other in faults)
    more = f" (and {same - 1} more)" if same > 1 else ""
    words = fault.message
    if fault.reason == "ConfigurationRefused":
        words = in_terms_of_the_spec(words.splitlines()[-1] if words else "exit code 2")
    return _Verdict("True", fault.reason, _short(f"{where}{more}: {words}"))


_RANKS = {
    "ConfigurationRefused": 0,
    "ImagePullFailed": 1,
    "PodsRefused": 2,
    "ContainerNotCreated": 3,
    "Unschedulable": 4,
}
"""Which fault is named first: what only a change of the spec mends."""


def _available(
    service: ModelService, observed: Observed, plan: Plan, degraded: _Verdict
) -> _Verdict:
    needed: list[names.Role] = ["router", "decode"]
    if service.spec.disaggregation.mode == "always":
        needed.append("prefill")
    lacking = [role for role in needed if not any(map(_takes_requests, observed.pods_of(role)))]
    from_zero = _from_zero(service)
    missing = [r for r in lacking if r not in from_zero or plan.progress[r].wanted > 0]
    if missing:
        text = f"No {' and no '.join(missing)} pod is ready."
        if degraded.status == "True":
            return _Verdict("False", degraded.reason, _short(f"{text} {degraded.message}"))
        if from_zero.issuperset(missing):
            return _Verdict("False", "StartingFromZero", f"{text} {_HOLD}")
        return _Verdict("False", "NotReady", text)
    if "decode" in lacking:
        text = f"No decode pod runs since no request came; one starts for the next. {_HOLD}"
        return _Verdict("True", "ScaledToZero", text)
    if text := unreached([role for role in needed if role not in lacking], observed):
        return _Verdict("False", WORKERS_NOT_REACHED, text)
    return _Verdict("True", "Serving", "Requests are answered.")


_HOLD = "Routers hold requests until one is ready."


def _from_zero(service: ModelService) -> frozenset[names.Role]:
    """Roles that the autoscaler takes to zero and back."""
    roles: dict[names.Role, Role] = {"prefill": service.spec.prefill, "decode": service.spec.decode}
    return frozenset(
        role
        for role, spec in roles.items()
        if spec.scaling is not None and spec.scaling.min_replicas == 0
    )


def _progressing(service: ModelService, roles: Roles, observed: Observed, plan: Plan) -> _Verdict:
    old = sum(progress.old for progress in plan.progress.values())
    lacking = [
        f"{progress.ready} of {progress.wanted} {role}"
        for role, progress in plan.progress.items()
        if progress.ready < progress.wanted
    ]
    routers = service.spec.router.initial_replicas
    ready = roles.router.ready_replicas
    if ready < routers:
        lacking.append(f"{ready} of {routers} router")
    counts = f"{', '.join(lacking)} pods are ready" if lacking else "all new pods are ready"
    if plan.drain_first:
        text = f"No place for new workers beside the old ones, so old ones go first: {counts}."
        return _Verdict("True", "DrainFirst", text)
    if old:
        return _Verdict("True", "RollingOut", f"{old} workers are of an old revision; {counts}.")
    if lacking:
        started = any(pod.ready for pod in observed.pods)
        return _Verdict("True", "Scaling" if started else "Starting", f"Only {counts}.")
    if draining := sum(progress.draining for progress in plan.progress.values()):
        return _Verdict("True", "Draining", f"{draining} workers finish their requests and go.")
    return _Verdict("False", "Complete", "Everything is as the spec wants it.")


def _ready(available: _Verdict, progressing: _Verdict, degraded: _Verdict) -> _Verdict:
    if degraded.status == "True":
        return _Verdict("False", degraded.reason, degraded.message)
    if progressing.status == "True" and progressing.reason != "Draining":
        return _Verdict("False", progressing.reason, progressing.message)
    if available.status == "False":
        return available
    if available.reason == "ScaledToZero":
        return available
    return _Verdict("True", "AllReady", "All pods of the newest spec are ready.")


def _condition(kind: Kind, verdict: _Verdict, seen: Seen) -> Condition:
    before: Mapping[str, Any] = next(
        (each for each in seen.stored.get("conditions") or () if each["type"] == kind), {}
    )
    since = datetime.fromtimestamp(int(seen.now), UTC)
    if before.get("status") == verdict.status:
        since = datetime.fromisoformat(before["lastTransitionTime"])
    return Condition(
        type=kind,
        status=verdict.status,
        reason=verdict.reason,
        message=verdict.message,
        last_transition_time=since,
        observed_generation=seen.generation,
    )


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[: _LONGEST_MESSAGE - 1]}…"
