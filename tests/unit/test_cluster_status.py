"""Conditions, roles and events of a ModelService, as tables."""

from dataclasses import replace
from typing import Any

import pytest

from helpers.simulated_cluster import (
    ACCOUNT_OBJECTS,
    INSTALLATION,
    Simulation,
    router_revision,
    service,
)
from kvasir.operator.cluster.faults import Fault
from kvasir.operator.cluster.names import WORKER_ROLES
from kvasir.operator.cluster.observed import Deployment, Observed, Pod, Pool
from kvasir.operator.cluster.plan import next_step
from kvasir.operator.cluster.status import (
    Event,
    Seen,
    pool_status,
    refused_status,
    service_status,
    transitions,
)
from kvasir.operator.modelservice import ModelService
from kvasir.operator.resource_status import ModelServiceStatus, dump

NOW = 1_800_000_000.0
SEEN = Seen("n", 3, {}, NOW)


def names() -> dict[str, str]:
    plan = next_step(service(), INSTALLATION, Observed({}), NOW)
    return {role: progress.deployment for role, progress in plan.progress.items()} | {
        "router": "s-router"
    }


DEPLOYMENTS = names()
NEWEST = "newest"
"""Of routers: what the spec of the test asks for."""


def pod(role: str, number: int = 0, **changes: Any) -> Pod:
    own = {"deployment": DEPLOYMENTS[role], "pod_revision": NEWEST}
    values: dict[str, Any] = {"ready": True, **own} | changes
    return Pod(name=f"s-{role}-{number}", role=role, **values)


def current(pods: tuple[Pod, ...], wanted: ModelService) -> tuple[Pod, ...]:
    newest = router_revision(wanted)
    return tuple(
        replace(each, pod_revision=newest) if each.pod_revision == NEWEST else each for each in pods
    )


def status(
    *pods: Pod,
    spec: dict[str, Any] | None = None,
    stored: dict[str, Any] | None = None,
    refused: Fault | None = None,
    deployments: tuple[Deployment, ...] = (),
    pools: tuple[Pool, ...] = (),
) -> ModelServiceStatus:
    own = tuple(
        Deployment(name, role, replicas=1) for role, name in DEPLOYMENTS.items() if role != "router"
    )
    wanted = service(**(spec or {}))
    observed = Observed(
        ACCOUNT_OBJECTS, deployments=(*own, *deployments), pods=current(pods, wanted), pools=pools
    )
    plan = next_step(wanted, INSTALLATION, observed, NOW)
    return service_status(wanted, observed, plan, replace(SEEN, stored=stored or {}), refused)


def reasons(told: ModelServiceStatus) -> dict[str, tuple[str, str]]:
    return {each.type: (each.status, each.reason) for each in told.conditions}


def message(told: ModelServiceStatus, kind: str) -> str:
    return next(each.message for each in told.conditions if each.type == kind)


ALL = pod("router"), pod("prefill"), pod("decode")
FINE = ("False", "AsExpected")
NO_PLACE = Fault("Unschedulable", "0/3 nodes are available: 3 Insufficient example.com/gpu.")
NO_IMAGE = Fault("ImagePullFailed", 'Back-off pulling image "x"')
REFUSED = Fault("ConfigurationRefused", "kvasir-worker: model: no such file; give another")
CRASHED = Fault("CrashLooping", "exit code 139")


@pytest.mark.parametrize(
    ("pods", "ready", "available", "progressing", "degraded"),
    [
        (ALL, ("True", "AllReady"), ("True", "Serving"), ("False", "Complete"), FINE),
        ((), ("False", "Starting"), ("False", "NotReady"), ("True", "Starting"), FINE),
        (  # The decode worker is missing.
            ALL[:2],
            ("False", "Scaling"),
            ("False", "NotReady"),
            ("True", "Scaling"),
            FINE,
        ),
        (  # Without a prefill worker, decode workers compute prompts themselves.
            (pod("router"), pod("decode")),
            ("False", "Scaling"),
            ("True", "Serving"),
            ("True", "Scaling"),
            FINE,
        ),
        (
            (*ALL, pod("decode", 1, deployment="s-decode-old")),
            ("False", "RollingOut"),
            ("True", "Serving"),
            ("True", "RollingOut"),
            FINE,
        ),
        (
            (*ALL, pod("decode", 1, draining_since=NOW - 9)),
            ("True", "AllReady"),
            ("True", "Serving"),
            ("True", "Draining"),
            FINE,
        ),
        (
            (*ALL[:2], pod("decode", ready=False, fault=NO_PLACE)),
            ("False", "Unschedulable"),
            ("False", "Unschedulable"),
            ("True", "Scaling"),
            ("True", "Unschedulable"),
        ),
        (  # What only the spec can mend comes first.
            (
                pod("router", ready=False, fault=CRASHED),
                pod("prefill", ready=False, fault=NO_PLACE),
                pod("decode", ready=False, fault=REFUSED),
            ),
            ("False", "ConfigurationRefused"),
            ("False", "ConfigurationRefused"),
            ("True", "Starting"),
            ("True", "ConfigurationRefused"),
        ),
        (  # A pod that ends or works again has no fault any more.
            (*ALL, pod("decode", 1, ready=False, terminating=True, fault=CRASHED)),
            ("True", "AllReady"),
            ("True", "Serving"),
            ("False", "Complete"),
            FINE,
        ),
    ],
)
def test_conditions(
    pods: tuple[Pod, ...],
    ready: tuple[str, str],
    available: tuple[str, str],
    progressing: tuple[str, str],
    degraded: tuple[str, str],
) -> None:
    told = status(*pods)
    assert reasons(told) == {
        "Ready": ready,
        "Available": available,
        "Progressing": progressing,
        "Degraded": degraded,
    }
    assert {each.observed_generation for each in told.conditions} == {3}


