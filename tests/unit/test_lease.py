"""Leader election where the API server is slow; the rest is tested against a real one."""

import asyncio
from typing import Any

from kvasir.operator.cluster.client import Cluster
from kvasir.operator.cluster.lease import Lease, lead
from kvasir.operator.cluster.observed import Object, Reference


class SlowCluster(Cluster):
    """Keeps one Lease. The first write takes `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stored: dict[str, Any] | None = None
        self.holders: list[str] = []

    async def get(self, namespace: str, key: Reference) -> Object | None:  # noqa: ARG002 - a client's
        return self._stored

    async def create(self, namespace: str, item: Object) -> None:
        await self.replace(namespace, item)

    async def replace(self, namespace: str, item: Object) -> None:  # noqa: ARG002 - a client's
        if not self.holders:
            await asyncio.sleep(self._seconds)
        self._stored = dict(item)
        self.holders.append(item["spec"]["holderIdentity"])


async def test_a_lease_that_came_late_is_renewed_before_the_work_begins() -> None:
    lease = Lease("here", "operator", "me", duration=3.0)
    cluster = SlowCluster(lease.deadline + 0.1)
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        assert cluster.holders == ["me", "me"]

    await lead(cluster, lease, work)  # raises LeaseLostError if it leads with an old lease
    assert begun.is_set()
    assert cluster.holders == ["me", "me", ""]
