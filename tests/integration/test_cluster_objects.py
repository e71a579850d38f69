"""A real API server takes the objects of a ModelService, and they do what they are for."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from kubernetes.aio.config import incluster_config

from cluster.clients import CommandError, Kubectl
from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from cluster.processes import wait_until
from kvasir.operator.cluster import names, objects
from kvasir.operator.cluster.objects import Installation, Object
from kvasir.operator.modelservice import ModelService
from kvasir.router.config import RouterConfig
from kvasir.router.discovery import WorkerAddress
from kvasir.router.kube_discovery import KubernetesWorkers, workers_in

CRDS = Path(__file__).parents[2] / "charts/kvasir/crds"
INSTALLATION = Installation("nowhere.invalid/worker:1", "nowhere.invalid/router:1", "default")

SPECS: dict[str, dict[str, Any]] = {
    "minimal": {},
    "volume": {"model": {"source": "pvc://models/llama"}},
    "accelerated": {
        "decode": {
            "accelerator": {"resourceName": "example.com/npu", "count": 2},
            "resources": {"requests": {"cpu": "500m"}, "limits": {"memory": "4Gi"}},
        }
    },
    "overlaid": {
        "prefill": {
            "template": {
                "metadata": {"annotations": {"note": "x"}},
                "spec": {
                    "tolerations": [{"key": "gpu", "operator": "Exists"}],
                    "containers": [
                        {
                            "name": "worker",
                            "env": [{"name": "LEVEL", "value": "3"}],
                            "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
                        }
                    ],
                    "volumes": [{"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}}],
                },
            }
        }
    },
}


@pytest.fixture(scope="module")
def crds(kubectl: Kubectl) -> None:
    kubectl("apply", "--server-side", "--force-conflicts", f"--filename={CRDS}")
    for plural in ("modelservices", "workerpools"):
        kubectl("wait", "--for=condition=Established", f"crd/{plural}.kvasir.dev")


@pytest.fixture
def restricted(kubectl: Kubectl, namespace: str) -> str:
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    return namespace


def created(kubectl: Kubectl, namespace: str, spec: dict[str, Any]) -> ModelService:
    """A ModelService as the API server gives it back."""
    model = {"model": {"source": "bundled://smollm2-135m-instruct"}}
    manifest = {
        "apiVersion": "kvasir.dev/v1alpha1",
        "kind": "ModelService",
        "metadata": {"name": "chat", "namespace": namespace},
        "spec": model | spec,
    }
    kubectl.apply(manifest)
    return ModelService.model_validate(
        kubectl.get("modelservice", "chat", f"--namespace={namespace}")
    )


def everything(service: ModelService) -> list[Object]:
    revisions = [objects.worker_revision(service, r, INSTALLATION) for r in names.WORKER_ROLES]
    return [
        *objects.shared(service, INSTALLATION),
        objects.router_deployment(service, INSTALLATION, 2, "a1"),
        *(objects.worker_pool(service, role, 1) for role in names.WORKER_ROLES),
        *(each.config_map for each in revisions),
        *(each.deployment(1) for each in revisions),
    ]


def apply(kubectl: Kubectl, items: list[Object], *flags: str) -> str:
    manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    manager = f"--field-manager={names.OPERATOR}"
    return kubectl("apply", "--server-side", manager, *flags, "--filename=-", stdin=manifest)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_the_api_server_accepts_each_object(
    kubectl: Kubectl, restricted: str, crds: None, spec: dict[str, Any]
) -> None:
    made = everything(created(kubectl, restricted, spec))
    printed = apply(kubectl, made, "--dry-run=server")
    assert printed.count("serverside-applied (server dry run)") == len(made)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_pods_meet_the_restricted_standard(
    kubectl: Kubectl, restricted: str, crds: None, spec: dict[str, Any]
) -> None:
    """The API server judges pods, and of a Deployment's template it only warns."""
    made = everything(created(kubectl, restricted, spec))
    accounts = [each for each in made if each["kind"] == "ServiceAccount"]
    apply(kubectl, accounts)
    for each in made:
        if each["kind"] == "Deployment":
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "probe", "namespace": restricted},
                "spec": each["spec"]["template"]["spec"],
            }
            assert "probe serverside-applied" in apply(kubectl, [pod], "--dry-run=server")


