"""Many services at once: odd ones, and a hundred."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from cluster.processes import wait_until
from helpers.operator_stage import SECONDS, Stage, operator_stage, sample


@pytest.fixture
def patient_stage(
    control_plane: ControlPlane, namespace: str, node: FakeNode, installed: None, tmp_path: Path
) -> Iterator[Stage]:
    """With an operator that keeps its lease however slow a busy machine makes it."""
    with operator_stage(control_plane, namespace, tmp_path, "--lease-seconds=120") as made:
        yield made


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
