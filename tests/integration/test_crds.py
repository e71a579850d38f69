"""The CustomResourceDefinitions in a real API server: what is filled in, shown, scaled, deleted.

What it refuses is test_crds_invalid.py's part.
"""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.api import ApiError
from cluster.clients import CommandError, Kubectl
from cluster.control_plane import ControlPlane
from cluster.processes import wait_until
from helpers.custom_resources import Services, install, service, services_in
from kvasir.operator import manifest
from kvasir.operator.crd import RESOURCES, custom_resource_definition
from kvasir.operator.modelservice import ModelService
from kvasir.operator.resource_status import (
    Condition,
    LastDecision,
    ModelServiceStatus,
    Roles,
    RoleStatus,
    WorkerPoolStatus,
    dump,
)
from kvasir.operator.workerpool import WorkerPool

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = ROOT / "deploy" / "samples" / "01-minimal.yaml"
TIME = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def installed(kubectl: Kubectl) -> None:
    install(kubectl)


@pytest.fixture
def services(control_plane: ControlPlane, namespace: str, installed: None) -> Iterator[Services]:
    with services_in(control_plane, namespace) as found:
        yield found


def pool(**spec: object) -> dict[str, Any]:
    return {
        "apiVersion": "kvasir.dev/v1alpha1",
        "kind": "WorkerPool",
        "metadata": {"name": "smollm2-decode"},
        "spec": {"modelService": "smollm2", "role": "decode", "replicas": 1, **spec},
    }


def columns(kubectl: Kubectl, *arguments: str) -> dict[str, str]:
    """The one object of ``kubectl get`` as header to cell."""
    header, row = kubectl("get", *arguments).splitlines()
    # Cells may be empty, so they are cut where the headers begin.
    starts = [match.start() for match in re.finditer(r"\S+", header)]
    ends = [*starts[1:], None]
    return {
        header[start:end].strip(): row[start:end].strip()
        for start, end in zip(starts, ends, strict=True)
    }


def test_the_smallest_sample_and_its_columns(
    kubectl: Kubectl, namespace: str, installed: None
) -> None:
    here = f"--namespace={namespace}"
    kubectl("apply", f"--filename={MINIMAL}", here)
    source = "bundled://smollm2-135m-instruct"
    row = columns(kubectl, "msvc", here)
    assert list(row) == ["NAME", "READY", "PREFILL", "DECODE", "MODEL", "AGE"]
    assert (row["NAME"], row["READY"], row["MODEL"]) == ("smollm2", "", source)

    status = ModelServiceStatus(
        observed_generation=1,
        conditions=[
            Condition(
                type="Ready",
                status="True",
                reason="AllReady",
                message="1 prefill and 3 decode workers take requests.",
                last_transition_time=TIME,
                observed_generation=1,
            )
        ],
        roles=Roles(
            prefill=RoleStatus(replicas=2, ready_replicas=1, revision="0123456789"),
            decode=RoleStatus(replicas=3, ready_replicas=3),
        ),
        last_decision=LastDecision(
            time=TIME,
            role="decode",
            desired=3,
            reason="KV use is high.",
            limited_by="max",
            inputs={"kvUsage": "0.91"},
        ),
        url="http://smollm2.default",
    )
    patch = json.dumps({"status": dump(status)})
    kubectl(
        *("patch", "msvc", "smollm2", here, "--subresource=status", "--type=merge"),
        f"--patch={patch}",
    )
    row = columns(kubectl, "msvc", here, "--output=wide")
    assert list(row) == ["NAME", "READY", "PREFILL", "DECODE", "MODEL", "REASON", "AGE"]
    assert list(row.values())[:-1] == ["smollm2", "True", "1", "3", source, "AllReady"]
    kubectl("wait", "--for=condition=Ready", "msvc/smollm2", here, "--timeout=5s")
    stored = kubectl.get("msvc", "smollm2", here)
    assert ModelServiceStatus.model_validate_json(json.dumps(stored["status"])) == status


def test_the_definitions_fit_an_annotation(kubectl: Kubectl, installed: None) -> None:
    for resource in RESOURCES:
        found = kubectl.get("crd", f"{resource.plural}.kvasir.dev")
        annotations = found["metadata"]["annotations"]
        size = len(annotations["kubectl.kubernetes.io/last-applied-configuration"])
        assert 1000 < size < 256 * 1024 / 4
        problems = [c for c in found["status"]["conditions"] if c["type"] == "NonStructuralSchema"]
        assert problems == []


