"""The workers of a ModelService as Kubernetes objects. Pure.

Each role has one Deployment for each revision of its pods, or one LeaderWorkerSet where a worker
spans nodes (multi_node.py). Its template never changes: what would change it changes its name, so
that the operator decides when pods go, and no other controller. What the two revisions of a worker
name:

- ``revision``, the same for both roles: workers with equal ones exchange KV.
- ``pod_revision``, of one role: template and configuration. Replicas are no part of it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from kvasir.operator.cluster import multi_node, names, overlay
from kvasir.operator.cluster.pods import (
    Container,
    Installation,
    Object,
    compute_resources,
    config_text,
    digest,
    metadata,
    pod_spec,
    with_default_requests,
)
from kvasir.operator.modelservice import API_VERSION, ModelService, Role
from kvasir.operator.plan import revision
from kvasir.operator.workerpool import KIND as POOL_KIND
from kvasir.operator.workerpool import WorkerRole

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that Kubernetes itself puts on every namespace."""
GRACE_SECONDS = 15
"""Between the end of the drain and the end of the process, before the kubelet kills it."""
MODEL_FOLDER = "/models"
BASE_MEMORY = 1024**3
"""Bytes that a worker requests beside its KV cache where the ModelService does not say: enough for
the process and a model of a few hundred million parameters."""
DEFAULT_CPU = "100m"
"""What a worker requests where the ModelService does not say: enough to be scheduled by."""

_MIB = 1024**2

_CONFIG_FILE = "worker.json"


@dataclass(frozen=True, slots=True)
class WorkerRevision:
    """All pods of a role that are alike: what keeps them, but for its replicas."""

    role: WorkerRole
    name: str
    """Of the Deployment and what its pods need."""
    revision: str
    pod_revision: str
    config_map: Object
    network_policy: Object | None
    """Of workers that span nodes."""
    _deployment: Object

    @property
    def companions(self) -> tuple[Object, ...]:
        """What the pods need, and what goes with them."""
        policies = () if self.network_policy is None else (self.network_policy,)
        return (self.config_map, *policies)

    def deployment(self, replicas: int) -> Object:
        """A fresh Deployment of ``replicas`` workers."""
        spec = {"replicas": replicas, **self._deployment["spec"]}
        return {**self._deployment, "spec": spec}


def worker_revision(
    service: ModelService, role: WorkerRole, installation: Installation
) -> WorkerRevision:
    """The revision of a role's pods that the ModelService asks for now."""
    kv_revision = revision(service)
    text = config_text(_config(service, role, kv_revision))
    content = [_template(service, role, installation, ""), text]
    pod_revision = digest(content)
    name = names.deployment(service.name, role, pod_revision)
    marks = {names.REVISION_LABEL: kv_revision, names.POD_REVISION_LABEL: pod_revision}
    labels = names.labels(service.name, "worker", role) | marks
    own = metadata(service, name, labels)
    template = _template(service, role, installation, name)
    template["metadata"]["labels"] |= marks
    size = multi_node.pods_for_each_worker(_role(service, role))
    return WorkerRevision(
        role=role,
        name=name,
        revision=kv_revision,
        pod_revision=pod_revision,
        config_map={
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": own,
            "immutable": True,
            "data": {_CONFIG_FILE: text},
        },
        network_policy=(
            multi_node.group_network_policy(service, name, labels, pod_revision)
            if size > 1
            else None
        ),
        _deployment=(
            multi_node.leader_worker_set(own, template, size)
            if size > 1
            else _deployment(own, template, service, role)
        ),
    )


def _deployment(own: Object, template: Object, service: ModelService, role: WorkerRole) -> Object:
    selected = names.role_selector(service.name, role)
    selected[names.POD_REVISION_LABEL] = own["labels"][names.POD_REVISION_LABEL]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": own,
        "spec": {"selector": {"matchLabels": selected}, "template": template},
    }


def worker_pool(service: ModelService, role: WorkerRole, replicas: int) -> Object:
    """What is scaled. ``replicas`` is the number to create it with, or to keep."""
    return {
        "apiVersion": API_VERSION,
        "kind": POOL_KIND,
        "metadata": metadata(
            service,
            names.pool(service.name, role),
            names.labels(service.name, "worker", role),
        ),
        "spec": {"modelService": service.name, "role": role, "replicas": replicas},
    }


def workers_service(service: ModelService) -> Object:
    """Headless: routers read its EndpointSlices to know each worker and its condition."""
    ports = {"grpc": names.GRPC_PORT, "metrics": names.METRICS_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(
            service, names.workers(service.name), names.labels(service.name, "worker")
        ),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": False,
            "selector": names.selector(service.name, "worker"),
            "ports": [
                {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
                for name, port in ports.items()
            ],
        },
    }


