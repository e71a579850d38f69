"""The operator as a process against a real control plane; the node and the workers are played."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.clients import Kubectl
from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from cluster.pod_status import IMAGE_PULL_FAILED, NOT_READY, READY, Rule, always, crashed
from cluster.processes import wait_until
from helpers.operator_daemon import Operator
from helpers.operator_stage import SECONDS, Stage, operator_stage, restricted, sample

QUICK = "--lease-seconds=3"


@pytest.fixture
def quick_stage(
    control_plane: ControlPlane, namespace: str, node: FakeNode, installed: None, tmp_path: Path
) -> Iterator[Stage]:
    """With an operator whose lease ends soon after it does."""
    with operator_stage(control_plane, namespace, tmp_path, QUICK) as made:
        yield made


def test_the_sample_becomes_ready(stage: Stage) -> None:
    stage.apply(sample())
    stage.wait_ready()
    status = stage.get("msvc", "smollm2")["status"]
    assert status["url"] == f"http://smollm2.{stage.namespace}.svc"
    assert {role: each["readyReplicas"] for role, each in status["roles"].items()} == {
        "prefill": 1,
        "decode": 1,
        "router": 1,
    }
    by_type = {each["type"]: each["reason"] for each in status["conditions"]}
    assert by_type == {
        "Ready": "AllReady",
        "Available": "Serving",
        "Progressing": "Complete",
        "Degraded": "AsExpected",
    }
    pool = stage.get("wpool", "smollm2-decode")
    assert pool["status"]["readyReplicas"] == 1
    events = stage.run("events", "--for=msvc/smollm2")
    assert "AllReady" in events


def test_a_step_without_a_change_writes_nothing(
    control_plane: ControlPlane,
    kubectl: Kubectl,
    namespace: str,
    node: FakeNode,
    installed: None,
    tmp_path: Path,
) -> None:
    """By the operator's own count, by what the API server saw of its account, and by versions."""
    account = restricted(control_plane, namespace, tmp_path, f"watchNamespaces={{{namespace}}}")
    operator = Operator(account.kubeconfig, namespace, tmp_path / "operator.log", resync_seconds=2)
    stage = Stage(kubectl, namespace, operator)

    def seen() -> int:
        user = f"system:serviceaccount:{namespace}:kvasir-operator"
        return sum(write.resource != "leases" for write in control_plane.writes_of(user))

    try:
        operator.wait_started(leader=1)
        stage.apply(sample())
        stage.wait_ready()
        stage.wait_until(lambda: stage.settled(2), "no more writes")
        # An Event is refused to nobody, and the counts must be of the same things.
        assert operator.writes == seen() > 20
        versions, steps, writes = _versions(stage), operator.steps, operator.writes
        stage.wait_until(lambda: operator.steps >= steps + 3, "steps of their own")
        stage.run("annotate", "msvc/smollm2", "example.com/touched=yes")
        steps = operator.steps
        stage.wait_until(lambda: operator.steps >= steps + 2, "a step")
        assert operator.writes == writes == seen(), operator.process.tail()
        assert _versions(stage) == versions
    finally:
        operator.process.kill()


def test_a_restarted_operator_changes_nothing(quick_stage: Stage) -> None:
    stage = quick_stage
    stage.apply(sample())
    stage.wait_ready()
    stage.wait_quiet()
    versions = _versions(stage)
    stage.operator.process.kill()
    stage.operator.process.start()
    stage.operator.wait_started(leader=1)
    stage.wait_until(lambda: stage.operator.steps > 0, "a step")
    stage.wait_quiet()
    assert _versions(stage) == versions


def _versions(stage: Stage) -> dict[str, str]:
    kinds = "deploy,cm,svc,sa,role,rolebinding,pdb,netpol,wpool,pods"
    found = stage.get(kinds, "--selector=kvasir.dev/modelservice=smollm2")["items"]
    assert len(found) > 15
    return {
        f"{each['kind']}/{each['metadata']['name']}": each["metadata"]["resourceVersion"]
        for each in found
    }


def test_a_pool_is_scaled_up_and_down(stage: Stage) -> None:
    stage.apply(sample())
    stage.wait_ready()
    pool = "wpool/smollm2-decode"
    stage.run("scale", pool, "--replicas=3")
    stage.run("wait", "--for=jsonpath={.status.readyReplicas}=3", pool, "--timeout=60s")
    stage.wait_ready()
    stage.run("scale", pool, "--replicas=1")
    stage.run("wait", "--for=jsonpath={.status.replicas}=1", pool, "--timeout=60s")
    stage.wait_until(lambda: len(stage.names("pods")) == 3, "one pod of each role")
    events = stage.run("events", "--for=msvc/smollm2")
    assert events.count("DrainStarted") == 2
    assert events.count("DrainCompleted") == 2
    # The ModelService's own number counts again when it changes.
    stage.apply(sample(decode={"replicas": 2}))
    stage.run("wait", "--for=jsonpath={.status.readyReplicas}=2", pool, "--timeout=60s")