def test_objects_serve_stay_and_go(
    kubectl: Kubectl, restricted: str, crds: None, node: FakeNode
) -> None:
    service = created(kubectl, restricted, {"decode": {"replicas": 1}})
    made = everything(service)
    apply(kubectl, made)
    inside = f"--namespace={restricted}"
    for each in made:
        if each["kind"] == "Deployment":
            name = f"deploy/{each['metadata']['name']}"
            kubectl("wait", "--for=condition=Available", name, inside, "--timeout=60s")

    pods = {p["metadata"]["name"]: p for p in kubectl.get("pods", inside)["items"]}
    roles = sorted(pod["metadata"]["labels"]["kvasir.dev/role"] for pod in pods.values())
    assert roles == ["decode", "prefill", "router", "router"]

    def found() -> dict[str, str]:
        selected = "--selector=kubernetes.io/service-name=chat-workers"
        slices = kubectl.get("endpointslices", selected, inside)["items"]
        return {worker.worker_id: worker.address for worker in workers_in(slices) if worker.accepts}

    workers = {
        name: f"{pod['status']['podIP']}:50051"
        for name, pod in pods.items()
        if pod["metadata"]["labels"]["kvasir.dev/role"] != "router"
    }
    wait_until(lambda: found() == workers, "both workers in the EndpointSlice", 30)

    kinds = ",".join(sorted({each["kind"] for each in made}))
    before = versions(kubectl, kinds, inside, made)
    apply(kubectl, everything(service))
    assert versions(kubectl, kinds, inside, made) == before, "a second apply changes nothing"

    kubectl("delete", "modelservice/chat", inside, "--cascade=foreground", "--timeout=60s")
    wait_until(lambda: not versions(kubectl, kinds, inside, made), "all are gone", 30)


def versions(
    kubectl: Kubectl, kinds: str, inside: str, made: list[Object]
) -> dict[tuple[str, str], str]:
    """Generation, or the resourceVersion of kinds without one, of each object that there is."""
    ours = {(each["kind"], each["metadata"]["name"]) for each in made}
    found = {}
    for item in kubectl.get(kinds, inside)["items"]:
        metadata = item["metadata"]
        key = (item["kind"], metadata["name"])
        if key in ours:
            found[key] = str(metadata.get("generation", metadata["resourceVersion"]))
    return found


async def test_a_router_finds_its_workers_as_its_pod_would(
    control_plane: ControlPlane,
    restricted: str,
    crds: None,
    node: FakeNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its ServiceAccount's token and rights, and by the configuration that it is given."""
    kubectl = control_plane.kubectl
    made = everything(created(kubectl, restricted, {}))
    apply(kubectl, made)
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text(kubectl("create", "token", "chat-router", f"--namespace={restricted}").strip())
    authority.write_bytes(control_plane.authority.certificate)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    address = urlsplit(control_plane.url)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(address.hostname))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (text,) = [
        each["data"]["router.json"]
        for each in made
        if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", "chat-router")
    ]
    config = RouterConfig.model_validate_json(text)
    assert config.kubernetes is not None
    source = KubernetesWorkers(config.kubernetes)
    await source.start()
    found: tuple[WorkerAddress, ...] = ()
    try:
        async with asyncio.timeout(60):
            while sum(worker.accepts for worker in found) < 2:
                found = source.poll() or found
                await asyncio.sleep(0.05)
    finally:
        await source.close()
    assert sorted(worker.worker_id.split("-")[1] for worker in found) == ["decode", "prefill"]


def test_a_router_may_watch_its_workers_and_a_worker_nothing(
    kubectl: Kubectl, restricted: str, crds: None, tmp_path: Path
) -> None:
    apply(kubectl, everything(created(kubectl, restricted, {})))
    router = kubectl.service_account("chat-router", restricted, tmp_path)
    assert "chat-workers" in router("get", "endpointslices", f"--namespace={restricted}")
    worker = kubectl.service_account("chat-worker", restricted, tmp_path)
    refused = [
        (router, ["get", "pods"]),
        (router, ["get", "secrets"]),
        (router, ["get", "endpointslices", "--namespace=default"]),
        (worker, ["get", "endpointslices"]),
    ]
    for who, request in refused:
        with pytest.raises(CommandError, match="Forbidden"):
            who(*request)
