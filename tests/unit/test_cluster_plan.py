"""The plan of a ModelService in a cluster: tables of steps, and whole rollouts in a simulation."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.simulated_cluster import (
    ACCOUNT,
    ACCOUNT_OBJECTS,
    INSTALLATION,
    Simulation,
    service,
    takes_requests,
)
from kvasir.operator.cluster.difference import projection
from kvasir.operator.cluster.drain import Drain, shrink
from kvasir.operator.cluster.faults import Fault
from kvasir.operator.cluster.names import ACCOUNT_ANNOTATION
from kvasir.operator.cluster.observed import (
    APPLIED_REPLICAS,
    ROLLOUT_MINIMUM,
    Deployment,
    Fleet,
    Observed,
    Pod,
    Pool,
    Reference,
    WorkerLoad,
    observe,
)
from kvasir.operator.cluster.plan import Plan, needs_fleet, next_step, wanted_replicas

NOW = 1000.0
DEADLINE = 300.0
NOTHING = Observed(objects={})
IDLE = WorkerLoad(0, 0, draining=False)
BUSY = WorkerLoad(1, 0, draining=False)
DRAINED = WorkerLoad(0, 0, draining=True)
FINISHING = WorkerLoad(1, 0, draining=True)


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


# --- drain ------------------------------------------------------------------------------------


def worker(name: str, **changes: Any) -> Pod:
    values: dict[str, Any] = {"ready": True, "address": "10.0.0.1"} | changes
    return Pod(name, "decode", "d", **values)


def shrunk(target: int, *pods: Pod, replicas: int = -1, **loads: WorkerLoad) -> tuple[int, Drain]:
    """With one router, which knows who drains. ``replicas``: those of the pods, if left out."""
    router = {name: "draining" if load.draining else "ready" for name, load in loads.items()}
    observed = Observed(
        objects={},
        pods=(*pods, Pod("r", "router", "s-router", ready=True)),
        fleet=Fleet(loads, {"r": router}),
    )
    deployment = Deployment("d", "decode", replicas=len(pods) if replicas < 0 else replicas)
    return shrink(deployment, target, observed, NOW, DEADLINE)


def test_the_least_loaded_worker_drains_and_the_size_stays() -> None:
    pods = worker("a"), worker("b"), worker("c")
    size, drain = shrunk(2, *pods, a=BUSY, b=IDLE, c=WorkerLoad(0, 3, draining=False))
    assert size == 3
    assert drain == Drain(begin=("b",), waiting=("b",))


def test_of_equals_the_newest_one_drains() -> None:
    pods = worker("a", created=1.0), worker("b", created=3.0), worker("c", created=2.0)
    _, drain = shrunk(2, *pods, a=IDLE, b=IDLE, c=IDLE)
    assert drain.begin == ("b",)


@pytest.mark.parametrize(
    ("since", "load", "expected", "size"),
    [
        (999.0, FINISHING, Drain(waiting=("a",)), 2),
        (999.0, DRAINED, Drain(condemn=("a",), completed=("a",)), 1),
        (999.0, BUSY, Drain(repeat=("a",), waiting=("a",)), 2),  # it was never told, or restarted
        (999.0, None, Drain(waiting=("a",)), 2),  # no answer: it may have requests
        (700.0, FINISHING, Drain(condemn=("a",), timed_out=("a",)), 1),
        (700.0, None, Drain(condemn=("a",), timed_out=("a",)), 1),
    ],
)
def test_a_drain_ends_when_nothing_runs_or_at_the_deadline(
    since: float, load: WorkerLoad | None, expected: Drain, size: int
) -> None:
    pods = worker("a", draining_since=since), worker("b")
    found = shrunk(1, *pods, b=IDLE) if load is None else shrunk(1, *pods, a=load, b=IDLE)
    assert found == (size, expected)


def test_a_router_that_has_not_heard_of_it_holds_a_drain_up() -> None:
    draining = worker("a", draining_since=999.0)
    routers = Pod("r", "router", "s-router", ready=True), Pod("q", "router", "s-router", ready=True)
    deployment = Deployment("d", "decode", replicas=1)
    for views, agreed in [
        ({"r": {"a": "draining"}, "q": {"a": "draining"}}, True),
        ({"r": {"a": "draining"}, "q": {}}, True),
        ({"r": {"a": "draining"}, "q": {"a": "ready"}}, False),
        ({"r": {"a": "draining"}}, False),
    ]:
        observed = Observed({}, pods=(draining, *routers), fleet=Fleet({"a": DRAINED}, views))
        size, _ = shrink(deployment, 0, observed, NOW, DEADLINE)
        assert size == (0 if agreed else 1), views


def test_who_takes_no_requests_goes_first_and_at_once() -> None:
    pods = worker("a"), worker("b", ready=False), worker("c", ready=False, scheduled=False)
    assert shrunk(1, *pods, a=BUSY) == (1, Drain(condemn=("b", "c")))


def test_pods_that_were_never_made_need_no_drain() -> None:
    assert shrunk(1, worker("a"), replicas=4, a=BUSY) == (1, Drain())


def test_a_drain_is_called_off_when_its_worker_is_needed() -> None:
    pods = worker("a", draining_since=999.0), worker("b", draining_since=998.0, condemned=True)
    size, drain = shrunk(2, *pods, a=FINISHING, b=DRAINED)
    assert (size, drain) == (2, Drain(cancel=("b", "a")))
    # The drain that began first goes on.
    _, drain = shrunk(1, *pods, a=FINISHING, b=FINISHING)
    assert drain == Drain(cancel=("a",), waiting=("b",))


def test_a_shrunk_deployment_is_left_to_lose_its_pod() -> None:
    leaving = worker("a", draining_since=999.0, condemned=True)
    assert shrunk(1, leaving, worker("b"), replicas=1, a=DRAINED, b=BUSY) == (
        1,
        Drain(completed=("a",)),
    )
    assert shrunk(1, worker("a", terminating=True), worker("b"), replicas=1) == (1, Drain())


# --- rollouts ---------------------------------------------------------------------------------


def run(simulation: Simulation, until: Callable[[Plan], bool], seconds: int = 120) -> list[Plan]:
    """Steps until a plan satisfies ``until``."""
    plans = []
    for _ in range(seconds):
        plans.append(simulation.step())
        if until(plans[-1]):
            return plans
    raise AssertionError(f"not within {seconds} s: {simulation}")


def settled(plan: Plan) -> bool:
    return all(each.ready == each.wanted and not each.old for each in plan.progress.values())


def started(**spec: Any) -> Simulation:
    simulation = Simulation(service(**spec))
    run(simulation, settled)
    return simulation


CHANGED = {"engine": {"blockSize": 32}}


def test_old_workers_go_only_when_both_new_roles_are_ready() -> None:
    simulation = started(decode={"replicas": 2})
    for each in simulation.workers.values():
        each.requests = 4
    simulation.spec = service(decode={"replicas": 2}, **CHANGED)
    (new,) = {
        name
        for name in simulation.deployments("decode")
        for _ in [simulation.step()]
        for name in simulation.deployments("decode").keys() - {name}
    }
    while simulation.ready("decode", new) < 2:
        assert simulation.ready("decode") - simulation.ready("decode", new) == 2
        simulation.step()
    run(simulation, settled)
    assert simulation.deployments("decode") == {new: 2}
    assert not simulation.lost
    assert len([key for key in simulation.objects if key.startswith("ConfigMap")]) == 3


def test_a_broken_revision_takes_nothing_away() -> None:
    simulation = started()
    simulation.broken = True
    simulation.spec = service(**CHANGED)
    for _ in range(60):
        simulation.step()
        assert simulation.serves()
    simulation.broken = False
    run(simulation, settled)


def test_the_newest_spec_wins_in_the_middle_of_a_rollout() -> None:
    simulation = started()
    (old,) = simulation.deployments("decode")
    simulation.broken = True
    simulation.spec = service(**CHANGED)
    for _ in range(10):
        simulation.step()
    simulation.broken = False
    simulation.spec = service(engine={"blockSize": 64})
    for _ in range(3):
        simulation.step()
        assert simulation.serves()
    # Of the two old ones, the one that serves is kept.
    assert set(simulation.deployments("decode")) > {old}
    assert len(simulation.deployments("decode")) == 2
    run(simulation, settled)
    assert len(simulation.deployments("decode")) == 1


def test_back_to_the_old_spec_changes_no_worker() -> None:
    simulation = started()
    before = set(simulation.workers)
    simulation.spec = service(**CHANGED)
    simulation.step()
    simulation.step()
    simulation.spec = service()
    run(simulation, settled)
    assert set(simulation.workers) >= before
    run(simulation, lambda _: set(simulation.workers) == before)


def test_without_room_for_both_old_workers_go_first() -> None:
    simulation = Simulation(service(), places=2)
    run(simulation, settled)
    for each in simulation.workers.values():
        each.requests = 3
    simulation.spec = service(**CHANGED)
    plans = run(simulation, settled)
    assert any(plan.drain_first for plan in plans)
    assert not plans[-1].drain_first
    assert not simulation.lost


def test_both_roles_keep_the_same_one_of_two_old_revisions() -> None:
    simulation = started()
    for size, seconds in ((32, 4), (64, 4), (128, 20)):
        simulation.spec = service(engine={"blockSize": size})
        for _ in range(seconds):
            simulation.step()
            assert simulation.serves()


def test_with_some_room_only_as_many_old_workers_go_first() -> None:
    simulation = Simulation(service(decode={"replicas": 4}), places=8)
    run(simulation, settled)
    simulation.spec = service(decode={"replicas": 4}, **CHANGED)
    fewest = 9
    for _ in range(60):
        plan = simulation.step()
        fewest = min(fewest, simulation.ready("decode"))
        if settled(plan):
            break
    assert settled(plan)
    assert fewest >= 2


def test_one_roles_template_leaves_the_other_roles_workers_alone() -> None:
    simulation = started()
    prefill = {name for name, each in simulation.workers.items() if each.pod.role == "prefill"}
    simulation.spec = service(decode={"template": {"metadata": {"annotations": {"a": "b"}}}})
    run(simulation, settled)
    left = {name for name, each in simulation.workers.items() if each.pod.role == "prefill"}
    assert left == prefill


def test_scaling_goes_on_during_a_rollout() -> None:
    simulation = started()
    simulation.broken = True
    simulation.spec = service(**CHANGED)
    simulation.step()
    simulation.scale("decode", 3)
    simulation.step()
    assert 3 in simulation.deployments("decode").values()


def test_what_is_settled_stays_as_it_is() -> None:
    simulation = started(decode={"replicas": 2})
    before = set(simulation.workers)
    for _ in range(20):
        plan = simulation.step()
        assert (plan.drains, plan.resize, plan.delete) == (Drain(), (), ())
        assert not plan.undecided
        assert not needs_fleet(simulation.spec, INSTALLATION, simulation.observed())
    assert set(simulation.workers) == before


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("engine"), st.sampled_from([16, 32, 64])),
        st.tuples(st.just("prefill"), st.integers(0, 3)),
        st.tuples(st.just("decode"), st.integers(1, 3)),
        st.tuples(st.just("requests"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.integers(1, 8)),
        st.tuples(st.just("kill"), st.integers(0, 5)),
    ),
    max_size=12,
)


@settings(max_examples=30, deadline=None)
@given(ACTIONS, st.sampled_from([6, 100]))
# The growing role has no old workers left to give their places: the other role's have to.
@example([("prefill", 2), ("engine", 32), ("decode", 3)], 6)
def test_anything_in_any_order_ends_as_the_spec_wants(
    actions: list[tuple[str, int]], places: int
) -> None:
    simulation = Simulation(service(rollout={"drainDeadline": "30s"}), places=places)
    run(simulation, settled)
    for action, value in actions:
        match action:
            case "engine":
                simulation.spec = service(
                    engine={"blockSize": value}, rollout={"drainDeadline": "30s"}
                )
            case "prefill" | "decode":
                simulation.scale(action, value)
            case "requests":
                for each in simulation.workers.values():
                    each.requests = value if takes_requests(each) else 0
            case "wait":
                for _ in range(value):
                    simulation.step()
            case "kill":
                for name in sorted(simulation.workers)[:value]:
                    simulation.workers.pop(name)
        simulation.step()
    run(simulation, settled, seconds=300)
    assert not simulation.lost
    assert len(simulation.deployments("decode")) == len(simulation.deployments("prefill")) == 1


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("engine"), st.sampled_from([16, 32, 64])),
            st.tuples(st.sampled_from(["prefill", "decode"]), st.integers(1, 3)),
            st.tuples(st.just("wait"), st.integers(1, 8)),
        ),
        max_size=12,
    )
)
def test_with_room_for_both_revisions_one_always_serves(actions: list[tuple[str, int]]) -> None:
    simulation = started()
    for action, value in actions:
        if action == "engine":
            simulation.spec = service(engine={"blockSize": value})
        elif action != "wait":
            simulation.scale(action, value)
        for _ in range(value if action == "wait" else 1):
            simulation.step()
            assert simulation.serves()


# --- what was seen ----------------------------------------------------------------------------


def pod(**status: Any) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {
                "kvasir.dev/modelservice": "s",
                "kvasir.dev/role": "decode",
                "kvasir.dev/pod-revision": "abc",
            },
        },
        "spec": {"nodeName": "n"},
        "status": status,
    }


def container(**state: Any) -> dict[str, Any]:
    return pod(containerStatuses=[{"name": "worker", "image": "i", **state}])


BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
REFUSED = {"terminated": {"exitCode": 2, "message": "bad: fix\n"}}
KILLED = {"exitCode": 137, "reason": "OOMKilled"}


@pytest.mark.parametrize(
    ("item", "fault"),
    [
        (pod(), None),
        (container(state={"running": {}}), None),
        (container(state={"waiting": {"reason": "ContainerCreating"}}), None),
        (
            pod(
                conditions=[
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/1 nodes",
                    }
                ]
            ),
            Fault("Unschedulable", "0/1 nodes"),
        ),
        (
            container(state={"waiting": {"reason": "ErrImagePull", "message": "no such image"}}),
            Fault("ImagePullFailed", "no such image"),
        ),
        (
            container(state={"waiting": {"reason": "InvalidImageName"}}),
            Fault("ImagePullFailed", "image i: InvalidImageName"),
        ),
        (
            container(state=BACK_OFF, lastState=REFUSED),
            Fault("ConfigurationRefused", "bad: fix"),
        ),
        (
            container(state=BACK_OFF, lastState={"terminated": {"exitCode": 139}}),
            Fault("CrashLooping", "exit code 139"),
        ),
        (
            container(state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
            Fault(
                "OutOfMemory",
                "container worker was killed since its node ran out of memory; it has no limit. "
                "Set spec.decode.resources.requests.memory to what it takes",
            ),
        ),
        (
            container(state={"waiting": {"reason": "ContainerCreating"}}, lastState=REFUSED),
            Fault("ConfigurationRefused", "bad: fix"),
        ),
        (container(state={"running": {}}, lastState=REFUSED, ready=True), None),
        (container(state={"running": {}}, lastState={"terminated": {"exitCode": 0}}), None),
    ],
)
def test_why_a_pod_does_not_become_ready(item: dict[str, Any], fault: Fault | None) -> None:
    (seen,) = observe([item], "s").pods
    assert seen.fault == fault
    assert seen.deployment == "s-decode-abc"


@pytest.mark.parametrize(
    ("unready_since", "told"), [("00:00:05", True), ("00:00:10", True), ("00:00:30", False)]
)
def test_a_fault_is_told_until_the_container_has_been_ready_again(
    unready_since: str, told: bool
) -> None:
    """It began anew at 00:00:10; a container that was ready since then works again."""
    item = container(
        ready=False,
        state={"running": {"startedAt": "2026-01-01T00:00:10Z"}},
        lastState=REFUSED,
    )
    changed = f"2026-01-01T{unready_since}Z"
    item["status"]["conditions"] = [
        {"type": "Ready", "status": "False", "lastTransitionTime": changed}
    ]
    (seen,) = observe([item], "s").pods
    assert (seen.fault is not None) is told


def test_a_container_that_needs_more_memory_than_its_limit_says_what_to_raise() -> None:
    item = container(state=BACK_OFF, lastState={"terminated": KILLED})
    item["spec"]["containers"] = [{"name": "worker", "resources": {"limits": {"memory": "2Gi"}}}]
    (seen,) = observe([item], "s").pods
    assert seen.fault == Fault(
        "OutOfMemory",
        "container worker was killed at its memory limit of 2Gi; "
        "raise spec.decode.resources.limits.memory, or lower spec.engine.kvCacheMemory",
    )


def test_a_drain_time_that_somebody_spoiled_counts_as_none() -> None:
    item = pod()
    item["metadata"]["annotations"] = {"kvasir.dev/draining-since": "yesterday"}
    (seen,) = observe([item], "s").pods
    assert seen.draining_since is None


@pytest.mark.parametrize(
    ("seen", "wanted", "equal"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 2}, {"a": 1}, False),
        ({}, {"a": 1}, False),
        ({"a": [{"x": 1, "y": 2}]}, {"a": [{"x": 1}]}, True),
        ({"a": [1, 2]}, {"a": [1]}, False),
        ({}, {"a": {}}, True),
        ({}, {"a": []}, True),
        ({"a": "b"}, {"a": {"b": 1}}, False),
        ({"a": 1}, {"a": [1]}, False),
    ],
)
def test_projection(seen: object, wanted: object, equal: bool) -> None:
    assert (projection(seen, wanted) == wanted) is equal
