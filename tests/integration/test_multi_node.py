"""Workers that span nodes, by a real operator with the chart's rights and a real API server.

LeaderWorkerSet's own part is played (helpers.leader_worker_sets), and the node, as elsewhere.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.clients import Kubectl
from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from helpers import leader_worker_sets
from helpers.custom_resources import install
from helpers.operator_daemon import Operator
from helpers.operator_stage import Stage, restricted, sample

OWN_IMAGE = {"spec": {"containers": [{"name": "worker", "image": "nowhere.invalid/spread:1"}]}}
DEVICES = 64
SPREAD = {
    "replicas": 2,
    "parallelism": {"tensor": 4},
    "accelerator": {"resourceName": "example.com/npu", "count": 2},
    "template": OWN_IMAGE,
}
SPREAD_PODS = 2
"""Of each worker: 4 ranks, 2 in each pod."""


@pytest.fixture
def without_api(kubectl: Kubectl) -> Iterator[None]:
    install(kubectl)
    leader_worker_sets.remove(kubectl)
    yield
    leader_worker_sets.remove(kubectl)


@pytest.fixture
def stage(
    control_plane: ControlPlane,
    kubectl: Kubectl,
    namespace: str,
    without_api: None,
    node: FakeNode,
    tmp_path: Path,
) -> Iterator[Stage]:
    """Its pods have to meet the restricted standard, and find 64 devices on the node."""
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    devices = f'{{"example.com/npu":"{DEVICES}"}}'
    patch = f'{{"status":{{"capacity":{devices},"allocatable":{devices}}}}}'
    kubectl("patch", "node", node.name, "--subresource=status", f"--patch={patch}")
    account = restricted(control_plane, namespace, tmp_path, f"watchNamespaces={{{namespace}}}")
    operator = Operator(account.kubeconfig, namespace, tmp_path / "operator.log")
    try:
        operator.wait_started(leader=1)
        yield Stage(kubectl, namespace, operator)
    finally:
        operator.process.kill()


@pytest.fixture
def with_api(control_plane: ControlPlane, kubectl: Kubectl, stage: Stage) -> Iterator[Stage]:
    leader_worker_sets.install(kubectl)
    with leader_worker_sets.played(control_plane, stage.namespace):
        yield stage


def pods(stage: Stage, component: str) -> int:
    selector = f"--selector=app.kubernetes.io/component={component}"
    items = stage.get("pods", selector)["items"]
    return sum("deletionTimestamp" not in each["metadata"] for each in items)


def spread(stage: Stage, workers: int) -> None:
    """Wait until there are so many decode workers, all of them whole and ready."""
    followers = workers * (SPREAD_PODS - 1)
    stage.wait_until(lambda: pods(stage, "follower") == followers, f"{followers} followers")
    stage.wait_ready()


def sets(stage: Stage) -> set[str]:
    return stage.names("leaderworkersets")


def test_a_missing_api_is_named_and_its_coming_heals(
    stage: Stage, kubectl: Kubectl, control_plane: ControlPlane
) -> None:
    stage.apply(sample(decode=SPREAD))
    stage.wait_reason("LeaderWorkerSetMissing")
    assert "leaderworkerset.x-k8s.io/v1" in stage.condition("Degraded")[2]
    # The rest is there, and the operator has no other trouble.
    stage.wait_until(lambda: pods(stage, "worker") == 1, "the prefill worker")
    assert stage.operator.metric("kvasir_operator_reconciliations_total", outcome="failed") == 0
    leader_worker_sets.install(kubectl)
    with leader_worker_sets.played(control_plane, stage.namespace):
        stage.wait_ready()
        assert len(sets(stage)) == 1


def test_workers_that_span_nodes_come_scale_roll_out_and_go(with_api: Stage) -> None:
    stage = with_api
    stage.apply(sample(decode=SPREAD))
    spread(stage, 2)
    assert pods(stage, "worker") == 1 + 2

    def addresses() -> int:
        selector = "--selector=kubernetes.io/service-name=smollm2-workers"
        slices = stage.get("endpointslices", selector)["items"]
        return sum(len(each.get("endpoints") or ()) for each in slices)

    stage.wait_until(lambda: addresses() == 1 + 2, "routers see leaders and no followers")

    stage.run("scale", "wpool/smollm2-decode", "--replicas=3")
    spread(stage, 3)
    stage.run("scale", "wpool/smollm2-decode", "--replicas=1")
    spread(stage, 1)
    events = stage.run("events", "--for=msvc/smollm2")
    assert events.count("DrainStarted") == events.count("DrainCompleted") == 2

    before = sets(stage)
    stage.apply(sample(decode=SPREAD | {"replicas": 1}, engine={"blockSize": 32}))
    stage.wait_until(lambda: len(sets(stage) - before) == len(sets(stage)) == 1, "the new revision")
    stage.wait_ready()

    # Back to one pod for each worker: nothing of the sets stays.
    stage.apply(sample(decode={"replicas": 1}))
    stage.wait_until(
        lambda: not stage.names("leaderworkersets", "statefulsets") and not pods(stage, "follower"),
        "no set and no follower is left",
    )
    stage.wait_ready()
    assert stage.names("networkpolicies") == {"networkpolicy.networking.k8s.io/smollm2-workers"}


def test_a_step_without_a_change_writes_nothing(with_api: Stage) -> None:
    stage = with_api
    stage.apply(sample(decode=SPREAD))
    spread(stage, 2)
    stage.wait_quiet()
    steps, writes = stage.operator.steps, stage.operator.writes
    stage.run("annotate", "msvc/smollm2", "example.com/touched=yes")
    stage.wait_until(lambda: stage.operator.steps > steps, "a step")
    stage.wait_quiet()
    assert stage.operator.writes == writes


def test_a_follower_without_a_place_is_named(with_api: Stage) -> None:
    too_many = DEVICES // 2 + 1  # for two pods; the leader finds its place
    role = {
        "parallelism": {"tensor": 2 * too_many},
        "accelerator": {"resourceName": "example.com/npu", "count": too_many},
        "template": OWN_IMAGE,
    }
    with_api.apply(sample(decode=role))
    assert "Insufficient example.com/npu" in with_api.wait_reason("Unschedulable")
    assert pods(with_api, "follower") == 1
