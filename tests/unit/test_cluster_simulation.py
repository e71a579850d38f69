"""Whole rollouts of a ModelService in a simulated cluster."""

from collections.abc import Callable
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers.simulated_cluster import INSTALLATION, Simulation, service, takes_requests
from kvasir.operator.cluster.drain import Drain
from kvasir.operator.cluster.plan import Plan, needs_fleet


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