def worker_account(service: ModelService) -> Object:
    """Without a token: workers never ask the API server."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(
            service, names.worker_account(service.name), names.labels(service.name, "worker")
        ),
        "automountServiceAccountToken": False,
    }


def worker_network_policy(service: ModelService, installation: Installation) -> Object:
    """Nobody reaches a worker but this service's workers and routers, and the operator.

    Its metrics are read from further namespaces, where the installation names any. Workers trust
    who reaches them: routers have checked the API keys.
    """
    peers: list[Object] = [
        {"podSelector": {"matchLabels": names.selector(service.name, component)}}
        for component in ("router", "worker")
    ]
    if installation.operator_namespace is not None:
        peers.append(
            {
                "namespaceSelector": {
                    "matchLabels": {NAMESPACE_NAME: installation.operator_namespace}
                },
                "podSelector": {"matchLabels": names.OPERATOR_LABELS},
            }
        )
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(
            service, names.workers(service.name), names.labels(service.name, "worker")
        ),
        "spec": {
            "podSelector": {"matchLabels": names.selector(service.name, "worker")},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": peers, "ports": _ports(names.GRPC_PORT, names.METRICS_PORT)},
                *_metrics_readers(installation),
            ],
        },
    }


def _metrics_readers(installation: Installation) -> Iterator[Object]:
    """Metrics alone, for every pod of the namespaces that the installation names."""
    if installation.metrics_namespaces:
        among = {
            "key": NAMESPACE_NAME,
            "operator": "In",
            "values": list(installation.metrics_namespaces),
        }
        peer = {"namespaceSelector": {"matchExpressions": [among]}}
        yield {"from": [peer], "ports": _ports(names.METRICS_PORT)}


def _ports(*numbers: int) -> list[Object]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]


def _role(service: ModelService, role: WorkerRole) -> Role:
    return service.spec.prefill if role == "prefill" else service.spec.decode


def _template(
    service: ModelService, role: WorkerRole, installation: Installation, config_map: str
) -> Object:
    """The pod template, but for the labels that name its revision."""
    wanted = _role(service, role)
    container = Container(
        name="worker",
        image=installation.worker_image,
        config_file=_CONFIG_FILE,
        settings={"worker_id": "$(POD_NAME)", "host": "$(POD_IP)"},
        ports={"grpc": names.GRPC_PORT, "metrics": names.METRICS_PORT},
        probed_port="metrics",
        ready_path="/ready",
        resources=_resources(wanted),
    )
    grace = math.ceil(service.spec.rollout.drain_deadline) + GRACE_SECONDS
    spec = pod_spec(container, config_map, names.worker_account(service.name), grace)
    spec["automountServiceAccountToken"] = False
    if (claim := _claim(service)) is not None:
        _mount_model(spec, claim)
    base = {"metadata": {"labels": names.labels(service.name, "worker", role)}, "spec": spec}
    template = overlay.merge(base, wanted.template or {})
    return with_default_requests(template, container.name, _default_requests(service, wanted))


def _default_requests(service: ModelService, role: Role) -> Mapping[str, str]:
    """The process and a small model; and the KV cache, unless an accelerator's memory holds it."""
    cache = service.spec.engine.kv_cache_memory if role.accelerator is None else 0
    return {"cpu": DEFAULT_CPU, "memory": f"{-(-(BASE_MEMORY + cache) // _MIB)}Mi"}


def _resources(role: Role) -> Object:
    resources = compute_resources(role.resources)
    if role.accelerator is not None:
        # Extended resources are not overcommitted: the request is the limit.
        count = {role.accelerator.resource_name: str(role.accelerator.count)}
        resources["limits"] = resources.get("limits", {}) | count
    return dict(resources)


def _claim(service: ModelService) -> str | None:
    """The PersistentVolumeClaim that holds the model."""
    scheme, _, rest = service.spec.model.source.partition("://")
    return rest.partition("/")[0] if scheme == "pvc" else None


def _mount_model(spec: Object, claim: str) -> None:
    source = {"claimName": claim, "readOnly": True}
    spec["volumes"].append({"name": "model", "persistentVolumeClaim": source})
    mount = {"name": "model", "mountPath": MODEL_FOLDER, "readOnly": True}
    spec["containers"][0]["volumeMounts"].append(mount)


def _model_url(source: str) -> str:
    """Where the worker finds the model in its pod."""
    scheme, _, rest = source.partition("://")
    if scheme != "pvc":
        return source
    return f"file://{MODEL_FOLDER}/{quote(rest.partition('/')[2])}"


def _config(service: ModelService, role: WorkerRole, kv_revision: str) -> dict[str, Any]:
    """WorkerConfig but for what differs between the pods of a role."""
    model, engine = service.spec.model, service.spec.engine
    parallelism = _role(service, role).parallelism
    spread = {
        f"{kind}_parallel": size for kind, size in parallelism.model_dump().items() if size > 1
    }
    # Messages are to name what the user wrote, not where it is mounted.
    shown = {"model_source": model.source} if _claim(service) is not None else {}
    return {
        "role": role,
        "port": names.GRPC_PORT,
        "metrics_port": names.METRICS_PORT,
        "revision": kv_revision,
        "model": _model_url(model.source),
        "served_name": service.served_name,
        "max_model_len": model.max_model_len,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "activation_quantization": model.activation_quantization,
        "block_size": engine.block_size,
        "kv_cache_memory": engine.kv_cache_memory,
        "max_batched_tokens": engine.max_batched_tokens,
        "max_running_requests": engine.max_running_requests,
        "prefix_caching": engine.prefix_caching,
        "speculative_method": engine.speculative.method,
        "num_speculative_tokens": engine.speculative.most_tokens,
        "drain_deadline": service.spec.rollout.drain_deadline,
        **shown,
        **spread,
    }
