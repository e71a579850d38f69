"""LeaderWorkerSet for control planes that lack it: the API, and a player of its controller.

The schema is our own and holds the fields, bounds and defaults of v1 that matter here; pod
templates are left open, and judged when pods are made of them. The player makes what the
documentation says: a StatefulSet of leaders, one of followers for each leader and owned by it,
and the labels. StatefulSets, pods and garbage collection are Kubernetes's own.

Reference: https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from cluster.api import ApiClient, ApiError, Object
from cluster.clients import Kubectl
from cluster.control_plane import ControlPlane

CRD_NAME = "leaderworkersets.leaderworkerset.x-k8s.io"
_API = "leaderworkerset.x-k8s.io/v1"
_LABEL = "leaderworkerset.sigs.k8s.io"
_PERIOD = 0.2


def _count(least: int) -> dict[str, Any]:
    return {"type": "integer", "format": "int32", "minimum": least, "default": 1}


def _one_of(default: str, *others: str) -> dict[str, Any]:
    return {"type": "string", "enum": [default, *others], "default": default}


_OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_SPEC = {
    "type": "object",
    "required": ["leaderWorkerTemplate"],
    "properties": {
        "replicas": _count(0),
        "startupPolicy": _one_of("LeaderCreated", "LeaderReady"),
        "leaderWorkerTemplate": {
            "type": "object",
            "required": ["workerTemplate"],
            "properties": {
                "size": _count(1),
                "restartPolicy": _one_of("RecreateGroupOnPodRestart", "None"),
                "leaderTemplate": _OPEN,
                "workerTemplate": _OPEN,
            },
        },
    },
}
_CRD: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": CRD_NAME,
        "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
    },
    "spec": {
        "group": _API.partition("/")[0],
        "scope": "Namespaced",
        "names": {
            "kind": "LeaderWorkerSet",
            "plural": "leaderworkersets",
            "singular": "leaderworkerset",
            "shortNames": ["lws"],
        },
        "versions": [
            {
                "name": _API.partition("/")[2],
                "served": True,
                "storage": True,
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.replicas",
                        "statusReplicasPath": ".status.replicas",
                    },
                },
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {"spec": _SPEC, "status": _OPEN},
                    }
                },
            }
        ],
    },
}


def install(kubectl: Kubectl) -> None:
    kubectl.apply(_CRD)
    kubectl("wait", "--for=condition=Established", f"crd/{CRD_NAME}", "--timeout=60s")


def remove(kubectl: Kubectl) -> None:
    kubectl("delete", "crd", CRD_NAME, "--ignore-not-found", "--timeout=60s")


@contextmanager
def played(plane: ControlPlane, namespace: str) -> Iterator[None]:
    """A controller for the sets of a namespace, which may be there before their API is."""
    player = _Player(plane, namespace)
    player.start()
    try:
        yield
    finally:
        player.stop()


class _Player:
    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self._plane = plane
        self._namespace = namespace
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="leader-worker-sets")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Raises what broke it, if anything."""
        self._ended.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        client = self._plane.client()
        try:
            while not self._ended.wait(_PERIOD):
                self._step(client)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            client.close()

    def _step(self, client: ApiClient) -> None:
        for item in self._list(client, f"/apis/{_API}", "leaderworkersets"):
            if "deletionTimestamp" in item["metadata"]:
                continue
            self._keep_leaders(client, item)
            for pod in self._list(client, "/api/v1", "pods"):
                labels = pod["metadata"]["labels"]
                is_leader = labels.get(f"{_LABEL}/worker-index") == "0"
                if is_leader and labels[f"{_LABEL}/name"] == item["metadata"]["name"]:
                    self._keep_followers(client, item, pod)

    def _keep_leaders(self, client: ApiClient, item: Object) -> None:
        name = item["metadata"]["name"]
        spec = item["spec"]
        labels = {f"{_LABEL}/name": name, f"{_LABEL}/worker-index": "0"}
        template = spec["leaderWorkerTemplate"]["leaderTemplate"]
        made = _stateful_set(name, spec["replicas"], 0, labels, template, _owner(item, _API))
        path = self._path("/apis/apps/v1", "statefulsets")
        try:
            client.create(path, made)
        except ApiError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise
            client.patch(f"{path}/{name}", {"spec": {"replicas": spec["replicas"]}})

    def _keep_followers(self, client: ApiClient, item: Object, leader: Object) -> None:
        metadata = leader["metadata"]
        key = hashlib.sha256(metadata["uid"].encode()).hexdigest()[:40]
        group = {
            f"{_LABEL}/name": item["metadata"]["name"],
            f"{_LABEL}/group-index": metadata["name"].rpartition("-")[2],
            f"{_LABEL}/group-key": key,
        }
        if not group.items() <= metadata["labels"].items():
            self._tolerate_gone(
                client.patch,
                self._path("/api/v1", f"pods/{metadata['name']}"),
                {"metadata": {"labels": group, "uid": metadata["uid"]}},
            )
        template = item["spec"]["leaderWorkerTemplate"]
        made = _stateful_set(
            metadata["name"],
            template["size"] - 1,
            1,
            group,
            template["workerTemplate"],
            _owner(leader, "v1"),
        )
        self._tolerate_gone(client.create, self._path("/apis/apps/v1", "statefulsets"), made)

    @staticmethod
    def _tolerate_gone(send: Any, path: str, body: Object) -> None:
        """It is there already, or what it belongs to has just gone."""
        try:
            send(path, body)
        except ApiError as error:
            if error.status not in {HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND}:
                raise

    def _list(self, client: ApiClient, prefix: str, plural: str) -> list[Object]:
        try:
            found: list[Object] = client.get(self._path(prefix, plural))["items"]
        except ApiError as error:
            if error.status in {HTTPStatus.NOT_FOUND, HTTPStatus.TOO_MANY_REQUESTS}:
                return []  # the API is not there, or not yet
            raise
        kinds = {"leaderworkersets": "LeaderWorkerSet", "pods": "Pod"}
        return [{**each, "kind": kinds[plural]} for each in found]

    def _path(self, prefix: str, rest: str) -> str:
        return f"{prefix}/namespaces/{self._namespace}/{rest}"


def _stateful_set(
    name: str,
    replicas: int,
    first: int,
    labels: dict[str, str],
    template: Object,
    owner: Object,
) -> Object:
    together = {**template["metadata"]["labels"], **labels}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
        "spec": {
            "replicas": replicas,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "ordinals": {"start": first},
            "selector": {"matchLabels": labels},
            "template": {**template, "metadata": {**template["metadata"], "labels": together}},
        },
    }


def _owner(item: Object, version: str) -> Object:
    return {
        "apiVersion": version,
        "kind": item["kind"],
        "name": item["metadata"]["name"],
        "uid": item["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
