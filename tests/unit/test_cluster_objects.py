"""The objects of a ModelService in a cluster: owners, names, selectors, revisions."""

import json
from typing import Any

import pytest

from helpers.cluster_service import (
    INSTALLATION,
    UID,
    a_service,
    deployment,
    everything,
    matches,
    pod_revision,
)
from kvasir.operator.cluster import names, objects
from kvasir.operator.cluster.objects import Installation, Object
from kvasir.operator.plan import revision


def test_what_there_is() -> None:
    service = a_service()
    prefill, decode = (pod_revision(service, role) for role in names.WORKER_ROLES)
    found = sorted((each["kind"], each["metadata"]["name"]) for each in everything(service))
    assert found == sorted(
        [
            ("ConfigMap", "chat-router"),
            ("ConfigMap", f"chat-decode-{decode}"),
            ("ConfigMap", f"chat-prefill-{prefill}"),
            ("Deployment", "chat-router"),
            ("Deployment", f"chat-decode-{decode}"),
            ("Deployment", f"chat-prefill-{prefill}"),
            ("NetworkPolicy", "chat-workers"),
            ("PodDisruptionBudget", "chat-decode"),
            ("PodDisruptionBudget", "chat-prefill"),
            ("PodDisruptionBudget", "chat-router"),
            ("Role", "chat-router"),
            ("RoleBinding", "chat-router"),
            ("Service", "chat"),
            ("Service", "chat-workers"),
            ("ServiceAccount", "chat-router"),
            ("ServiceAccount", "chat-worker"),
            ("WorkerPool", "chat-decode"),
            ("WorkerPool", "chat-prefill"),
        ]
    )


@pytest.mark.parametrize("each", everything(a_service()), ids=lambda each: str(each["kind"]))
def test_each_is_owned_labeled_and_in_the_services_namespace(each: Object) -> None:
    metadata = each["metadata"]
    assert metadata["namespace"] == "team"
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("ModelService", "chat", UID)
    assert owner["controller"] is True
    labels = metadata["labels"]
    assert labels.keys() >= {
        f"app.kubernetes.io/{key}"
        for key in ("name", "instance", "component", "part-of", "managed-by", "version")
    }
    assert labels["kvasir.dev/modelservice"] == "chat"
    assert "status" not in each


def test_the_longest_names_fit() -> None:
    service = a_service()
    long = service.model_copy(
        update={"metadata": service.metadata.model_copy(update={"name": "a" * 40})}
    )
    for each in everything(long):
        assert len(each["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in each["metadata"]["labels"].values())


def test_selectors_match_the_pods_they_are_for_and_no_others() -> None:
    service = a_service()
    pods: dict[str, dict[str, str]] = {
        role: deployment(service, role)["spec"]["template"]["metadata"]["labels"]
        for role in names.WORKER_ROLES
    }
    pods["router"] = objects.router_deployment(service, INSTALLATION, 1, "a1")["spec"]["template"][
        "metadata"
    ]["labels"]
    workers = {"prefill", "decode"}
    expected = {
        ("Deployment", "chat-router"): {"router"},
        ("NetworkPolicy", "chat-workers"): workers,
        ("PodDisruptionBudget", "chat-decode"): {"decode"},
        ("PodDisruptionBudget", "chat-prefill"): {"prefill"},
        ("PodDisruptionBudget", "chat-router"): {"router"},
        ("Service", "chat"): {"router"},
        ("Service", "chat-workers"): workers,
    }
    for role in names.WORKER_ROLES:
        expected["Deployment", deployment(service, role)["metadata"]["name"]] = {role}
    for each in everything(service):
        spec = each.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is not None:
            selector = selector.get("matchLabels", selector)
            selected = {role for role, labels in pods.items() if matches(selector, labels)}
            assert selected == expected.pop((each["kind"], each["metadata"]["name"]))
    assert not expected


# --- revisions ---------------------------------------------------------------------------------

LABELED = {"metadata": {"labels": {"team": "a"}}}


@pytest.mark.parametrize(
    ("change", "changed_pods", "changed_kv"),
    [
        ({}, set(), False),
        ({"decode": {"replicas": 7}}, set(), False),
        ({"prefill": {"scaling": {"minReplicas": 1, "maxReplicas": 3}}}, set(), False),
        ({"router": {"replicas": 3, "template": LABELED}}, set(), False),
        ({"disaggregation": {"mode": "never"}}, set(), False),
        ({"objectives": {"ttftP95": "1s"}}, set(), False),
        ({"decode": {"template": LABELED}}, {"decode"}, False),
        ({"prefill": {"resources": {"requests": {"cpu": 1}}}}, {"prefill"}, False),
        ({"rollout": {"drainDeadline": "10s"}}, {"prefill", "decode"}, False),
        ({"engine": {"blockSize": 32}}, {"prefill", "decode"}, True),
        ({"model": {"source": "pvc://claim/model"}}, {"prefill", "decode"}, True),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_what_changes_a_revision(
    change: dict[str, Any], changed_pods: set[str], changed_kv: bool
) -> None:
    before, after = a_service(), a_service(**change)
    changed = {
        role
        for role in names.WORKER_ROLES
        if pod_revision(before, role) != pod_revision(after, role)
    }
    assert changed == changed_pods
    assert (revision(before) != revision(after)) is changed_kv


def test_a_new_image_is_a_new_revision_and_replicas_are_no_part_of_one() -> None:
    service = a_service()
    newer = objects.worker_revision(service, "decode", Installation("kvasir/worker:2", "r"))
    assert newer.pod_revision != pod_revision(service, "decode")
    assert newer.revision == revision(service)
    one, two = newer.deployment(1), newer.deployment(2)
    assert (one["spec"].pop("replicas"), two["spec"].pop("replicas")) == (1, 2)
    assert one == two


def test_revisions_are_in_the_labels_of_deployment_and_pods() -> None:
    made = objects.worker_revision(a_service(), "decode", INSTALLATION)
    each = made.deployment(1)
    for labels in (each["metadata"]["labels"], each["spec"]["template"]["metadata"]["labels"]):
        assert labels["kvasir.dev/revision"] == made.revision
        assert labels["kvasir.dev/pod-revision"] == made.pod_revision
        assert labels["kvasir.dev/role"] == "decode"
