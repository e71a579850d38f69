"""The chart with a real helm and a real API server: rendered, accepted, installed, limited."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from cluster.clients import CommandError, Helm, Kubectl
from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from cluster.processes import Daemon, free_port, wait_until

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvasir"
SAMPLES = sorted((ROOT / "deploy" / "samples").glob("*.yaml"))
OPERATOR = "kvasir-operator"
DIGEST = f"sha256:{'0123456789abcdef' * 4}"

Object = dict[str, Any]

VALUES: dict[str, Object] = {
    "defaults": {},
    "namespaced": {"watchNamespaces": ["HERE", "default"]},
    "standby": {"replicas": 2},
    "images": {
        "images": {
            "registry": "registry.example.com:5000/team",
            "tag": "v1",
            "pullPolicy": "Always",
            "pullSecrets": ["pull"],
            "worker": {"digest": DIGEST},
        }
    },
    "monitored": {
        "serviceMonitor": {"enabled": True, "interval": "1m", "labels": {"release": "prometheus"}}
    },
    "open": {"networkPolicy": {"enabled": False}},
    "other-port": {"networkPolicy": {"apiServerPorts": [8443]}},
    "placed": {
        "podAnnotations": {"example.com/note": "true"},
        "podLabels": {"team": "serving"},
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "files": {
        "extraVolumes": [{"name": "authorities", "configMap": {"name": "authorities"}}],
        "extraVolumeMounts": [
            {"name": "authorities", "mountPath": "/etc/ssl/extra", "readOnly": True}
        ],
    },
    "unlimited": {
        "resources": {"requests": {"cpu": 0.5, "memory": "1Gi"}, "limits": {"memory": None}}
    },
}

_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
SERVICE_MONITOR = {
    # The fields that the chart uses, of a resource that the Prometheus operator would bring.
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "servicemonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "scope": "Namespaced",
        "names": {
            "kind": "ServiceMonitor",
            "plural": "servicemonitors",
            "singular": "servicemonitor",
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "required": ["selector", "endpoints"],
                                "properties": {
                                    "selector": {
                                        "type": "object",
                                        "properties": {"matchLabels": _STRINGS},
                                    },
                                    "endpoints": {
                                        "type": "array",
                                        "items": {
                                            "type": "object",
                                            "properties": {
                                                "port": {"type": "string"},
                                                "interval": {"type": "string"},
                                            },
                                        },
                                    },
                                },
                            }
                        },
                    }
                },
            }
        ],
    },
}


@pytest.fixture(scope="module")
def helm(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(control_plane.kubeconfig, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="module")
def resources(kubectl: Kubectl) -> None:
    """Every custom resource that the chart brings or names."""
    kubectl("apply", f"--filename={CHART / 'crds'}")
    kubectl.apply(SERVICE_MONITOR)
    kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")


def render(helm: Helm, folder: Path, values: Object, namespace: str = "here") -> list[Object]:
    text = json.dumps(values).replace("HERE", namespace)
    path = folder / "values.yaml"
    path.write_text(text, encoding="utf-8")
    shown = helm("template", "kvasir", str(CHART), f"--namespace={namespace}", f"--values={path}")
    return [each for each in yaml.safe_load_all(shown) if each]


def pods(objects: list[Object]) -> Iterator[tuple[bool, Object]]:
    """Each pod's spec, and whether the pod is one that goes on."""
    for each in objects:
        if each["kind"] == "Pod":
            yield False, each["spec"]
        elif "template" in each.get("spec", {}):
            yield True, each["spec"]["template"]["spec"]


def rules(objects: list[Object]) -> Iterator[Object]:
    for each in objects:
        yield from each.get("rules", [])


@pytest.mark.parametrize("name", VALUES)
def test_lint_finds_nothing(helm: Helm, tmp_path: Path, name: str) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(json.dumps(VALUES[name]).replace("HERE", "here"), encoding="utf-8")
    said = helm("lint", "--strict", str(CHART), f"--values={path}")
    assert "[ERROR]" not in said
    assert "[WARNING]" not in said


@pytest.mark.parametrize("name", VALUES)
def test_the_api_server_accepts_every_object(
    kubectl: Kubectl, helm: Helm, namespace: str, tmp_path: Path, resources: None, name: str
) -> None:
    # Warnings are for what the API server accepts but would not enforce, such as pod security.
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    objects = render(helm, tmp_path, VALUES[name], namespace)
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    said = kubectl(
        *("apply", "--server-side", "--dry-run=server", "--validate=strict", "--filename=-"),
        stdin=listed,
    )
    assert len(said.splitlines()) == len(objects)


