"""What belongs to somebody else is left alone, and what was refused or made anew is told."""

import json
import time
from pathlib import Path
from typing import Any

from cluster.clients import CommandError
from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from helpers.operator_daemon import Operator
from helpers.operator_stage import Stage, sample


def without_version(item: dict[str, Any]) -> dict[str, Any]:
    """What anybody wrote of it: an untouched object has even the same resourceVersion."""
    return {key: item.get(key) for key in ("metadata", "spec", "data", "secrets")}


def test_the_api_servers_own_service_is_not_taken_over(
    control_plane: ControlPlane, namespace: str, node: FakeNode, installed: None, tmp_path: Path
) -> None:
    """Its fields agree with what a ModelService of that name wants, as far as anybody set them."""
    log = tmp_path / "operator.log"
    operator = Operator(control_plane.kubeconfig, namespace, log, "--namespace=default")
    stage = Stage(control_plane.kubectl, "default", operator)
    document = {**sample(), "metadata": {"name": "kubernetes"}}
    try:
        operator.wait_started(leader=1)
        before = stage.get("svc", "kubernetes")
        stage.apply(document)

        def reason() -> str:
            path = '{.status.conditions[?(@.type=="Ready")].message}'
            return stage.run("get", "msvc", "kubernetes", f"--output=jsonpath={path}")

        told = "Service kubernetes was not made by the operator; delete it, or rename the ModelServ"
        stage.wait_until(lambda: reason().startswith(told), "the conflict is told")
        stage.run("delete", "msvc", "kubernetes", "--timeout=30s")
        stage.wait_until(lambda: not stage.names("deploy"), "what was made is gone")
        assert without_version(stage.get("svc", "kubernetes")) == without_version(before)
    finally:
        stage.run("delete", "msvc", "kubernetes", "--ignore-not-found", "--timeout=30s")
        operator.process.kill()


def test_objects_of_a_user_outlive_the_service(stage: Stage) -> None:
    """Such as hold nothing that anybody could disagree with."""
    stage.run("create", "configmap", "smollm2-router")
    stage.run("create", "serviceaccount", "smollm2-worker")
    labels = ("kvasir.dev/modelservice=smollm2", "app.kubernetes.io/managed-by=kvasir-operator")
    stage.run("create", "serviceaccount", "smollm2-router")
    stage.run("label", "serviceaccount", "smollm2-router", *labels)
    mine = [("cm", "smollm2-router"), ("sa", "smollm2-worker"), ("sa", "smollm2-router")]
    before = [without_version(stage.get(*each)) for each in mine]
    stage.apply(sample())
    message = stage.wait_reason("NameConflict")
    assert "was not made by the operator; delete it, or rename the ModelService" in message
    stage.run("delete", "msvc", "smollm2", "--timeout=30s")
    stage.wait_until(lambda: not stage.names("deploy", "wpool"), "what was made is gone")
    time.sleep(2)
    assert [without_version(stage.get(*each)) for each in mine] == before
    stage.apply(sample())
    stage.wait_reason("NameConflict")
    for kind, name in mine:
        stage.run("delete", kind, name)
    stage.wait_ready()


def test_a_field_that_is_not_wanted_any_more_goes(stage: Stage) -> None:
    """Also where it was there from the beginning; see client.applied_fields."""
    template = {"metadata": {"annotations": {"example.com/a": "1", "example.com/b": "1"}}}
    stage.apply(sample(router={"template": template}))
    stage.wait_ready()

    def annotations() -> set[str]:
        found = stage.get("deploy", "smollm2-router")["spec"]["template"]["metadata"]
        return {name for name in found["annotations"] if name.startswith("example.com/")}

    assert annotations() == {"example.com/a", "example.com/b"}
    template["metadata"]["annotations"].pop("example.com/a")
    stage.apply(sample(router={"template": template}))
    stage.wait_until(lambda: annotations() == {"example.com/b"}, "the first one goes")
    stage.apply(sample())
    stage.wait_until(lambda: annotations() == set(), "the other one goes")
    stage.wait_ready()


def test_what_lost_its_labels_gets_them_again(stage: Stage) -> None:
    stage.apply(sample())
    stage.wait_ready()
    stage.run("label", "svc/smollm2", "kvasir.dev/modelservice-")
    stage.run("annotate", "msvc/smollm2", "example.com/touched=yes")
    selector = "--selector=kvasir.dev/modelservice=smollm2"
    names = {"service/smollm2", "service/smollm2-workers"}
    stage.wait_until(
        lambda: set(stage.run("get", "svc", selector, "--output=name").split()) == names, "both"
    )


def test_a_service_that_is_made_anew_at_once_gets_its_names(stage: Stage) -> None:
    stage.apply(sample())
    stage.wait_ready()
    stage.run("delete", "msvc", "smollm2", "--timeout=30s")
    stage.apply(sample())
    stage.wait_ready()
    uid = stage.get("msvc", "smollm2")["metadata"]["uid"]
    for item in stage.get("svc,cm,sa,deploy", "--selector=kvasir.dev/modelservice=smollm2")[
        "items"
    ]:
        assert [each["uid"] for each in item["metadata"]["ownerReferences"]] == [uid]


