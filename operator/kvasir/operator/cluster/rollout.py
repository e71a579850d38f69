"""Which workers of older revisions stay while a new one comes up. Pure: no I/O, no clock.

- Old workers stay until the new revision is complete: all its workers are ready, in both roles, and
  every router uses them. Of several old Deployments of a role, the most useful one is kept, and of
  the others what it takes to serve.
- DrainFirst: new workers that find no place get that of old ones, no more than they need, and only
  where it would do for them (places.py) and there was none for PATIENCE. They get it a few at a
  time: of the workers that a role had, as many as ``_slack`` says may be missing. A role's only
  worker may be, so that its service is down until the new one is ready; ``interrupted`` says so.
- How many have to serve is written on the WorkerPool (annotation ROLLOUT_MINIMUM). While a place is
  free and the scheduler has not used it yet, nothing else tells that it was given already.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvasir.operator.cluster import names
from kvasir.operator.cluster.drain import in_order
from kvasir.operator.cluster.observed import Deployment, Observed, Pod
from kvasir.operator.cluster.places import Needs, would_fit
from kvasir.operator.workerpool import WorkerRole

PATIENCE = 30.0
"""Seconds without a place after which a new worker gets that of an old one. A place that is free in
a moment is no reason to take a worker away: pods end, and schedulers try again. Where nodes are
added on demand, it takes minutes, which the operator is to be told (--room-patience)."""

_SLACK_SHARE = 4
"""One in so many workers may be missing, as with the Deployments of Kubernetes."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """``targets``: Deployment to the replicas that it should end with for now.

    ``minimum``: workers of a role that go on serving, where places are short.
    """

    targets: Mapping[str, int]
    drain_first: bool = False
    awaits_room: bool = False
    """Whether old workers go first unless there is room soon."""
    interrupted: tuple[WorkerRole, ...] = ()
    """Roles that then have no worker until a new one is ready."""
    minimum: Mapping[WorkerRole, int] = field(default_factory=dict)


def rollout(
    newest: Mapping[WorkerRole, str],
    wanted: Mapping[WorkerRole, int],
    observed: Observed,
    unplaced_before: float,
) -> Rollout:
    """What becomes of each Deployment of workers.

    Args:
        newest: role to its Deployment of the newest revision.
        wanted: role to its number of workers.
        observed: what there is, with the fleet if there are old Deployments.
        unplaced_before: a worker without a place since then gets that of an old one; seconds since
            the Unix epoch.
    """
    targets = dict.fromkeys((each.name for each in observed.workers), 0)
    targets |= {name: wanted[role] for role, name in newest.items()}
    if all(_complete(role, newest[role], wanted[role], observed) for role in newest):
        return Rollout(targets)
    roles = [_Role(role, newest[role], wanted[role], observed) for role in newest]
    helped = [role.helped_by(roles) for role in roles]
    for role, pods in zip(roles, helped, strict=True):
        role.homeless = [pod for pod in pods if _since(pod) <= unplaced_before]
        role.give_up_others()
    for role in roles:
        role.give_places(role.lacking(role))
        # Where a role has too few old workers for its new ones, those of the other one give their
        # places, if new ones already do their work.
        for other in roles:
            if other is not role and other.started:
                beyond = max(0, role.lacking(other) - role.staying)
                other.give_places(other.lacking(other) + beyond)
    for role in roles:
        targets |= role.targets
    drain_first = any(role.homeless for role in roles)
    return Rollout(
        targets,
        drain_first=drain_first,
        awaits_room=any(helped) and not drain_first,
        interrupted=tuple(
            role.name
            for role, pods in zip(roles, helped, strict=True)
            if pods and not role.minimum and not role.started
        ),
        minimum={role.name: role.minimum for role in roles if role.old and role.tight},
    )


_USABLE = ("ready", "incompatible")
"""States in routers' eyes. Workers with another model are incompatible until the old ones drain:
a router serves one model, and changes over when nobody else takes requests for it."""


def takes_requests(pods: Iterable[Pod]) -> int:
    """How many of the pods do."""
    return sum(pod.ready and not pod.terminating and pod.draining_since is None for pod in pods)


def _complete(role: str, deployment: str, wanted: int, observed: Observed) -> bool:
    """Whether a role's newest workers are all there, and every router uses them."""
    if deployment not in {each.name for each in observed.of(role)}:
        return False
    routers = [pod.name for pod in observed.pods_of("router") if pod.ready and not pod.terminating]
    used = takes_requests(
        pod
        for pod in observed.pods_of(role, deployment)
        if all(
            observed.fleet.routers.get(router, {}).get(pod.name) in _USABLE for router in routers
        )
    )
    return used >= wanted


