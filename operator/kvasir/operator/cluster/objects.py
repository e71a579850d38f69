"""Everything that a ModelService is made of in a cluster. Pure.

Objects are plain dicts, bodies for a server-side apply: they hold only fields that the operator
owns. What serves at once is ``shared``; the workers' Deployments come and go with the rollout,
one revision at a time (worker_objects.WorkerRevision).

    shared(service, installation)            Services, accounts, policies, budgets, router config
    router_deployment(..., replicas)         one, changed in place
    worker_revision(service, role, ...)      ConfigMap and Deployment of a role's newest revision
    worker_pool(service, role, replicas)     what is scaled
"""

from collections.abc import Mapping

from kvasir.operator.cluster import names
from kvasir.operator.cluster.pods import Installation, Object, metadata
from kvasir.operator.cluster.router_objects import (
    router_access,
    router_config_map,
    router_deployment,
    router_service,
)
from kvasir.operator.cluster.worker_objects import (
    WorkerRevision,
    worker_account,
    worker_network_policy,
    worker_pool,
    worker_revision,
    workers_service,
)
from kvasir.operator.modelservice import ModelService

__all__ = [
    "Installation",
    "Object",
    "WorkerRevision",
    "router_deployment",
    "shared",
    "worker_pool",
    "worker_revision",
]


def shared(service: ModelService, installation: Installation) -> tuple[Object, ...]:
    """All but Deployments, their revisions' ConfigMaps and WorkerPools."""
    budgets = (
        _budget(service, names.pool(service.name, role), role) for role in names.WORKER_ROLES
    )
    return (
        worker_account(service),
        *router_access(service),
        workers_service(service),
        router_service(service),
        worker_network_policy(service, installation),
        router_config_map(service),
        *budgets,
        _budget(service, names.router(service.name), "router"),
    )


def _budget(service: ModelService, name: str, role: names.Role) -> Object:
    """Nodes are emptied one pod of a role at a time; pods that serve nothing never hold that up."""
    component: names.Component = "router" if role == "router" else "worker"
    selected: Mapping[str, str] = names.role_selector(service.name, role)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(service, name, names.labels(service.name, component, role)),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": dict(selected)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
