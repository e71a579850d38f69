"""The operator as a process against a real control plane; the node and the workers are played."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.clients import CommandError, Kubectl
from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from cluster.pod_status import IMAGE_PULL_FAILED, NOT_READY, READY, Rule, always, crashed
from cluster.processes import wait_until
from helpers.operator_daemon import Operator
from helpers.operator_stage import SECONDS, Stage, operator_stage, restricted, sample

QUICK = "--lease-seconds=3"


@pytest.fixture
def elsewhere(kubectl: Kubectl, namespace: str) -> Iterator[str]:
    """A second namespace."""
    name = f"{namespace}-other"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def quick_stage(
    control_plane: ControlPlane, namespace: str, node: FakeNode, installed: None, tmp_path: Path
) -> Iterator[Stage]:
    """With an operator whose lease ends soon after it does."""
    with operator_stage(control_plane, namespace, tmp_path, QUICK) as made:
        yield made


@pytest.fixture
def patient_stage(
    control_plane: ControlPlane, namespace: str, node: FakeNode, installed: None, tmp_path: Path
) -> Iterator[Stage]:
    """With an operator that keeps its lease however slow a busy machine makes it."""
    with operator_stage(control_plane, namespace, tmp_path, "--lease-seconds=120") as made:
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


def test_of_two_operators_one_acts_and_the_other_follows(
    stage: Stage, control_plane: ControlPlane, tmp_path: Path
) -> None:
    other = Operator(control_plane.kubeconfig, stage.namespace, tmp_path / "other.log")
    try:
        stage.apply(sample())
        stage.wait_ready()
        other.wait_started(leader=0)
        assert other.steps == 0
        stage.operator.process.send(signal.SIGTERM)
        other.wait_started(leader=1)
        stage.wait_until(lambda: not stage.operator.process.running, "the first one ended")
        stage.run("scale", "wpool/smollm2-prefill", "--replicas=2")
        ready = "--for=jsonpath={.status.readyReplicas}=2"
        stage.run("wait", ready, "wpool/smollm2-prefill", "--timeout=60s")
    finally:
        other.process.kill()


def test_a_paused_leader_is_replaced_and_then_ends(
    quick_stage: Stage, control_plane: ControlPlane, tmp_path: Path
) -> None:
    stage = quick_stage
    other = Operator(control_plane.kubeconfig, stage.namespace, tmp_path / "other.log", QUICK)
    try:
        other.wait_started(leader=0)
        stage.operator.process.pause()
        other.wait_started(leader=1)
        stage.operator.process.resume()
        stage.wait_until(lambda: not stage.operator.process.running, "the first one ended")
        assert "not renewed" in stage.operator.process.log
    finally:
        other.process.kill()


@pytest.mark.parametrize("cluster_wide", [False, True], ids=["namespaced", "cluster-wide"])
def test_what_the_chart_grants_is_enough_and_no_more(
    control_plane: ControlPlane,
    kubectl: Kubectl,
    namespace: str,
    elsewhere: str,
    installed: None,
    node: FakeNode,
    tmp_path: Path,
    cluster_wide: bool,
) -> None:
    settings = [] if cluster_wide else [f"watchNamespaces={{{namespace}}}"]
    account = restricted(control_plane, namespace, tmp_path, *settings)
    log = tmp_path / "operator.log"
    operator = Operator(account.kubeconfig, namespace, log, cluster_wide=cluster_wide)
    try:
        operator.wait_started(leader=1)
        stages = [Stage(kubectl, place, operator) for place in (namespace, elsewhere)]
        served, others = (stages, []) if cluster_wide else (stages[:1], stages[1:])
        for stage in stages:
            stage.apply(sample())
        for stage in served:
            stage.wait_ready()
            stage.run("scale", "wpool/smollm2-decode", "--replicas=2")
            stage.apply(sample(engine={"blockSize": 32}))
            stage.wait_until(stage.rolled_out, "rolled out")
        # But for services that other tests leave in namespaces that are about to go.
        own = [each for each in operator.process.log.splitlines() if namespace in each]
        assert not [each for each in own if "orbidden" in each or "step failed" in each]
        refused = [["secrets"], ["secrets", f"--namespace={elsewhere}"]]
        for stage in others:
            assert not stage.names("deploy")
            refused += [["pods", f"--namespace={elsewhere}"], ["msvc", "--all-namespaces"]]
        for asked in refused:
            with pytest.raises(CommandError, match="Forbidden"):
                account("get", *asked)
    finally:
        operator.process.kill()


def test_the_operator_goes_on_when_the_api_server_was_killed(
    stage: Stage, control_plane: ControlPlane
) -> None:
    stage.apply(sample())
    stage.wait_ready()
    control_plane.api_server.kill()
    control_plane.api_server.start()
    control_plane.wait_ready()
    if (
        not stage.operator.process.running
    ):  # the lease was lost meanwhile; a kubelet starts it again
        stage.operator.process.start()
    stage.operator.wait_started(leader=1)
    stage.run("scale", "wpool/smollm2-decode", "--replicas=2")
    ready = "--for=jsonpath={.status.readyReplicas}=2"
    stage.run("wait", ready, "wpool/smollm2-decode", "--timeout=60s")


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


ODD: list[tuple[dict[str, Any], str]] = [
    # (spec, reason of Ready)
    ({"decode": {"template": {"spec": {"containers": "x"}}}}, "ObjectRefused"),
    ({"decode": {"template": {"spec": {"containers": [{"name": "a"}]}}}}, "ObjectRefused"),
    ({"decode": {"template": {"spec": {"nodeName": {"a": 1}}}}}, "ObjectRefused"),
    ({"decode": {"template": {"spec": {"nodeSelector": {"a b": "c"}}}}}, "ObjectRefused"),
    ({"decode": {"template": {"spec": {"unknown": 1}}}}, "ObjectRefused"),
    ({"decode": {"template": {"metadata": {"labels": {"kvasir.dev/role": "x"}}}}}, "Unsupported"),
    ({"router": {"template": {"spec": {"serviceAccountName": "Not A Name"}}}}, "ObjectRefused"),
    ({"decode": {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}}}, "ObjectRefused"),
    ({"decode": {"resources": {"requests": {"a b": 2}}}}, "ObjectRefused"),
    ({"decode": {"parallelism": {"tensor": 8}}}, "Unsupported"),
    ({"model": {"source": "file:///model"}}, "Unsupported"),
    ({"model": {"source": "pvc://claim/../x"}}, "Unsupported"),
    ({"decode": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}}, "Unschedulable"),
    ({"prefill": {"replicas": 0}}, "AllReady"),
    ({"decode": {"template": {}}}, "AllReady"),
]


def test_every_odd_spec_ends_in_a_condition_and_can_be_deleted(stage: Stage) -> None:
    for number, (spec, _) in enumerate(ODD):
        document = sample(**spec)
        document["metadata"] = {"name": f"odd-{number}"}
        stage.apply(document)

    def reasons() -> dict[str, str]:
        return {
            item["metadata"]["name"]: each["reason"]
            for item in stage.get("msvc")["items"]
            for each in item.get("status", {}).get("conditions", [])
            if each["type"] == "Ready"
        }

    expected = {f"odd-{number}": reason for number, (_, reason) in enumerate(ODD)}
    wait_until(
        lambda: reasons() == expected,
        "every reason is the expected one",
        SECONDS,
        lambda: f"{expected}\n{reasons()}\n{stage.operator.process.tail()}",
    )
    assert "Traceback" not in stage.operator.process.log
    stage.run("delete", "msvc", "--all", "--timeout=30s")


def test_a_hundred_services(patient_stage: Stage) -> None:
    """Prints the figures (pytest -s); only what must not grow with the number is asserted."""
    stage, count, documents = patient_stage, 100, []
    for number in range(count):
        document = sample()
        document["metadata"] = {"name": f"s-{number}", "namespace": stage.namespace}
        documents.append(document)
    begun = time.monotonic()
    stage.kubectl.apply(*documents)
    applied = time.monotonic() - begun

    def ready() -> int:
        found = stage.get("msvc")["items"]
        conditions = [
            each for item in found for each in item.get("status", {}).get("conditions", [])
        ]
        return sum(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    wait_until(lambda: ready() == count, "all are ready", 240, stage.operator.process.tail)
    seconds = time.monotonic() - begun
    stage.wait_quiet()
    requests = stage.operator.metric("kvasir_operator_api_requests_total")
    memory = stage.operator.process.resident_bytes / 2**20
    print(  # noqa: T201 - figures for people
        f"{count} services: applied in {applied:.1f} s, ready after {seconds:.1f} s; for each "
        f"{requests / count:.0f} requests, {stage.operator.writes / count:.0f} of them writes, and "
        f"{stage.operator.steps / count:.1f} steps; operator {memory:.0f} MiB"
    )
    assert stage.operator.metric("kvasir_operator_reconciliations_total", outcome="failed") == 0
    assert stage.operator.writes / count < 50
    assert memory < 500
