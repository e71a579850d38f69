"""The operator as a process against a real control plane; the node and the workers are played."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.clients import CommandError, Helm, Kubectl
from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from cluster.pod_status import IMAGE_PULL_FAILED, NOT_READY, READY, Rule, always, crashed
from cluster.processes import wait_until
from helpers.operator_daemon import Operator

ROOT = Path(__file__).resolve().parents[2]
CRDS = ROOT / "charts" / "kvasir" / "crds"
SAMPLE = ROOT / "deploy" / "samples" / "01-minimal.yaml"
SECONDS = 60


@pytest.fixture(scope="module")
def installed(kubectl: Kubectl) -> None:
    kubectl("apply", f"--filename={CRDS}")
    for name in ("modelservices", "workerpools"):
        kubectl("wait", "--for=condition=Established", f"crd/{name}.kvasir.dev", "--timeout=60s")


class Stage:
    """One namespace with an operator."""

    def __init__(self, kubectl: Kubectl, namespace: str, operator: Operator) -> None:
        self.kubectl = kubectl
        self.namespace = namespace
        self.operator = operator

    def run(self, *arguments: str) -> str:
        return self.kubectl(*arguments, f"--namespace={self.namespace}")

    def get(self, *arguments: str) -> dict[str, Any]:
        return self.kubectl.get(*arguments, f"--namespace={self.namespace}")

    def apply(self, document: dict[str, Any]) -> None:
        document = {**document, "metadata": {**document["metadata"], "namespace": self.namespace}}
        self.kubectl.apply(document)

    def condition(self, kind: str = "Ready") -> tuple[str, str, str]:
        """Status, reason and message."""
        found = self.get("msvc", "smollm2").get("status", {}).get("conditions", [])
        for each in found:
            if each["type"] == kind:
                return each["status"], each["reason"], each["message"]
        return "", "", ""

    def wait_ready(self, seconds: int = SECONDS) -> None:
        try:
            self.run("wait", "--for=condition=Ready", "msvc/smollm2", f"--timeout={seconds}s")
        except Exception as error:
            raise AssertionError(f"{error}\n{self.explain()}") from error

    def wait_until(self, predicate: Callable[[], bool], what: str) -> None:
        wait_until(predicate, what, SECONDS, self.explain)

    def wait_reason(self, reason: str, kind: str = "Ready") -> str:
        self.wait_until(lambda: self.condition(kind)[1] == reason, f"{kind} is {reason}")
        return self.condition(kind)[2]

    def wait_quiet(self) -> None:
        """Until a second passes without a step."""

        def quiet() -> bool:
            before = self.operator.steps
            time.sleep(1)
            return self.operator.steps == before

        self.wait_until(quiet, "no more steps")

    def names(self, *kinds: str) -> set[str]:
        return set(self.run("get", ",".join(kinds), "--output=name").split())

    def workers(self, role: str) -> set[str]:
        selector = f"--selector=kvasir.dev/role={role}"
        return set(self.run("get", "deploy", selector, "--output=name").split())

    def explain(self) -> str:
        return f"{self.run('get', 'msvc,pods,deploy,wpool', '-o', 'wide')}\n" + (
            self.operator.process.tail()
        )


@pytest.fixture
def stage(
    control_plane: ControlPlane,
    kubectl: Kubectl,
    namespace: str,
    node: FakeNode,
    installed: None,
    tmp_path: Path,
) -> Iterator[Stage]:
    operator = Operator(control_plane.kubeconfig, namespace, tmp_path / "operator.log")
    try:
        operator.wait_started(leader=1)
        yield Stage(kubectl, namespace, operator)
    finally:
        operator.process.kill()


@pytest.fixture
def restricted(
    kubectl: Kubectl, namespace: str, control_plane: ControlPlane, tmp_path: Path
) -> Kubectl:
    """The operator's service account, with what the chart grants it in one namespace."""
    helm = Helm(control_plane.kubeconfig, tmp_path)
    chart = ("template", "kvasir", str(ROOT / "charts" / "kvasir"), f"--namespace={namespace}")
    shown = [f"--show-only=templates/{name}.yaml" for name in ("rbac", "serviceaccount")]
    manifest = helm(*chart, f"--set=watchNamespaces={{{namespace}}}", *shown)
    kubectl("apply", "--filename=-", stdin=manifest)
    return kubectl.service_account("kvasir-operator", namespace, tmp_path)


