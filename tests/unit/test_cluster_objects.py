"""What a ModelService becomes in a cluster."""

import json
from typing import Any

import pytest

from helpers.cluster_service import (
    INSTALLATION,
    UID,
    a_service,
    deployment,
    everything,
    matches,
    pod_revision,
)
from kvasir.operator.cluster import names, objects
from kvasir.operator.cluster.objects import Installation, Object
from kvasir.operator.cluster.pods import TMP_FOLDER
from kvasir.operator.modelservice import ModelService
from kvasir.operator.plan import revision
from kvasir.operator.workerpool import WorkerRole
from kvasir.router.config import RouterConfig
from kvasir.worker.config import WorkerConfig


def pod(service: ModelService, role: WorkerRole = "decode") -> dict[str, Any]:
    spec: dict[str, Any] = deployment(service, role)["spec"]["template"]["spec"]
    return spec


def container(service: ModelService, role: WorkerRole = "decode") -> dict[str, Any]:
    only: dict[str, Any] = pod(service, role)["containers"][0]
    return only


# --- all of them -------------------------------------------------------------------------------


def test_what_there_is() -> None:
    service = a_service()
    prefill, decode = (pod_revision(service, role) for role in names.WORKER_ROLES)
    found = sorted((each["kind"], each["metadata"]["name"]) for each in everything(service))
    assert found == sorted(
        [
            ("ConfigMap", "chat-router"),
            ("ConfigMap", f"chat-decode-{decode}"),
            ("ConfigMap", f"chat-prefill-{prefill}"),
            ("Deployment", "chat-router"),
            ("Deployment", f"chat-decode-{decode}"),
            ("Deployment", f"chat-prefill-{prefill}"),
            ("NetworkPolicy", "chat-workers"),
            ("PodDisruptionBudget", "chat-decode"),
            ("PodDisruptionBudget", "chat-prefill"),
            ("PodDisruptionBudget", "chat-router"),
            ("Role", "chat-router"),
            ("RoleBinding", "chat-router"),
            ("Service", "chat"),
            ("Service", "chat-workers"),
            ("ServiceAccount", "chat-router"),
            ("ServiceAccount", "chat-worker"),
            ("WorkerPool", "chat-decode"),
            ("WorkerPool", "chat-prefill"),
        ]
    )


@pytest.mark.parametrize("each", everything(a_service()), ids=lambda each: str(each["kind"]))
def test_each_is_owned_labeled_and_in_the_services_namespace(each: Object) -> None:
    metadata = each["metadata"]
    assert metadata["namespace"] == "team"
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("ModelService", "chat", UID)
    assert owner["controller"] is True
    labels = metadata["labels"]
    assert labels.keys() >= {
        f"app.kubernetes.io/{key}"
        for key in ("name", "instance", "component", "part-of", "managed-by", "version")
    }
    assert labels["kvasir.dev/modelservice"] == "chat"
    assert "status" not in each


