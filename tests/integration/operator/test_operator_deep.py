"""ModelServices nested as deep as the API server stores them, and what ends the watches."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from helpers.operator_daemon import Operator
from helpers.operator_stage import Stage, sample

DEPTHS = (900, 3000, 9000)


def create_deep(control_plane: ControlPlane, namespace: str, depth: int) -> None:
    """``deep-DEPTH``; as text, since Python's encoder goes as deep as its recursion limit."""
    document: dict[str, Any] = sample(decode={"replicas": 1, "template": {"spec": {"x": "DEEP"}}})
    document["metadata"] = {"name": f"deep-{depth}", "namespace": namespace}
    nested = '{"a":' * depth + "1" + "}" * depth
    text = json.dumps(document).replace('"DEEP"', nested)
    control_plane.kubectl("create", "--filename=-", "--validate=false", stdin=text)


def reasons(stage: Stage) -> dict[str, str]:
    """Reason of Ready by name; as kubectl reads it, which goes as deep as it must."""
    ready = '{.status.conditions[?(@.type=="Ready")].reason}'
    path = "{range .items[*]}{.metadata.name} " + ready + '{"\\n"}{end}'
    lines = stage.run("get", "msvc", f"--output=jsonpath={path}").splitlines()
    return {name: reason for name, _, reason in (line.partition(" ") for line in lines)}


@pytest.mark.parametrize("present", [False, True], ids=["later", "at the start"])
def test_an_endlessly_nested_service_is_refused_and_hinders_no_other(
    stage: Stage, control_plane: ControlPlane, present: bool
) -> None:
    if present:
        stage.operator.process.kill()
    for depth in DEPTHS:
        create_deep(control_plane, stage.namespace, depth)
    if present:
        stage.operator.process.start()
        stage.operator.wait_started(leader=1)
    refused = {f"deep-{depth}": "Unsupported" for depth in DEPTHS}
    stage.wait_until(lambda: reasons(stage) == refused, "all are refused")
    message = stage.run(
        *("get", "msvc", "deep-9000"),
        '--output=jsonpath={.status.conditions[?(@.type=="Ready")].message}',
    )
    assert message.startswith("spec.decode.template: nested more than 64 deep; ")
    stage.apply(sample())
    stage.wait_ready()
    stage.run("delete", "msvc", *refused, "--timeout=30s")
    stage.run("scale", "wpool/smollm2-decode", "--replicas=2")
    ready = "--for=jsonpath={.status.readyReplicas}=2"
    stage.run("wait", ready, "wpool/smollm2-decode", "--timeout=60s")
    assert "Traceback" not in stage.operator.process.log


def test_an_operator_whose_watches_end_gives_up_its_lease_and_exits(
    control_plane: ControlPlane,
    namespace: str,
    node: FakeNode,
    installed: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would otherwise lead for ever and do nothing. Here it can read less than is stored."""
    monkeypatch.setenv("KVASIR_TEST_RECURSION_LIMIT", "500")
    operator = Operator(control_plane.kubeconfig, namespace, tmp_path / "operator.log")
    stage = Stage(control_plane.kubectl, namespace, operator)
    try:
        operator.wait_started(leader=1)
        create_deep(control_plane, namespace, 900)
        stage.wait_until(lambda: not operator.process.running, "it ended")
        assert "RecursionError" in operator.process.log
        lease = stage.get("lease", "kvasir-operator")
        assert not lease["spec"].get("holderIdentity")
    finally:
        operator.process.kill()
