"""How far a ModelService is on its way to its newest spec, in words. Pure: no I/O, no clock."""

from dataclasses import dataclass
from typing import Literal

from kvasir.operator.cluster import names
from kvasir.operator.cluster.observed import Observed, Pod
from kvasir.operator.cluster.plan import Plan
from kvasir.operator.cluster.rollout import takes_requests
from kvasir.operator.modelservice import ModelService, Role
from kvasir.operator.resource_status import Roles

Status = Literal["True", "False"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a condition says."""

    status: Status
    reason: str
    message: str


def is_newest(pod: Pod, plan: Plan) -> bool:
    """Whether a pod is of the newest revision of its role."""
    progress = plan.progress.get(pod.role)
    if progress is None:  # routers, whose one Deployment changes in place
        return pod.pod_revision == plan.router_revision
    return pod.deployment == progress.deployment


def needed(service: ModelService) -> tuple[names.Role, ...]:
    """Roles without which no request is answered."""
    always = service.spec.disaggregation.mode == "always"
    return ("router", "decode", "prefill") if always else ("router", "decode")


def progressing_verdict(
    service: ModelService, roles: Roles, observed: Observed, plan: Plan
) -> Verdict:
    """Whether something is on its way to what the spec wants, and how far it is."""
    new_routers = [pod for pod in observed.pods_of("router") if is_newest(pod, plan)]
    old_routers = roles.router.replicas - roles.router.updated_replicas
    old = sum(progress.old for progress in plan.progress.values())
    ready = {role: (each.ready, each.wanted) for role, each in plan.progress.items()}
    ready["router"] = takes_requests(new_routers), service.spec.router.initial_replicas
    lacking = [f"{have} of {want} {role}" for role, (have, want) in ready.items() if have < want]
    counts = f"{', '.join(lacking)} pods are ready" if lacking else "all new pods are ready"
    if plan.drain_first:
        text = f"No room beside the old workers, so old ones go first{_down(service, plan)}"
        return Verdict("True", "DrainFirst", f"{text}: {counts}.")
    if plan.awaits_room:
        text = "No room beside the old workers; unless there is some soon, old ones go first"
        return Verdict("True", "WaitingForRoom", f"{text}{_down(service, plan)}: {counts}.")
    if old or old_routers:
        left = ((old, "worker"), (old_routers, "router"))
        who = " and ".join(_count(number, what) for number, what in left if number)
        verb = "is" if old + old_routers == 1 else "are"
        return Verdict("True", "RollingOut", f"{who} {verb} of an old revision; {counts}.")
    if lacking:
        started = any(pod.ready for pod in observed.pods)
        return Verdict("True", "Scaling" if started else "Starting", f"Only {counts}.")
    if draining := sum(progress.draining for progress in plan.progress.values()):
        do = "finishes its requests and goes" if draining == 1 else "finish their requests and go"
        return Verdict("True", "Draining", f"{_count(draining, 'worker')} {do}.")
    return Verdict(
        "False", "Complete", f"Everything is as the spec wants it.{scaled_by_hand(service, plan)}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _down(service: ModelService, plan: Plan) -> str:
    """What it costs that old workers go first, where a role has no other ones."""
    if not plan.interrupted:
        return ""
    roles = " and ".join(plan.interrupted)
    if set(plan.interrupted).isdisjoint(needed(service)):
        return f", and there is no {roles} worker until a new one is ready"
    return f", and the service is down until a new {roles} worker is ready"


def scaled_by_hand(service: ModelService, plan: Plan) -> str:
    """Pools that somebody has scaled to another number than the spec's."""
    roles: dict[names.Role, Role] = {"prefill": service.spec.prefill, "decode": service.spec.decode}
    others = [
        (role, plan.progress[role].wanted, spec.initial_replicas)
        for role, spec in roles.items()
        if spec.scaling is None and plan.progress[role].wanted != spec.initial_replicas
    ]
    return "".join(
        f" {role.capitalize()} has {_count(has, 'replica')} by its WorkerPool; "
        f"the spec says {says}."
        for role, has, says in others
    )
