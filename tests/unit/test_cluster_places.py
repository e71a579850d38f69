"""When a new worker gets the place of an old one: what the scheduler says, and what it costs."""

from decimal import Decimal
from typing import Any

import pytest

from helpers.simulated_cluster import Simulation, service
from kvasir.operator.cluster.faults import Fault
from kvasir.operator.cluster.observed import Deployment, Observed, Pod, observe
from kvasir.operator.cluster.places import Needs, insufficient, needs, would_fit
from kvasir.operator.cluster.rollout import Rollout, rollout
from kvasir.operator.quantity import parse_amount

GI = 2**30
GPU = "nvidia.com/gpu"
NOT_HELPFUL = "preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling."
NO_VICTIMS = "preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod."

NO_MEMORY = f"0/1 nodes are available: 1 Insufficient memory. {NO_VICTIMS}"
NO_CLAIM = f'0/1 nodes are available: persistentvolumeclaim "nope" not found. {NOT_HELPFUL}'
NO_NODE = (
    f"0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector. {NOT_HELPFUL}"
)
NO_GPU = f"0/1 nodes are available: 1 Insufficient nvidia.com/gpu. {NO_VICTIMS}"
NO_GPU_AND_TAINTS = (
    "0/5 nodes are available: 2 Insufficient nvidia.com/gpu, 3 node(s) had untolerated taint(s). "
    "no new claims to deallocate, preemption: 0/5 nodes are available: 5 Preemption is not helpful "
    "for scheduling."
)
FULL = f"0/1 nodes are available: 1 Insufficient cpu, 1 Insufficient memory, 1 Too many pods. {'x'}"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (NO_MEMORY, {"memory"}),
        (NO_CLAIM, set()),
        (NO_NODE, set()),
        (NO_GPU, {GPU}),
        (NO_GPU_AND_TAINTS, {GPU}),
        (FULL, {"cpu", "memory", "pods"}),
        ("0/1 nodes are available: 1 Insufficient hugepages-2Mi.", {"hugepages-2Mi"}),
        # What preemption lacks is not what the pod lacks.
        (
            "0/1 nodes are available: 1 node(s) were unschedulable. preemption: Insufficient x",
            set(),
        ),
        ("", set()),
    ],
)
def test_what_nodes_have_too_little_of(message: str, expected: set[str]) -> None:
    assert insufficient(message) == expected


def asks(selection: str = "", **requests: float) -> Needs:
    amounts = {"gpu": GPU}
    found = {amounts.get(name, name): Decimal(amount) for name, amount in requests.items()}
    return Needs(found, selection)


@pytest.mark.parametrize(
    ("message", "newcomer", "leaver", "expected"),
    [
        (NO_MEMORY, asks(memory=4 * GI), asks(memory=4 * GI), True),
        (NO_MEMORY, asks(memory=900 * GI), asks(memory=4 * GI), False),
        (NO_MEMORY, asks(memory=4 * GI), asks(), False),
        (NO_CLAIM, asks(memory=GI), asks(memory=GI), False),
        (NO_NODE, asks(memory=GI), asks(memory=GI), False),
        (NO_GPU, asks(gpu=1), asks(gpu=1), True),
        (NO_GPU, asks(gpu=2), asks(gpu=1), False),
        (NO_GPU, asks(gpu=1), asks(cpu=4), False),
        # Other nodes than the old worker's may be the ones that it may run on.
        (NO_GPU_AND_TAINTS, asks("zone a", gpu=1), asks("zone b", gpu=1), False),
        (FULL, asks(cpu=1, memory=1, pods=1), asks(cpu=1, memory=2, pods=1), True),
        (FULL, asks(cpu=2, memory=1, pods=1), asks(cpu=1, memory=2, pods=1), False),
    ],
)
def test_whose_place_would_do(message: str, newcomer: Needs, leaver: Needs, expected: bool) -> None:
    assert would_fit(message, newcomer, leaver) is expected


def requested(**amounts: str) -> dict[str, Any]:
    return {"resources": {"requests": amounts}}


def test_needs_of_a_pod() -> None:
    spec: dict[str, Any] = {
        "containers": [requested(cpu="500m", memory="1Gi"), requested(cpu="1")],
        "initContainers": [
            {**requested(cpu="250m"), "restartPolicy": "Always"},
            requested(cpu="100m", memory="3Gi"),
        ],
        "overhead": {"memory": "64Mi"},
        "nodeSelector": {"a": "b"},
    }
    found = needs({"spec": spec})
    assert found.requests == {"cpu": Decimal("1.75"), "memory": 3 * GI + 64 * 2**20, "pods": 1}
    assert found.selection != needs({"spec": {**spec, "nodeSelector": {}}}).selection
    whole = needs({"spec": {**spec, **requested(cpu="4")}})
    assert whole.requests["cpu"] == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500m", "0.5"), ("2", "2"), ("1.5G", "1500000000"), ("2e3", "2000"), ("1E", "1e18")],
)
def test_amounts(text: str, expected: str) -> None:
    assert parse_amount(text) == Decimal(expected)
    with pytest.raises(ValueError, match="no quantity"):
        parse_amount(f"{text} cores")


