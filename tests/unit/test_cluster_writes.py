"""What the client and overlays decide without a cluster."""

from typing import Any

import pytest

from helpers.simulated_cluster import service
from kvasir.operator.cluster.client import applied_fields
from kvasir.operator.cluster.observed import Fleet, Observed, Pod
from kvasir.operator.cluster.overlay import deeper_than
from kvasir.operator.cluster.reach import unreached
from kvasir.operator.cluster.refusals import refusal

ME = "kvasir-operator/s"


def entry(manager: str, operation: str, **more: Any) -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "fieldsV1": {"f:spec": {}}, **more}


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ([], None),
        ([entry(ME, "Apply"), entry("kubectl", "Update")], None),
        ([entry(ME, "Update", subresource="scale")], None),
        (
            [entry(ME, "Update"), entry("kube", "Update", subresource="status")],
            [entry("kube", "Update", subresource="status"), entry(ME, "Apply")],
        ),
        ([entry(ME, "Update"), entry(ME, "Apply")], [entry(ME, "Apply")]),
    ],
)
def test_what_was_created_counts_as_applied(
    entries: list[dict[str, Any]], wanted: list[dict[str, Any]] | None
) -> None:
    assert applied_fields(entries, ME) == wanted


def nested(levels: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if kind is dict else [value]
    return value


@pytest.mark.parametrize("kind", [dict, list])
def test_depth_is_counted_without_recursion(kind: type) -> None:
    assert not deeper_than(3, nested(3, kind))
    assert deeper_than(3, nested(4, kind))
    assert deeper_than(64, nested(100_000, kind))


@pytest.mark.parametrize("role", ["decode", "prefill", "router"])
def test_a_template_that_is_nested_too_deep_is_refused(role: str) -> None:
    assert refusal(service(**{role: {"template": nested(64, dict)}})) is None
    refused = refusal(service(**{role: {"template": nested(65, dict)}}))
    assert refused is not None
    assert f"spec.{role}.template: nested more than 64 deep" in refused.problems[0]


ROUTERS = (
    Pod("r-0", "router", "s-router", ready=True),
    Pod("r-1", "router", "s-router", ready=True),
)
WORKERS = (Pod("d-0", "decode", "d", ready=True), Pod("p-0", "prefill", "p", ready=True))
BOTH = {"d-0": "ready", "p-0": "ready"}


@pytest.mark.parametrize(
    ("views", "words"),
    [
        ({}, ""),
        ({"r-0": BOTH}, ""),
        ({"r-0": BOTH, "r-1": BOTH}, ""),
        ({"r-0": BOTH, "r-1": {}}, "Router r-1 reaches no decode worker."),
        ({"r-0": {"d-0": "draining", "p-0": "ready"}}, "Router r-0 reaches no decode worker."),
        ({"r-0": {"d-0": "ready"}}, "Router r-0 reaches no prefill worker."),
        ({"gone": {}}, ""),
    ],
)
def test_what_routers_say_of_the_workers(views: dict[str, dict[str, str]], words: str) -> None:
    observed = Observed({}, pods=(*ROUTERS, *WORKERS), fleet=Fleet(routers=views))
    assert unreached(("router", "decode", "prefill"), observed) == words
