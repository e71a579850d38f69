"""Names, labels, annotations and ports of everything that a ModelService has in a cluster. Pure.

Names are stable: users, dashboards and autoscalers write them down. Only what belongs to one
revision of the workers carries that revision in its name.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Literal

from kvasir.operator.modelservice import API_VERSION
from kvasir.operator.workerpool import WorkerRole

Component = Literal["worker", "router", "follower"]
"""``follower``: a pod of a worker that spans nodes, other than its leader."""
Role = Literal["prefill", "decode", "router"]

WORKER_ROLES: tuple[WorkerRole, ...] = ("prefill", "decode")

GROUP = API_VERSION.partition("/")[0]
OPERATOR = "kvasir-operator"
"""Field manager, and value of ``app.kubernetes.io/managed-by``."""

NAME_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"
PART_OF_LABEL = "app.kubernetes.io/part-of"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
VERSION_LABEL = "app.kubernetes.io/version"
SERVICE_LABEL = f"{GROUP}/modelservice"
ROLE_LABEL = f"{GROUP}/role"
REVISION_LABEL = f"{GROUP}/revision"
"""Workers with equal values exchange KV."""
POD_REVISION_LABEL = f"{GROUP}/pod-revision"
"""Pods of a role with equal values are made from the same template and configuration."""

OPERATOR_LABELS = {NAME_LABEL: "kvasir", COMPONENT_LABEL: "operator"}
"""Of the operator's own pods, which the chart makes."""

CONFIG_HASH_ANNOTATION = f"{GROUP}/config-hash"
ACCOUNT_ANNOTATION = f"{GROUP}/service-account-uid"
"""On a router's pod: its tokens are of this ServiceAccount, and of no other one of that name."""

LEADER_WORKER_SET_API = "leaderworkerset.x-k8s.io/v1"
GROUP_INDEX_LABEL = "leaderworkerset.sigs.k8s.io/group-index"
"""Which worker of its LeaderWorkerSet a pod belongs to, counted from 0."""
GROUP_KEY_LABEL = "leaderworkerset.sigs.k8s.io/group-key"
"""Equal for the pods of one worker, and for no others."""

GRPC_PORT = 50051
METRICS_PORT = 9400
HTTP_PORT = 8000
SERVICE_PORT = 80
"""Of the router's Service."""


def pool(service: str, role: WorkerRole) -> str:
    """The WorkerPool of a role, and the PodDisruptionBudget of its pods."""
    return f"{service}-{role}"


def deployment(service: str, role: WorkerRole, pod_revision: str) -> str:
    """The Deployment or LeaderWorkerSet of one revision of a role, and what its pods need."""
    return f"{service}-{role}-{pod_revision}"


def router(service: str) -> str:
    """What all routers share: Deployment, ConfigMap, ServiceAccount, Role, RoleBinding, budget."""
    return f"{service}-router"


def worker_account(service: str) -> str:
    return f"{service}-worker"


def workers(service: str) -> str:
    """The headless Service of all workers, and the NetworkPolicy in front of them."""
    return f"{service}-workers"


def url(service: str, namespace: str) -> str:
    """Where the HTTP API answers inside the cluster."""
    return f"http://{service}.{namespace}.svc"


def labels(service: str, component: Component, role: Role | None = None) -> dict[str, str]:
    """Labels of an object; ``role`` where it belongs to one role alone."""
    return {
        NAME_LABEL: "kvasir",
        PART_OF_LABEL: "kvasir",
        MANAGED_BY_LABEL: OPERATOR,
        VERSION_LABEL: version("kvasir"),
        COMPONENT_LABEL: component,
        INSTANCE_LABEL: service,
        SERVICE_LABEL: service,
        **({} if role is None else {ROLE_LABEL: role}),
    }


def selector(service: str, component: Component) -> dict[str, str]:
    """Pods of a component, whatever their revision."""
    return {COMPONENT_LABEL: component, SERVICE_LABEL: service}


def role_selector(service: str, role: Role) -> dict[str, str]:
    """Pods of a role, whatever their revision."""
    return {SERVICE_LABEL: service, ROLE_LABEL: role}


def as_query(chosen: Mapping[str, str]) -> str:
    """A selector as the API server reads it in a query, and in ``status.selector``."""
    return ",".join(f"{key}={value}" for key, value in sorted(chosen.items()))