# --- rollouts: one prefill and one decode worker serve, and a new revision finds no place ---------

SINCE, NOW, PATIENCE = 1000.0, 1040.0, 30.0


def step(message: str, new: Needs, old: Needs, now: float = NOW) -> Rollout:
    pods = []
    for role in ("prefill", "decode"):
        pods += [
            Pod(f"{role}-old-0", role, f"{role}-old", ready=True, needs=old),
            Pod(
                *(f"{role}-new-0", role, f"{role}-new"),
                scheduled=False,
                fault=Fault("Unschedulable", message),
                unplaced_since=SINCE,
                needs=new,
            ),
        ]
    deployments = (
        Deployment(f"{role}-{age}", role, age, replicas=1)
        for role in ("prefill", "decode")
        for age in ("old", "new")
    )
    return rollout(
        {"prefill": "prefill-new", "decode": "decode-new"},
        {"prefill": 1, "decode": 1},
        Observed({}, deployments=tuple(deployments), pods=tuple(pods)),
        unplaced_before=now - PATIENCE,
    )


@pytest.mark.parametrize(
    ("message", "new", "old"),
    [
        (NO_MEMORY, asks(memory=900 * GI), asks(memory=4 * GI)),
        (NO_CLAIM, asks(memory=GI), asks(memory=GI)),
        (NO_NODE, asks("gpu=yes", memory=GI), asks(memory=GI)),
        (NO_GPU, asks(gpu=1, memory=GI), asks(memory=GI)),
        (NO_GPU, asks(gpu=8), asks(gpu=4)),
    ],
)
def test_a_place_that_would_not_do_is_not_taken(message: str, new: Needs, old: Needs) -> None:
    found = step(message, new, old, now=SINCE + 1e6)
    assert found.targets == {"prefill-new": 1, "decode-new": 1, "prefill-old": 1, "decode-old": 1}
    assert not found.drain_first
    assert not found.awaits_room
    assert not found.minimum


def test_a_place_that_would_do_is_taken_after_a_while_and_that_is_told_before() -> None:
    early = step(NO_GPU, asks(gpu=1), asks(gpu=1), now=SINCE + PATIENCE - 1)
    assert (early.targets["prefill-old"], early.targets["decode-old"]) == (1, 1)
    assert (early.awaits_room, early.drain_first) == (True, False)
    assert early.interrupted == ("prefill", "decode")
    late = step(NO_GPU, asks(gpu=1), asks(gpu=1), now=SINCE + PATIENCE)
    assert (late.targets["prefill-old"], late.targets["decode-old"]) == (0, 0)
    assert (late.awaits_room, late.drain_first) == (False, True)
    assert late.interrupted == ("prefill", "decode")


def test_where_others_serve_meanwhile_nothing_is_interrupted() -> None:
    simulation = Simulation(service(decode={"replicas": 2}, prefill={"replicas": 2}), places=4)
    while not simulation.ready("decode") == simulation.ready("prefill") == 2:
        simulation.step()
    simulation.spec = service(
        decode={"replicas": 2}, prefill={"replicas": 2}, engine={"blockSize": 32}
    )
    plans = [simulation.step() for _ in range(20)]
    assert any(plan.awaits_room for plan in plans)
    assert any(plan.drain_first for plan in plans)
    assert not any(plan.interrupted for plan in plans)


def test_of_a_worker_that_spans_nodes_the_largest_pod_counts() -> None:
    def pod(place: int, gpus: int, **status: Any) -> dict[str, Any]:
        labels = {
            "kvasir.dev/modelservice": "s",
            "kvasir.dev/role": "decode",
            "kvasir.dev/pod-revision": "r",
            "app.kubernetes.io/component": "follower" if place else "worker",
            "leaderworkerset.sigs.k8s.io/group-key": "k",
        }
        return {
            "kind": "Pod",
            "metadata": {
                "name": f"s-{place}",
                "labels": labels,
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {"containers": [requested(**{GPU: str(gpus)})]},
            "status": status,
        }

    unplaced = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": NO_GPU,
        "lastTransitionTime": "2026-01-01T00:00:30Z",
    }
    (seen,) = observe([pod(0, 4), pod(1, 8, conditions=[unplaced])], "s").pods
    assert seen.needs.requests[GPU] == 8
    assert seen.unplaced_since is not None
    assert seen.unplaced_since - seen.created == 30
