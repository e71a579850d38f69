"""Events: in the order of time, and a transition that comes again is counted."""

from typing import Any, cast

from helpers.simulated_cluster import service
from kvasir.operator.cluster.client import Cluster
from kvasir.operator.cluster.faults import Fault
from kvasir.operator.cluster.observed import Object, Observed, Reference
from kvasir.operator.cluster.plan import next_step
from kvasir.operator.cluster.pods import Installation
from kvasir.operator.cluster.queue import Key
from kvasir.operator.cluster.status import Seen, service_status
from kvasir.operator.cluster.telling import REPEATS, Subject, Teller
from kvasir.operator.resource_status import ModelServiceStatus, dump


class Events:
    """The part of a Cluster that keeps Events; a status is told from the one given before."""

    def __init__(self) -> None:
        self.stored: dict[str, dict[str, Any]] = {}

    async def create(self, namespace: str, item: Object) -> None:
        assert namespace == "n"
        assert item["metadata"]["name"] not in self.stored
        self.stored[item["metadata"]["name"]] = dict(item)

    async def merge(self, namespace: str, key: Reference, patch: Object) -> None:
        assert (namespace, key.kind) == ("n", "Event")
        self.stored[key.name] |= patch

    async def apply_status(self, namespace: str, item: Object) -> None:
        pass

    def counts(self, reason: str) -> list[int]:
        return [each["count"] for each in self.stored.values() if each["reason"] == reason]


class Stage:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.events = Events()
        self.teller = Teller(cast("Cluster", self.events), lambda: self.now)
        self.status: dict[str, Any] = {}

    def subject(self) -> Subject:
        metadata = {"name": "s", "uid": "1", "resourceVersion": "1", "generation": 1}
        body = {"kind": "ModelService", "metadata": metadata, "status": self.status}
        return Subject(Key("n", "s"), body)

    async def tell(self, fault: Fault | None) -> None:
        told = self._status(fault)
        await self.teller.tell(self.subject(), told)
        self.status = dump(told)

    def _status(self, fault: Fault | None) -> ModelServiceStatus:
        plan = next_step(service(), Installation("w", "r"), Observed({}), self.now)
        return service_status(service(), Observed({}), plan, Seen("n", 1, {}, self.now), fault)


async def test_a_transition_that_comes_again_is_counted() -> None:
    stage = Stage()
    for _ in range(50):
        await stage.tell(Fault("NameConflict", "x"))
        stage.now += 1
        await stage.tell(None)
        stage.now += 1
    assert stage.events.counts("NameConflict") == [50]
    assert stage.events.counts("AsExpected") == [50]
    (event,) = (each for each in stage.events.stored.values() if each["reason"] == "NameConflict")
    assert (event["firstTimestamp"], event["lastTimestamp"]) == (
        "2027-01-15T08:00:00Z",
        "2027-01-15T08:01:38Z",
    )
    await stage.tell(Fault("NameConflict", "y"))
    assert sorted(stage.events.counts("NameConflict")) == [1, 50]
    stage.now += REPEATS
    await stage.tell(None)
    assert stage.events.counts("AsExpected") == [50, 1]


async def test_acts_are_told_one_by_one_in_the_order_of_their_names() -> None:
    stage = Stage()
    for text in ("a", "b", "b", "a"):
        await stage.teller.event(stage.subject(), "Normal", "DrainStarted", text)
    told = [stage.events.stored[name]["message"] for name in sorted(stage.events.stored)]
    assert told == ["a", "b", "b", "a"]
    assert stage.events.counts("DrainStarted") == [1] * 4