def test_a_prefill_worker_is_needed_where_the_spec_says_always() -> None:
    told = status(pod("router"), pod("decode"), spec={"disaggregation": {"mode": "always"}})
    assert reasons(told)["Available"] == ("False", "NotReady")
    assert message(told, "Available") == "No prefill pod is ready."


ZERO = {"scaling": {"minReplicas": 0, "maxReplicas": 2}}


def asleep_or_starting(*pods: Pod, wanted: dict[str, int], **spec: Any) -> ModelServiceStatus:
    """Of a service whose pools may be empty, with what they ask for now."""
    scaled = service(prefill=ZERO, decode=ZERO, **spec)
    pools = tuple(Pool(role, wanted[role], "scaling") for role in WORKER_ROLES)
    deployments = tuple(
        Deployment(DEPLOYMENTS[role], role, replicas=wanted[role]) for role in WORKER_ROLES
    )
    observed = Observed(
        ACCOUNT_OBJECTS, deployments=deployments, pods=current(pods, scaled), pools=pools
    )
    plan = next_step(scaled, INSTALLATION, observed, NOW)
    return service_status(scaled, observed, plan, SEEN)


def test_a_service_that_is_scaled_to_zero_is_ready() -> None:
    told = asleep_or_starting(pod("router"), wanted={"prefill": 0, "decode": 0})
    assert reasons(told) == {
        "Ready": ("True", "ScaledToZero"),
        "Available": ("True", "ScaledToZero"),
        "Progressing": ("False", "Complete"),
        "Degraded": FINE,
    }
    assert message(told, "Ready") == (
        "No decode pod runs since no request came; one starts for the next. "
        "Routers hold requests until one is ready."
    )
    assert {event.type for event in transitions({}, told)} == {"Normal"}


def test_a_service_that_is_scaled_to_zero_needs_its_router() -> None:
    told = asleep_or_starting(wanted={"prefill": 0, "decode": 0})
    assert reasons(told)["Available"] == ("False", "NotReady")
    assert message(told, "Available") == "No router pod is ready."
    assert reasons(told)["Ready"] == ("False", "Starting")


def test_a_worker_that_starts_from_zero_has_to_show_that_it_works() -> None:
    starting = pod("router"), pod("decode", ready=False)
    told = asleep_or_starting(*starting, wanted={"prefill": 0, "decode": 1})
    assert reasons(told)["Available"] == ("False", "StartingFromZero")
    assert reasons(told)["Ready"] == ("False", "Scaling")
    assert {event.type for event in transitions({}, told)} == {"Normal"}
    homeless = pod("router"), pod("decode", ready=False, fault=NO_PLACE)
    told = asleep_or_starting(*homeless, wanted={"prefill": 0, "decode": 1})
    assert reasons(told)["Available"] == ("False", "Unschedulable")


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_without_prefill_workers_decode_workers_compute_prompts(mode: str) -> None:
    pods = pod("router"), pod("decode")
    told = asleep_or_starting(
        *pods, wanted={"prefill": 0, "decode": 1}, disaggregation={"mode": mode}
    )
    assert reasons(told)["Ready"] == ("True", "AllReady")
    assert reasons(told)["Available"] == ("True", "Serving")


def test_a_pool_that_somebody_set_to_zero_is_not_ready() -> None:
    told = status(pod("router"), pod("prefill"), spec={"decode": {"replicas": 0}})
    assert reasons(told)["Ready"] == ("False", "NotReady")


def test_messages_name_the_object_and_the_cause() -> None:
    told = status(pod("decode", ready=False, fault=NO_IMAGE), pod("decode", 1, fault=NO_IMAGE))
    assert message(told, "Ready") == 'Pod s-decode-0: Back-off pulling image "x"'
    refused = status(pod("decode", ready=False, fault=REFUSED))
    assert (
        message(refused, "Ready") == "Pod s-decode-0: spec.model.source: no such file; give another"
    )
    pods = [pod("decode", number, ready=False, fault=NO_PLACE) for number in range(3)]
    assert message(status(*pods), "Ready").startswith("Pod s-decode-0 (and 2 more): 0/3 nodes")
    assert message(status(), "Progressing") == (
        "Only 0 of 1 prefill, 0 of 1 decode, 0 of 1 router pods are ready."
    )


