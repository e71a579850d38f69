"""What pods of workers and routers have alike, and what every object carries. Pure.

Pods meet the Pod Security Standard "restricted": no root, no privileges, a read-only root file
system with a writable /tmp. They run as USER whatever the image says, since one that names no
number would be refused as root; an overlay can name another.

Reference: https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvasir.operator.modelservice import API_VERSION, KIND, ModelService, Resources

Object = dict[str, Any]

CONFIG_FOLDER = "/etc/kvasir"
TMP_FOLDER = "/tmp"  # noqa: S108  # an emptyDir of each pod alone

USER = 65532
"""User and group of the processes, and group of the files that volumes hold."""

_STARTUP_PERIOD = 2
_STARTUP_SECONDS = 300
"""For an interpreter with large libraries on a cold disk. Loading a model comes after that."""

_POD_SECURITY: Object = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


@dataclass(frozen=True, slots=True)
class Installation:
    """What is the same for every ModelService of an operator.

    ``operator_namespace``: where the operator's pods are; None if it runs outside the cluster.
    """

    worker_image: str
    router_image: str
    operator_namespace: str | None = None
    metrics_namespaces: tuple[str, ...] = ()
    """Whose pods may read the workers' metrics, beside the operator's."""


@dataclass(frozen=True, slots=True)
class Container:
    """What sets the main container of a pod apart from others."""

    name: str
    image: str
    config_file: str
    """Its name in CONFIG_FOLDER."""
    settings: Mapping[str, str]
    """Fields of its configuration that each pod has of its own; may name $(POD_NAME), $(POD_IP)."""
    ports: Mapping[str, int]
    probed_port: str
    ready_path: str
    resources: Object


def metadata(service: ModelService, name: str, labels: Mapping[str, str]) -> Object:
    """Of an object that goes when its ModelService goes."""
    return {
        "name": name,
        "namespace": service.metadata.namespace,
        "labels": dict(labels),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": service.name,
                "uid": service.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }


def digest(content: object) -> str:
    """Ten hex digits that differ where JSON content differs."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def config_text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def pod_spec(container: Container, config_map: str, account: str, grace_seconds: int) -> Object:
    """A restricted pod with one container and its configuration."""
    return {
        "serviceAccountName": account,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        "securityContext": _POD_SECURITY,
        "containers": [_container(container)],
        "volumes": [
            {"name": "config", "configMap": {"name": config_map}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }


def compute_resources(resources: Resources | None) -> dict[str, dict[str, str]]:
    """As in a container; amounts as text, as the API server gives them back."""
    if resources is None:
        return {}
    parts = {"requests": resources.requests, "limits": resources.limits}
    return {
        part: {name: str(amount) for name, amount in amounts.items()}
        for part, amounts in parts.items()
        if amounts
    }


def with_default_requests(template: Object, container: str, defaults: Mapping[str, str]) -> Object:
    """The pod template whose container requests ``defaults`` where nobody says anything else.

    An amount that a request or a limit names is left alone: without a request, the limit is it.
    Where the pod as a whole has resources, nothing is added. What an overlay has made no pod
    template stays as it is, for the API server to refuse.
    """
    spec = template.get("spec")
    if not isinstance(spec, dict) or "resources" in spec:
        return template
    containers = spec.get("containers")
    if not isinstance(containers, list):
        return template
    completed = [
        _with_requests(one, defaults)
        if isinstance(one, dict) and one.get("name") == container
        else one
        for one in containers
    ]
    return {**template, "spec": {**spec, "containers": completed}}


def _with_requests(container: Object, defaults: Mapping[str, str]) -> Object:
    resources = container.get("resources", {})
    if not isinstance(resources, dict):
        return container
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    if not (isinstance(requests, dict) and isinstance(limits, dict)):
        return container
    added = {name: amount for name, amount in defaults.items() if name not in limits}
    return {**container, "resources": {**resources, "requests": {**added, **requests}}}


def _container(container: Container) -> Object:
    own = [f"--set={field}={value}" for field, value in container.settings.items()]
    return {
        "name": container.name,
        "image": container.image,
        "command": [f"kvasir-{container.name}"],
        "args": [f"--config={CONFIG_FOLDER}/{container.config_file}", *own],
        "env": [
            _from_pod("POD_NAME", "metadata.name"),
            _from_pod("POD_IP", "status.podIP"),
            {"name": "HOME", "value": TMP_FOLDER},
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in container.ports.items()],
        "resources": container.resources,
        "securityContext": _CONTAINER_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": TMP_FOLDER},
        ],
        "startupProbe": {
            **_get(container, "/health"),
            "periodSeconds": _STARTUP_PERIOD,
            "failureThreshold": _STARTUP_SECONDS // _STARTUP_PERIOD,
        },
        "livenessProbe": {**_get(container, "/health"), "periodSeconds": 10, "timeoutSeconds": 5},
        "readinessProbe": {
            **_get(container, container.ready_path),
            "periodSeconds": 2,
            "timeoutSeconds": 3,
        },
    }


def _from_pod(variable: str, path: str) -> Object:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _get(container: Container, path: str) -> Object:
    return {"httpGet": {"path": path, "port": container.probed_port}}
