"""The plan of a ModelService in a cluster: what there is after a step."""

from typing import Any

import pytest

from helpers.simulated_cluster import ACCOUNT, ACCOUNT_OBJECTS, INSTALLATION, service
from kvasir.operator.cluster.drain import Drain
from kvasir.operator.cluster.names import ACCOUNT_ANNOTATION
from kvasir.operator.cluster.observed import (
    APPLIED_REPLICAS,
    ROLLOUT_MINIMUM,
    Observed,
    Pool,
    Reference,
    observe,
)
from kvasir.operator.cluster.plan import Plan, next_step, wanted_replicas

NOW = 1000.0
NOTHING = Observed(objects={})


def objects_of(plan: Plan, kind: str) -> list[Any]:
    return [item for item in plan.apply if item["kind"] == kind]


def test_an_empty_namespace_gets_everything_but_routers_at_once() -> None:
    plan = next_step(service(decode={"replicas": 3}), INSTALLATION, NOTHING, NOW)
    sizes = {
        item["metadata"]["labels"]["kvasir.dev/role"]: item["spec"]["replicas"]
        for item in objects_of(plan, "Deployment")
    }
    assert sizes == {"prefill": 1, "decode": 3}
    pools = {item["spec"]["role"]: item for item in objects_of(plan, "WorkerPool")}
    assert pools["decode"]["spec"]["replicas"] == 3
    assert pools["decode"]["metadata"]["annotations"] == {
        APPLIED_REPLICAS: "3",
        ROLLOUT_MINIMUM: "0",
    }
    assert (plan.drains, plan.resize, plan.delete) == (Drain(), (), ())
    # What pods need is there before them.
    kinds = [item["kind"] for item in plan.apply]
    assert kinds.index("ServiceAccount") < kinds.index("Deployment")


def router_accounts(plan: Plan) -> list[str]:
    return [
        item["spec"]["template"]["metadata"]["annotations"][ACCOUNT_ANNOTATION]
        for item in objects_of(plan, "Deployment")
        if item["metadata"]["labels"]["kvasir.dev/role"] == "router"
    ]


def test_routers_come_with_their_account_and_roll_with_a_new_one_only() -> None:
    plan = next_step(service(), INSTALLATION, Observed(dict(ACCOUNT_OBJECTS)), NOW)
    assert router_accounts(plan) == [ACCOUNT]
    (routers,) = (
        item for item in objects_of(plan, "Deployment") if item["metadata"]["name"] == "s-router"
    )
    running = {Reference("Deployment", "s-router"): routers}
    # The account is gone: until it is made anew, nothing changes.
    plan = next_step(service(), INSTALLATION, Observed(running), NOW)
    assert router_accounts(plan) == [ACCOUNT]
    (account,) = ACCOUNT_OBJECTS
    anew = {**running, account: {"metadata": {"uid": "other"}}}
    assert router_accounts(next_step(service(), INSTALLATION, Observed(anew), NOW)) == ["other"]
    # Routers of an operator that noted no account stay while there is none.
    del routers["spec"]["template"]["metadata"]["annotations"]
    plan = next_step(service(), INSTALLATION, Observed(running), NOW)
    assert not router_accounts(plan)
    assert not plan.delete


@pytest.mark.parametrize("text", ["9" * 5000, "-1", "", "x", "1e3"])
def test_a_rollout_minimum_that_is_no_number_of_workers_counts_as_none(text: str) -> None:
    (pool,) = (
        item
        for item in objects_of(next_step(service(), INSTALLATION, NOTHING, NOW), "WorkerPool")
        if item["spec"]["role"] == "decode"
    )
    pool["metadata"]["annotations"][ROLLOUT_MINIMUM] = text
    assert [each.minimum for each in observe([pool], "1").pools] == [0]


def test_only_what_the_service_controls_is_its_own() -> None:
    (pool, _) = objects_of(next_step(service(), INSTALLATION, NOTHING, NOW), "WorkerPool")
    assert observe([pool], "1").pools
    assert not observe([pool], "of an earlier one").pools
    del pool["metadata"]["ownerReferences"]
    assert not observe([pool], "1").pools


SCALING = {"scaling": {"minReplicas": 2, "maxReplicas": 4}}


@pytest.mark.parametrize(
    ("decode", "pool", "expected"),
    [
        ({"replicas": 2}, None, 2),
        ({"replicas": 2}, (2, "2"), 2),
        ({"replicas": 2}, (5, "2"), 5),  # kubectl scale
        ({"replicas": 2}, (0, "2"), 0),
        ({"replicas": 3}, (5, "2"), 3),  # the ModelService's own number changed
        ({"replicas": 2}, (5, None), 2),  # made by somebody else
        (SCALING, None, 2),
        (SCALING, (3, "scaling"), 3),
        (SCALING, (3, "1"), 3),  # scaling was added
        (SCALING, (9, "scaling"), 4),
        (SCALING, (1, "scaling"), 2),
        ({"replicas": 2}, (4, "scaling"), 2),  # scaling was removed
    ],
)
def test_wanted_replicas(
    decode: dict[str, Any], pool: tuple[int, str | None] | None, expected: int
) -> None:
    pools = () if pool is None else (Pool("decode", *pool),)
    observed = Observed(objects={}, pools=pools)
    assert wanted_replicas(service(decode=decode), "decode", observed) == expected
