"""Writes what the operator says: the status of resources, and Events. Owns no decision.

A status is written when it differs from the one that is stored; Events tell of its transitions, and
of single acts.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvasir.operator import modelservice, workerpool
from kvasir.operator.cluster import names, status
from kvasir.operator.cluster.client import ApiError, Cluster
from kvasir.operator.cluster.observed import Object, Observed, Reference
from kvasir.operator.cluster.queue import Key
from kvasir.operator.resource_status import ModelServiceStatus, dump

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


class Teller:
    """Tells of ModelServices in one cluster. ``clock``: seconds since the Unix epoch."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock

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
            await self.event(subject, event.type, event.reason, event.message)

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

    async def event(self, subject: Subject, kind: str, reason: str, message: str) -> None:
        now = datetime.fromtimestamp(int(self._clock()), UTC).isoformat().replace("+00:00", "Z")
        metadata = subject.body["metadata"]
        _log.info("%s service=%s %s", reason, subject.key, message)
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{subject.key.name}."},
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
        try:
            await self._cluster.create(subject.key.namespace, event)
        except ApiError as error:  # whoever reads events misses one; nothing else depends on it
            _log.warning("event not written service=%s error=%s", subject.key, error)


def _only_status(item: Object, told: Mapping[str, Any]) -> Object:
    return {
        "apiVersion": modelservice.API_VERSION,
        "kind": item["kind"],
        "metadata": {"name": item["metadata"]["name"], "uid": item["metadata"]["uid"]},
        "status": told,
    }
