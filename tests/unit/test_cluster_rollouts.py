"""Rollouts, scaling and drains in any interleaving: state machines over the plan.

The parts of the simulated cluster act one at a time, in any order and with any delay between, and
the operator may end within a step. A rollout's promises are checked from outside after each act.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from helpers.simulated_cluster import (
    INSTALLATION,
    NO_PLACE,
    ONE_PLACE,
    Simulation,
    Worker,
    service,
    takes_requests,
)
from kvasir.operator.cluster.drain import Drain
from kvasir.operator.cluster.names import WORKER_ROLES
from kvasir.operator.cluster.objects import worker_revision
from kvasir.operator.cluster.observed import Deployment, Observed, Pod, Pool
from kvasir.operator.cluster.plan import Plan, needs_fleet
from kvasir.operator.cluster.rollout import rollout
from kvasir.operator.workerpool import WorkerRole

LONG_AGO, NOW = 0.0, 100.0


def worker(deployment: str, number: int, **changes: Any) -> Pod:
    values: dict[str, Any] = {"ready": True, "needs": ONE_PLACE} | changes
    return Pod(f"{deployment}-{number}", "decode", deployment, **values)


def workers(deployment: str, count: int, **changes: Any) -> list[Pod]:
    return [worker(deployment, number, **changes) for number in range(count)]


def homeless(count: int) -> list[Pod]:
    unplaced = {"fault": NO_PLACE, "unplaced_since": LONG_AGO}
    return workers("new", count, ready=False, scheduled=False, **unplaced)


def given(
    wanted: int, *pods: Pod, minimum: int = 0, **replicas: int
) -> tuple[dict[str, int], Mapping[WorkerRole, int]]:
    """Targets of the old decode Deployments, and the minimum, in a rollout to ``new``."""
    observed = Observed(
        {},
        deployments=tuple(
            Deployment(name, "decode", name, replicas=count)
            for name, count in {**replicas, "new": wanted}.items()
        ),
        pods=pods,
        pools=(Pool("decode", wanted, None, minimum),),
    )
    newest: dict[WorkerRole, str] = {"prefill": "p", "decode": "new"}
    found = rollout(newest, {"prefill": 1, "decode": wanted}, observed, unplaced_before=NOW)
    return {name: found.targets[name] for name in replicas}, found.minimum


def test_old_workers_give_their_places_a_few_at_a_time() -> None:
    assert given(4, *workers("old", 4), *homeless(4), old=4) == ({"old": 3}, {"decode": 3})
    assert given(8, *workers("old", 8), *homeless(8), old=8) == ({"old": 6}, {"decode": 6})
    assert given(8, *workers("old", 8), *homeless(1), old=8) == ({"old": 7}, {"decode": 6})
    # With a spare place, the first one that goes is made up for already.
    spare = worker("new", 9)
    assert given(4, *workers("old", 4), spare, *homeless(3), old=4) == ({"old": 2}, {"decode": 3})


def test_a_place_that_is_free_soon_is_not_asked_for_twice() -> None:
    leaving = worker("old", 7, terminating=True)
    condemned = worker("old", 7, draining_since=1.0, condemned=True)
    for last in (leaving, condemned):
        found, _ = given(8, *workers("old", 7), last, *homeless(1), old=7)
        assert found == {"old": 7}
    # It is free, and the scheduler has not seen it yet.
    found, minimum = given(8, *workers("old", 6), *homeless(8), minimum=6, old=6)
    assert (found, minimum) == ({"old": 6}, {"decode": 6})


def test_who_serves_nobody_gives_its_place_first() -> None:
    broken = worker("old", 9, ready=False)
    found, _ = given(4, *workers("old", 3), broken, *homeless(1), minimum=3, old=4)
    assert found == {"old": 3}


def test_more_workers_than_there_are_places_for_do_not_hold_a_rollout_up() -> None:
    assert given(8, *workers("old", 3), *homeless(8), old=3) == ({"old": 2}, {"decode": 2})


def test_of_several_old_revisions_enough_workers_stay() -> None:
    found, _ = given(4, *workers("a", 2), *workers("b", 2), *homeless(4), a=2, b=2)
    assert sum(found.values()) == 3
    # Where there is room, one of them is enough.
    found, _ = given(
        4, *workers("a", 4), *workers("b", 3), *workers("new", 2, ready=False), a=4, b=3
    )
    assert found == {"a": 4, "b": 0}


ROLES = st.sampled_from(WORKER_ROLES)
SIZES = st.sampled_from([16, 32, 64])
FAIR_SECONDS = 400


class Cluster(RuleBasedStateMachine):
    """A ModelService in a cluster that has room for at least one of its revisions."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"prefill": 1, "decode": 1}
        self.simulation = Simulation(service())
        self.killed: set[str] = set()

    def settle(self) -> None:
        """Everybody acts every second, until nothing changes any more."""
        self.simulation.broken = False
        for _ in range(FAIR_SECONDS):
            plan = self.observe_and_plan()
            if self.settled(plan):
                return
            self.act(plan, effects=None)
            self.simulation.tick()
            self.promises()
        raise AssertionError(f"not settled within {FAIR_SECONDS} s: {self.simulation}")

    def settled(self, plan: Plan) -> bool:
        workers = [worker.pod for worker in self.simulation.workers.values()]
        return (
            (plan.drains, plan.resize, plan.delete) == (Drain(), (), ())
            and all(each.ready == each.wanted and not each.old for each in plan.progress.values())
            and len(workers) == sum(self.sizes.values())
            and all(self.simulation.objects.get(key) == item for key, item in self.made(plan))
        )

    def made(self, plan: Plan) -> list[tuple[str, dict[str, object]]]:
        """What the step would write, as the simulation stores it."""
        after = replace(self.simulation, objects=dict(self.simulation.objects))
        after.act(replace(plan, drains=Drain(), resize=(), delete=()))
        return list(after.objects.items())

    def observe_and_plan(self) -> Plan:
        return self.simulation.plan()

    def act(self, plan: Plan, effects: int | None) -> None:
        """What the operator does; it ends after so many effects (None: it does not)."""
        drains = plan.drains
        told = iter(
            (field, name)
            for field in ("begin", "repeat", "cancel", "condemn")
            for name in getattr(drains, field)
        )
        done: dict[str, tuple[str, ...]] = {}
        for field, name in islice(told, effects):
            done[field] = (*done.get(field, ()), name)
        whole = effects is None or next(told, None) is None
        self.simulation.act(
            replace(plan, drains=Drain(**done))
            if whole
            else replace(plan, drains=Drain(**done), apply=(), resize=(), delete=())
        )

    def newest(self, role: str) -> str:
        (name,) = (
            worker_revision(self.simulation.spec, each, INSTALLATION).name
            for each in WORKER_ROLES
            if each == role
        )
        return name

    def of(self, role: str) -> list[Worker]:
        return [each for each in self.simulation.workers.values() if each.pod.role == role]

    # --- what happens -------------------------------------------------------------------------

    @rule(effects=st.none() | st.integers(0, 3))
    def step(self, effects: int | None) -> None:
        plan = self.observe_and_plan()
        for role in WORKER_ROLES:
            self.takes_no_more_than_needed(role, plan)
        self.act(plan, effects)

    def takes_no_more_than_needed(self, role: str, plan: Plan) -> None:
        """Which workers are told to drain, against what there is."""
        newest, wanted = self.newest(role), plan.progress[role].wanted
        pods = [each.pod for each in self.of(role)]
        own = [pod for pod in pods if pod.deployment == newest and not pod.terminating]
        old = [pod for pod in pods if pod.deployment != newest]
        begun = set(plan.drains.begin)
        assert len(begun & {pod.name for pod in own}) <= max(0, len(own) - wanted)
        complete = all(each.ready >= each.wanted for each in plan.progress.values())
        if complete or len({pod.deployment for pod in old}) > 1:
            return  # then old workers go without giving their place to a new one
        homeless = sum(
            each.pod.fault is not None and not each.pod.terminating
            for each in self.simulation.workers.values()
        )
        leaving = sum(
            pod.scheduled and (pod.terminating or pod.draining_since is not None) for pod in old
        )
        assert len(begun & {pod.name for pod in old}) <= max(0, homeless - leaving)

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds: int) -> None:
        self.simulation.now += seconds

    @rule()
    def replicate(self) -> None:
        self.simulation.replicate()

    @rule()
    def schedule(self) -> None:
        self.simulation.schedule()

    @rule()
    def start_workers(self) -> None:
        self.simulation.start_workers()

    @rule()
    def end_pods(self) -> None:
        self.simulation.end_pods()

    @rule()
    def finish_requests(self) -> None:
        self.simulation.finish_requests()

    @rule(count=st.integers(1, 3))
    def send_requests(self, count: int) -> None:
        for worker in self.simulation.workers.values():
            if takes_requests(worker):
                worker.requests = count

    @rule(size=SIZES)
    def change_spec(self, size: int) -> None:
        self.simulation.spec = service(engine={"blockSize": size})

    @invariant()
    def promises(self) -> None:
        lost = set(self.simulation.lost) - self.killed
        assert not lost, f"went with requests: {lost}"

    def teardown(self) -> None:
        self.settle()
        before = set(self.simulation.workers)
        for _ in range(3):
            plan = self.simulation.step()
            assert self.settled(plan)
            assert not plan.undecided
            assert not plan.drain_first
            assert not needs_fleet(self.simulation.spec, INSTALLATION, self.simulation.observed())
        assert set(self.simulation.workers) == before


