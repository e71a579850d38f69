"""Whether a pod that finds no place would find that of another one. Pure: no I/O, no clock.

Owns how the scheduler's words are read. Whatever is not known to help counts as no help: who asks
takes a worker that serves away. A claim that does not exist, a selector that matches no node, a
taint, or more memory than a worker has now, are mended by no place of another worker.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from kvasir.operator.quantity import parse_amount

Object = Mapping[str, Any]
Requests = Mapping[str, Decimal]
"""Resource to amount, in its base unit: cores, bytes, devices, pods."""

_PODS = "pods"
_INSUFFICIENT = re.compile(r"\bInsufficient ([A-Za-z0-9](?:[\w./-]*\w)?)")
_TOO_MANY_PODS = "Too many pods"
_PREEMPTION = "preemption:"
"""What comes after it tells of preemption, not of the pod."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a pod asks of its node. ``selection``: which nodes it may run on, as text to compare."""

    requests: Requests = field(default_factory=dict)
    selection: str = ""


def needs(pod: Object) -> Needs:
    """What the scheduler looks at of a pod, as the API server stores it: requests are filled in.

    https://kubernetes.io/docs/concepts/workloads/pods/init-containers/#resource-sharing-within-containers
    """
    spec = pod["spec"]
    first = spec.get("initContainers") or ()
    lasting = [*spec.get("containers", ()), *filter(_stays, first)]
    together = _sum(_requests(each) for each in lasting)
    at_most = largest([together, *(_requests(each) for each in first if not _stays(each))])
    whole = {**at_most, **_requests(spec)}
    overhead = _amounts(spec.get("overhead") or {})
    parts = [spec.get(name) for name in ("nodeSelector", "affinity", "tolerations")]
    return Needs(_sum([whole, overhead, {_PODS: Decimal(1)}]), repr(parts))


def insufficient(message: str) -> frozenset[str]:
    """Resources that nodes have too little of, as the scheduler says of a pod."""
    about_nodes = message.partition(_PREEMPTION)[0]
    found = frozenset(_INSUFFICIENT.findall(about_nodes))
    return found | {_PODS} if _TOO_MANY_PODS in about_nodes else found


def would_fit(message: str, newcomer: Needs, leaver: Needs) -> bool:
    """Whether the place of ``leaver`` would do for a pod that the scheduler says ``message`` of."""
    lacking = insufficient(message)
    return (
        bool(lacking)
        and newcomer.selection == leaver.selection
        and all(
            name in leaver.requests and newcomer.requests.get(name, 0) <= leaver.requests[name]
            for name in lacking
        )
    )


def largest(each: Iterable[Requests]) -> Requests:
    """Of each resource the largest amount."""
    found: dict[str, Decimal] = {}
    for requests in each:
        found |= {name: max(amount, found.get(name, amount)) for name, amount in requests.items()}
    return found


def _sum(each: Iterable[Requests]) -> Requests:
    found: dict[str, Decimal] = {}
    for requests in each:
        found |= {name: amount + found.get(name, 0) for name, amount in requests.items()}
    return found


def _stays(container: Object) -> bool:
    """Whether an init container runs beside the others."""
    return container.get("restartPolicy") == "Always"


def _requests(item: Object) -> Requests:
    return _amounts((item.get("resources") or {}).get("requests") or {})


def _amounts(amounts: Mapping[str, str]) -> Requests:
    return {name: parse_amount(amount) for name, amount in amounts.items()}
