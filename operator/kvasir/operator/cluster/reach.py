"""Whether routers reach the workers: what they say of that themselves. Pure: no I/O, no clock.

Pods may all be ready and no request be answered, such as when a router cannot read EndpointSlices.
"""

from collections.abc import Iterable

from kvasir.operator.cluster import names
from kvasir.operator.cluster.observed import Observed

WORKERS_NOT_REACHED = "WorkersNotReached"
"""Reason of a condition."""


def unreached(roles: Iterable[names.Role], observed: Observed) -> str:
    """Who of the routers has no ready worker of one of the roles; empty: none says so.

    A router that does not answer says nothing.
    """
    routers = {pod.name for pod in observed.pods_of("router") if pod.ready and not pod.terminating}
    asked = sorted(routers.intersection(observed.fleet.routers))
    for role in roles:
        workers = {pod.name for pod in observed.pods_of(role)}
        for router in asked:
            seen = observed.fleet.routers[router]
            if role != "router" and not any(seen.get(name) == "ready" for name in workers):
                return f"Router {router} reaches no {role} worker."
    return ""