@pytest.mark.parametrize("name", VALUES)
def test_every_container_is_restricted_bounded_and_probed(
    helm: Helm, tmp_path: Path, name: str
) -> None:
    found = list(pods(render(helm, tmp_path, VALUES[name])))
    assert len(found) == 2
    for goes_on, spec in found:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not any(spec.get(f"host{kind}") for kind in ("Network", "PID", "IPC"))
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            probes = {"startupProbe", "livenessProbe", "readinessProbe"}
            assert not goes_on or probes <= container.keys()
            image, _, tag = container["image"].rpartition(":")
            assert image
            assert tag not in ("", "latest")


@pytest.mark.parametrize("name", VALUES)
def test_no_right_is_a_wildcard_or_reads_secrets(helm: Helm, tmp_path: Path, name: str) -> None:
    granted = list(rules(render(helm, tmp_path, VALUES[name])))
    assert granted
    for rule in granted:
        assert not any("*" in word for part in rule.values() for word in part), rule
        assert "secrets" not in rule["resources"]
        assert not {"bind", "escalate", "impersonate", "deletecollection"} & set(rule["verbs"])


def test_rights_outside_the_named_namespaces_are_none(helm: Helm, tmp_path: Path) -> None:
    objects = render(helm, tmp_path, VALUES["namespaced"])
    assert not {each["kind"] for each in objects} & {"ClusterRole", "ClusterRoleBinding"}
    places = {each["metadata"]["namespace"] for each in objects if each["kind"] == "Role"}
    assert places == {"here", "default"}
    (_, spec) = next(pods(objects))
    args = spec["containers"][0]["args"]
    assert [arg for arg in args if arg.startswith("--namespace=")] == [
        "--namespace=here",
        "--namespace=default",
    ]


def test_images_are_what_the_values_say(helm: Helm, tmp_path: Path) -> None:
    (_, spec) = next(pods(render(helm, tmp_path, VALUES["images"])))
    prefix = "registry.example.com:5000/team/kvasir"
    (container,) = spec["containers"]
    assert container["image"] == f"{prefix}/operator:v1"
    assert f"--router-image={prefix}/router:v1" in container["args"]
    assert f"--worker-image={prefix}/worker@{DIGEST}" in container["args"]
    assert spec["imagePullSecrets"] == [{"name": "pull"}]


def test_what_is_optional_is_there_when_asked_for(helm: Helm, tmp_path: Path) -> None:
    optional = {"ServiceMonitor", "PodDisruptionBudget", "NetworkPolicy"}

    def kinds(name: str) -> set[str]:
        return {each["kind"] for each in render(helm, tmp_path, VALUES[name])} & optional

    assert kinds("defaults") == {"NetworkPolicy"}
    assert kinds("open") == set()
    assert kinds("monitored") == {"NetworkPolicy", "ServiceMonitor"}
    assert kinds("standby") == {"NetworkPolicy", "PodDisruptionBudget"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("replica=1", "'replica'"),
        ("images.worker.tag=x", "'tag'"),
        ("images.tag=latest", "/images/tag"),
        ("serviceMonitor.enable=true", "'enable'"),
        ("resources.request.cpu=1", "'request'"),
        ("tolerations[0].keys=x", "'keys'"),
        ("podLabels.app\\.kubernetes\\.io/name=x", "app.kubernetes.io/name"),
        ("watchNamespaces={Not_A_Name}", "/watchNamespaces/0"),
        ("replicas=0", "/replicas"),
        ("images.pullPolicy=Often", "/images/pullPolicy"),
        ("extraVolumeMounts[0].name=x", "mountPath"),
        ("global.x=1", "'x'"),
    ],
)
def test_unknown_and_wrong_values_are_refused_by_name(
    helm: Helm, setting: str, message: str
) -> None:
    with pytest.raises(CommandError) as refused:
        helm("template", "kvasir", str(CHART), "--set", setting)
    assert "values don't meet the specifications of the schema" in str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_the_api_server_accepts_each_sample(
    kubectl: Kubectl, namespace: str, resources: None, path: Path
) -> None:
    kubectl("apply", "--dry-run=server", f"--filename={path}", f"--namespace={namespace}")


@pytest.fixture
def elsewhere(kubectl: Kubectl, namespace: str) -> Iterator[str]:
    """A namespace that is not the operator's."""
    name = f"{namespace}-other"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def may(kubectl: Kubectl, account: str, verb: str, resource: str, namespace: str) -> bool:
    """What the API server's own authorizer says of a service account, NAMESPACE:NAME."""
    kind, _, below = resource.partition("/")
    try:
        said = kubectl(
            *("auth", "can-i", verb, kind, f"--subresource={below}", f"--namespace={namespace}"),
            f"--as=system:serviceaccount:{account}",
        )
    except CommandError as error:  # `no` is exit code 1
        said = str(error)
    answer = said.split()[-1]
    assert answer in ("yes", "no"), said
    return answer == "yes"


