"""The only module that talks to the API server. JSON in, JSON out; every request is counted.

An object is created with POST, which never touches one that is there; from then on it is written
by server-side apply. None is sent for an object that says already what is wanted. Holds no object:
each reconciliation reads what it needs.

https://kubernetes.io/docs/reference/using-api/server-side-apply/
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

from kubernetes.aio import client as kubernetes
from kubernetes.aio.client.exceptions import ApiException
from prometheus_client import CollectorRegistry, Counter

from kvasir.operator.cluster.difference import projection
from kvasir.operator.cluster.names import (
    GROUP,
    LEADER_WORKER_SET_API,
    OPERATOR,
    SERVICE_LABEL,
)
from kvasir.operator.cluster.observed import Object, Reference, reference

_PATHS = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "Event": ("/api/v1", "events"),
    "LeaderWorkerSet": (f"/apis/{LEADER_WORKER_SET_API}", "leaderworkersets"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "ModelService": (f"/apis/{GROUP}/v1alpha1", "modelservices"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "Pod": ("/api/v1", "pods"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "Service": ("/api/v1", "services"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "WorkerPool": (f"/apis/{GROUP}/v1alpha1", "workerpools"),
}
_OPTIONAL = frozenset({"LeaderWorkerSet"})
"""Kinds that not every cluster has: there are none where the API server does not know them."""
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_TIMEOUT = 30.0
"""Seconds for a request."""


_REFUSALS = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.CONFLICT,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    }
)
_MISFIT = "failed to create typed patch object"


class ApiError(Exception):
    """The API server refused a request, or did not answer (``status`` 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def gone(self) -> bool:
        return self.status == HTTPStatus.NOT_FOUND

    @property
    def refusal(self) -> bool:
        """Whether it is about the object itself: another try gives the same answer."""
        # What does not fit the schema of its kind is an internal error to server-side apply.
        misfit = self.status == HTTPStatus.INTERNAL_SERVER_ERROR and _MISFIT in str(self)
        return self.status in _REFUSALS or misfit

    @property
    def conflict(self) -> bool:
        return self.status == HTTPStatus.CONFLICT


class Cluster:
    """An API server, as one user. Close it, or use it as an asynchronous context."""

    def __init__(self, api: kubernetes.ApiClient, registry: CollectorRegistry) -> None:
        self._api = api
        self._requests = Counter(
            "kvasir_operator_api_requests",
            "Requests to the API server, without the watches",
            ["verb", "kind"],
            registry=registry,
        )
        # What was applied, and what came back for it; see difference.py. Lost in a restart, this
        # costs one write that changes nothing.
        self._settled: dict[tuple[str, Reference], tuple[Object, object]] = {}
        self._answered = -math.inf

    @property
    def silent_for(self) -> float:
        """Seconds since the API server's latest answer, a refusal too; infinite before any."""
        return time.monotonic() - self._answered

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._api.close()

    async def get(self, namespace: str, key: Reference) -> Object | None:
        """The object; None if there is none."""
        try:
            found: Object = await self._send("get", namespace, key.kind, key.name)
            return found
        except ApiError as error:
            if error.gone:
                return None
            raise

    async def list(self, namespace: str, kind: str, selector: str) -> Sequence[Object]:
        """Objects of a kind that have the labels."""
        try:
            found = await self._send("list", namespace, kind, query={"labelSelector": selector})
        except ApiError as error:
            if error.gone and kind in _OPTIONAL:
                return []
            raise
        # Items of a list do not say what they are; the list does.
        own = {"apiVersion": found["apiVersion"], "kind": kind}
        return [{**item, **own} for item in found["items"]]

    async def find(self, namespace: str, key: Reference) -> Object | None:
        """As ``get``, with the right to list objects, and whoever made it."""
        query = {"fieldSelector": f"metadata.name={key.name}"}
        found = await self._send("list", namespace, key.kind, query=query)
        return next(({**item, "kind": key.kind} for item in found["items"]), None)

    async def create(self, namespace: str, item: Object) -> None:
        await self._send("create", namespace, item["kind"], body=item)

    async def replace(self, namespace: str, item: Object) -> None:
        """Write the object as a whole. Refused (conflict) if it changed since it was read."""
        await self._send("update", namespace, item["kind"], item["metadata"]["name"], body=item)

    async def apply(self, namespace: str, item: Object, seen: Object | None) -> bool:
        """Make the object say what is wanted; whether that took a write.

        ``seen`` is the object as it was read, and the caller's to change; only that very one is
        written. None: there is none, and one is created. Where one is there nevertheless, it is
        left alone: that is a conflict.
        """
        key = reference(item)
        settled, answer = self._settled.get((namespace, key), (None, None))
        manager = f"{OPERATOR}/{item['metadata']['labels'][SERVICE_LABEL]}"
        if seen is None:
            # What is unknown to the API server is refused, as it is when an object is applied.
            query = {"fieldManager": manager, "fieldValidation": "Strict"}
            stored = await self._send("create", namespace, key.kind, body=item, query=query)
            if projection(stored, item) != item:
                # An operator that starts anew applies it once; so that this changes nothing then.
                stored = await self._apply_to(namespace, item, stored, manager)
        else:
            says = projection(seen, item)
            if says == item or (settled == item and says == answer):
                return False
            stored = await self._apply_to(namespace, item, seen, manager)
        self._settled[namespace, key] = item, projection(stored, item)
        return True

    async def _apply_to(
        self, namespace: str, item: Object, seen: Object, manager: str
    ) -> Mapping[str, Any]:
        own = {**item["metadata"], "uid": seen["metadata"]["uid"]}
        fields = applied_fields(seen["metadata"].get("managedFields") or (), manager)
        if fields is not None:
            version = seen["metadata"]["resourceVersion"]
            patch = {"metadata": {"managedFields": fields, "resourceVersion": version}}
            query = {"fieldManager": manager}
            key = reference(item)
            found = await self._send(
                "patch", namespace, key.kind, key.name, body=patch, query=query, content=_MERGE
            )
            if "resourceVersion" in own:
                own["resourceVersion"] = found["metadata"]["resourceVersion"]
        stored: Mapping[str, Any] = await self._send(
            "apply",
            namespace,
            item["kind"],
            item["metadata"]["name"],
            body={**item, "metadata": own},
            query={"fieldManager": manager, "force": "true"},
            content=_APPLY,
        )
        return stored

    async def apply_status(self, namespace: str, item: Object) -> None:
        """Write the status; ``item`` holds nothing else."""
        await self._send(
            "apply",
            namespace,
            item["kind"],
            f"{item['metadata']['name']}/status",
            body=item,
            query={"fieldManager": OPERATOR, "force": "true"},
            content=_APPLY,
        )

    async def merge(self, namespace: str, key: Reference, patch: Mapping[str, Any]) -> None:
        """Change fields of an object, which may be gone. Null removes a field."""
        await self._unless_gone(
            "patch", namespace, key, body=patch, query={"fieldManager": OPERATOR}, content=_MERGE
        )

    async def delete(self, namespace: str, key: Reference, uid: str) -> None:
        """Delete the object that has the uid, which may be gone, and what belongs to it."""
        self._settled.pop((namespace, key), None)
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        await self._unless_gone("delete", namespace, key, body=body)

    def forget(self, namespace: str, service: str) -> None:
        """The objects of a ModelService that is gone."""
        self._settled = {
            key: (item, answer)
            for key, (item, answer) in self._settled.items()
            if key[0] != namespace or item["metadata"]["labels"][SERVICE_LABEL] != service
        }

    async def _unless_gone(
        self,
        verb: str,
        namespace: str,
        key: Reference,
        *,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> None:
        try:
            await self._send(
                verb, namespace, key.kind, key.name, body=body, query=query, content=content
            )
        except ApiError as error:
            if not error.gone:
                raise

    async def _send(  # noqa: PLR0913 - what an HTTP request is made of
        self,
        verb: str,
        namespace: str,
        kind: str,
        name: str = "",
        *,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Any:
        prefix, plural = _PATHS[kind]
        path = "/".join(filter(None, (prefix, "namespaces", namespace, plural, name)))
        self._requests.labels(verb, kind).inc()
        method, url, headers, sent, _ = await self._api.param_serialize(
            _METHODS[verb],
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content},
            body=dict(body) if body is not None else None,
            auth_settings=["BearerToken"],
        )
        try:
            answer = await self._api.call_api(method, url, headers, sent, _request_timeout=_TIMEOUT)
            data = await answer.read()
        except (OSError, TimeoutError, ApiException) as error:
            raise ApiError(0, f"{verb} {kind} {name}: {error!r}") from error
        self._answered = time.monotonic()
        if not HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
            raise ApiError(answer.status, _message(data))
        return json.loads(data)


_METHODS = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "update": "PUT",
    "apply": "PATCH",
    "patch": "PATCH",
    "delete": "DELETE",
}


def applied_fields(entries: Sequence[Object], manager: str) -> list[Object] | None:
    """``managedFields`` where what ``manager`` created counts as applied; None: nothing to change.

    A field that it created would otherwise stay when it is not applied any more.
    https://kubernetes.io/docs/reference/using-api/server-side-apply/#upgrading-from-client-side-apply-to-server-side-apply
    """

    def created(entry: Object) -> bool:
        whole = not entry.get("subresource")
        return whole and (entry.get("manager"), entry.get("operation")) == (manager, "Update")

    if not any(map(created, entries)):
        return None
    applied = any(
        (each.get("manager"), each.get("operation")) == (manager, "Apply") for each in entries
    )
    rest = [each for each in entries if not created(each)]
    if applied:  # it was applied meanwhile; what it created is in there
        return rest
    return rest + [{**each, "operation": "Apply"} for each in entries if created(each)]


def _message(data: bytes) -> str:
    """What the API server says; a proxy before it may answer in another form."""
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")[:1000]