def test_kubectl_explains(kubectl: Kubectl, installed: None) -> None:
    def explained(field: str) -> str:
        return " ".join(kubectl("explain", field).split())

    def known() -> bool:
        try:
            return "ModelService" in explained("msvc")
        except CommandError:
            return False

    # The API server publishes a schema shortly after the resource is there.
    wait_until(known, "the schema is published", 30)
    assert "served by separate pools of prefill and decode workers" in explained("msvc")
    assert "Tokens in a KV block." in explained("msvc.spec.engine")
    assert "such as 512Mi or 20Gi" in explained("msvc.spec.engine.kvCacheMemory")
    assert "ENUM: auto always never" in explained("msvc.spec.disaggregation.mode")
    assert "Why, in a sentence." in explained("msvc.status.lastDecision.reason")
    assert "Write it by kubectl scale" in explained("wpool.spec.replicas")


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "samples").glob("*.yaml")), ids=str)
def test_samples_load_alike(path: Path, services: Services) -> None:
    read = manifest.load(path)
    stored = services.create(yaml.safe_load(path.read_text("utf-8")))
    assert ModelService.model_validate(stored).spec == read.spec


def test_a_worker_pool_is_scaled(kubectl: Kubectl, namespace: str, installed: None) -> None:
    here = f"--namespace={namespace}"
    document = pool()
    document["metadata"]["namespace"] = namespace
    kubectl.apply(document)
    kubectl("scale", "wpool/smollm2-decode", here, "--replicas=7")
    status = dump(WorkerPoolStatus(replicas=4, ready_replicas=3, selector="kvasir.dev/role=decode"))
    kubectl(
        *("patch", "wpool", "smollm2-decode", here, "--subresource=status", "--type=merge"),
        f"--patch={json.dumps({'status': status})}",
    )
    scale = kubectl.get("wpool/smollm2-decode", here, "--subresource=scale")
    assert scale["kind"] == "Scale"
    assert scale["spec"] == {"replicas": 7}
    assert scale["status"] == {"replicas": 4, "selector": "kvasir.dev/role=decode"}
    row = columns(kubectl, "wpool", here)
    assert list(row) == ["NAME", "ROLE", "DESIRED", "READY", "DRAINING", "AGE"]
    assert list(row.values())[:-1] == ["smollm2-decode", "decode", "7", "3", "0"]
    with pytest.raises(CommandError, match="less than or equal to 1024"):
        kubectl("scale", "wpool/smollm2-decode", here, "--replicas=1025")
    assert (
        WorkerPool.model_validate(kubectl.get("wpool", "smollm2-decode", here)).spec.replicas == 7
    )


def test_what_a_worker_pool_is_cannot_change(
    kubectl: Kubectl, namespace: str, installed: None
) -> None:
    def document(name: str = "smollm2-decode", **spec: object) -> dict[str, Any]:
        found = pool(**spec)
        found["metadata"] |= {"namespace": namespace, "name": name}
        return found

    kubectl.apply(document())
    kubectl.apply(document(replicas=2))
    with pytest.raises(CommandError, match=r"spec\.role: .*cannot be changed"):
        kubectl.apply(document(role="prefill"))
    with pytest.raises(CommandError, match=r"spec\.modelService: .*cannot be changed"):
        kubectl.apply(document(modelService="other"))
    with pytest.raises(CommandError, match=r"metadata\.name: .*spec\.modelService, a hyphen"):
        kubectl.apply(document(name="another"))
    with pytest.raises(CommandError, match=r'spec\.role: Unsupported value: "router"'):
        kubectl.apply(document(name="smollm2-router", role="router"))


def test_a_model_service_may_change_its_model(
    kubectl: Kubectl, namespace: str, installed: None
) -> None:
    for source in ("file:///model", "hf://org/name@main"):
        document = service({"model": {"source": source}})
        document["metadata"]["namespace"] = namespace
        kubectl.apply(document)
    found = kubectl.get("msvc", "a", f"--namespace={namespace}")
    assert found["spec"]["model"]["source"] == "hf://org/name@main"
    assert found["metadata"]["generation"] == 2


def test_the_longest_name_and_a_generated_one(services: Services) -> None:
    services.create(service({}, "a" * 40))
    document = service({})
    document["metadata"] = {"generateName": "smol-"}
    assert ModelService.model_validate(services.create(document)).name.startswith("smol-")


def test_an_object_that_became_invalid_can_be_deleted(
    kubectl: Kubectl, services: Services, namespace: str
) -> None:
    lenient = custom_resource_definition(RESOURCES[0])
    (version,) = lenient["spec"]["versions"]
    version["schema"]["openAPIV3Schema"] = {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
    }
    invalid = service({"engine": {"blockSize": "large", "unknown": 1}, "decode": {"replicas": -1}})
    kubectl.apply(lenient)
    try:
        wait_until(lambda: accepted(services, invalid), "the lenient schema holds", 30)
    finally:
        install(kubectl)
    other = service({"decode": {"replicas": -1}}, "b")
    wait_until(lambda: not accepted(services, other), "the strict schema holds", 30)
    assert kubectl.get("msvc", "a", f"--namespace={namespace}")["spec"]["decode"]["replicas"] == -1
    services.delete("a")


def accepted(services: Services, document: dict[str, Any]) -> bool:
    try:
        services.create(document)
    except ApiError as error:
        return "already exists" in str(error)
    return True
