"""What the operator watches: each change of an object calls for a step of its ModelService.

kopf keeps the watches. Only its plain event handlers are used: these put neither finalizers nor
annotations on objects, so that any of them can be deleted also while no operator runs.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import kopf

from kvasir.operator.cluster import names
from kvasir.operator.cluster.queue import Key, Queue
from kvasir.operator.cluster.watches import Watches, by_kubeconfig, in_cluster
from kvasir.operator.modelservice import API_VERSION

_GROUP, _VERSION = API_VERSION.split("/")
_SERVICES = (_GROUP, _VERSION, "modelservices")
_POOLS = (_GROUP, _VERSION, "workerpools")
_OWNED = (
    ("", "v1", "configmaps"),
    ("", "v1", "pods"),
    ("", "v1", "serviceaccounts"),
    ("", "v1", "services"),
    ("apps", "v1", "deployments"),
    ("networking.k8s.io", "v1", "networkpolicies"),
    ("policy", "v1", "poddisruptionbudgets"),
    ("rbac.authorization.k8s.io", "v1", "rolebindings"),
    ("rbac.authorization.k8s.io", "v1", "roles"),
)
"""Group, version and plural; those that are not ours are filtered out by the API server."""


def watched(namespaces: Sequence[str]) -> Iterator[str]:
    """Paths of everything that is watched: in these namespaces, or in all if none is named."""
    for group, version, plural in (_SERVICES, _POOLS, *_OWNED):
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        if not namespaces:
            yield f"{root}/{plural}"
        for namespace in namespaces:
            yield f"{root}/namespaces/{namespace}/{plural}"


def registry(queue: Queue, watches: Watches) -> kopf.OperatorRegistry:
    """Handlers that put what changed into the queue."""
    made = kopf.OperatorRegistry()

    async def service_changed(namespace: str | None, name: str | None, **_: Any) -> None:
        queue.add(Key(namespace or "", name or ""))

    async def object_changed(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        if service := labels.get(names.SERVICE_LABEL):
            queue.add(Key(namespace or "", service))

    async def login(**known: Any) -> kopf.AiohttpSession | None:
        if session := in_cluster(watches):
            return session
        info = kopf.login_with_kubeconfig(**known)
        return None if info is None else by_kubeconfig(watches, info)

    kopf.on.login(registry=made)(login)
    kopf.on.event(*_SERVICES, registry=made)(service_changed)
    kopf.on.event(*_POOLS, registry=made)(object_changed)
    for resource in _OWNED:
        kopf.on.event(*resource, registry=made)(object_changed)
    return made


def settings() -> kopf.OperatorSettings:
    """Watches only what the operator made, posts and writes nothing by itself."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True
    made.networking.error_backoffs = _Backoffs()
    for resource in _OWNED:
        made.watching.label_selectors[resource] = f"{names.MANAGED_BY_LABEL}={names.OPERATOR}"
    return made


class _Backoffs:
    """Seconds between tries of a watch: without end, since an API server comes back."""

    def __iter__(self) -> Iterator[float]:
        return chain((0.5, 1.0, 2.0), repeat(5.0))
