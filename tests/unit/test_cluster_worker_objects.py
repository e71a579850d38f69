"""The objects of workers in a cluster: configuration, pods, resources, who may reach them."""

import json
from typing import Any

import pytest

from helpers.cluster_pods import container, pod
from helpers.cluster_service import INSTALLATION, a_service
from kvasir.operator.cluster import names, objects
from kvasir.operator.cluster.objects import Installation
from kvasir.operator.cluster.pods import TMP_FOLDER
from kvasir.operator.plan import revision
from kvasir.operator.workerpool import WorkerRole
from kvasir.worker.config import WorkerConfig


@pytest.mark.parametrize("role", names.WORKER_ROLES)
def test_a_workers_configuration_is_one_that_it_accepts(role: WorkerRole) -> None:
    service = a_service(
        engine={"kvCacheMemory": "1Gi", "maxRunningRequests": 7}, rollout={"drainDeadline": "90s"}
    )
    made = objects.worker_revision(service, role, INSTALLATION)
    (text,) = made.config_map["data"].values()
    own = {"worker_id": "chat-decode-x-y", "host": "10.0.0.1"}
    config = WorkerConfig.model_validate(json.loads(text) | own)
    assert (config.role, config.port, config.metrics_port) == (role, 50051, 9400)
    assert (config.kv_cache_memory, config.max_running_requests) == (2**30, 7)
    assert (config.served_name, config.drain_deadline) == ("chat", 90.0)
    assert config.revision == made.revision == revision(service)
    worker = container(service, role)
    assert worker["command"] == ["kvasir-worker"]
    assert worker["args"] == [
        "--config=/etc/kvasir/worker.json",
        "--set=worker_id=$(POD_NAME)",
        "--set=host=$(POD_IP)",
    ]
    assert made.config_map["immutable"] is True
    assert pod(service, role)["volumes"][0]["configMap"]["name"] == made.name


