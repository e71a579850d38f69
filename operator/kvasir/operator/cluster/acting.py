"""Does what a plan says, in an order that matters: what protects requests comes first.

Drains come before what ends pods. A write that the API server refuses hinders none of the others,
but for a Deployment whose next pod to go could not be marked: that one keeps its size. Why the
first one was refused is returned.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from kvasir.operator import workerpool
from kvasir.operator.cluster import multi_node
from kvasir.operator.cluster.client import ApiError, Cluster
from kvasir.operator.cluster.drain import Drain
from kvasir.operator.cluster.faults import Fault
from kvasir.operator.cluster.observed import (
    DELETION_COST,
    DRAINING_SINCE,
    Object,
    Observed,
    Pod,
    Reference,
    controller,
    controls,
    reference,
)
from kvasir.operator.cluster.plan import Plan, Resize
from kvasir.operator.cluster.telling import Subject, Teller
from kvasir.operator.cluster.workers import Workers
from kvasir.operator.modelservice import KIND

_CONDEMNED = "-1000"

_log = logging.getLogger("kvasir.operator")


class Actor:
    """Acts on one cluster and its workers. ``clock``: seconds since the Unix epoch."""

    def __init__(
        self, cluster: Cluster, workers: Workers, teller: Teller, clock: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._workers = workers
        self._teller = teller
        self._clock = clock

    async def __call__(self, subject: Subject, plan: Plan, observed: Observed) -> Fault | None:
        """Do what the plan says; what the API server refuses is returned, the rest done."""
        pods = {pod.name: pod for pod in observed.pods}
        faults = await self._drain(subject, plan.drains, pods)
        unmarked = {pods[name].deployment for name in plan.drains.condemn if name in faults}
        kept = {Reference("Deployment", name) for name in unmarked}
        outcomes = [
            *faults.values(),
            *[
                await self._apply(subject, item, observed.objects.get(reference(item)))
                for item in plan.apply
                if reference(item) not in kept
            ],
            *[
                await self._merge(subject, each.key, _replicas(each, observed))
                for each in plan.resize
                if each.key not in kept
            ],
            *[
                await self._delete(subject, key, observed.objects[key])
                for key in plan.delete
                if key not in kept
            ],
        ]
        return next(filter(None, outcomes), None)

    async def _apply(self, subject: Subject, item: Object, seen: Object | None) -> Fault | None:
        namespace = subject.key.namespace
        try:
            await self._cluster.apply(namespace, item, seen)
        except ApiError as error:
            if error.conflict and item["kind"] == workerpool.KIND and seen is not None:
                return None  # it was scaled meanwhile, and that change calls the next step
            if error.gone and item["kind"] == multi_node.KIND:
                return multi_node.MISSING
            if not error.refusal:
                raise
            if error.conflict and seen is None:
                return await self._name_taken(subject, item, error)
            return _refused(reference(item), error)
        return None

    async def _name_taken(self, subject: Subject, item: Object, error: ApiError) -> Fault | None:
        """There is an object of the name: whose is it?"""
        there = await self._cluster.find(subject.key.namespace, reference(item))
        if there is None:
            raise error  # it went at this moment: the next try creates it
        if controls(subject.body["metadata"]["uid"], there):
            return await self._apply(subject, item, there)  # its labels were lost
        return _name_conflict(there, subject.key.name)

    async def _merge(
        self, subject: Subject, key: Reference, patch: Mapping[str, Any]
    ) -> Fault | None:
        try:
            await self._cluster.merge(subject.key.namespace, key, patch)
        except ApiError as error:
            if not error.refusal:
                raise
            return _refused(key, error)
        return None

    async def _delete(self, subject: Subject, key: Reference, seen: Object) -> Fault | None:
        _log.info("deleting service=%s object=%s", subject.key, key)
        try:
            await self._cluster.delete(subject.key.namespace, key, seen["metadata"]["uid"])
        except ApiError as error:
            if not error.refusal:
                raise
            return _refused(key, error)
        return None

    async def _drain(
        self, subject: Subject, drains: Drain, pods: Mapping[str, Pod]
    ) -> dict[str, Fault]:
        """Pods that could not be annotated, and why; what depends on that is not done."""
        faults: dict[str, Fault] = {}

        async def annotated(name: str, annotations: Mapping[str, str | None]) -> bool:
            patch = {"metadata": {"annotations": annotations}}
            fault = await self._merge(subject, Reference("Pod", name), patch)
            if fault is not None:
                faults[name] = fault
            return fault is None

        for name in drains.begin:
            # First written, then told: an operator that ends in between tells it again.
            since = datetime.fromtimestamp(self._clock(), UTC).isoformat()
            if not await annotated(name, {DRAINING_SINCE: since}):
                continue
            await self._workers.drain(pods[name])
            await self._teller.event(subject, "Normal", "DrainStarted", f"Worker {name} drains.")
        for name in drains.repeat:
            await self._workers.drain(pods[name])
        for name in drains.cancel:
            await self._workers.undrain(pods[name])
            await annotated(name, {DRAINING_SINCE: None, DELETION_COST: None})
        for name in drains.condemn:
            if not await annotated(name, {DELETION_COST: _CONDEMNED}):
                continue
            await self._tell_end(subject, drains, name)
        return faults

    async def _tell_end(self, subject: Subject, drains: Drain, name: str) -> None:
        if name in drains.completed:
            text = f"Worker {name} has no requests left and goes."
            await self._teller.event(subject, "Normal", "DrainCompleted", text)
        elif name in drains.timed_out:
            text = f"Worker {name} still had requests at the drain deadline and goes."
            await self._teller.event(subject, "Warning", "DrainTimedOut", text)


def _replicas(resize: Resize, observed: Observed) -> Mapping[str, Any]:
    uid = observed.objects[resize.key]["metadata"]["uid"]
    return {"metadata": {"uid": uid}, "spec": {"replicas": resize.replicas}}


def _refused(key: Reference, error: ApiError) -> Fault:
    return Fault("ObjectRefused", f"{key}: {error}")


def _name_conflict(there: Object, service: str) -> Fault:
    """An object has the name of one that the ModelService needs."""
    owner = controller(there)
    if owner is None:
        text = "was not made by the operator; delete it, or rename the ModelService"
    elif (owner["kind"], owner["name"]) == (KIND, service):
        text = f"belongs to an earlier ModelService {service}, and goes soon"
    else:
        text = f"belongs to {owner['kind']} {owner['name']}; rename one of the two"
    return Fault("NameConflict", f"{reference(there)} {text}")
