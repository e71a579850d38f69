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
from kvasir.operator.cluster.progress import (
    Verdict,
    is_newest,
    needed,
    progressing_verdict,
    scaled_by_hand,
)
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


def service_status(
    service: ModelService, observed: Observed, plan: Plan, seen: Seen, refused: Fault | None = None
) -> ModelServiceStatus:
    """The status after a step. ``refused``: what the API server said against an object."""
    roles = Roles(**{role: _role(role, observed, plan) for role in _ROLES})
    degraded = _degraded(observed, refused)
    progressing = progressing_verdict(service, roles, observed, plan)
    available = _available(service, observed, plan, degraded)
    verdicts: dict[Kind, Verdict] = {
        "Ready": _ready(available, progressing, degraded, scaled_by_hand(service, plan)),
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
    verdict = Verdict("False", reason, _short("; ".join(problems)))
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
    {
        "Starting",
        "StartingFromZero",
        "Scaling",
        "RollingOut",
        "WaitingForRoom",
        "Draining",
        WORKERS_NOT_REACHED,
    }
)


# --- roles ------------------------------------------------------------------------------------


def _role(role: names.Role, observed: Observed, plan: Plan) -> RoleStatus:
    alive = [pod for pod in observed.pods_of(role) if not pod.terminating]
    progress = plan.progress.get(role)
    return RoleStatus(
        replicas=len(alive),
        ready_replicas=sum(_takes_requests(pod) for pod in alive),
        updated_replicas=sum(is_newest(pod, plan) for pod in alive),
        draining_replicas=sum(pod.draining_since is not None for pod in alive),
        revision=progress.revision if progress else None,
    )


def _takes_requests(pod: Pod) -> bool:
    return pod.ready and not pod.terminating and pod.draining_since is None


# --- conditions -------------------------------------------------------------------------------


def _degraded(observed: Observed, refused: Fault | None) -> Verdict:
    if refused is not None:
        return Verdict("True", refused.reason, _short(refused.message))
    faults = [
        (f"Deployment {each.name}", each.fault)
        for each in observed.deployments
        if each.fault is not None
    ]
    faults += [
        (f"Pod {pod.name}", pod.fault)
        for pod in observed.pods
        # What drains goes anyway; and it may be unready since it drains.
        if pod.fault is not None
        and not pod.terminating
        and not pod.ready
        and pod.draining_since is None
    ]
    if not faults:
        return Verdict("False", "AsExpected", "Nothing hinders what the spec wants.")
    where, fault = min(faults, key=lambda each: (_RANKS.get(each[1].reason, 9), each[0]))
    same = sum(other.reason == fault.reason for _, other in faults)
    more = f" (and {same - 1} more)" if same > 1 else ""
    words = fault.message
    if fault.reason == "ConfigurationRefused":
        words = in_terms_of_the_spec(words.splitlines()[-1] if words else "exit code 2")
    return Verdict("True", fault.reason, _short(f"{where}{more}: {words}"))


_RANKS = {
    "ConfigurationRefused": 0,
    "ImagePullFailed": 1,
    "PodsRefused": 2,
    "ContainerNotCreated": 3,
    "Unschedulable": 4,
    "OutOfMemory": 5,
    "CrashLooping": 6,
}
"""Which fault is named first: what only a change of the spec mends. Any fixed order would do for
what is told to stay the same while the faults do."""


def _available(service: ModelService, observed: Observed, plan: Plan, degraded: Verdict) -> Verdict:
    lacking = [
        role for role in needed(service) if not any(map(_takes_requests, observed.pods_of(role)))
    ]
    from_zero = _from_zero(service)
    missing = [r for r in lacking if r not in from_zero or plan.progress[r].wanted > 0]
    if missing:
        text = f"No {' and no '.join(missing)} pod is ready."
        if degraded.status == "True":
            return Verdict("False", degraded.reason, _short(f"{text} {degraded.message}"))
        if from_zero.issuperset(missing):
            return Verdict("False", "StartingFromZero", f"{text} {_HOLD}")
        return Verdict("False", "NotReady", text)
    if "decode" in lacking:
        text = f"No decode pod runs since no request came; one starts for the next. {_HOLD}"
        return Verdict("True", "ScaledToZero", text)
    if text := unreached([role for role in needed(service) if role not in lacking], observed):
        return Verdict("False", WORKERS_NOT_REACHED, text)
    return Verdict("True", "Serving", "Requests are answered.")


_HOLD = "Routers hold requests until one is ready."


def _from_zero(service: ModelService) -> frozenset[names.Role]:
    """Roles that the autoscaler takes to zero and back."""
    roles: dict[names.Role, Role] = {"prefill": service.spec.prefill, "decode": service.spec.decode}
    return frozenset(
        role
        for role, spec in roles.items()
        if spec.scaling is not None and spec.scaling.min_replicas == 0
    )


def _ready(available: Verdict, progressing: Verdict, degraded: Verdict, scaled: str) -> Verdict:
    if degraded.status == "True":
        return Verdict("False", degraded.reason, degraded.message)
    if progressing.status == "True" and progressing.reason != "Draining":
        return Verdict("False", progressing.reason, progressing.message)
    if available.status == "False":
        return available
    if available.reason == "ScaledToZero":
        return available
    return Verdict("True", "AllReady", f"All pods of the newest spec are ready.{scaled}")


def _condition(kind: Kind, verdict: Verdict, seen: Seen) -> Condition:
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
