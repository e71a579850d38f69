"""The autoscaler at work: what it remembers, decides and tells, without a cluster."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from helpers.simulated_cluster import service
from kvasir.operator.cluster.autoscaler import Autoscaler, held_to_bounds, last_decision
from kvasir.operator.cluster.faults import Fault
from kvasir.operator.cluster.observed import Fleet, Observed, Pod, Pool
from kvasir.operator.cluster.queue import Key
from kvasir.operator.scale import Decision
from kvasir.operator.signals import RouterSample, WorkerSample

KEY = Key("n", "s")
NOW = 1_800_000_000.0
IDLE = WorkerSample(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
FULL = replace(IDLE, running=64.0, waiting=9.0, kv_usage=1.0)
NO_PLACE = Fault("Unschedulable", "no node has room")


class Scripted:
    """Says what a test wants, and remembers who was asked."""

    def __init__(self) -> None:
        self.now = NOW
        self.said = IDLE
        self.silent: set[str] = set()

    async def scrape(
        self, pods: Sequence[Pod]
    ) -> tuple[dict[str, WorkerSample], dict[str, RouterSample]]:
        heard = [pod for pod in pods if pod.ready and pod.name not in self.silent]
        return (
            {p.name: replace(self.said, time=self.now) for p in heard if p.role != "router"},
            {p.name: RouterSample(self.now, 0.0, 0.0, 0.0) for p in heard if p.role == "router"},
        )

    async def observe(self, pods: Sequence[Pod]) -> Fleet:
        raise AssertionError(f"an autoscaler reads metrics alone, but asked {pods}")

    async def views(self, pods: Sequence[Pod]) -> dict[str, dict[str, str]]:
        raise AssertionError(f"an autoscaler reads metrics alone, but asked {pods}")

    async def drain(self, pod: Pod) -> None:
        raise AssertionError(f"an autoscaler drains nobody, but told {pod}")

    undrain = drain


class Stage:
    """A service whose decode pool is scaled, 5 s by 5 s."""

    def __init__(self, low: int = 1, high: int = 4, window: str = "60s") -> None:
        self.workers = Scripted()
        self.autoscaler = Autoscaler(self.workers, lambda: self.workers.now)
        bounds = {"minReplicas": low, "maxReplicas": high, "stabilizationWindow": window}
        self.service = service(decode={"scaling": bounds})
        self.pods: tuple[Pod, ...] = ()

    async def run(self, seconds: float, wanted: int) -> list[Decision]:
        """The decisions that users see."""
        found: list[Decision] = []
        for _ in range(round(seconds / 5)):
            self.workers.now += 5
            router = Pod("r", "router", "s-router", ready=True)
            pools = (Pool("decode", wanted, "scaling"), Pool("prefill", 1, "1"))
            observed = Observed({}, pods=(router, *self.pods), pools=pools)
            found += await self.autoscaler.decisions(KEY, self.service, observed)
        return found


def pods(count: int, **changes: Any) -> tuple[Pod, ...]:
    values = {"ready": True} | changes
    return tuple(Pod(f"d-{i}", "decode", "s-decode-1", **values) for i in range(count))


async def test_a_step_down_waits_for_the_window_of_the_spec() -> None:
    stage = Stage(window="60s")
    stage.pods = pods(2)
    assert not await stage.run(60, wanted=2)
    (lowered,) = await stage.run(5, wanted=2)
    assert (lowered.role, lowered.desired) == ("decode", 1)


async def test_one_decision_in_a_period() -> None:
    stage = Stage()
    stage.pods = pods(1)
    stage.workers.said = FULL
    assert await stage.run(5, wanted=1)
    stage.workers.now -= 3
    assert not await stage.run(5, wanted=1)  # 2 s later


async def test_what_stays_in_the_way_is_told_once() -> None:
    stage = Stage(high=2)
    stage.pods = pods(2)
    stage.workers.said = FULL
    assert not await stage.run(30, wanted=2)  # it may pass
    (told,) = await stage.run(300, wanted=2)
    assert (told.desired, told.limited_by) == (2, "max")
    assert told.reason == (
        "Keep decode at 2: KV cache usage is 100% on average (target 80%), "
        "which needs 3 replicas; maxReplicas is 2."
    )


async def test_a_limit_that_a_change_told_of_is_not_told_again() -> None:
    stage = Stage(high=2)
    stage.pods = pods(1)
    stage.workers.said = FULL
    (raised,) = await stage.run(5, wanted=1)
    assert raised.desired == 2
    stage.pods = pods(3)
    (lowered,) = await stage.run(5, wanted=3)  # into the bounds
    assert (lowered.desired, lowered.limited_by) == (2, "max")
    stage.pods = pods(2)
    assert not await stage.run(120, wanted=2)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (3, ["wpool/s-decode asked for 3, but spec.decode.scaling.maxReplicas is 2."]),
        (0, ["wpool/s-decode asked for 0, but spec.decode.scaling.minReplicas is 1."]),
        (2, []),
    ],
)
def test_who_scales_beyond_the_bounds_is_told(asked: int, told: list[str]) -> None:
    pools = (Pool("decode", asked, "scaling"), Pool("prefill", 9, "9"))
    assert list(held_to_bounds(Stage(high=2).service, Observed({}, pools=pools))) == told


async def test_calm_is_not_told() -> None:
    stage = Stage()
    stage.pods = pods(1)
    assert not await stage.run(600, wanted=1)


@pytest.mark.parametrize(
    ("changes", "pending", "unschedulable", "most"),
    [
        ({"scheduled": True}, 1, 0, 5),
        ({"scheduled": False}, 1, 0, 5),  # the scheduler has not looked at it yet
        ({"scheduled": False, "fault": NO_PLACE}, 0, 1, 4),
    ],
)
async def test_pods_without_a_place_are_told_apart(
    changes: dict[str, Any], pending: int, unschedulable: int, most: int
) -> None:
    stage = Stage(high=9)
    stage.pods = (*pods(4), Pod("d-9", "decode", "s-decode-1", **changes))
    stage.workers.said = FULL
    found = await stage.run(60, wanted=4)
    decision = found[-1]
    assert decision.inputs["pending"] == pending
    assert decision.inputs["unschedulable"] == unschedulable
    assert decision.desired == most


async def test_a_pod_that_is_gone_is_not_missed() -> None:
    stage = Stage(low=1, high=2)
    stage.pods = pods(2)
    await stage.run(30, wanted=2)
    stage.pods = pods(1)
    stage.workers.said = FULL
    (raised,) = await stage.run(5, wanted=1)
    assert "d-1" not in raised.reason
    stage.pods = (*pods(1), Pod("d-1", "decode", "s-decode-1", ready=True))  # the same name again
    stage.workers.silent = {"d-1"}
    told = await stage.run(60, wanted=2)
    assert "d-1 (no data)" in told[-1].reason  # nothing of its namesake is left


async def test_a_service_that_is_gone_is_forgotten() -> None:
    stage = Stage(window="60s")
    stage.pods = pods(2)
    await stage.run(55, wanted=2)
    stage.autoscaler.forget(KEY)
    assert not await stage.run(60, wanted=2)
    assert await stage.run(5, wanted=2)


async def test_a_decision_in_the_status() -> None:
    stage = Stage(high=2)
    stage.pods = pods(1)
    stage.workers.said = FULL
    (raised,) = await stage.run(5, wanted=1)
    told = last_decision(raised)
    assert (told.role, told.desired, told.limited_by) == ("decode", 2, None)
    assert told.time.timestamp() == NOW + 5
    assert told.inputs["kvUsage"] == "1.0"
    unknown = last_decision(replace(raised, inputs={"kv_usage": None}, limited_by="bad_data"))
    assert (unknown.inputs, unknown.limited_by) == ({"kvUsage": "unknown"}, "badData")