NEEDED = {
    **dict.fromkeys(("modelservices.kvasir.dev", "endpointslices.discovery.k8s.io"), "list watch"),
    "modelservices.kvasir.dev/status": "patch",
    "workerpools.kvasir.dev": "list watch create patch delete",
    "workerpools.kvasir.dev/status": "patch",
    "deployments.apps": "list watch create patch delete",
    "configmaps": "list watch create patch delete",
    "services": "list watch create patch delete",
    "serviceaccounts": "list watch create patch delete",
    "poddisruptionbudgets.policy": "list watch create patch delete",
    "networkpolicies.networking.k8s.io": "list watch create patch delete",
    "roles.rbac.authorization.k8s.io": "list watch create patch delete",
    "rolebindings.rbac.authorization.k8s.io": "list watch create patch delete",
    "pods": "list watch patch",
    "events": "create",
}
FORBIDDEN = {
    "secrets": "get list create",
    "pods": "create delete",
    "pods/exec": "create",
    "modelservices.kvasir.dev": "create delete",
    "nodes": "list",
    "namespaces": "list delete",
    "serviceaccounts/token": "create",
    "clusterroles.rbac.authorization.k8s.io": "create",
}


def pairs(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(verb, resource) for resource, verbs in table.items() for verb in verbs.split()]


@contextmanager
def installed(kubectl: Kubectl, helm: Helm, namespace: str, *settings: str) -> Iterator[None]:
    """The chart as a release, which leaves nothing behind."""
    sets = [f"--set={setting}" for setting in settings]
    here = f"--namespace={namespace}"
    helm("install", "kvasir", str(CHART), here, "--wait", "--timeout=90s", "--skip-crds", *sets)
    try:
        yield
    finally:
        helm("uninstall", "kvasir", here, "--wait")
    query = "--selector=app.kubernetes.io/managed-by=Helm"
    kinds = "all,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings,pdb,netpol"
    assert kubectl.get(kinds, query, "--all-namespaces")["items"] == []


def test_a_namespaced_install_reads_no_other_namespace(
    kubectl: Kubectl,
    helm: Helm,
    namespace: str,
    elsewhere: str,
    node: FakeNode,
    resources: None,
    tmp_path: Path,
) -> None:
    # The pods of the install itself must pass.
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    with installed(kubectl, helm, namespace, f"watchNamespaces={{{namespace}}}"):
        account = f"{namespace}:{OPERATOR}"
        for verb, resource in pairs(NEEDED):
            assert may(kubectl, account, verb, resource, namespace), (verb, resource)
            assert not may(kubectl, account, verb, resource, elsewhere), (verb, resource)
        for verb, resource in pairs(FORBIDDEN):
            assert not may(kubectl, account, verb, resource, namespace), (verb, resource)

        operator = kubectl.service_account(OPERATOR, namespace, tmp_path)
        assert operator.get("modelservices")["items"] == []
        assert operator.get("pods")["items"]
        for reads in ("modelservices", "pods", "configmaps", "leases", "secrets"):
            for where in (f"--namespace={elsewhere}", "--all-namespaces"):
                with pytest.raises(CommandError, match="Forbidden"):
                    operator.get(reads, where)


def test_a_cluster_wide_install_serves_every_namespace(
    kubectl: Kubectl,
    helm: Helm,
    namespace: str,
    elsewhere: str,
    node: FakeNode,
    resources: None,
    tmp_path: Path,
) -> None:
    with installed(kubectl, helm, namespace):
        account = f"{namespace}:{OPERATOR}"
        for verb, resource in pairs(NEEDED):
            assert may(kubectl, account, verb, resource, elsewhere), (verb, resource)
        for verb, resource in pairs(FORBIDDEN):
            assert not may(kubectl, account, verb, resource, elsewhere), (verb, resource)

        # Its own Lease and no other.
        operator = kubectl.service_account(OPERATOR, namespace, tmp_path)
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": {}}
        for name in (OPERATOR, "other"):
            body = json.dumps({**lease, "metadata": {"name": name}})
            operator("create", "--filename=-", stdin=body)
        assert operator.get("lease", OPERATOR)["kind"] == "Lease"
        with pytest.raises(CommandError, match="Forbidden"):
            operator.get("lease", "other")

        # The Role of a ModelService's routers can be granted; one that says more cannot.
        role = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "smollm2-router", "namespace": elsewhere},
        }
        reads = {"verbs": ["get", "list", "watch"]}
        slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], **reads}
        operator.apply({**role, "rules": [slices]}, server_side=True)
        secrets = {"apiGroups": [""], "resources": ["secrets"], **reads}
        with pytest.raises(CommandError, match="attempting to grant RBAC permissions"):
            operator.apply({**role, "rules": [secrets]}, server_side=True)


