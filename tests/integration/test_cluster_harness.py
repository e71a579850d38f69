"""The real control plane and the played node do what tests of the operator rely on."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.api import DisconnectedError
from cluster.clients import CommandError, Helm, Kubectl
from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode, fake_node
from cluster.pod_status import IMAGE_PULL_FAILED, NOT_READY, READY, Outcome, always, says_ready
from cluster.processes import wait_until

_TIMEOUT = "60s"

_CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "gauges.harness.test"},
    "spec": {
        "group": "harness.test",
        "scope": "Namespaced",
        "names": {"kind": "Gauge", "plural": "gauges", "singular": "gauge"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.replicas",
                        "statusReplicasPath": ".status.replicas",
                    },
                },
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {
                            "spec": {
                                "type": "object",
                                "properties": {
                                    "low": {"type": "integer", "default": 1},
                                    "high": {"type": "integer"},
                                    "replicas": {"type": "integer", "default": 2},
                                },
                                "x-kubernetes-validations": [
                                    {
                                        "rule": "self.low <= self.high",
                                        "message": "low must not be above high",
                                    }
                                ],
                            },
                            "status": {
                                "type": "object",
                                "properties": {"replicas": {"type": "integer"}},
                            },
                        },
                    }
                },
            }
        ],
    },
}


def _gauge(namespace: str, **spec: object) -> dict[str, object]:
    return {
        "apiVersion": "harness.test/v1",
        "kind": "Gauge",
        "metadata": {"name": "one", "namespace": namespace},
        "spec": spec,
    }


def _deployment(namespace: str, replicas: int, **pod: object) -> dict[str, Any]:
    container = {"name": "main", "image": "nowhere.invalid/pause:1"}
    spec = {"terminationGracePeriodSeconds": 30, "containers": [container], **pod}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web", "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": spec},
        },
    }


def _pods(kubectl: Kubectl, namespace: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kubectl.get("pods", f"--namespace={namespace}")["items"]
    return found


def _wait_available(kubectl: Kubectl, namespace: str) -> None:
    condition = "--for=condition=Available"
    kubectl("wait", condition, "deploy/web", f"--namespace={namespace}", f"--timeout={_TIMEOUT}")


@pytest.fixture(scope="module")
def gauges(kubectl: Kubectl) -> None:
    kubectl.apply(_CRD)
    kubectl("wait", "--for=condition=Established", "crd/gauges.harness.test")


def test_a_cel_rule_refuses_and_a_default_is_filled_in(
    kubectl: Kubectl, namespace: str, gauges: None
) -> None:
    with pytest.raises(CommandError, match="low must not be above high"):
        kubectl.apply(_gauge(namespace, low=3, high=2))
    kubectl.apply(_gauge(namespace, high=2))
    assert kubectl.get("gauge", "one", f"--namespace={namespace}")["spec"]["low"] == 1


def test_scale_subresource_and_explain(kubectl: Kubectl, namespace: str, gauges: None) -> None:
    kubectl.apply(_gauge(namespace, high=9))
    kubectl("scale", "gauge/one", "--replicas=7", f"--namespace={namespace}")
    assert kubectl.get("gauge", "one", f"--namespace={namespace}")["spec"]["replicas"] == 7
    assert "replicas\t<integer>" in kubectl("explain", "gauge.spec")


def test_a_deployment_becomes_available_with_endpoints(
    kubectl: Kubectl, namespace: str, node: FakeNode
) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": namespace},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80}]},
    }
    kubectl.apply(_deployment(namespace, 3), service)
    _wait_available(kubectl, namespace)
    pods = _pods(kubectl, namespace)
    assert {pod["spec"]["nodeName"] for pod in pods} == {node.name}
    addresses = {pod["status"]["podIP"] for pod in pods}
    assert len(addresses) == 3

    def endpoints() -> set[str]:
        slices = kubectl.get("endpointslices", f"--namespace={namespace}")["items"]
        ready = [e for s in slices for e in s["endpoints"] if e["conditions"]["ready"]]
        return {address for endpoint in ready for address in endpoint["addresses"]}

    wait_until(lambda: endpoints() == addresses, "all three in the EndpointSlice", 30)


def test_unschedulable_is_the_schedulers_word(
    kubectl: Kubectl, namespace: str, node: FakeNode
) -> None:
    pod = _deployment(namespace, 1, nodeSelector={"no-such": "node"})
    kubectl.apply(pod)

    def reason() -> str:
        conditions = [
            c for p in _pods(kubectl, namespace) for c in p["status"].get("conditions", [])
        ]
        return str([c.get("reason") for c in conditions if c["type"] == "PodScheduled"])

    wait_until(lambda: "Unschedulable" in reason(), "Unschedulable", 30)


def test_the_nodes_rule_decides_and_may_change(
    kubectl: Kubectl, namespace: str, node: FakeNode
) -> None:
    node.rule = always(IMAGE_PULL_FAILED)
    kubectl.apply(_deployment(namespace, 2))

    def waiting() -> list[str]:
        statuses = [
            s for p in _pods(kubectl, namespace) for s in p["status"].get("containerStatuses", [])
        ]
        return [status["state"].get("waiting", {}).get("reason", "") for status in statuses]

    wait_until(lambda: waiting() == ["ImagePullBackOff"] * 2, "both pulls fail", 30)
    node.rule = always(NOT_READY)
    wait_until(lambda: waiting() == ["", ""], "both run", 30)
    with pytest.raises(CommandError, match="timed out"):
        kubectl(
            "wait",
            "--for=condition=Ready",
            "pod",
            "--all",
            f"--namespace={namespace}",
            "--timeout=1s",
        )
    node.rule = always(READY)
    _wait_available(kubectl, namespace)


def test_deletion_takes_the_time_that_the_pod_needs(
    kubectl: Kubectl, namespace: str, node: FakeNode
) -> None:
    node.rule = always(Outcome(stop_seconds=2))
    kubectl.apply(_deployment(namespace, 1))
    _wait_available(kubectl, namespace)
    started = time.monotonic()
    kubectl("delete", "deploy/web", f"--namespace={namespace}", "--cascade=foreground")
    wait_until(lambda: not _pods(kubectl, namespace), "pod gone", 30)
    assert time.monotonic() - started >= 2


def test_rbac_refuses_what_is_not_granted(kubectl: Kubectl, namespace: str, tmp_path: Path) -> None:
    kubectl("create", "serviceaccount", "reader", f"--namespace={namespace}")
    kubectl(
        "create",
        "role",
        "read",
        "--verb=get,list",
        "--resource=configmaps",
        f"--namespace={namespace}",
    )
    kubectl(
        "create",
        "rolebinding",
        "read",
        "--role=read",
        f"--serviceaccount={namespace}:reader",
        f"--namespace={namespace}",
    )
    reader = kubectl.service_account("reader", namespace, tmp_path)
    assert reader.get("configmaps")["items"]
    for refused in (["get", "secrets"], ["get", "configmaps", "--namespace=default"]):
        with pytest.raises(CommandError, match="Forbidden"):
            reader(*refused)


def test_server_side_apply_keeps_owners_apart(kubectl: Kubectl, namespace: str) -> None:
    def config(value: str) -> str:
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "shared", "namespace": namespace},
                "data": {"key": value},
            }
        )

    apply = ("apply", "--server-side", "--filename=-")
    kubectl(*apply, "--field-manager=first", stdin=config("a"))
    with pytest.raises(CommandError, match='conflict with "first"'):
        kubectl(*apply, "--field-manager=second", stdin=config("b"))
    kubectl(*apply, "--field-manager=second", "--force-conflicts", stdin=config("b"))
    found = kubectl.get("configmap", "shared", f"--namespace={namespace}")
    assert found["data"] == {"key": "b"}


def test_restricted_pod_security_refuses_root(kubectl: Kubectl, namespace: str) -> None:
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "root", "namespace": namespace},
        "spec": {"containers": [{"name": "main", "image": "nowhere.invalid/pause:1"}]},
    }
    with pytest.raises(CommandError, match="violates PodSecurity"):
        kubectl.apply(pod)


def test_everything_goes_on_when_the_api_server_was_killed(
    control_plane: ControlPlane, kubectl: Kubectl, namespace: str, node: FakeNode
) -> None:
    kubectl.apply(_deployment(namespace, 1))
    _wait_available(kubectl, namespace)
    control_plane.api_server.kill()
    with pytest.raises(CommandError):
        kubectl("get", "nodes")
    control_plane.api_server.start()
    control_plane.wait_ready()
    kubectl("scale", "deploy/web", "--replicas=2", f"--namespace={namespace}")
    ready = "--for=jsonpath={.status.readyReplicas}=2"
    kubectl("wait", ready, "deploy/web", f"--namespace={namespace}", f"--timeout={_TIMEOUT}")


def test_a_node_that_was_thought_lost_is_ready_again_with_its_pods(
    control_plane: ControlPlane, kubectl: Kubectl, namespace: str, node: FakeNode
) -> None:
    """The controllers write as much when its lease was not renewed: while no server answered."""
    kubectl.apply(_deployment(namespace, 1))
    _wait_available(kubectl, namespace)
    lost = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    patch = ("--subresource=status", "--type=strategic", f"--patch={json.dumps(lost)}")
    kubectl("patch", "node", node.name, *patch)
    [pod] = _pods(kubectl, namespace)
    not_ready = json.dumps(lost).replace("Unknown", "False")
    kubectl(
        *("patch", "pod", pod["metadata"]["name"], f"--namespace={namespace}"),
        *("--subresource=status", "--type=strategic", f"--patch={not_ready}"),
    )

    def well() -> bool:
        spec = kubectl.get("node", node.name)["spec"]
        return not spec.get("taints") and all(map(says_ready, _pods(kubectl, namespace)))

    wait_until(well, "no taint, and its pod Ready", 60)
    kubectl("scale", "deploy/web", "--replicas=2", f"--namespace={namespace}")
    ready = "--for=jsonpath={.status.readyReplicas}=2"
    kubectl("wait", ready, "deploy/web", f"--namespace={namespace}", f"--timeout={_TIMEOUT}")


def test_a_second_node_with_accelerators_takes_what_asks_for_them(
    control_plane: ControlPlane, kubectl: Kubectl, namespace: str, node: FakeNode
) -> None:
    container = {
        "name": "main",
        "image": "nowhere.invalid/pause:1",
        "resources": {"limits": {"example.com/accelerator": "4"}},
    }
    with fake_node(control_plane, "accelerated", 1, {"example.com/accelerator": "8"}) as other:
        kubectl.apply(_deployment(namespace, 2, containers=[container]))
        _wait_available(kubectl, namespace)
        assert {pod["spec"]["nodeName"] for pod in _pods(kubectl, namespace)} == {other.name}
        kubectl("delete", "deploy/web", f"--namespace={namespace}")
        wait_until(lambda: not _pods(kubectl, namespace), "pods gone", 30)


def test_a_paused_api_server_answers_after_it_resumes(control_plane: ControlPlane) -> None:
    client = control_plane.client(timeout=1)
    control_plane.api_server.pause()
    try:
        with pytest.raises(DisconnectedError):
            client.text("/readyz")
    finally:
        control_plane.api_server.resume()
    control_plane.wait_ready()
    assert client.text("/readyz") == "ok"
    client.close()


def test_helm_sees_the_version(control_plane: ControlPlane, tmp_path: Path) -> None:
    helm = Helm(control_plane.kubeconfig, tmp_path)
    assert helm("list", "--all-namespaces", "--output=json").strip() == "[]"
    server = json.loads(control_plane.kubectl("version", "--output=json"))["serverVersion"]
    assert server["gitVersion"].startswith("v1.36.")


def test_nothing_is_left_after_a_control_plane_ends(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path)
    try:
        plane.wait_ready()
        daemons = plane.daemons
        plane.scheduler.send(signal.SIGSTOP)  # also one that cannot end by itself
    finally:
        plane.end()
    assert [daemon.name for daemon in daemons if daemon.running] == []
