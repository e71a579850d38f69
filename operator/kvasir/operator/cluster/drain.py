"""How a Deployment of workers shrinks without cutting a request. Pure: no I/O, no clock.

What is going on is written on the pods themselves (annotations DRAINING_SINCE and DELETION_COST),
so that any operator goes on where another one ended:

    choose --> annotate --Engine.Drain--> routers agree, nothing runs --> condemn --> shrink

A pod that nobody could have sent a request to goes at once. A drain is called off when its worker
is needed again, and it ends at the deadline in any case. A Deployment gives up the pods that are
condemned; a LeaderWorkerSet its last ones, whatever they do, so that these are the ones to drain.
"""

from dataclasses import dataclass, replace

from kvasir.operator.cluster.observed import Deployment, Observed, Pod


@dataclass(frozen=True, slots=True)
class Drain:
    """What is to be done to workers, by the names of their pods."""

    begin: tuple[str, ...] = ()
    """Write the time on the pod, and tell the worker."""
    repeat: tuple[str, ...] = ()
    """Tell the worker again: it restarted, or the operator did."""
    cancel: tuple[str, ...] = ()
    """Tell the worker that it goes on, and take the time off the pod."""
    condemn: tuple[str, ...] = ()
    """Make the pod the one that its Deployment gives up first."""
    waiting: tuple[str, ...] = ()
    """Still has requests; look again soon."""
    completed: tuple[str, ...] = ()
    timed_out: tuple[str, ...] = ()

    def __add__(self, other: "Drain") -> "Drain":
        return Drain(
            *(
                getattr(self, name) + getattr(other, name)
                for name in (
                    "begin",
                    "repeat",
                    "cancel",
                    "condemn",
                    "waiting",
                    "completed",
                    "timed_out",
                )
            )
        )


def shrink(
    deployment: Deployment, target: int, observed: Observed, now: float, deadline: float
) -> tuple[int, Drain]:
    """The replicas that the Deployment may have now, and what to do to its workers.

    Args:
        deployment: one Deployment of workers.
        target: replicas that it should end with; more than it has changes nothing here.
        observed: pods, and what workers and routers say.
        now: seconds since the Unix epoch.
        deadline: longest drain, in seconds.
    """
    pods = [
        pod for pod in observed.pods_of(deployment.role, deployment.name) if not pod.terminating
    ]
    # Pods, not the number asked for: that one falls first, and the pods follow.
    order = sorted(pods, key=lambda pod: _cost(pod, observed))
    if deployment.ordered:
        victims = [pod for pod in order if pod.ordinal >= target]
    else:
        victims = order[: max(0, len(pods) - target)]
    others = [pod for pod in order if pod not in victims]
    drain = Drain(
        cancel=tuple(p.name for p in others if p.draining_since is not None or p.condemned)
    )
    kept = list(others)
    for pod in victims:
        step, done = _step(pod, observed, now, deadline)
        drain += step
        if not done:
            kept.append(pod)
    # Whatever is last goes first, so that an earlier one that is done waits for a later one.
    needed = max((pod.ordinal + 1 for pod in kept), default=0) if deployment.ordered else len(kept)
    return min(deployment.replicas, max(target, needed)), drain


def in_order(deployment: Deployment, observed: Observed) -> tuple[Pod, ...]:
    """Its pods, but for those that end already; the first one is the first to give up."""
    pods = [
        pod for pod in observed.pods_of(deployment.role, deployment.name) if not pod.terminating
    ]
    if deployment.ordered:
        return tuple(sorted(pods, key=lambda pod: -pod.ordinal))
    return tuple(sorted(pods, key=lambda pod: _cost(pod, observed)))


def _cost(pod: Pod, observed: Observed) -> tuple[bool, float, bool, int, float]:
    """Whom to give up first: who drains already, then who takes no requests, then who has few.

    Among equals the newest one, whose cache is worth least.
    """
    load = observed.fleet.loads.get(pod.name)
    requests = load.running + load.waiting if load is not None else 0
    since = pod.draining_since
    return (since is None, since or 0.0, pod.ready, requests, -pod.created)


def _step(pod: Pod, observed: Observed, now: float, deadline: float) -> tuple[Drain, bool]:
    """What to do to a pod that has to go, and whether it may go now."""
    load = observed.fleet.loads.get(pod.name)
    gone = replace(Drain(), condemn=() if pod.condemned else (pod.name,))
    if pod.draining_since is None:
        if not pod.ready and load is None:
            return gone, True
        return Drain(begin=(pod.name,), waiting=(pod.name,)), False
    if now - pod.draining_since >= deadline:
        return replace(gone, timed_out=(pod.name,)), True
    if load is None:
        return Drain(waiting=(pod.name,)), False
    if not load.draining:
        return Drain(repeat=(pod.name,), waiting=(pod.name,)), False
    if load.running or load.waiting or not _agreed(pod, observed):
        return Drain(waiting=(pod.name,)), False
    return replace(gone, completed=(pod.name,)), True


def _agreed(pod: Pod, observed: Observed) -> bool:
    """Whether no router would still send requests there; one that is silent might."""
    routers = [each for each in observed.pods_of("router") if each.ready and not each.terminating]
    return all(
        each.name in observed.fleet.routers
        and observed.fleet.routers[each.name].get(pod.name) != "ready"
        for each in routers
    )
