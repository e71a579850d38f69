"""Which worker drains, and when its drain ends."""

from typing import Any

import pytest

from kvasir.operator.cluster.drain import Drain, shrink
from kvasir.operator.cluster.observed import Deployment, Fleet, Observed, Pod, WorkerLoad

NOW = 1000.0
DEADLINE = 300.0
IDLE = WorkerLoad(0, 0, draining=False)
BUSY = WorkerLoad(1, 0, draining=False)
DRAINED = WorkerLoad(0, 0, draining=True)
FINISHING = WorkerLoad(1, 0, draining=True)


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
