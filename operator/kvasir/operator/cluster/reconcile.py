"""One step of one ModelService: observe, plan, act, tell.

Stateless: each step starts from what the API server, the workers and the routers say.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Histogram
from pydantic import ValidationError

from kvasir.operator import modelservice, workerpool
from kvasir.operator.cluster import names, status
from kvasir.operator.cluster.acting import Actor
from kvasir.operator.cluster.autoscaler import (
    PERIOD,
    Autoscaler,
    held_to_bounds,
    last_decision,
)
from kvasir.operator.cluster.client import ApiError, Cluster
from kvasir.operator.cluster.objects import Installation
from kvasir.operator.cluster.observed import (
    Fleet,
    Observed,
    Reference,
    observe,
)
from kvasir.operator.cluster.plan import needs_fleet, next_step
from kvasir.operator.cluster.queue import Key, StepError
from kvasir.operator.cluster.reach import WORKERS_NOT_REACHED
from kvasir.operator.cluster.refusals import refusal
from kvasir.operator.cluster.rollout import PATIENCE
from kvasir.operator.cluster.telling import Subject, Teller
from kvasir.operator.cluster.workers import Workers
from kvasir.operator.manifest import problems_of
from kvasir.operator.modelservice import ModelService
from kvasir.operator.resource_status import LastDecision

KINDS = (
    "ConfigMap",
    "Deployment",
    "LeaderWorkerSet",
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

RESYNC = 300.0
"""Seconds between two looks at a service that nothing happens to: a watch may miss something."""
_SOON = 1.0
"""Seconds between two questions to workers that drain, and to routers."""
_RETRY = 10.0
"""Seconds until an object that the API server refused is tried again: what hindered it may go."""

_log = logging.getLogger("kvasir.operator")


class Reconciler:
    """Makes steps of the ModelServices of one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        workers: Workers,
        installation: Installation,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.time,
        patience: float = PATIENCE,
    ) -> None:
        """``clock``: seconds since the Unix epoch. ``patience``: as in ``next_step``."""
        self._cluster = cluster
        self._workers = workers
        self._installation = installation
        self._clock = clock
        self._patience = patience
        self._teller = Teller(cluster, clock)
        self._act = Actor(cluster, workers, self._teller, clock)
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
        subject = Subject(key, body)
        try:
            spec = ModelService.model_validate(body)
        except ValidationError as error:
            await self._teller.refuse(subject, "Invalid", problems_of(error))
            return RESYNC
        if refused := refusal(spec):
            await self._teller.refuse(subject, "Unsupported", refused.problems)
            return RESYNC
        observed = await self._observe(key, spec)
        now = self._clock()
        plan = next_step(spec, self._installation, observed, now, self._patience)
        fault = await self._act(subject, plan, observed)
        decision = await self._autoscale(subject, spec, observed)
        told = status.service_status(spec, observed, plan, subject.seen(self._clock()), fault)
        if decision is not None:
            told = told.model_copy(update={"last_decision": decision})
        if fault is None:
            for text in held_to_bounds(spec, observed):
                await self._teller.event(subject, "Normal", "ScalingLimited", text)
        await self._teller.tell(subject, told)
        await self._teller.tell_pools(subject, told, observed)
        if plan.undecided:
            return _SOON
        if fault is not None:
            return _RETRY
        if any(each.reason == WORKERS_NOT_REACHED for each in told.conditions):
            return _SOON
        scaled = spec.spec.prefill.scaling or spec.spec.decode.scaling
        return PERIOD if scaled else RESYNC

    async def _observe(self, key: Key, spec: ModelService) -> Observed:
        selector = f"{names.SERVICE_LABEL}={key.name}"
        found = await asyncio.gather(
            *(self._cluster.list(key.namespace, kind, selector) for kind in KINDS)
        )
        observed = observe((item for items in found for item in items), spec.metadata.uid)
        if needs_fleet(spec, self._installation, observed):
            return replace(observed, fleet=await self._workers.observe(observed.pods))
        return replace(observed, fleet=Fleet(routers=await self._workers.views(observed.pods)))

    async def _autoscale(
        self, subject: Subject, spec: ModelService, observed: Observed
    ) -> LastDecision | None:
        """Scale pools as the load asks, as anybody else would; the change calls the next step."""
        scaled = limited = None
        for decision in await self._autoscaler.decisions(subject.key, spec, observed):
            key = Reference(workerpool.KIND, names.pool(subject.key.name, decision.role))
            pool = observed.objects[key]
            if decision.desired == pool["spec"]["replicas"]:
                limited = decision
                await self._teller.event(subject, "Normal", "ScalingLimited", decision.reason)
                continue
            patch = {
                "metadata": {"resourceVersion": pool["metadata"]["resourceVersion"]},
                "spec": {"replicas": decision.desired},
            }
            try:
                await self._cluster.merge(subject.key.namespace, key, patch)
            except ApiError as error:
                if not error.conflict:
                    raise
                continue  # somebody else scaled it at this moment, or the plan did
            scaled = decision
            await self._teller.event(subject, "Normal", "Scaled", decision.reason)
        made = scaled or limited
        return None if made is None else last_decision(made)