def test_routers_go_with_their_account(stage: Stage) -> None:
    """Their tokens are bound to its uid."""
    stage.apply(sample())
    stage.wait_ready()

    def routers() -> set[str]:
        selector = "--selector=kvasir.dev/role=router"
        return set(stage.run("get", "pods", selector, "--output=name").split())

    old = routers()
    assert stage.get("deploy", "smollm2-router")["metadata"]["generation"] == 1
    stage.run("delete", "serviceaccount", "smollm2-router")
    stage.wait_until(lambda: bool(routers()) and not routers() & old, "new routers")
    stage.wait_ready()
    assert stage.get("deploy", "smollm2-router")["metadata"]["generation"] == 2


def test_a_router_that_sees_no_worker_makes_the_service_unavailable(stage: Stage) -> None:
    stage.apply(sample())
    stage.wait_ready()
    stage.operator.play({"router": {"blind": 1}})
    stage.run("annotate", "msvc/smollm2", "example.com/touched=yes")
    message = stage.wait_reason("WorkersNotReached")
    assert message.startswith("Router smollm2-router-")
    assert message.endswith(" reaches no decode worker.")
    assert stage.condition("Available")[:2] == ("False", "WorkersNotReached")
    stage.operator.play({})
    stage.wait_ready()


REFUSE = {
    "apiVersion": "admissionregistration.k8s.io/v1",
    "kind": "ValidatingAdmissionPolicy",
    "spec": {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "operations": ["UPDATE"],
                    "resources": ["pods"],
                }
            ]
        },
        "validations": [
            {
                "expression": "!has(object.metadata.annotations) || "
                "!('kvasir.dev/draining-since' in object.metadata.annotations)",
                "message": "no annotations here",
            }
        ],
    },
}


def test_a_drain_that_admission_refuses_is_told_and_hinders_nothing_else(stage: Stage) -> None:
    name = f"no-drains-{stage.namespace}"
    place = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": stage.namespace}}}
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"], "matchResources": place},
    }
    stage.apply(sample(decode={"replicas": 2}))
    stage.wait_ready()
    stage.kubectl.apply({**REFUSE, "metadata": {"name": name}}, binding)
    try:
        (pod, *_) = stage.names("pods")
        mark = ("annotate", pod, "kvasir.dev/draining-since=x", "--dry-run=server")

        def refused() -> bool:
            try:
                stage.run(*mark)
            except CommandError as error:
                return "no annotations here" in str(error)
            return False

        stage.wait_until(refused, "the policy holds")
        stage.apply(sample(decode={"replicas": 1}, router={"replicas": 2}))
        message = stage.wait_reason("ObjectRefused")
        assert message.startswith("Pod smollm2-decode-")
        assert "no annotations here" in message
        ready = "--for=jsonpath={.status.readyReplicas}=2"
        stage.run("wait", ready, "deploy/smollm2-router", "--timeout=60s")
        assert len([each for each in stage.names("pods") if "-decode-" in each]) == 2
    finally:
        policies = "validatingadmissionpolicy,validatingadmissionpolicybinding"
        stage.kubectl("delete", policies, name)
    stage.wait_ready()
    stage.wait_until(
        lambda: len([each for each in stage.names("pods") if "-decode-" in each]) == 1, "one went"
    )


def test_a_rollout_minimum_that_somebody_wrote_is_set_right(stage: Stage) -> None:
    stage.apply(sample())
    stage.wait_ready()
    key = "kvasir.dev/rollout-minimum"
    patch = json.dumps({"metadata": {"annotations": {key: "9" * 5000}}})
    stage.run("patch", "wpool/smollm2-decode", "--type=merge", f"--patch={patch}")

    def healed() -> bool:
        return bool(stage.get("wpool", "smollm2-decode")["metadata"]["annotations"][key] == "0")

    stage.wait_until(healed, "it is 0 again")


def test_a_lease_that_nobody_renews_keeps_no_operator_out_for_ever(
    control_plane: ControlPlane, namespace: str, installed: None, tmp_path: Path
) -> None:
    kubectl = control_plane.kubectl
    kubectl.apply(
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": "kvasir-operator", "namespace": namespace},
            "spec": {
                "holderIdentity": "somebody",
                "leaseDurationSeconds": 2**31 - 1,
                "renewTime": "2026-01-01T00:00:00.000000Z",
            },
        }
    )
    log = tmp_path / "operator.log"
    operator = Operator(control_plane.kubeconfig, namespace, log, "--lease-seconds=3")
    try:
        operator.wait_started(leader=0)
        operator.wait_started(leader=1)
    finally:
        operator.process.kill()