@pytest.mark.parametrize("namespaced", [True, False], ids=["namespaced", "cluster-wide"])
def test_the_operator_works_with_these_arguments_and_rights(
    kubectl: Kubectl,
    helm: Helm,
    namespace: str,
    elsewhere: str,
    node: FakeNode,
    resources: None,
    tmp_path: Path,
    namespaced: bool,
) -> None:
    """The process that the pod would run, as the pod's account; the node only plays the pod."""
    place = namespace if namespaced else elsewhere
    settings = [f"watchNamespaces={{{namespace}}}"] if namespaced else []
    with installed(kubectl, helm, namespace, *settings):
        deployment = kubectl.get("deploy", OPERATOR, f"--namespace={namespace}")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        account = kubectl.service_account(OPERATOR, namespace, tmp_path)
        port = free_port()
        outside = ["--host=127.0.0.1", f"--port={port}", f"--lease-namespace={namespace}"]
        command = [
            *("env", f"KUBECONFIG={account.kubeconfig}"),
            str(Path(sys.executable).parent / container["command"][0]),
            *container["args"],
            *outside,
        ]
        operator = Daemon("operator", command, tmp_path / "operator.log")
        try:
            kubectl("apply", f"--filename={SAMPLES[0]}", f"--namespace={place}")
            here = f"--namespace={place}"
            own = "--selector=kvasir.dev/modelservice=smollm2"

            def served() -> bool:
                assert operator.running, operator.log
                found = kubectl.get("msvc", "smollm2", here).get("status", {})
                made = kubectl.get("deployments", own, here)["items"]
                return "conditions" in found and len(made) == 3

            wait_until(served, "objects and status of smollm2", 60, lambda: operator.log)
            for path in ("/readyz", "/healthz", "/metrics"):
                with urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                    text = answer.read().decode()
            assert "\nkvasir_operator_leader 1.0" in text
            assert "orbidden" not in operator.log
            assert " ERROR kvasir" not in operator.log
            events = kubectl.get("events", here)["items"]
            assert "kvasir-operator" in {event["source"].get("component") for event in events}
        finally:
            operator.kill()
            kubectl("delete", "msvc", "--all", f"--namespace={place}", "--ignore-not-found")


def test_who_edits_a_namespace_may_use_the_resources(
    kubectl: Kubectl, helm: Helm, namespace: str, elsewhere: str, node: FakeNode, resources: None
) -> None:
    with installed(kubectl, helm, namespace):
        for user in ("edit", "view"):
            kubectl("create", "serviceaccount", user, f"--namespace={elsewhere}")
            kubectl(
                *("create", "rolebinding", user, f"--clusterrole={user}"),
                *(f"--serviceaccount={elsewhere}:{user}", f"--namespace={elsewhere}"),
            )
        for user, verb, resource, expected in [
            ("edit", "create", "modelservices.kvasir.dev", True),
            ("edit", "patch", "workerpools.kvasir.dev/scale", True),
            ("edit", "patch", "modelservices.kvasir.dev/status", False),
            ("edit", "delete", "workerpools.kvasir.dev", False),
            ("view", "list", "modelservices.kvasir.dev", True),
            ("view", "create", "modelservices.kvasir.dev", False),
            ("view", "patch", "workerpools.kvasir.dev/scale", False),
        ]:
            account = f"{elsewhere}:{user}"
            assert may(kubectl, account, verb, resource, elsewhere) is expected, (
                user,
                verb,
                resource,
            )


def test_upgrade_changes_mode_and_uninstall_keeps_the_services(
    kubectl: Kubectl, helm: Helm, namespace: str, node: FakeNode, resources: None
) -> None:
    here = f"--namespace={namespace}"
    with installed(kubectl, helm, namespace):
        kubectl("apply", f"--filename={SAMPLES[0]}", here)
        helm(
            *("upgrade", "kvasir", str(CHART), here, "--wait", "--timeout=90s"),
            *("--reset-then-reuse-values", "--set=replicas=2"),
            f"--set=watchNamespaces={{{namespace}}}",
        )
        assert kubectl.get("deploy", OPERATOR, here)["status"]["readyReplicas"] == 2
        query = "--selector=app.kubernetes.io/managed-by=Helm"
        assert kubectl.get("clusterroles", query)["items"] == []
        notes = helm("get", "notes", "kvasir", here)
        assert f"It serves ModelServices in: {namespace}." in notes
    assert kubectl.get("msvc", "smollm2", here)["spec"]["model"]["source"].startswith("bundled://")