def test_the_longest_names_fit() -> None:
    service = a_service()
    long = service.model_copy(
        update={"metadata": service.metadata.model_copy(update={"name": "a" * 40})}
    )
    for each in everything(long):
        assert len(each["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in each["metadata"]["labels"].values())


def test_selectors_match_the_pods_they_are_for_and_no_others() -> None:
    service = a_service()
    pods: dict[str, dict[str, str]] = {
        role: deployment(service, role)["spec"]["template"]["metadata"]["labels"]
        for role in names.WORKER_ROLES
    }
    pods["router"] = objects.router_deployment(service, INSTALLATION, 1, "a1")["spec"]["template"][
        "metadata"
    ]["labels"]
    workers = {"prefill", "decode"}
    expected = {
        ("Deployment", "chat-router"): {"router"},
        ("NetworkPolicy", "chat-workers"): workers,
        ("PodDisruptionBudget", "chat-decode"): {"decode"},
        ("PodDisruptionBudget", "chat-prefill"): {"prefill"},
        ("PodDisruptionBudget", "chat-router"): {"router"},
        ("Service", "chat"): {"router"},
        ("Service", "chat-workers"): workers,
    }
    for role in names.WORKER_ROLES:
        expected["Deployment", deployment(service, role)["metadata"]["name"]] = {role}
    for each in everything(service):
        spec = each.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is not None:
            selector = selector.get("matchLabels", selector)
            selected = {role for role, labels in pods.items() if matches(selector, labels)}
            assert selected == expected.pop((each["kind"], each["metadata"]["name"]))
    assert not expected


# --- workers -----------------------------------------------------------------------------------


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


# --- routers -----------------------------------------------------------------------------------


def test_a_routers_configuration_is_one_that_it_accepts() -> None:
    service = a_service(
        disaggregation={"mode": "always", "minUncachedTokens": 9}, rollout={"drainDeadline": "60s"}
    )
    (config_map,) = [
        each for each in objects.shared(service, INSTALLATION) if each["kind"] == "ConfigMap"
    ]
    config = RouterConfig.model_validate_json(config_map["data"]["router.json"])
    assert config.kubernetes is not None
    assert (config.kubernetes.namespace, config.kubernetes.service) == ("team", "chat-workers")
    assert (config.port, config.drain_linger, config.drain_deadline) == (8000, 5.0, 60.0)
    assert (config.disaggregation.mode, config.disaggregation.min_uncached_tokens) == ("always", 9)


@pytest.mark.parametrize(
    ("decode", "seconds"),
    [
        ({"replicas": 1}, 30.0),
        ({"scaling": {"minReplicas": 0, "maxReplicas": 2}}, 300.0),
        # As long, so that a change of the bounds restarts no router.
        ({"scaling": {"minReplicas": 1, "maxReplicas": 2}}, 300.0),
    ],
)
def test_routers_hold_requests_for_longer_where_workers_start_for_them(
    decode: dict[str, Any], seconds: float
) -> None:
    service = a_service(decode=decode)
    (config_map,) = [
        each for each in objects.shared(service, INSTALLATION) if each["kind"] == "ConfigMap"
    ]
    config = RouterConfig.model_validate_json(config_map["data"]["router.json"])
    assert config.no_worker_timeout == seconds


def test_a_router_is_ready_without_workers_and_leaves_slowly() -> None:
    template = objects.router_deployment(a_service(), INSTALLATION, 3, "a1")["spec"]["template"]
    (main,) = template["spec"]["containers"]
    assert main["readinessProbe"]["httpGet"]["path"] == "/health"
    # It lingers by itself.
    assert "lifecycle" not in main
    assert template["spec"]["terminationGracePeriodSeconds"] == 5 + 300 + 15
    assert "--set=host=*" in main["args"]


def test_a_changed_router_configuration_restarts_routers_and_replicas_do_not() -> None:
    def template(replicas: int, **spec: Any) -> Any:
        made = objects.router_deployment(a_service(**spec), INSTALLATION, replicas, "a1")
        return made["spec"]["template"]

    assert template(1) == template(5)
    assert template(1) != template(1, disaggregation={"mode": "never"})


def test_a_router_may_read_endpoint_slices_and_nothing_else() -> None:
    (role,) = [e for e in objects.shared(a_service(), INSTALLATION) if e["kind"] == "Role"]
    assert role["rules"] == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        }
    ]


# --- revisions ---------------------------------------------------------------------------------

LABELED = {"metadata": {"labels": {"team": "a"}}}


@pytest.mark.parametrize(
    ("change", "changed_pods", "changed_kv"),
    [
        ({}, set(), False),
        ({"decode": {"replicas": 7}}, set(), False),
        ({"prefill": {"scaling": {"minReplicas": 1, "maxReplicas": 3}}}, set(), False),
        ({"router": {"replicas": 3, "template": LABELED}}, set(), False),
        ({"disaggregation": {"mode": "never"}}, set(), False),
        ({"objectives": {"ttftP95": "1s"}}, set(), False),
        ({"decode": {"template": LABELED}}, {"decode"}, False),
        ({"prefill": {"resources": {"requests": {"cpu": 1}}}}, {"prefill"}, False),
        ({"rollout": {"drainDeadline": "10s"}}, {"prefill", "decode"}, False),
        ({"engine": {"blockSize": 32}}, {"prefill", "decode"}, True),
        ({"model": {"source": "pvc://claim/model"}}, {"prefill", "decode"}, True),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_what_changes_a_revision(
    change: dict[str, Any], changed_pods: set[str], changed_kv: bool
) -> None:
    before, after = a_service(), a_service(**change)
    changed = {
        role
        for role in names.WORKER_ROLES
        if pod_revision(before, role) != pod_revision(after, role)
    }
    assert changed == changed_pods
    assert (revision(before) != revision(after)) is changed_kv


def test_a_new_image_is_a_new_revision_and_replicas_are_no_part_of_one() -> None:
    service = a_service()
    newer = objects.worker_revision(service, "decode", Installation("kvasir/worker:2", "r"))
    assert newer.pod_revision != pod_revision(service, "decode")
    assert newer.revision == revision(service)
    one, two = newer.deployment(1), newer.deployment(2)
    assert (one["spec"].pop("replicas"), two["spec"].pop("replicas")) == (1, 2)
    assert one == two


def test_revisions_are_in_the_labels_of_deployment_and_pods() -> None:
    made = objects.worker_revision(a_service(), "decode", INSTALLATION)
    each = made.deployment(1)
    for labels in (each["metadata"]["labels"], each["spec"]["template"]["metadata"]["labels"]):
        assert labels["kvasir.dev/revision"] == made.revision
        assert labels["kvasir.dev/pod-revision"] == made.pod_revision
        assert labels["kvasir.dev/role"] == "decode"