def test_worker_probes_ports_and_grace() -> None:
    service = a_service(rollout={"drainDeadline": "1500ms"})
    worker = container(service)
    assert worker["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "metrics"}
    assert worker["livenessProbe"]["httpGet"] == {"path": "/health", "port": "metrics"}
    startup = worker["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 300
    assert {port["name"]: port["containerPort"] for port in worker["ports"]} == {
        "grpc": 50051,
        "metrics": 9400,
    }
    assert pod(service)["terminationGracePeriodSeconds"] == 2 + 15


@pytest.mark.parametrize("component", ["prefill", "decode", "router"])
def test_pods_are_restricted(component: str) -> None:
    service = a_service(model={"source": "pvc://claim/model"})
    spec = (
        objects.router_deployment(service, INSTALLATION, 1, "a1")["spec"]["template"]["spec"]
        if component == "router"
        else pod(service, "prefill" if component == "prefill" else "decode")
    )
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    (main,) = spec["containers"]
    assert main["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert spec["automountServiceAccountToken"] is (component == "router")
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert all("hostPath" not in volume for volume in spec["volumes"])
    writable = [mount["mountPath"] for mount in main["volumeMounts"] if "readOnly" not in mount]
    assert writable == [TMP_FOLDER]


def test_a_model_on_a_volume_is_mounted_read_only() -> None:
    service = a_service(model={"source": "pvc://models/llama 3/50%#1".replace(" ", "-")})
    assert {
        "name": "model",
        "persistentVolumeClaim": {"claimName": "models", "readOnly": True},
    } in pod(service)["volumes"]
    mounts = container(service)["volumeMounts"]
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in mounts
    config = objects.worker_revision(service, "decode", INSTALLATION).config_map["data"]
    assert json.loads(config["worker.json"])["model"] == "file:///models/llama-3/50%25%231"
    # What refusals of the model are to name.
    assert json.loads(config["worker.json"])["model_source"] == service.spec.model.source


def test_resources_and_accelerators() -> None:
    role = {
        "resources": {"requests": {"cpu": 2, "memory": "4Gi"}, "limits": {"memory": "4Gi"}},
        "accelerator": {"resourceName": "example.com/npu", "count": 4},
    }
    service = a_service(decode=role)
    assert container(service)["resources"] == {
        "requests": {"cpu": "2", "memory": "4Gi"},
        "limits": {"memory": "4Gi", "example.com/npu": "4"},
    }


@pytest.mark.parametrize(
    ("decode", "requests"),
    [
        ({}, {"cpu": "100m", "memory": "1048Mi"}),
        # The cache is in the accelerator's memory.
        (
            {"accelerator": {"resourceName": "example.com/npu"}},
            {"cpu": "100m", "memory": "1024Mi"},
        ),
        ({"resources": {"requests": {"memory": "4Gi"}}}, {"cpu": "100m", "memory": "4Gi"}),
        # Kubernetes takes the limit for the request; more than it would be refused.
        ({"resources": {"limits": {"memory": "512Mi"}}}, {"cpu": "100m"}),
        (
            {
                "template": {
                    "spec": {
                        "containers": [{"name": "worker", "resources": {"limits": {"cpu": 2}}}]
                    }
                }
            },
            {"memory": "1048Mi"},
        ),
        ({"template": {"spec": {"resources": {"requests": {"memory": "1Gi"}}}}}, None),
        # No pod template: the API server says so.
        (
            {
                "template": {
                    "spec": {"containers": [{"name": "worker", "resources": {"limits": 2}}]}
                }
            },
            None,
        ),
    ],
)
def test_workers_request_memory_for_their_kv_cache_where_nobody_says_more(
    decode: dict[str, Any], requests: dict[str, str] | None
) -> None:
    service = a_service(engine={"kvCacheMemory": "24Mi"}, decode=decode)
    assert container(service)["resources"].get("requests") == requests


@pytest.mark.parametrize("template", [{"spec": None}, {"spec": {"containers": "none"}}])
def test_an_overlay_that_leaves_no_pod_is_left_to_the_api_server(template: Any) -> None:
    service = a_service(decode={"template": template}, router={"template": template})
    objects.worker_revision(service, "decode", INSTALLATION)
    objects.router_deployment(service, INSTALLATION, 1, "a1")


def test_routers_request_a_little() -> None:
    service = a_service(router={"resources": {"limits": {"memory": "256Mi"}}})
    found = [
        objects.router_deployment(each, INSTALLATION, 1, "a1")["spec"]["template"]["spec"]
        for each in (a_service(), service)
    ]
    resources = [spec["containers"][0]["resources"] for spec in found]
    assert resources == [
        {"requests": {"cpu": "50m", "memory": "128Mi"}},
        {"requests": {"cpu": "50m"}, "limits": {"memory": "256Mi"}},
    ]


def test_workers_are_reached_by_their_own_and_the_operator_only() -> None:
    def peers(installation: Installation) -> Any:
        shared = objects.shared(a_service(), installation)
        (policy,) = [each for each in shared if each["kind"] == "NetworkPolicy"]
        (rule,) = policy["spec"]["ingress"]
        assert [port["port"] for port in rule["ports"]] == [50051, 9400]
        return rule["from"]

    assert peers(INSTALLATION)[2]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "kvasir-system"
    }
    assert len(peers(Installation("w", "r"))) == 2


def test_metrics_of_workers_are_read_from_named_namespaces_and_nothing_else_is() -> None:
    def rules(*namespaces: str) -> Any:
        installation = Installation("w", "r", metrics_namespaces=namespaces)
        shared = objects.shared(a_service(), installation)
        (policy,) = [each for each in shared if each["kind"] == "NetworkPolicy"]
        return policy["spec"]["ingress"]

    assert len(rules()) == 1
    own, readers = rules("monitoring", "other")
    assert own == rules()[0]
    (peer,) = readers["from"]
    (among,) = peer["namespaceSelector"]["matchExpressions"]
    assert (among["key"], among["values"]) == (
        "kubernetes.io/metadata.name",
        ["monitoring", "other"],
    )
    assert readers["ports"] == [{"port": 9400, "protocol": "TCP"}]