class _Role:
    """Gives up old workers of one role, one after the other, for the time of one step."""

    def __init__(self, name: WorkerRole, newest: str, wanted: int, observed: Observed) -> None:
        self.name = name
        pods = observed.pods_of(name)
        new = observed.pods_of(name, newest)
        self.started = takes_requests(new) > 0
        self.homeless: Sequence[Pod] = ()
        """New workers that get the places of old ones."""
        self._unplaced = [p for p in new if p.unplaced_since is not None and not p.terminating]
        self._places = [
            pod.needs
            for pod in pods
            if pod.deployment != newest and pod.scheduled and not pod.terminating
        ]
        """Of old workers."""
        pool = observed.pool(name)
        self._before = pool.minimum if pool is not None else 0
        present = sum(pod.ready and not pod.terminating for pod in pods)
        self.minimum = _minimum(wanted, present, self._before)
        self.old = sorted(
            (each for each in observed.of(name) if each.name != newest),
            key=lambda each: _worth(each, observed),
        )
        """The last one is the one to keep."""
        self._staying: dict[str, list[Pod]] = {}
        self._leaving = sum(pod.scheduled for pod in pods if pod.terminating)
        for each in self.old:
            order = in_order(each, observed)
            gone = max(0, len(order) - each.replicas)
            self._staying[each.name] = list(order[gone:])
            self._leaving += sum(pod.scheduled for pod in order[:gone])
        staying = (pod for pods in self._staying.values() for pod in pods)
        self._spare = takes_requests((*staying, *new)) - self.minimum

    @property
    def tight(self) -> bool:
        """Whether there are, or were in this rollout, new workers without a place."""
        return bool(self.homeless) or self._before > 0

    def helped_by(self, roles: Iterable["_Role"]) -> list[Pod]:
        """New workers without a place, for which that of an old worker of the roles would do."""
        places = [place for role in roles for place in role._places]
        return [pod for pod in self._unplaced if any(_fits(pod, place) for place in places)]

    def lacking(self, giver: "_Role") -> int:
        """Places of another role, or its own, that new workers need, but for those free anyway."""
        helped = sum(any(_fits(pod, place) for place in giver._places) for pod in self.homeless)
        return helped - self._leaving

    @property
    def staying(self) -> int:
        """Old workers that need not go so far."""
        return sum(map(len, self._staying.values()))

    @property
    def targets(self) -> Iterator[tuple[str, int]]:
        return ((name, len(pods)) for name, pods in self._staying.items())

    def give_up_others(self) -> None:
        """All but the Deployment to keep, as far as workers can be spared."""
        for each in self.old[:-1]:
            while self._give_up(each):
                pass

    def give_places(self, count: int) -> None:
        """So many workers of the kept Deployment, as far as they can be spared."""
        for _ in range(count):
            if not (self.old and self._give_up(self.old[-1])):
                return

    def _give_up(self, deployment: Deployment) -> bool:
        """The next worker of a Deployment; False if there is none that can be spared."""
        staying = self._staying[deployment.name]
        if not staying:
            return False
        serves = takes_requests(staying[:1])
        if serves > self._spare:
            return False
        self._spare -= serves
        self._leaving += staying.pop(0).scheduled
        return True


def _minimum(wanted: int, present: int, before: int) -> int:
    """Workers that have to serve; it rises with what there is, and falls with what is wanted.

    ``present``: ready workers, also those that drain. ``before``: the minimum of the last step.
    """
    staff = min(wanted, present)
    return max(0, staff - _slack(staff), min(before, wanted - _slack(wanted)))


def _slack(workers: int) -> int:
    return max(1, workers // _SLACK_SHARE)


def _fits(pod: Pod, place: Needs) -> bool:
    return pod.fault is not None and would_fit(pod.fault.message, pod.needs, place)


def _since(pod: Pod) -> float:
    return math.inf if pod.unplaced_since is None else pod.unplaced_since


def _worth(deployment: Deployment, observed: Observed) -> tuple[int, int, str, int, str]:
    """How useful an old Deployment is meanwhile: as its revision serves in all its roles.

    The revision decides before the Deployment does, so that no role keeps another one than the
    others: routers pair workers within one revision.
    """
    serving = [
        sum(
            takes_requests(observed.pods_of(role, each.name))
            for each in observed.of(role)
            if each.revision == deployment.revision
        )
        for role in names.WORKER_ROLES
    ]
    ready = takes_requests(observed.pods_of(deployment.role, deployment.name))
    return min(serving), sum(serving), deployment.revision, ready, deployment.name