def sample(**spec: Any) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(SAMPLE.read_text(encoding="utf-8"))
    document["spec"] |= spec
    return document


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


def test_a_step_without_a_change_writes_nothing(stage: Stage) -> None:
    stage.apply(sample())
    stage.wait_ready()
    stage.wait_quiet()
    versions = _versions(stage)
    steps, writes = stage.operator.steps, stage.operator.writes
    stage.run("annotate", "msvc/smollm2", "example.com/touched=yes")
    stage.wait_until(lambda: stage.operator.steps > steps, "a step")
    stage.wait_quiet()
    assert stage.operator.writes == writes, stage.operator.process.tail()
    assert _versions(stage) == versions


def test_a_restarted_operator_changes_nothing(stage: Stage) -> None:
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


def test_an_operator_killed_during_a_rollout_comes_to_the_same_end(stage: Stage) -> None:
    stage.apply(sample(decode={"replicas": 2}))
    stage.wait_ready()
    before = stage.names("deploy", "cm", "wpool")
    for number in range(10):
        stage.apply(sample(decode={"replicas": 2}, engine={"maxBatchedTokens": 256 + number}))
        time.sleep(0.05 + 0.13 * number)
        stage.operator.process.kill()
        stage.operator.process.start()
    stage.operator.wait_started(leader=1)
    stage.wait_ready()
    stage.wait_until(lambda: len(stage.names("pods")) == 4, "no old pods")
    after = stage.names("deploy", "cm", "wpool")
    assert len(after) == len(before)
    assert len(stage.workers("decode")) == len(stage.workers("prefill")) == 1
    pods = stage.get("pods")["items"]
    assert not any(
        "kvasir.dev/draining-since" in each["metadata"].get("annotations", {}) for each in pods
    )


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
    stage: Stage, control_plane: ControlPlane, tmp_path: Path
) -> None:
    other = Operator(control_plane.kubeconfig, stage.namespace, tmp_path / "other.log")
    try:
        other.wait_started(leader=0)
        stage.operator.process.pause()
        other.wait_started(leader=1)
        stage.operator.process.resume()
        stage.wait_until(lambda: not stage.operator.process.running, "the first one ended")
        assert "not renewed" in stage.operator.process.log
    finally:
        other.process.kill()


def test_what_the_chart_grants_is_enough_and_no_more(
    restricted: Kubectl,
    kubectl: Kubectl,
    namespace: str,
    installed: None,
    node: FakeNode,
    tmp_path: Path,
) -> None:
    operator = Operator(restricted.kubeconfig, namespace, tmp_path / "operator.log")
    try:
        operator.wait_started(leader=1)
        stage = Stage(kubectl, namespace, operator)
        stage.apply(sample())
        stage.wait_ready()
        stage.run("scale", "wpool/smollm2-decode", "--replicas=2")
        stage.apply(sample(engine={"blockSize": 32}))
        stage.wait_ready()
        stage.wait_quiet()
        assert operator.metric("kvasir_operator_reconciliations_total", outcome="failed") == 0
        assert "orbidden" not in operator.process.log
        for refused in (["pods", "--namespace=default"], ["msvc", "--all-namespaces"], ["secrets"]):
            with pytest.raises(CommandError, match="Forbidden"):
                restricted("get", *refused)
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


def test_load_adds_workers_and_the_status_says_why(stage: Stage) -> None:
    scaling = {"minReplicas": 1, "maxReplicas": 3}
    stage.apply(sample(decode={"scaling": scaling}))
    stage.wait_ready()
    assert "lastDecision" not in stage.get("msvc", "smollm2")["status"]
    stage.operator.busy.touch()
    pool = "wpool/smollm2-decode"
    stage.run("wait", "--for=jsonpath={.status.readyReplicas}=3", pool, "--timeout=60s")
    stage.wait_ready()
    decision = stage.get("msvc", "smollm2")["status"]["lastDecision"]
    assert (decision["role"], decision["desired"]) == ("decode", 3)
    assert decision["reason"].startswith("Raise decode from ")
    assert "Raise decode from 1" in stage.run("events", "--for=msvc/smollm2")
    time.sleep(6)  # one more decision
    assert stage.get("wpool", "smollm2-decode")["spec"]["replicas"] == 3


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


def test_a_hundred_services(stage: Stage) -> None:
    """Prints the figures (pytest -s); only what must not grow with the number is asserted."""
    count, documents = 100, []
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
