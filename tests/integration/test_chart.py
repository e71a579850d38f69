"""The chart with a real helm and a real API server: linted, rendered, accepted, refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.clients import CommandError, Helm, Kubectl
from cluster.control_plane import ControlPlane
from helpers.chart import CHART, SAMPLES, Object, install_resources, render

DIGEST = f"sha256:{'0123456789abcdef' * 4}"

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
    "scraped": {"networkPolicy": {"metricsFrom": ["monitoring", "observability"]}},
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


@pytest.fixture(scope="module")
def helm(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(control_plane.kubeconfig, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="module")
def resources(kubectl: Kubectl) -> None:
    install_resources(kubectl)


def values_file(folder: Path, name: str, namespace: str = "here") -> Path:
    path = folder / "values.yaml"
    path.write_text(json.dumps(VALUES[name]).replace("HERE", namespace), encoding="utf-8")
    return path


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
    said = helm("lint", "--strict", str(CHART), f"--values={values_file(tmp_path, name)}")
    assert "[ERROR]" not in said
    assert "[WARNING]" not in said


@pytest.mark.parametrize("name", VALUES)
def test_the_api_server_accepts_every_object(
    kubectl: Kubectl, helm: Helm, namespace: str, tmp_path: Path, resources: None, name: str
) -> None:
    # Warnings are for what the API server accepts but would not enforce, such as pod security.
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    objects = render(helm, values_file(tmp_path, name, namespace), namespace)
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
    found = list(pods(render(helm, values_file(tmp_path, name))))
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
    granted = list(rules(render(helm, values_file(tmp_path, name))))
    assert granted
    for rule in granted:
        assert not any("*" in word for part in rule.values() for word in part), rule
        assert "secrets" not in rule["resources"]
        assert not {"bind", "escalate", "impersonate", "deletecollection"} & set(rule["verbs"])


def test_rights_outside_the_named_namespaces_are_none(helm: Helm, tmp_path: Path) -> None:
    objects = render(helm, values_file(tmp_path, "namespaced"))
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
    (_, spec) = next(pods(render(helm, values_file(tmp_path, "images"))))
    prefix = "registry.example.com:5000/team/kvasir"
    (container,) = spec["containers"]
    assert container["image"] == f"{prefix}/operator:v1"
    assert f"--router-image={prefix}/router:v1" in container["args"]
    assert f"--worker-image={prefix}/worker@{DIGEST}" in container["args"]
    assert spec["imagePullSecrets"] == [{"name": "pull"}]


def test_metrics_of_workers_are_read_from_the_namespaces_that_are_named(
    helm: Helm, tmp_path: Path
) -> None:
    def named(name: str) -> list[str]:
        (_, spec) = next(pods(render(helm, values_file(tmp_path, name))))
        args: list[str] = spec["containers"][0]["args"]
        return [arg for arg in args if arg.startswith("--metrics-from")]

    assert named("defaults") == []
    assert named("scraped") == ["--metrics-from=monitoring", "--metrics-from=observability"]


def test_no_image_of_a_stranger_is_pulled_by_default(helm: Helm, tmp_path: Path) -> None:
    (_, spec) = next(pods(render(helm, values_file(tmp_path, "defaults"))))
    (container,) = spec["containers"]
    assert container["image"].startswith("localhost/kvasir/operator:")


def test_what_is_optional_is_there_when_asked_for(helm: Helm, tmp_path: Path) -> None:
    optional = {"ServiceMonitor", "PodDisruptionBudget", "NetworkPolicy"}

    def kinds(name: str) -> set[str]:
        return {each["kind"] for each in render(helm, values_file(tmp_path, name))} & optional

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
        ("networkPolicy.metricsFrom={Not_A_Name}", "/networkPolicy/metricsFrom/0"),
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
