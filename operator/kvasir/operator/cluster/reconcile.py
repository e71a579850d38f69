"""One step of one ModelService: observe, plan, act, tell. The only place that acts on a plan.

Stateless: each step starts from what the API server, the workers and the routers say. An order
that matters: what protects requests (drains) comes before what ends pods.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from pydantic import ValidationError

from kvasir.operator import modelservice, workerpool
from kvasir.operator.cluster import names, status
from kvasir.operator.cluster.autoscaler import PERIOD, Autoscaler, last_decision
from kvasir.operator.cluster.client import ApiError, Cluster
from kvasir.operator.cluster.drain import Drain
from kvasir.operator.cluster.objects import Installation
from kvasir.operator.cluster.observed import (
    DELETION_COST,
    DRAINING_SINCE,
    Fault,
    Object,
    Observed,
    Pod,
    Reference,
    observe,
    reference,
)
from kvasir.operator.cluster.plan import Plan, needs_fleet, next_step
from kvasir.operator.cluster.queue import Key, StepError
from kvasir.operator.cluster.refusals import refusal
from kvasir.operator.cluster.workers import Workers
from kvasir.operator.manifest import problems_of
from kvasir.operator.modelservice import ModelService
from kvasir.operator.resource_status import LastDecision, ModelServiceStatus, dump

KINDS = (
    "ConfigMap",
    "Deployment",
    "NetworkPolicy",
    "Pod",
    "PodDisruptionBudget",
    "Role",
    "RoleBinding",
    "Service",
    "ServiceAccount",
    "WorkerPool",
)
"""What a ModelService has objects of."""

_RESYNC = 300.0
"""Seconds between two looks at a service that nothing happens to: a watch may miss something."""
_SOON = 1.0
"""Seconds between two questions to workers that drain, and to routers."""
_RETRY = 10.0
"""Seconds until an object that the API server refused is tried again: what hindered it may go."""
_CONDEMNED = "-1000"

_log = logging.getLogger("kvasir.operator")


@dataclass(frozen=True, slots=True)
class _Service:
    """A ModelService as it was read."""

    key: Key
    body: Object

    @property
    def generation(self) -> int:
        return int(self.body["metadata"]["generation"])

    def seen(self, now: float) -> status.Seen:
        stored = self.body.get("status") or {}
        return status.Seen(self.key.namespace, self.generation, stored, now)


class Reconciler:
    """Makes steps of the ModelServices of one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        workers: Workers,
        installation: Installation,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock``: seconds since the Unix epoch."""
        self._cluster = cluster
        self._workers = workers
        self._installation = installation
        self._clock = clock
        self._autoscaler = Autoscaler(workers, clock)
        self._steps = Counter(
            "kvasir_operator_reconciliations",
            "Steps of ModelServices, by how they ended",
            ["outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "kvasir_operator_reconciliation_seconds", "Duration of a step", registry=registry
        )

    async def __call__(self, key: Key) -> float | None:
        """One step; returns when the next one is due, changes or not, as ``queue.Reconcile``."""
        with self._seconds.time():
            try:
                again = await self._step(key)
            except ApiError as error:
                self._steps.labels("failed").inc()
                raise StepError(str(error)) from error
        self._steps.labels("done").inc()
        return again

    async def _step(self, key: Key) -> float | None:
        body = await self._cluster.get(key.namespace, Reference(modelservice.KIND, key.name))
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._autoscaler.forget(key)
            self._cluster.forget(key.namespace, key.name)
            return None  # its objects go with it, by their owner references
        service = _Service(key, body)
        try:
            spec = ModelService.model_validate(body)
        except ValidationError as error:
            await self._refuse(service, "Invalid", problems_of(error))
            return _RESYNC
        if refused := refusal(spec):
            await self._refuse(service, "Unsupported", refused.problems)
            return _RESYNC
        observed = await self._observe(key, spec)
        plan = next_step(spec, self._installation, observed, self._clock())
        fault = await self._act(service, plan, observed)
        decision = await self._autoscale(service, spec, observed)
        told = status.service_status(spec, observed, plan, service.seen(self._clock()), fault)
        if decision is not None:
            told = told.model_copy(update={"last_decision": decision})
        await self._tell(service, told)
        await self._tell_pools(service, told, observed)
        if plan.undecided:
            return _SOON
        if fault is not None:
            return _RETRY
        scaled = spec.spec.prefill.scaling or spec.spec.decode.scaling
        return PERIOD if scaled else _RESYNC

    async def _observe(self, key: Key, spec: ModelService) -> Observed:
        selector = f"{names.SERVICE_LABEL}={key.name}"
        found = await asyncio.gather(
            *(self._cluster.list(key.namespace, kind, selector) for kind in KINDS)
        )
        observed = observe(item for items in found for item in items)
        if needs_fleet(spec, self._installation, observed):
            observed = replace(observed, fleet=await self._workers.observe(observed.pods))
        return observed

    # --- acting -------------------------------------------------------------------------------

    async def _act(self, service: _Service, plan: Plan, observed: Observed) -> Fault | None:
        """Do what the plan says; what the API server refuses is returned, the rest done."""
        namespace = service.key.namespace
        await self._drain(service, plan.drains, {pod.name: pod for pod in observed.pods})
        faults = [
            await self._apply(namespace, item, observed.objects.get(reference(item)))
            for item in plan.apply
        ]
        for each in plan.resize:
            patch = {"spec": {"replicas": each.replicas}}
            await self._cluster.merge(namespace, Reference("Deployment", each.deployment), patch)
        for key in plan.delete:
            _log.info("deleting service=%s object=%s", service.key, key)
            await self._cluster.delete(namespace, key)
        return next(filter(None, faults), None)

    async def _apply(self, namespace: str, item: Object, seen: Object | None) -> Fault | None:
        try:
            await self._cluster.apply(namespace, item, seen)
        except ApiError as error:
            if error.conflict and item["kind"] == workerpool.KIND and seen is not None:
                return None  # it was scaled meanwhile, and that change calls the next step
            if not error.refusal:
                raise
            reason = "NameConflict" if error.conflict else "ObjectRefused"
            return Fault(reason, f"{reference(item)}: {error}")
        return None

    async def _autoscale(
        self, service: _Service, spec: ModelService, observed: Observed
    ) -> LastDecision | None:
        """Scale pools as the load asks, as anybody else would; the change calls the next step."""
        made = None
        for decision in await self._autoscaler.changes(service.key, spec, observed):
            key = Reference(workerpool.KIND, names.pool(service.key.name, decision.role))
            version = observed.objects[key]["metadata"]["resourceVersion"]
            patch = {
                "metadata": {"resourceVersion": version},
                "spec": {"replicas": decision.desired},
            }
            try:
                await self._cluster.merge(service.key.namespace, key, patch)
            except ApiError as error:
                if not error.conflict:
                    raise
                continue  # somebody else scaled it at this moment, or the plan did
            made = last_decision(decision)
            await self._event(service, "Normal", "Scaled", decision.reason)
        return made

    async def _drain(self, service: _Service, drains: Drain, pods: Mapping[str, Pod]) -> None:
        for name in drains.begin:
            # First written, then told: an operator that ends in between tells it again.
            since = datetime.fromtimestamp(self._clock(), UTC).isoformat()
            await self._annotate(service, name, {DRAINING_SINCE: since})
            await self._workers.drain(pods[name])
            await self._event(service, "Normal", "DrainStarted", f"Worker {name} drains.")
        for name in drains.repeat:
            await self._workers.drain(pods[name])
        for name in drains.cancel:
            await self._workers.undrain(pods[name])
            await self._annotate(service, name, {DRAINING_SINCE: None, DELETION_COST: None})
        for name in drains.condemn:
            await self._annotate(service, name, {DELETION_COST: _CONDEMNED})
            if name in drains.completed:
                text = f"Worker {name} has no requests left and goes."
                await self._event(service, "Normal", "DrainCompleted", text)
            elif name in drains.timed_out:
                text = f"Worker {name} still had requests at the drain deadline and goes."
                await self._event(service, "Warning", "DrainTimedOut", text)

    async def _annotate(
        self, service: _Service, pod: str, annotations: Mapping[str, str | None]
    ) -> None:
        patch = {"metadata": {"annotations": annotations}}
        await self._cluster.merge(service.key.namespace, Reference("Pod", pod), patch)

    # --- telling ------------------------------------------------------------------------------

    async def _refuse(self, service: _Service, reason: str, problems: tuple[str, ...]) -> None:
        seen = service.seen(self._clock())
        await self._tell(service, status.refused_status(reason, problems, seen))

    async def _tell(self, service: _Service, told: ModelServiceStatus) -> None:
        stored = service.body.get("status") or {}
        if dump(told) == stored:
            return
        await self._cluster.apply_status(
            service.key.namespace, _only_status(service.body, dump(told))
        )
        for event in status.transitions(stored, told):
            await self._event(service, event.type, event.reason, event.message)

    async def _tell_pools(
        self, service: _Service, told: ModelServiceStatus, observed: Observed
    ) -> None:
        for pool in observed.pools:
            role = told.roles.prefill if pool.role == "prefill" else told.roles.decode
            new = dump(status.pool_status(pool.role, service.key.name, role, pool.generation))
            if new == pool.status:
                continue
            key = Reference(workerpool.KIND, names.pool(service.key.name, pool.role))
            await self._cluster.apply_status(
                service.key.namespace, _only_status(observed.objects[key], new)
            )

    async def _event(self, service: _Service, kind: str, reason: str, message: str) -> None:
        now = datetime.fromtimestamp(int(self._clock()), UTC).isoformat().replace("+00:00", "Z")
        metadata = service.body["metadata"]
        _log.info("%s service=%s %s", reason, service.key, message)
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{service.key.name}."},
            "involvedObject": {
                "apiVersion": modelservice.API_VERSION,
                "kind": modelservice.KIND,
                "name": service.key.name,
                "namespace": service.key.namespace,
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
            await self._cluster.create(service.key.namespace, event)
        except ApiError as error:  # whoever reads events misses one; nothing else depends on it
            _log.warning("event not written service=%s error=%s", service.key, error)


def _only_status(item: Object, told: Mapping[str, Any]) -> Object:
    return {
        "apiVersion": modelservice.API_VERSION,
        "kind": item["kind"],
        "metadata": {"name": item["metadata"]["name"], "uid": item["metadata"]["uid"]},
        "status": told,
    }
