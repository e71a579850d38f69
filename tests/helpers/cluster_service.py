"""A ModelService in a cluster, and everything that it is made of."""

from typing import Any

from kvasir.operator.cluster import names, objects
from kvasir.operator.cluster.objects import Installation, Object
from kvasir.operator.modelservice import ModelService
from kvasir.operator.workerpool import WorkerRole

INSTALLATION = Installation("kvasir/worker:1", "kvasir/router:1", "kvasir-system")
UID = "8b1e9f0a-0000-4000-8000-000000000001"


def a_service(**spec: Any) -> ModelService:
    return ModelService.model_validate(
        {
            "apiVersion": "kvasir.dev/v1alpha1",
            "kind": "ModelService",
            "metadata": {"name": "chat", "namespace": "team", "uid": UID},
            "spec": {"model": {"source": "bundled://smollm2-135m-instruct"}} | spec,
        }
    )


def deployment(service: ModelService, role: WorkerRole = "decode") -> Object:
    return objects.worker_revision(service, role, INSTALLATION).deployment(2)


def pod_revision(service: ModelService, role: WorkerRole) -> str:
    return objects.worker_revision(service, role, INSTALLATION).pod_revision


def everything(service: ModelService) -> list[Object]:
    revisions = [objects.worker_revision(service, r, INSTALLATION) for r in names.WORKER_ROLES]
    return [
        *objects.shared(service, INSTALLATION),
        objects.router_deployment(service, INSTALLATION, 1, "a1"),
        *(objects.worker_pool(service, role, 1) for role in names.WORKER_ROLES),
        *(each.config_map for each in revisions),
        *(each.deployment(1) for each in revisions),
    ]


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()
