"""A cluster small enough to run a plan in: Deployments, pods, accelerators, workers and routers.

Plays the parts of Kubernetes that a plan relies on, a tick at a time: ReplicaSets that create and
delete pods in the order that Kubernetes documents, pods that take a while to be ready, a scheduler
with few places, workers that finish requests, routers that see it all. Times are seconds.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from kvasir.operator.cluster.faults import Fault
from kvasir.operator.cluster.names import (
    POD_REVISION_LABEL,
    REVISION_LABEL,
    ROLE_LABEL,
    WORKER_ROLES,
)
from kvasir.operator.cluster.objects import Installation, router_deployment
from kvasir.operator.cluster.observed import (
    Fleet,
    Observed,
    Pod,
    Reference,
    WorkerLoad,
    observe,
    reference,
)
from kvasir.operator.cluster.places import Needs
from kvasir.operator.cluster.plan import Plan, needs_fleet, next_step
from kvasir.operator.modelservice import ModelService

INSTALLATION = Installation("worker:1", "router:1")
ACCOUNT = "a1"
"""Uid of the routers' ServiceAccount."""
ACCOUNT_OBJECTS = {Reference("ServiceAccount", "s-router"): {"metadata": {"uid": ACCOUNT}}}
PATIENCE = 2.0
NO_PLACE = Fault(
    "Unschedulable",
    "0/1 nodes are available: 1 Insufficient example.com/gpu. preemption: 0/1 nodes are available: "
    "1 No preemption victims found for incoming pod.",
)
ONE_PLACE = Needs({"example.com/gpu": Decimal(1)})


def service(**spec: Any) -> ModelService:
    """A ModelService as the API server has it."""
    return ModelService.model_validate(
        {
            "apiVersion": "kvasir.dev/v1alpha1",
            "kind": "ModelService",
            "metadata": {"name": "s", "namespace": "n", "uid": "1", "generation": 1},
            "spec": {"model": {"source": "bundled://smollm2-135m-instruct"}, **spec},
        }
    )


def router_revision(spec: ModelService) -> str:
    """Of the newest routers."""
    template = router_deployment(spec, INSTALLATION, 1, ACCOUNT)["spec"]["template"]
    return str(template["metadata"]["labels"][POD_REVISION_LABEL])


@dataclass
class Worker:
    """A pod with what runs in it; ``ready_at`` counts once it has a place."""

    pod: Pod
    requests: int = 0
    draining: bool = False
    ready_at: float = 0.0


