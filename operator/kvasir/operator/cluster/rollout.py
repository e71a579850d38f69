"""Which workers of older revisions stay while a new one comes up. Pure: no I/O, no clock.

- Old workers stay until the new revision is complete: all its workers are ready, in both roles, and
  every router uses them. Of several old Deployments of a role, the most useful one is kept, and of
  the others what it takes to serve.
- DrainFirst: new workers that find no place get that of old ones, no more than they need. They get
  it a few at a time: of the workers that a role had, as many as ``_slack`` says may be missing.
- How many have to serve is written on the WorkerPool (annotation ROLLOUT_MINIMUM). While a place is
  free and the scheduler has not used it yet, nothing else tells that it was given already.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvasir.operator.cluster import names
from kvasir.operator.cluster.drain import in_order
from kvasir.operator.cluster.observed import Deployment, Observed, Pod
from kvasir.operator.workerpool import WorkerRole

_SLACK_SHARE = 4
"""One in so many workers may be missing, as with the Deployments of Kubernetes."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """``targets``: Deployment to the replicas that it should end with for now.

    ``minimum``: workers of a role that go on serving, where places are short.
    """

    targets: Mapping[str, int]
    drain_first: bool = False
    minimum: Mapping[WorkerRole, int] = field(default_factory=dict)


def rollout(
    newest: Mapping[WorkerRole, str], wanted: Mapping[WorkerRole, int], observed: Observed
) -> Rollout:
    """What becomes of each Deployment of workers.

    Args:
        newest: role to its Deployment of the newest revision.
        wanted: role to its number of workers.
        observed: what there is, with the fleet if there are old Deployments.
    """
    targets = dict.fromkeys((each.name for each in observed.workers), 0)
    targets |= {name: wanted[role] for role, name in newest.items()}
    if all(_complete(role, newest[role], wanted[role], observed) for role in newest):
        return Rollout(targets)
    roles = [_Role(role, newest[role], wanted[role], observed) for role in newest]
    for role in roles:
        role.give_up_others()
    for role in roles:
        role.give_places(role.lacking)
        # Where a role has too few old workers for its new ones, those of the other one give their
        # places, if new ones already do their work.
        beyond = max(0, role.lacking - role.staying)
        for other in roles:
            if other is not role and other.started:
                other.give_places(other.lacking + beyond)
    for role in roles:
        targets |= role.targets
    serving_old = any(role.old for role in roles)
    return Rollout(
        targets,
        drain_first=serving_old and any(role.homeless for role in roles),
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
        self.homeless = sum(map(_finds_no_place, new))
        pool = observed.pool(name)
        before = pool.minimum if pool is not None else 0
        self.tight = self.homeless > 0 or before > 0
        """Whether there are, or were in this rollout, new workers without a place."""
        self.minimum = _minimum(wanted, sum(p.ready and not p.terminating for p in pods), before)
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
    def lacking(self) -> int:
        """Places that new workers need, but for those that others leave anyway."""
        return self.homeless - self._leaving

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


def _finds_no_place(pod: Pod) -> bool:
    return pod.fault is not None and pod.fault.reason == "Unschedulable" and not pod.terminating


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
