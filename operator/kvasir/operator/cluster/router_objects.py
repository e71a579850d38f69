"""The routers of a ModelService as Kubernetes objects. Pure.

There is one Deployment of routers, changed in place: routers hold no state, so that the
Deployment controller's own rolling update loses nothing.
"""

import math
from typing import Any

from kvasir.operator.cluster import names, overlay
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
from kvasir.operator.modelservice import ModelService
from kvasir.proto.process import EVERY_ADDRESS

GRACE_SECONDS = 15
"""Between the end of the drain and the end of the process, before the kubelet kills it."""
LINGER_SECONDS = 5
"""A stopping router goes on to accept for so long: proxies hear of its end a moment later. It does
so by itself; a preStop hook would only keep it from knowing, and from telling its clients to leave.
"""

HOLD_SECONDS = 300.0
"""How long requests wait where decode workers are scaled, and may be none: one has to start, which
with a large model takes minutes. Whatever minReplicas is: a change of it is to leave routers alone.
"""

DEFAULT_REQUESTS = {"cpu": "50m", "memory": "128Mi"}
"""Of a router whose ModelService says nothing of it."""

_CONFIG_FILE = "router.json"


def router_deployment(
    service: ModelService, installation: Installation, replicas: int, account: str
) -> Object:
    """``account``: uid of the ServiceAccount. Where that is made anew, so are the pods: the tokens
    that they have were of the former one, and are worth nothing.
    """
    template = _template(service, installation, account)
    template["metadata"]["labels"][names.POD_REVISION_LABEL] = digest(template)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(service, names.router(service.name)),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": names.selector(service.name, "router")},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": template,
        },
    }


def router_config_map(service: ModelService) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(service, names.router(service.name)),
        "data": {_CONFIG_FILE: config_text(_config(service))},
    }


def router_service(service: ModelService) -> Object:
    """Where clients send their requests."""
    port = {"name": "http", "port": names.SERVICE_PORT, "targetPort": "http", "protocol": "TCP"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(service, service.name),
        "spec": {"selector": names.selector(service.name, "router"), "ports": [port]},
    }


def router_access(service: ModelService) -> tuple[Object, Object, Object]:
    """ServiceAccount, Role and RoleBinding: read the EndpointSlices of the own namespace."""
    name = names.router(service.name)
    own = _metadata(service, name)
    group = "rbac.authorization.k8s.io"
    rule = {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    }
    account = {"kind": "ServiceAccount", "name": name, "namespace": service.metadata.namespace}
    return (
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": own,
            "automountServiceAccountToken": False,
        },
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": own, "rules": [rule]},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": own,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [account],
        },
    )


def _metadata(service: ModelService, name: str) -> Object:
    return metadata(service, name, names.labels(service.name, "router", "router"))


def _template(service: ModelService, installation: Installation, account: str) -> Object:
    """The pod template, but for the label that names its revision."""
    container = Container(
        name="router",
        image=installation.router_image,
        config_file=_CONFIG_FILE,
        settings={"router_id": "$(POD_NAME)", "host": EVERY_ADDRESS},
        ports={"http": names.HTTP_PORT},
        probed_port="http",
        # Not /ready: without any worker, routers hold requests until one comes.
        ready_path="/health",
        resources=dict(compute_resources(service.spec.router.resources)),
    )
    grace = math.ceil(service.spec.rollout.drain_deadline) + LINGER_SECONDS + GRACE_SECONDS
    name = names.router(service.name)
    spec = pod_spec(container, config_map=name, account=name, grace_seconds=grace)
    spec["automountServiceAccountToken"] = True
    base = {
        "metadata": {
            "labels": names.labels(service.name, "router", "router"),
            "annotations": {
                names.CONFIG_HASH_ANNOTATION: digest(_config(service)),
                names.ACCOUNT_ANNOTATION: account,
            },
        },
        "spec": spec,
    }
    template = overlay.merge(base, service.spec.router.template or {})
    return with_default_requests(template, container.name, DEFAULT_REQUESTS)


def _config(service: ModelService) -> dict[str, Any]:
    """RouterConfig but for what differs between routers."""
    scaled = service.spec.decode.scaling is not None
    return {
        "port": names.HTTP_PORT,
        "kubernetes": {
            "namespace": service.metadata.namespace,
            "service": names.workers(service.name),
        },
        "disaggregation": service.spec.disaggregation.model_dump(),
        "drain_linger": LINGER_SECONDS,
        "drain_deadline": service.spec.rollout.drain_deadline,
        **({"no_worker_timeout": HOLD_SECONDS} if scaled else {}),
    }
