"""ModelServices that cannot work, or not beside each other: told in a condition, and deletable."""

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import ValidationError

from cluster.clients import CommandError, Kubectl
from cluster.control_plane import ControlPlane
from cluster.processes import wait_until
from helpers.custom_resources import SOURCE, Services, services_in
from helpers.operator_stage import SECONDS, Stage, sample
from helpers.random_services import changed, changes
from kvasir.operator.modelservice import ModelService

COUNT = 200
CLEAR = {
    *("AllReady", "Invalid", "ObjectRefused", "PodsRefused", "Unschedulable", "Unsupported"),
}
"""Reasons of Ready that say how it stands, and will stand until somebody does something."""


# --- random ones ------------------------------------------------------------------------------


def random_services() -> list[dict[str, Any]]:
    """The same ones in each run; most of them have something wrong."""
    found: list[dict[str, Any]] = []

    @settings(
        max_examples=COUNT,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(each=changes())
    def collect(each: dict[tuple[str, ...], object]) -> None:
        document = changed(each)
        if document["spec"].get("model") == SOURCE:
            # One that clusters serve, so that the rest of the spec decides.
            document["spec"]["model"] = {"source": "bundled://smollm2-135m-instruct"}
        document["metadata"]["name"] = f"odd-{len(found)}"
        found.append(document)

    collect()
    return found


def wrong_places(document: dict[str, Any]) -> set[str]:
    """Paths of the fields that the typed resource refuses."""
    try:
        ModelService.model_validate(document)
    except ValidationError as error:
        return {".".join(map(str, each["loc"])) for each in error.errors()}
    return set()


def create_all(services: Services, documents: list[dict[str, Any]]) -> set[str]:
    """Names of those that the API server takes; of the others it names a field that is wrong."""
    accepted = set()
    for document in documents:
        message = services.try_create(document)
        if not message:
            accepted.add(document["metadata"]["name"])
            continue
        places = wrong_places(document)
        # CEL writes an entry of a map in brackets.
        message = re.sub(r"\[(\w+)\]", r".\1", message)
        assert any(place in message for place in places), (message, places)
    return accepted


def ready(stage: Stage) -> dict[str, dict[str, Any]]:
    """Name to the condition Ready that is about the newest spec."""
    return {
        item["metadata"]["name"]: each
        for item in stage.get("msvc")["items"]
        for each in item.get("status", {}).get("conditions", [])
        if each["type"] == "Ready" and each["observedGeneration"] == item["metadata"]["generation"]
    }


@pytest.mark.timeout(600)
def test_random_services_are_refused_by_field_or_end_in_a_condition(
    stage: Stage, control_plane: ControlPlane
) -> None:
    # So few pods that no spec can fill the node; what is beyond ends in a condition, too.
    stage.run("create", "quota", "few", "--hard=pods=20")
    pid = stage.operator.process.pid
    documents, begun = random_services(), time.monotonic()
    with services_in(control_plane, stage.namespace) as services:
        accepted = create_all(services, documents)
    refused, applied = len(documents) - len(accepted), time.monotonic() - begun

    def unclear() -> set[str]:
        found = ready(stage)
        return {name for name in accepted if found.get(name, {}).get("reason") not in CLEAR}

    def explain() -> str:
        conditions = {name: ready(stage).get(name) for name in unclear()}
        return f"{conditions}\n{stage.operator.process.tail()}"

    wait_until(lambda: not unclear(), "all end in a clear condition", 6 * SECONDS, explain)
    judged, conditions = time.monotonic() - begun - applied, ready(stage)
    assert all(each["message"] for each in conditions.values())
    assert (stage.operator.process.running, stage.operator.process.pid) == (True, pid)
    assert "Traceback" not in stage.operator.process.log
    begun = time.monotonic()
    stage.run("delete", "msvc", "--all", "--timeout=60s")
    left = {"configmap/kube-root-ca.crt", "serviceaccount/default", "resourcequota/few"}
    kinds = ("msvc", "wpool", "deploy", "cm", "svc", "sa", "role", "pdb", "netpol", "quota", "pods")
    wait_until(lambda: stage.names(*kinds) <= left, "all gone", 2 * SECONDS, stage.explain)
    reasons = Counter(each["reason"] for each in conditions.values())
    print(  # noqa: T201 - figures for people
        f"{refused} refused and {len(accepted)} accepted in {applied:.1f} s; conditions after "
        f"{judged:.1f} s: {dict(reasons)}; gone after {time.monotonic() - begun:.1f} s"
    )
    assert refused > COUNT / 4
    assert len(accepted) > COUNT / 8
    assert len(reasons) > 1


# --- older definitions ------------------------------------------------------------------------


@contextmanager
def any_spec_allowed(kubectl: Kubectl) -> Iterator[None]:
    """The definition without rules for the spec, as if from another version of the chart."""
    definition = kubectl.get("crd", "modelservices.kvasir.dev")
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    loose = {"type": "object", "properties": {**schema["properties"], "spec": anything}}
    patch = [
        {"op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema", "value": value}
        for value in (loose, schema)
    ]
    crd = ("patch", "crd", "modelservices.kvasir.dev", "--type=json")
    kubectl(*crd, f"--patch={json.dumps(patch[:1])}")
    try:
        yield
    finally:
        kubectl(*crd, f"--patch={json.dumps(patch[1:])}")


def test_a_spec_that_only_the_operator_refuses_is_invalid_by_field(stage: Stage) -> None:
    stage.apply(sample())
    stage.wait_ready()
    before = stage.names("deploy", "pods", "cm")
    wrong = json.dumps({"spec": {"engine": {"blockSize": 0, "kind": "x"}}})

    def accepted() -> bool:
        try:
            stage.run("patch", "msvc/smollm2", "--type=merge", f"--patch={wrong}")
        except CommandError:
            return False  # the API server has not yet read the definition
        return True

    with any_spec_allowed(stage.kubectl):
        stage.wait_until(accepted, "the API server accepts it")
        message = stage.wait_reason("Invalid")
    assert "spec.engine.blockSize: " in message
    assert "spec.engine.kind: " in message
    assert stage.names("deploy", "pods", "cm") == before
    right = json.dumps({"spec": {"engine": {"blockSize": None, "kind": None}}})
    stage.run("patch", "msvc/smollm2", "--type=merge", f"--patch={right}")
    stage.wait_ready()
    assert stage.names("deploy", "pods", "cm") == before


# --- names that clash -------------------------------------------------------------------------


def named(name: str) -> dict[str, Any]:
    return {**sample(), "metadata": {"name": name}}


def owner(stage: Stage, *what: str) -> tuple[str, str]:
    (found,) = stage.get(*what)["metadata"]["ownerReferences"]
    return found["kind"], found["name"]


@pytest.mark.parametrize("at_once", [True, False])
def test_of_two_services_that_need_one_name_the_first_keeps_it(stage: Stage, at_once: bool) -> None:
    """The workers' Service of the one has the name of the other one's router Service."""
    services = ["smollm2", "smollm2-workers"]
    place = {"namespace": stage.namespace}
    documents = [{**sample(), "metadata": {"name": name, **place}} for name in services]
    if at_once:
        stage.kubectl.apply(*documents)
    else:
        stage.kubectl.apply(documents[0])
        stage.wait_ready()
        stage.kubectl.apply(documents[1])

    def reasons() -> dict[str, str]:
        return {
            item["metadata"]["name"]: each["reason"] + " " + each["message"]
            for item in stage.get("msvc")["items"]
            for each in item.get("status", {}).get("conditions", [])
            if each["type"] == "Ready"
        }

    def one_of_each() -> bool:
        return {each.split()[0] for each in reasons().values()} == {"AllReady", "NameConflict"}

    stage.wait_until(one_of_each, "one is ready and the other has no name")
    kind, first = owner(stage, "svc", "smollm2-workers")
    second = next(name for name in services if name != first)
    assert kind == "ModelService"
    assert at_once or first == "smollm2"
    told = f"NameConflict Service smollm2-workers belongs to ModelService {first}; rename one"
    assert reasons()[second].startswith(told)
    version = stage.get("svc", "smollm2-workers")["metadata"]["resourceVersion"]
    # Neither of them is left in peace, and still neither takes it.
    for name in services * 2:
        stage.run("annotate", f"msvc/{name}", f"example.com/touched={time.time()}", "--overwrite")
        time.sleep(0.5)
    assert stage.get("svc", "smollm2-workers")["metadata"]["resourceVersion"] == version
    stage.run("delete", f"msvc/{first}", "--timeout=30s")
    stage.run("wait", "--for=condition=Ready", f"msvc/{second}", "--timeout=60s")
    assert owner(stage, "svc", "smollm2-workers") == ("ModelService", second)


def test_an_object_of_another_owner_is_left_alone_whatever_its_labels_say(stage: Stage) -> None:
    stage.run("create", "configmap", "owner")
    uid = stage.get("cm", "owner")["metadata"]["uid"]
    labels = {"kvasir.dev/modelservice": "smollm2", "kvasir.dev/role": "router"}
    other = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    for name in ("smollm2-router", "smollm2-unneeded"):
        stage.apply(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {
                    "name": name,
                    "labels": labels,
                    "ownerReferences": [{**other, "controller": True}],
                },
                "data": {"mine": "yes"},
            }
        )
    stage.apply(sample())
    told = "ConfigMap smollm2-router belongs to ConfigMap owner; rename one of the two"
    assert stage.wait_reason("NameConflict") == told
    for name in ("smollm2-router", "smollm2-unneeded"):
        assert stage.get("cm", name)["data"] == {"mine": "yes"}
        assert owner(stage, "cm", name) == ("ConfigMap", "owner")
    stage.run("delete", "configmap", "smollm2-router", "smollm2-unneeded")
    stage.wait_ready()