@dataclass
class Simulation:
    """``places``: workers that fit beside each other; ``start``: seconds until one is ready."""

    spec: ModelService
    places: int = 100
    start: float = 3.0
    broken: bool = False
    """New pods never become ready."""
    now: float = 1000.0
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    """Workers that went with requests."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def observed(self) -> Observed:
        seen = replace(
            observe(self.objects.values(), "1"),
            pods=(
                Pod(
                    "router-0",
                    "router",
                    "s-router",
                    ready=True,
                    pod_revision=router_revision(self.spec),
                ),
                *(worker.pod for worker in self.workers.values()),
            ),
        )
        if not needs_fleet(self.spec, INSTALLATION, seen):
            return seen
        ready = {name: each for name, each in self.workers.items() if each.pod.ready}
        return replace(
            seen,
            fleet=Fleet(
                {name: WorkerLoad(each.requests, 0, each.draining) for name, each in ready.items()},
                {
                    "router-0": {
                        name: "draining" if each.draining else "ready"
                        for name, each in ready.items()
                    }
                },
            ),
        )

    def step(self) -> Plan:
        """One step of an operator, then a second of everything else."""
        plan = self.plan()
        self.act(plan)
        self.tick()
        return plan

    def plan(self) -> Plan:
        return next_step(self.spec, INSTALLATION, self.observed(), self.now, PATIENCE)

    def act(self, plan: Plan) -> None:
        drains = plan.drains
        for name in drains.begin:
            self._mark(name, draining_since=self.now)
        for name in (*drains.begin, *drains.repeat):
            self.workers[name].draining = True
        for name in drains.cancel:
            self.workers[name].draining = False
            self._mark(name, draining_since=None, condemned=False)
        for name in drains.condemn:
            self._mark(name, condemned=True)
        for item in plan.apply:
            if item["kind"] in ("Deployment", "WorkerPool", "ConfigMap", "ServiceAccount"):
                self._apply(item)
        for resize in plan.resize:
            self.objects[str(resize.key)]["spec"]["replicas"] = resize.replicas
        for key in plan.delete:
            self.objects.pop(str(key))

    def tick(self) -> None:
        """A second in which everybody does all that there is to do."""
        self.now += 1
        self.finish_requests()
        self.end_pods()
        self.replicate()
        self.schedule()
        self.start_workers()

    def finish_requests(self) -> None:
        """One of each draining worker."""
        for worker in self.workers.values():
            if worker.draining and not worker.pod.terminating:
                worker.requests = max(0, worker.requests - 1)

    def end_pods(self) -> None:
        """Those that are told to."""
        for worker in list(self.workers.values()):
            if worker.pod.terminating:
                self._end(worker)

    def replicate(self) -> None:
        """What the Deployments' controllers do."""
        owners = {
            key.removeprefix("Deployment "): item
            for key, item in self.objects.items()
            if key.startswith("Deployment ") and item["metadata"]["labels"][ROLE_LABEL] != "router"
        }
        for worker in self.workers.values():
            if worker.pod.deployment not in owners:
                self._mark(worker.pod.name, terminating=True)
        for name, item in owners.items():
            self._replicate(name, item)

    def schedule(self) -> None:
        """What the scheduler does."""
        free = self.places - sum(worker.pod.scheduled for worker in self.workers.values())
        for worker in self.workers.values():
            name = worker.pod.name
            if worker.pod.scheduled or worker.pod.terminating:
                continue
            if free > 0:
                free -= 1
                worker.ready_at = self.now + self.start
                placed = {"fault": None, "unplaced_since": None, "address": "10.0.0.1"}
                self._mark(name, scheduled=True, **placed)
            elif worker.pod.fault is None:
                self._mark(name, fault=NO_PLACE, unplaced_since=self.now)

    def start_workers(self) -> None:
        """Those that have had their place for long enough become ready."""
        for worker in self.workers.values():
            if worker.pod.scheduled and not worker.pod.ready and not self.broken:
                self._mark(worker.pod.name, ready=self.now >= worker.ready_at)

    def scale(self, role: str, replicas: int) -> None:
        """As kubectl scale does."""
        self.objects[f"WorkerPool s-{role}"]["spec"]["replicas"] = replicas

    def ready(self, role: str, deployment: str | None = None) -> int:
        """Workers that take requests."""
        return sum(
            worker.pod.ready and not worker.draining and not worker.pod.terminating
            for worker in self.workers.values()
            if worker.pod.role == role and deployment in (None, worker.pod.deployment)
        )

    def deployments(self, role: str) -> dict[str, int]:
        """Name to replicas."""
        return {
            item["metadata"]["name"]: item["spec"]["replicas"]
            for item in self.objects.values()
            if item["kind"] == "Deployment" and item["metadata"]["labels"].get(ROLE_LABEL) == role
        }

    def serves(self) -> bool:
        """Whether some revision has ready workers of both roles."""
        revisions = [
            {
                w.pod.revision
                for w in self.workers.values()
                if w.pod.role == role and takes_requests(w)
            }
            for role in WORKER_ROLES
        ]
        return bool(revisions[0] & revisions[1])

    def _apply(self, item: Mapping[str, Any]) -> None:
        key = str(reference(item))
        made = {"resourceVersion": "1", "uid": ACCOUNT}
        self.objects[key] = {**item, "metadata": {**item["metadata"], **made}}

    def _mark(self, name: str, **changes: Any) -> None:
        worker = self.workers[name]
        worker.pod = replace(worker.pod, **changes)

    def _end(self, worker: Worker) -> None:
        if worker.requests:
            self.lost.append(worker.pod.name)
        del self.workers[worker.pod.name]

    def _replicate(self, deployment: str, item: Mapping[str, Any]) -> None:
        """https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#scaling-a-replicaset"""
        alive = [
            worker.pod
            for worker in self.workers.values()
            if worker.pod.deployment == deployment and not worker.pod.terminating
        ]
        labels = item["metadata"]["labels"]
        for _ in range(item["spec"]["replicas"] - len(alive)):
            name = f"{deployment}-{next(self._numbers)}"
            pod = Pod(
                name=name,
                role=labels[ROLE_LABEL],
                deployment=deployment,
                revision=labels[REVISION_LABEL],
                scheduled=False,
                created=self.now,
                needs=ONE_PLACE,
            )
            self.workers[name] = Worker(pod)
        alive.sort(key=lambda pod: (pod.scheduled, pod.ready, not pod.condemned, -pod.created))
        for pod in alive[: max(0, len(alive) - item["spec"]["replicas"])]:
            self._mark(pod.name, terminating=True)


def takes_requests(worker: Worker) -> bool:
    return worker.pod.ready and not worker.draining and not worker.pod.terminating
