"""Does what a plan says, in an order that matters: what protects requests comes first.

Drains come before what ends pods. An object that the API server refuses hinders none of the others;
why it was refused is returned.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

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
    reference,
)
from kvasir.operator.cluster.plan import Plan
from kvasir.operator.cluster.telling import Subject, Teller
from kvasir.operator.cluster.workers import Workers

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
        namespace = subject.key.namespace
        await self._drain(subject, plan.drains, {pod.name: pod for pod in observed.pods})
        faults = [
            await self._apply(namespace, item, observed.objects.get(reference(item)))
            for item in plan.apply
        ]
        for each in plan.resize:
            patch = {"spec": {"replicas": each.replicas}}
            await self._cluster.merge(namespace, each.key, patch)
        for key in plan.delete:
            _log.info("deleting service=%s object=%s", subject.key, key)
            await self._cluster.delete(namespace, key)
        return next(filter(None, faults), None)

    async def _apply(self, namespace: str, item: Object, seen: Object | None) -> Fault | None:
        try:
            await self._cluster.apply(namespace, item, seen)
        except ApiError as error:
            if error.conflict and item["kind"] == workerpool.KIND and seen is not None:
                return None  # it was scaled meanwhile, and that change calls the next step
            if error.gone and item["kind"] == multi_node.KIND:
                return multi_node.MISSING
            if not error.refusal:
                raise
            there = await self._cluster.find(namespace, reference(item)) if seen is None else None
            if there is not None:
                return _name_conflict(there, error)
            return Fault("ObjectRefused", f"{reference(item)}: {error}")
        return None

    async def _drain(self, subject: Subject, drains: Drain, pods: Mapping[str, Pod]) -> None:
        for name in drains.begin:
            # First written, then told: an operator that ends in between tells it again.
            since = datetime.fromtimestamp(self._clock(), UTC).isoformat()
            await self._annotate(subject, name, {DRAINING_SINCE: since})
            await self._workers.drain(pods[name])
            await self._teller.event(subject, "Normal", "DrainStarted", f"Worker {name} drains.")
        for name in drains.repeat:
            await self._workers.drain(pods[name])
        for name in drains.cancel:
            await self._workers.undrain(pods[name])
            await self._annotate(subject, name, {DRAINING_SINCE: None, DELETION_COST: None})
        for name in drains.condemn:
            await self._annotate(subject, name, {DELETION_COST: _CONDEMNED})
            if name in drains.completed:
                text = f"Worker {name} has no requests left and goes."
                await self._teller.event(subject, "Normal", "DrainCompleted", text)
            elif name in drains.timed_out:
                text = f"Worker {name} still had requests at the drain deadline and goes."
                await self._teller.event(subject, "Warning", "DrainTimedOut", text)

    async def _annotate(
        self, subject: Subject, pod: str, annotations: Mapping[str, str | None]
    ) -> None:
        patch = {"metadata": {"annotations": annotations}}
        await self._cluster.merge(subject.key.namespace, Reference("Pod", pod), patch)


def _name_conflict(there: Object, error: ApiError) -> Fault:
    """An object has the name of one that the ModelService needs."""
    owner = controller(there)
    if owner is not None:
        text = f"belongs to {owner['kind']} {owner['name']}; rename one of the two"
    else:
        text = f"was not made by the operator; delete it, or rename the ModelService: {error}"
    return Fault("NameConflict", f"{reference(there)} {text}")