class Trouble(Cluster):
    """Workers fail, pools are scaled, and new revisions may be broken."""

    @initialize(spare=st.integers(0, 6), prefill=st.integers(0, 3), decode=st.integers(1, 4))
    def begin(self, spare: int, prefill: int, decode: int) -> None:
        # Each role may grow to 4.
        self.simulation.places = 8 + spare
        self.simulation.step()
        self.scale("prefill", prefill)
        self.scale("decode", decode)
        self.settle()

    @rule(role=ROLES, size=st.integers(1, 4))
    def scale(self, role: str, size: int) -> None:
        self.sizes[role] = size
        self.simulation.scale(role, size)

    @rule(broken=st.booleans())
    def break_new_pods(self, broken: bool) -> None:
        self.simulation.broken = broken

    @rule(number=st.integers(0, 7))
    def fail(self, number: int) -> None:
        """A container restarts: its requests are gone, and what it was told."""
        workers = sorted(self.simulation.workers)
        if number < len(workers):
            worker = self.simulation.workers[workers[number]]
            worker.requests, worker.draining = 0, False
            worker.ready_at = self.simulation.now + self.simulation.start
            worker.pod = replace(worker.pod, ready=False)

    @rule(number=st.integers(0, 7))
    def kill(self, number: int) -> None:
        """A node takes a pod away."""
        workers = sorted(self.simulation.workers)
        if number < len(workers):
            self.killed.add(workers[number])
            del self.simulation.workers[workers[number]]


class Tight(Cluster):
    """Nothing fails, so that what is missing is what the operator took away."""

    @initialize(spare=st.integers(0, 4), prefill=st.integers(1, 5), decode=st.integers(1, 9))
    def begin(self, spare: int, prefill: int, decode: int) -> None:
        self.sizes = {"prefill": prefill, "decode": decode}
        self.simulation.places = prefill + decode + spare
        self.simulation.step()
        for role, size in self.sizes.items():
            self.simulation.scale(role, size)
        self.settle()
        self.begun = True

    begun = False

    @precondition(lambda self: self.begun)
    @invariant()
    def enough_serve(self) -> None:
        """A quarter may be missing, one at least."""
        for role, size in self.sizes.items():
            serving = sum(map(takes_requests, self.of(role)))
            assert serving >= size - max(1, size // 4), (role, size, serving)

    def promises(self) -> None:
        super().promises()
        if self.begun:
            self.enough_serve()


@pytest.mark.parametrize("machine", [Trouble, Tight])
def test_any_interleaving_keeps_the_promises_and_ends_as_wanted(machine: type[Cluster]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