def test_a_new_revision_replaces_the_old_one_when_it_is_ready(stage: Stage, node: FakeNode) -> None:
    stage.apply(sample())
    stage.wait_ready()
    old = stage.workers("decode") | stage.workers("prefill")
    kept = stage.names("deploy")
    node.rule = _ready_if(lambda pod: _deployment(pod) in kept)
    stage.apply(sample(engine={"blockSize": 32}))
    message = stage.wait_reason("RollingOut")
    assert "2 workers are of an old revision" in message
    stage.wait_until(lambda: len(stage.workers("decode")) == 2, "both revisions")
    time.sleep(3)
    assert old < stage.workers("decode") | stage.workers("prefill")
    assert stage.condition("Available")[0] == "True"
    node.rule = always(READY)
    stage.wait_ready()
    new = stage.workers("decode") | stage.workers("prefill")
    assert len(new) == 2
    assert not new & old
    assert len(stage.names("configmaps") - {"configmap/kube-root-ca.crt"}) == 3


def _deployment(pod: dict[str, Any]) -> str:
    owner = pod["metadata"]["ownerReferences"][0]["name"]
    return f"deployment.apps/{owner.rpartition('-')[0]}"


def _ready_if(condition: Callable[[dict[str, Any]], bool]) -> Rule:
    return lambda pod: READY if condition(pod) else NOT_READY


def test_a_change_of_one_role_leaves_the_other_alone(stage: Stage) -> None:
    stage.apply(sample())
    stage.wait_ready()
    decode, prefill = stage.workers("decode"), stage.workers("prefill")
    template = {"metadata": {"annotations": {"example.com/note": "new"}}}
    stage.apply(sample(decode={"replicas": 1, "template": template}))
    stage.wait_until(lambda: not stage.workers("decode") & decode, "the old one is gone")
    stage.wait_ready()
    assert stage.workers("prefill") == prefill


@pytest.mark.parametrize("running", [True, False])
def test_everything_goes_with_the_service(stage: Stage, running: bool) -> None:
    stage.apply(sample())
    stage.wait_ready()
    if not running:
        stage.operator.process.kill()
    stage.run("delete", "msvc/smollm2", "--timeout=30s")
    kinds = ("deploy", "rs", "pods", "cm", "svc", "sa", "role", "rolebinding", "pdb", "netpol")
    default = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
    wait_until(lambda: stage.names(*kinds, "wpool") <= default, "all gone", SECONDS, stage.explain)
    stage.kubectl("delete", "namespace", stage.namespace, "--timeout=60s")


def test_a_namespace_goes_with_its_services(stage: Stage) -> None:
    stage.apply(sample())
    stage.wait_ready()
    stage.operator.process.kill()
    stage.kubectl("delete", "namespace", stage.namespace, "--timeout=60s")


def test_what_hinders_pods_is_named(stage: Stage, node: FakeNode) -> None:
    node.rule = always(IMAGE_PULL_FAILED)
    stage.apply(sample())
    assert "Back-off pulling image" in stage.wait_reason("ImagePullFailed")
    assert stage.condition("Degraded")[:2] == ("True", "ImagePullFailed")
    words = "kvasir-worker: kv_cache_memory: 1 bytes is too small; use at least 2"
    node.rule = always(crashed(2, words))
    assert "spec.engine.kvCacheMemory: " in stage.wait_reason("ConfigurationRefused")
    node.rule = always(READY)
    stage.wait_ready()
    assert stage.condition("Degraded")[0] == "False"


def test_a_worker_that_finds_no_place_is_named(stage: Stage) -> None:
    accelerator = {"resourceName": "example.com/gpu", "count": 8}
    stage.apply(sample(decode={"replicas": 1, "accelerator": accelerator}))
    message = stage.wait_reason("Unschedulable")
    assert message.startswith("Pod smollm2-decode-")
    assert "Insufficient example.com/gpu" in message


def test_a_spec_that_is_not_served_is_refused_with_the_fix(stage: Stage) -> None:
    stage.apply(sample(engine={"type": "vllm"}))
    message = stage.wait_reason("Unsupported")
    assert message == "spec.engine.type: vllm is not served yet; use native"
    assert not stage.names("deploy")
    stage.apply(sample())
    stage.wait_ready()


def test_somebody_elses_object_is_not_taken_over(stage: Stage) -> None:
    stage.run("create", "configmap", "smollm2-router", "--from-literal=router.json=mine")
    stage.apply(sample())
    message = stage.wait_reason("NameConflict")
    assert "ConfigMap smollm2-router" in message
    assert stage.get("cm", "smollm2-router")["data"] == {"router.json": "mine"}
    stage.run("delete", "configmap", "smollm2-router")
    stage.wait_ready()


def test_what_somebody_changed_is_set_right(stage: Stage) -> None:
    stage.apply(sample())
    stage.wait_ready()
    stage.run(
        "patch", "svc/smollm2", "--type=merge", '--patch={"spec":{"sessionAffinity":"ClientIP"}}'
    )
    stage.run("delete", "svc/smollm2-workers", "pdb/smollm2-decode")
    stage.run("label", "svc/smollm2", "kvasir.dev/role=decode", "--overwrite")
    needed = {"service/smollm2-workers", "poddisruptionbudget.policy/smollm2-decode"}
    stage.wait_until(lambda: needed <= stage.names("svc", "pdb"), "both are there again")

    def label() -> str:
        labels: dict[str, str] = stage.get("svc", "smollm2")["metadata"]["labels"]
        return labels["kvasir.dev/role"]

    stage.wait_until(lambda: label() == "router", "the label is right again")
