"""Writes what the operator says: the status of resources, and Events. Owns no decision.

A status is written when it differs from the one that is stored; Events tell of its transitions, and
of single acts. A transition that comes again within REPEATS is counted on the Event that is there.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvasir.operator import modelservice, workerpool
from kvasir.operator.cluster import names, status
from kvasir.operator.cluster.client import ApiError, Cluster
from kvasir.operator.cluster.observed import Object, Observed, Reference
from kvasir.operator.cluster.queue import Key
from kvasir.operator.resource_status import ModelServiceStatus, dump

REPEATS = 600.0
"""Seconds; less than an API server keeps an Event after its last change, which is an hour."""

_log = logging.getLogger("kvasir.operator")


@dataclass(frozen=True, slots=True)
class Subject:
    """A ModelService as it was read."""

    key: Key
    body: Object

    @property
    def generation(self) -> int:
        return int(self.body["metadata"]["generation"])

    def seen(self, now: float) -> status.Seen:
        stored = self.body.get("status") or {}
        return status.Seen(self.key.namespace, self.generation, stored, now)


@dataclass(frozen=True, slots=True)
class _Told:
    """An Event that was written: its name, how often it was told, and when last."""

    event: str
    count: int
    at: float


class Teller:
    """Tells of ModelServices in one cluster. ``clock``: seconds since the Unix epoch."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._told: dict[tuple[str, status.Event], _Told] = {}
        """Transitions by the ModelService's uid; in a restart, one of each is told once more."""
        self._last_name = 0

    async def refuse(self, subject: Subject, reason: str, problems: tuple[str, ...]) -> None:
        seen = subject.seen(self._clock())
        await self.tell(subject, status.refused_status(reason, problems, seen))

    async def tell(self, subject: Subject, told: ModelServiceStatus) -> None:
        stored = subject.body.get("status") or {}
        if dump(told) == stored:
            return
        await self._cluster.apply_status(
            subject.key.namespace, _only_status(subject.body, dump(told))
        )
        for event in status.transitions(stored, told):
            await self._transition(subject, event)

    async def tell_pools(
        self, subject: Subject, told: ModelServiceStatus, observed: Observed
    ) -> None:
        for pool in observed.pools:
            role = told.roles.prefill if pool.role == "prefill" else told.roles.decode
            new = dump(status.pool_status(pool.role, subject.key.name, role, pool.generation))
            if new == pool.status:
                continue
            key = Reference(workerpool.KIND, names.pool(subject.key.name, pool.role))
            await self._cluster.apply_status(
                subject.key.namespace, _only_status(observed.objects[key], new)
            )

    async def _transition(self, subject: Subject, event: status.Event) -> None:
        now = self._clock()
        self._told = {key: each for key, each in self._told.items() if now - each.at < REPEATS}
        key = (subject.body["metadata"]["uid"], event)
        if (before := self._told.get(key)) is None:
            name = await self.event(subject, event.type, event.reason, event.message)
            told = _Told(name, 1, now)
        else:
            told = _Told(before.event, before.count + 1, now)
            again = {"count": told.count, "lastTimestamp": _rfc3339(now)}
            await self._write(
                subject,
                self._cluster.merge(subject.key.namespace, Reference("Event", told.event), again),
            )
        self._told[key] = told

    async def event(self, subject: Subject, kind: str, reason: str, message: str) -> str:
        """Tell it, whether it was told before or not; returns the Event's name."""
        now = _rfc3339(self._clock())
        metadata = subject.body["metadata"]
        name = self._next_name(subject.key.name)
        _log.info("%s service=%s %s", reason, subject.key, message)
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name},
            "involvedObject": {
                "apiVersion": modelservice.API_VERSION,
                "kind": modelservice.KIND,
                "name": subject.key.name,
                "namespace": subject.key.namespace,
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "type": kind,
            "reason": reason,
            "message": message,
            "source": {"component": names.OPERATOR},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self._write(subject, self._cluster.create(subject.key.namespace, event))
        return name

    def _next_name(self, service: str) -> str:
        """In the order of time: timestamps of Events are whole seconds, and listings go by name."""
        self._last_name = max(self._last_name + 1, int(self._clock() * 1e9))
        return f"{service}.{self._last_name:016x}"

    async def _write(self, subject: Subject, write: Awaitable[None]) -> None:
        try:
            await write
        except ApiError as error:  # whoever reads events misses one; nothing else depends on it
            _log.warning("event not written service=%s error=%s", subject.key, error)


def _rfc3339(time: float) -> str:
    """Of seconds since the Unix epoch."""
    return datetime.fromtimestamp(int(time), UTC).isoformat().replace("+00:00", "Z")


def _only_status(item: Object, told: Mapping[str, Any]) -> Object:
    return {
        "apiVersion": modelservice.API_VERSION,
        "kind": item["kind"],
        "metadata": {"name": item["metadata"]["name"], "uid": item["metadata"]["uid"]},
        "status": told,
    }
