"""Overlays on pods, and what a cluster cannot give."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.cluster_service import a_service, deployment, everything, matches
from kvasir.operator.cluster import overlay
from kvasir.operator.cluster.pods import TMP_FOLDER
from kvasir.operator.cluster.refusals import refusal


def test_an_overlay_changes_the_container_of_its_name_and_adds_others() -> None:
    service = a_service(
        decode={
            "template": {
                "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
                "spec": {
                    "nodeSelector": {"disk": "fast"},
                    "containers": [
                        {
                            "name": "worker",
                            "env": [{"name": "HOME", "value": "/x"}, {"name": "NEW", "value": "y"}],
                            "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
                            "livenessProbe": None,
                        },
                        {"name": "sidecar", "image": "s"},
                    ],
                    "volumes": [{"name": "cache", "emptyDir": {}}],
                },
            }
        }
    )
    template = deployment(service)["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["annotations"] == {"note": "b"}
    spec = template["spec"]
    assert spec["nodeSelector"] == {"disk": "fast"}
    worker, sidecar = spec["containers"]
    assert sidecar == {"name": "sidecar", "image": "s"}
    values = {entry["name"]: entry.get("value") for entry in worker["env"]}
    assert (values["HOME"], values["NEW"]) == ("/x", "y")
    assert "POD_NAME" in values
    assert worker["image"] == "kvasir/worker:1"
    assert "livenessProbe" not in worker
    assert [mount["mountPath"] for mount in worker["volumeMounts"]] == [
        "/etc/kvasir",
        TMP_FOLDER,
        "/cache",
    ]
    assert [volume["name"] for volume in spec["volumes"]] == ["config", "tmp", "cache"]


@pytest.mark.parametrize(
    ("base", "over", "merged"),
    [
        ({"a": 1, "b": 2}, {"b": None}, {"a": 1}),
        ({"a": {"x": 1}}, {"a": {"y": 2}}, {"a": {"x": 1, "y": 2}}),
        ({"a": {"x": 1}}, {"a": "text"}, {"a": "text"}),
        ({"a": "text"}, {"a": {"x": 1, "y": None}}, {"a": {"x": 1}}),
        ({"args": ["a", "b"]}, {"args": ["c"]}, {"args": ["c"]}),
        ({"env": [{"name": "a"}]}, {"env": "wrong"}, {"env": "wrong"}),
        ({"env": [{"name": "a"}]}, {"env": ["odd"]}, {"env": [{"name": "a"}, "odd"]}),
        ({"env": [{"name": "a"}]}, {"env": [{"name": []}]}, {"env": [{"name": "a"}, {"name": []}]}),
    ],
)
def test_merging(base: dict[str, Any], over: dict[str, Any], merged: dict[str, Any]) -> None:
    before = json.dumps(base)
    assert overlay.merge(base, over) == merged
    assert json.dumps(base) == before


FIELDS = st.sampled_from(
    ["metadata", "labels", "spec", "containers", "name", "env", "worker", "volumes", "a"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FIELDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(FIELDS, VALUES, max_size=4))
def test_any_overlay_is_refused_or_merged_and_changes_no_selector(template: dict[str, Any]) -> None:
    service = a_service(decode={"template": template}, router={"template": template})
    if refusal(service) is not None:
        return
    for each in everything(service):
        if each["kind"] == "Deployment":
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert matches(each["spec"]["selector"]["matchLabels"], labels)


@pytest.mark.parametrize(
    ("spec", "field", "fix"),
    [
        ({"model": {"source": "hf://a/b"}}, "spec.model.source", "pvc://CLAIM/PATH"),
        ({"model": {"source": "file:///m"}}, "spec.model.source", "pvc://CLAIM/PATH"),
        ({"model": {"source": "pvc://c/a/../b"}}, "spec.model.source", "write the path without"),
        (
            {"model": {"source": "bundled://m", "quantization": "fp8"}},
            "spec.model.quantization",
            "use none, int8 or int4",
        ),
        ({"engine": {"type": "vllm"}}, "spec.engine.type", "use native"),
        ({"decode": {"parallelism": {"tensor": 2}}}, "spec.decode.parallelism.tensor", "use 1"),
        (
            {
                "prefill": {
                    "accelerator": {"resourceName": "example.com/npu"},
                    "resources": {"limits": {"example.com/npu": 2}},
                }
            },
            "spec.prefill.resources.limits",
            "remove one of the two",
        ),
        (
            {"decode": {"template": {"metadata": {"labels": {"kvasir.dev/role": "x"}}}}},
            "spec.decode.template.metadata.labels",
            "remove it",
        ),
        (
            {"router": {"template": {"metadata": {"labels": None}}}},
            "spec.router.template.metadata",
            "remove it",
        ),
        ({"decode": {"template": {"metadata": None}}}, "spec.decode.template.metadata", "remove"),
    ],
)
def test_what_a_cluster_cannot_give_is_named_with_its_fix(
    spec: dict[str, Any], field: str, fix: str
) -> None:
    refused = refusal(a_service(**spec))
    assert refused is not None
    (problem,) = refused.problems
    assert problem.startswith(f"{field}: ")
    assert fix in problem


def test_all_problems_are_named_at_once() -> None:
    refused = refusal(a_service(model={"source": "hf://a/b"}, engine={"type": "vllm"}))
    assert refused is not None
    assert len(refused.problems) == 2


@pytest.mark.parametrize("source", ["bundled://smollm2-135m-instruct", "pvc://claim/model"])
def test_what_is_served_is_not_refused(source: str) -> None:
    assert refusal(a_service(model={"source": source}, decode={"replicas": 0})) is None


def test_a_name_that_no_service_can_have_is_refused() -> None:
    service = a_service()
    named = service.metadata.model_copy(update={"name": "3b"})
    refused = refusal(service.model_copy(update={"metadata": named}))
    assert refused is not None
    assert refused.problems[0].startswith("metadata.name: ")
