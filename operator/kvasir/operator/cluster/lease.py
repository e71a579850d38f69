"""Leader election: of several operators for the same ModelServices, one acts.

A Lease names the leader, who renews it. Another one takes over when it has seen no renewal for
the whole duration of the lease, by its own monotonic clock, so that clocks need not agree. A
leader that could not renew in time stops before that, so that there are never two.

https://kubernetes.io/docs/concepts/architecture/leases/
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvasir.operator.cluster.client import ApiError, Cluster
from kvasir.operator.cluster.observed import Object, Reference

_log = logging.getLogger("kvasir.operator")


class LeaseLostError(Exception):
    """This process does not lead any more; it must end what it does as the leader."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Where the Lease is, who asks for it, and for how many seconds it holds without renewal."""

    namespace: str
    name: str
    identity: str
    """Unique to this process."""
    duration: float = 15.0

    @property
    def period(self) -> float:
        """Seconds between renewals."""
        return self.duration / 5

    @property
    def longest(self) -> float:
        """Seconds for which any holder is believed, whatever it wrote: no operator is kept out."""
        return self.duration * 4

    @property
    def deadline(self) -> float:
        """Seconds without renewal after which the leader stops; the rest is its time to do so."""
        return self.duration * 2 / 3


async def lead(cluster: Cluster, lease: Lease, work: Callable[[], Awaitable[None]]) -> None:
    """Wait to become the leader, then do the work; the lease is given back when it ends.

    Raises:
        LeaseLostError: the lease could not be renewed in time. The work has been cancelled.
    """
    election = _Election(cluster, lease)
    await election.acquire()
    _log.info("leading lease=%s/%s identity=%s", lease.namespace, lease.name, lease.identity)
    worker = asyncio.ensure_future(work())
    renewal = asyncio.create_task(election.renew())
    try:
        await asyncio.wait([worker, renewal], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (worker, renewal):
            task.cancel()
        ended = await asyncio.gather(worker, renewal, return_exceptions=True)
        await election.release()
    for outcome in ended:
        if isinstance(outcome, Exception):
            raise outcome


class _Election:
    def __init__(self, cluster: Cluster, lease: Lease) -> None:
        self._cluster = cluster
        self._lease = lease
        self._seen: Any = None
        """What the holder wrote last."""
        self._since = 0.0
        """Since when that stands, on this machine's monotonic clock."""
        self._renewed = 0.0

    @property
    def _left(self) -> float:
        """Seconds until the leader stops, unless it renews the lease."""
        return self._renewed + self._lease.deadline - time.monotonic()

    async def acquire(self) -> None:
        """Returns when the lease is this process's, for long enough to be renewed."""
        while not await self._try_for_long():  # noqa: ASYNC110 - it waits for another machine
            await asyncio.sleep(self._lease.period)

    async def _try_for_long(self) -> bool:
        # An answer that came late tells of a lease that may be over by now: it is asked for anew.
        return await self._try() and self._left > self._lease.period

    async def renew(self) -> None:
        """Until it fails for too long: LeaseLostError."""
        while self._left > 0:
            await asyncio.sleep(self._lease.period)
            try:
                async with asyncio.timeout(max(0.1, self._left)):
                    mine = await self._try()
            except TimeoutError:
                continue
            if not mine and self._seen is not None and self._seen[0] != self._lease.identity:
                break
        raise LeaseLostError(f"lease {self._lease.namespace}/{self._lease.name} not renewed")

    async def release(self) -> None:
        """So that the next leader need not wait. Best effort: the lease ends by itself."""
        try:
            async with asyncio.timeout(self._lease.period):
                found = await self._read()
                if found is not None and _holder(found) == self._lease.identity:
                    await self._write(found, "")
        except (ApiError, TimeoutError) as error:
            _log.warning("lease not released error=%s", error)

    async def _try(self) -> bool:
        """Whether the lease is this process's from now on."""
        begun = time.monotonic()
        try:
            found = await self._read()
            if found is not None and not self._free(found):
                return False
            await self._write(found, self._lease.identity)
        except ApiError as error:
            if not error.conflict:  # a conflict says that another one was quicker
                _log.warning("lease not written error=%s", error)
            return False
        self._renewed = begun
        return True

    def _free(self, found: Object) -> bool:
        record = _holder(found), found["spec"].get("renewTime")
        if record != self._seen:
            self._seen, self._since = record, time.monotonic()
        if record[0] in ("", self._lease.identity):
            return True
        told: float = found["spec"].get("leaseDurationSeconds", self._lease.duration)
        return time.monotonic() - self._since >= min(told, self._lease.longest)

    async def _read(self) -> Object | None:
        return await self._cluster.get(self._lease.namespace, Reference("Lease", self._lease.name))

    async def _write(self, found: Object | None, holder: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": max(1, round(self._lease.duration)),
            "renewTime": now,
            "acquireTime": now,
        }
        if found is None:
            metadata = {"name": self._lease.name}
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
            await self._cluster.create(self._lease.namespace, {**body, "spec": spec})
            return
        if _holder(found) == holder:
            spec["acquireTime"] = found["spec"].get("acquireTime", now)
        await self._cluster.replace(
            self._lease.namespace, {**found, "kind": "Lease", "spec": {**found["spec"], **spec}}
        )


def _holder(found: Object) -> str:
    return found["spec"].get("holderIdentity") or ""
