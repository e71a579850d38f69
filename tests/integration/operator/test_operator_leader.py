"""Several operators, what the chart grants them, and an API server that was killed."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.clients import CommandError, Kubectl
from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from helpers.operator_daemon import Operator
from helpers.operator_stage import Stage, operator_stage, restricted, sample

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