def test_what_the_api_server_refuses_is_told() -> None:
    told = status(*ALL, refused=Fault("NameConflict", "Service s: conflict with x" + "y" * 5000))
    assert reasons(told)["Ready"] == ("False", "NameConflict")
    assert len(message(told, "Ready")) == 1024
    failed = Deployment("s-decode-x", "decode", fault=Fault("PodsRefused", "exceeded quota"))
    told = status(*ALL, deployments=(failed,))
    assert message(told, "Degraded") == "Deployment s-decode-x: exceeded quota"


def test_a_router_of_an_old_revision_is_on_its_way() -> None:
    old = pod("router", pod_revision="old")
    told = status(old, pod("router", 1, ready=False, fault=NO_PLACE), *ALL[1:])
    assert reasons(told)["Progressing"] == ("True", "RollingOut")
    assert message(told, "Progressing") == (
        "1 router is of an old revision; 0 of 1 router pods are ready."
    )
    assert reasons(told)["Ready"] == ("False", "Unschedulable")
    assert reasons(told)["Available"] == ("True", "Serving")
    router = told.roles.router
    assert (router.replicas, router.ready_replicas, router.updated_replicas) == (2, 1, 1)


def test_a_pool_that_somebody_scaled_is_told() -> None:
    pools = Pool("prefill", 1, "1"), Pool("decode", 2, "1")
    told = status(*ALL, pod("decode", 1), pools=pools)
    more = " Decode has 2 replicas by its WorkerPool; the spec says 1."
    assert message(told, "Ready") == f"All pods of the newest spec are ready.{more}"
    assert message(told, "Progressing").endswith(more)
    assert "WorkerPool" not in message(status(*ALL), "Ready")


def test_of_several_faults_the_same_one_is_told_in_any_order() -> None:
    killed = Fault("OutOfMemory", "too little")
    pods = [
        pod("prefill", 7, ready=False, fault=CRASHED),
        pod("decode", 8, ready=False, fault=killed),
        pod("decode", 9, ready=False, fault=CRASHED),
    ]
    first = status(*pods)
    assert message(first, "Degraded") == "Pod s-decode-8: too little"
    assert message(status(*reversed(pods)), "Degraded") == message(first, "Degraded")


def test_a_worker_that_drains_hinders_nothing() -> None:
    leaving = pod("decode", 1, ready=False, draining_since=NOW - 9, fault=CRASHED)
    assert reasons(status(*ALL, leaving))["Degraded"] == FINE


def test_roles_and_url() -> None:
    old = pod("decode", 1, deployment="s-decode-old", draining_since=NOW - 9)
    told = status(*ALL, old, pod("decode", 2, ready=False))
    decode = told.roles.decode
    assert (decode.replicas, decode.ready_replicas, decode.updated_replicas) == (3, 1, 2)
    assert decode.draining_replicas == 1
    assert decode.revision == DEPLOYMENTS["decode"].removeprefix("s-decode-")
    assert told.url == "http://s.n.svc"
    assert told.observed_generation == 3
    pool = dump(pool_status("decode", "s", decode, 7))
    assert pool["observedGeneration"] == 7
    assert pool["replicas"] == 3
    assert pool["selector"] == "kvasir.dev/modelservice=s,kvasir.dev/role=decode"


def test_a_transition_has_its_time_and_its_event_once() -> None:
    first = dump(status(*ALL))
    assert {each["lastTransitionTime"] for each in first["conditions"]} == {"2027-01-15T08:00:00Z"}
    for each in first["conditions"]:
        each["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    same = status(*ALL, stored=first)
    assert dump(same) == first
    assert not list(transitions(first, same))
    crashed = status(*ALL[:2], pod("decode", ready=False, fault=CRASHED), stored=first)
    times = {each.type: str(each.last_transition_time.year) for each in crashed.conditions}
    assert set(times.values()) == {"2027"}
    assert list(transitions(first, crashed)) == [
        Event("Warning", "CrashLooping", "Pod s-decode-0: exit code 139"),
        Event("Normal", "Scaling", message(crashed, "Progressing")),
    ]


def test_a_refused_spec_says_why_and_leaves_what_runs() -> None:
    stored = dump(status(*ALL))
    told = refused_status(
        "Unsupported", ["spec.engine.type: a; b", "c"], replace(SEEN, stored=stored)
    )
    assert reasons(told) == {"Ready": ("False", "Unsupported")}
    assert message(told, "Ready") == "spec.engine.type: a; b; c"
    assert dump(told)["roles"] == stored["roles"]


def test_a_rollout_without_room_says_so() -> None:
    simulation = Simulation(service(), places=2)
    while not simulation.serves():
        simulation.step()
    simulation.spec = service(engine={"blockSize": 32})
    told = []
    for _ in range(8):
        plan = simulation.step()
        told.append(service_status(simulation.spec, simulation.observed(), plan, SEEN))
    said = [(reasons(each)["Progressing"][1], message(each, "Progressing")) for each in told]
    in_order = list(dict.fromkeys(reason for reason, _ in said))
    assert in_order[:3] == ["RollingOut", "WaitingForRoom", "DrainFirst"]
    down = "the service is down until a new prefill and decode worker is ready"
    assert all(down in text for reason, text in said if reason == "WaitingForRoom")
