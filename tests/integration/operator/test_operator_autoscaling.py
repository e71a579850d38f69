"""Autoscaling by the operator as a process, against a real control plane.

The node is played, and so is what workers and routers say in their metrics; see operator_process.
"""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.clients import Kubectl
from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from cluster.pod_status import NOT_READY, READY, always
from cluster.processes import wait_until
from helpers.operator_daemon import Operator
from helpers.operator_process import Series

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "deploy" / "samples" / "01-minimal.yaml"
SECONDS = 180
WINDOW = 10
FULL: Series = {
    "vllm:num_requests_running": 64,
    "vllm:num_requests_waiting": 9,
    "vllm:kv_cache_usage_perc": 1.0,
}
CROWDED: Series = {**FULL, "vllm:num_requests_waiting": 64}
NAN: Series = {**FULL, "vllm:kv_cache_usage_perc": "NaN"}


class Stage:
    """One namespace with an operator and one service."""

    def __init__(self, kubectl: Kubectl, namespace: str, operator: Operator) -> None:
        self._kubectl = kubectl
        self.namespace = namespace
        self.operator = operator

    def apply(self, **spec: Any) -> None:
        document: dict[str, Any] = yaml.safe_load(SAMPLE.read_text(encoding="utf-8"))
        document["metadata"]["namespace"] = self.namespace
        document["spec"] |= spec
        self._kubectl.apply(document)

    def run(self, *arguments: str) -> str:
        return self._kubectl(*arguments, f"--namespace={self.namespace}")

    def get(self, *arguments: str) -> dict[str, Any]:
        return self._kubectl.get(*arguments, f"--namespace={self.namespace}")

    def wait_until(self, predicate: Callable[[], bool], what: str) -> None:
        wait_until(predicate, what, SECONDS, self._explain)

    def wait_ready(self, reason: str) -> None:
        self.wait_until(lambda: self.ready() == ("True", reason), f"Ready with {reason}")

    def ready(self) -> tuple[str, str]:
        """Status and reason of the condition."""
        found = self.get("msvc", "smollm2").get("status", {}).get("conditions", ())
        return next(((c["status"], c["reason"]) for c in found if c["type"] == "Ready"), ("", ""))

    def wanted(self, role: str = "decode") -> int:
        return int(self.get("wpool", f"smollm2-{role}")["spec"]["replicas"])

    def pods(self, role: str = "decode") -> list[str]:
        found = self.get("pods", f"--selector=kvasir.dev/role={role}")["items"]
        return sorted(pod["metadata"]["name"] for pod in found)

    def decision(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("msvc", "smollm2")["status"].get("lastDecision", {})
        return found

    def told(self, reason: str) -> list[str]:
        """Messages of the events, oldest first."""
        found = self.get("events", f"--field-selector=reason={reason}")["items"]
        found.sort(key=lambda each: each["metadata"]["resourceVersion"])
        return [each["message"] for each in found]

    def steps(self, role: str = "decode") -> list[tuple[int, int]]:
        """From and to how many replicas each event leads."""
        said = [re.match(rf"\w+ {role} from (\d+) to (\d+): ", t) for t in self.told("Scaled")]
        return [(int(match[1]), int(match[2])) for match in said if match]

    def _explain(self) -> str:
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
    log = tmp_path / "operator.log"
    # Nobody starts it again here if it loses its lease on a machine that is too busy.
    operator = Operator(control_plane.kubeconfig, namespace, log, "--lease-seconds=20")
    try:
        operator.wait_started(leader=1)
        yield Stage(kubectl, namespace, operator)
    finally:
        operator.process.kill()


def scaled(low: int, high: int, window: int = WINDOW, **role: Any) -> dict[str, Any]:
    bounds = {"minReplicas": low, "maxReplicas": high, "stabilizationWindow": f"{window}s"}
    return {"scaling": bounds, **role}


def test_load_adds_workers_and_its_end_removes_them_one_by_one(stage: Stage) -> None:
    stage.apply(decode=scaled(1, 3))
    stage.wait_ready("AllReady")
    assert not stage.decision()
    (first,) = stage.pods()
    stage.operator.play({"decode": FULL})
    stage.wait_until(lambda: len(stage.pods()) == 3, "three workers")
    stage.wait_ready("AllReady")
    up = stage.decision()
    assert (up["role"], up["desired"]) == ("decode", 3)
    assert re.fullmatch(r"Raise decode from \d to 3: KV cache usage is 100% .+", up["reason"])
    assert {"kvUsage", "ready", "wanted", "heldRequests"} <= set(up["inputs"])
    assert stage.wanted("prefill") == 1

    stage.operator.play({})
    stage.wait_until(lambda: len(stage.pods()) == 1, "one worker")
    stage.wait_ready("AllReady")
    assert stage.steps()[-2:] == [(3, 2), (2, 1)]
    assert stage.pods() == [first]  # the newest ones go first
    assert len(stage.told("DrainCompleted")) == 2
    down = stage.decision()
    assert (down["role"], down["desired"]) == ("decode", 1)
    assert down["reason"].startswith("Lower decode from 2 to 1: it is idle")


def test_an_idle_service_goes_to_zero_and_comes_back_for_a_request(stage: Stage) -> None:
    stage.apply(prefill=scaled(0, 2), decode=scaled(0, 2))
    stage.wait_ready("AllReady")  # it has shown that it works
    stage.wait_ready("ScaledToZero")
    assert (stage.wanted("prefill"), stage.wanted("decode")) == (0, 0)
    stage.wait_until(lambda: not stage.pods("prefill") + stage.pods("decode"), "no worker")
    stage.run("wait", "--for=condition=Available", "msvc/smollm2", "--timeout=1s")
    time.sleep(2 * WINDOW)  # and stays there
    assert stage.ready() == ("True", "ScaledToZero")

    stage.operator.play({"router": {'kvasir_router_held_requests{role="decode"}': 2}})
    stage.wait_until(lambda: len(stage.pods()) == 1, "a decode worker")
    assert stage.decision()["reason"] == (
        "Raise decode from 0 to 1: routers hold 2 requests until a worker is ready, "
        "which needs 1 replica."
    )
    stage.operator.play(
        {
            "decode": {"vllm:num_requests_running": 2, "vllm:kv_cache_usage_perc": 0.1},
            "router": {'kvasir_router_disaggregated_total{decision="local_no_worker"}': 1},
        }
    )
    stage.wait_until(lambda: len(stage.pods("prefill")) == 1, "a prefill worker")
    assert stage.decision()["reason"].startswith(
        "Raise prefill from 0 to 1: 1 prompt found no prefill worker"
    )
    stage.wait_ready("AllReady")


def test_pods_whose_metrics_cannot_be_used_are_named(stage: Stage) -> None:
    stage.operator.play({"decode": {"vllm:kv_cache_usage_perc": 0.7}})
    stage.apply(decode=scaled(3, 5, window=40))
    stage.wait_ready("AllReady")
    silent, broken, _ = stage.pods()
    stage.operator.play({"decode": FULL, silent: None, broken: NAN})
    stage.wait_until(lambda: stage.wanted() == 5, "five workers")
    said = " ".join(stage.told("Scaled"))
    assert f"{broken} (vllm:kv_cache_usage_perc is not a usable number)" in said

    stage.operator.play({silent: None, broken: None})
    stage.wait_until(lambda: stage.wanted() == 4, "a step down")
    (said,) = [each for each in stage.told("Scaled") if each.startswith("Lower")]
    assert (
        f"some metrics cannot be used, and what they hide counts as load: {silent} (no data)"
        in (said)
    )
    assert f"{broken} (no data for " in said  # it was heard before


def test_pods_that_find_no_place_ask_for_no_more(stage: Stage) -> None:
    """Three of these fit on the node."""
    large = {"requests": {"cpu": "19"}}
    stage.operator.play({"decode": CROWDED})
    stage.apply(decode=scaled(1, 9, resources=large))
    stage.wait_until(lambda: stage.ready() == ("False", "Unschedulable"), "no place")
    stage.wait_until(lambda: bool(stage.told("ScalingLimited")), "the limit is told")
    decision = stage.decision()
    assert decision["limitedBy"] == "pending"
    assert re.search(r"; \d pods? cannot be scheduled, so none is added\.", decision["reason"])
    assert int(decision["inputs"]["unschedulable"]) >= 1
    reached = stage.wanted()
    assert 3 < reached <= 6
    time.sleep(12)  # two more decisions
    assert stage.wanted() == reached
    assert len(stage.told("ScalingLimited")) == 1

    stage.operator.play({})
    stage.wait_until(lambda: stage.wanted() < reached, "a step down")


def test_a_role_is_scaled_during_a_rollout(stage: Stage, node: FakeNode) -> None:
    stage.apply(decode=scaled(1, 3))
    stage.wait_ready("AllReady")
    old = {*stage.pods("prefill"), *stage.pods("decode"), *stage.pods("router")}
    node.rule = lambda pod: READY if pod["metadata"]["name"] in old else NOT_READY
    stage.apply(decode=scaled(1, 3), engine={"blockSize": 32})
    stage.wait_until(lambda: stage.ready() == ("False", "RollingOut"), "the rollout hangs")
    stage.operator.play({"decode": FULL})
    stage.wait_until(lambda: stage.wanted() == 2, "two workers")  # one works, and no more than that
    stage.wait_until(lambda: len(stage.pods()) == 3, "two new ones beside the old one")
    assert stage.ready() == ("False", "RollingOut")
    node.rule = always(READY)
    stage.wait_until(lambda: len(stage.pods()) == 3, "three of them")
    stage.wait_ready("AllReady")
    stage.wait_until(lambda: not {*stage.pods()} & old, "no old one")


def test_a_restarted_operator_watches_a_whole_window_before_it_takes_a_worker(
    stage: Stage,
) -> None:
    window = 25
    stage.operator.play({"decode": FULL})
    stage.apply(decode=scaled(1, 2, window))
    stage.wait_until(lambda: len(stage.pods()) == 2, "two workers")
    stage.wait_ready("AllReady")
    stage.operator.play({})
    time.sleep(window - 10)  # nearly over
    stage.operator.process.kill()
    begun = time.monotonic()
    stage.operator.process.start()
    stage.wait_until(lambda: stage.wanted() == 1, "a step down")
    assert time.monotonic() - begun >= window
    assert stage.steps()[-1] == (2, 1)


def test_whoever_writes_the_scale_subresource_scales_a_pool(
    stage: Stage, control_plane: ControlPlane
) -> None:
    """As a HorizontalPodAutoscaler does: it reads replicas and selector, and writes replicas."""
    stage.operator.play({"decode": FULL})
    stage.apply()  # without scaling
    stage.wait_ready("AllReady")
    client = control_plane.client()
    group = "/apis/kvasir.dev/v1alpha1"
    path = f"{group}/namespaces/{stage.namespace}/workerpools/smollm2-decode/scale"
    try:
        scale = client.get(path)
        assert (scale["kind"], scale["spec"]["replicas"]) == ("Scale", 1)
        client.patch(path, {"spec": {"replicas": 3}})
        stage.wait_until(lambda: client.get(path)["status"]["replicas"] == 3, "three workers")
        stage.wait_ready("AllReady")
        selector = client.get(path)["status"]["selector"]
        selected = stage.get("pods", f"--selector={selector}")["items"]
        assert sorted(pod["metadata"]["name"] for pod in selected) == stage.pods()
        client.patch(path, {"spec": {"replicas": 2}})
        stage.wait_until(lambda: client.get(path)["status"]["replicas"] == 2, "two workers")
        time.sleep(6)  # a decision, if there were one
        assert stage.wanted() == 2
        assert not stage.decision()
    finally:
        client.close()


def test_who_scales_a_pool_beyond_its_bounds_is_told(stage: Stage) -> None:
    stage.apply(decode=scaled(1, 2))
    stage.wait_ready("AllReady")
    stage.run("scale", "wpool/smollm2-decode", "--replicas=5")
    said = "wpool/smollm2-decode asked for 5, but spec.decode.scaling.maxReplicas is 2."
    stage.wait_until(lambda: said in stage.told("ScalingLimited"), "the bound is told")
    stage.wait_until(lambda: stage.wanted() <= 2, "it is kept")
    assert stage.told("ScalingLimited").count(said) == 1
