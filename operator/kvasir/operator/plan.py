"""What should run on one machine. Pure: no I/O, no clock.

    ModelService --plan_local--> LocalPlan --supervision.next_actions--> actions

Configs are plain data for the JSON files that processes start with; the operator imports
neither the worker nor the router.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvasir.operator.modelservice import ModelService, Role
from kvasir.operator.quantity import format_bytes

HOST = "127.0.0.1"
_MOST_WORKERS = 32
"""A bound against typing errors: each worker is a process with its own copy of the model."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What this machine gives: CPU cores and bytes of memory."""

    cores: int
    memory: int


@dataclass(frozen=True, slots=True)
class Process:
    """One process that should run. ``id`` is unique within the plan."""

    id: str
    role: Literal["prefill", "decode", "router"]
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """All processes of a ModelService: its workers, then its router."""

    name: str
    served_name: str
    drain_deadline: float
    """Seconds that a stopping process has for its open requests."""
    processes: tuple[Process, ...]
    notes: tuple[str, ...] = ()
    """What the spec asks for and this machine leaves without effect; one line each."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The service is valid but cannot run here. ``problems``: ``path: what; the fix``."""

    problems: tuple[str, ...]


def revision(service: ModelService) -> str:
    """Names what makes workers' KV compatible: ten hex digits over model and engine."""
    spec = service.spec
    relevant = {"model": spec.model.model_dump(), "engine": spec.engine.model_dump()}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:10]


def plan_local(
    service: ModelService, machine: Machine, *, port: int, workers_file: Path
) -> LocalPlan | Refused:
    """The processes that serve ``service`` on this machine, or why it cannot be served.

    ``port`` is the router's HTTP port. Workers choose free ports and report them in their
    state files; the runtime collects these in ``workers_file`` for the router.
    """
    if problems := tuple(_problems(service, machine)):
        return Refused(problems)
    workers = tuple(_workers(service, machine))
    router = Process(
        id=f"{service.name}-router-0",
        role="router",
        config={
            "router_id": f"{service.name}-router-0",
            "host": HOST,
            "port": port,
            "workers_file": str(workers_file),
            "disaggregation": service.spec.disaggregation.model_dump(),
        },
    )
    return LocalPlan(
        name=service.name,
        served_name=service.served_name,
        drain_deadline=service.spec.rollout.drain_deadline,
        processes=(*workers, router),
        notes=tuple(_notes(service)),
    )


def _workers(service: ModelService, machine: Machine) -> Iterator[Process]:
    model, engine = service.spec.model, service.spec.engine
    prefill = service.spec.prefill.initial_replicas
    decode = service.spec.decode.initial_replicas
    common = {
        "host": HOST,
        "revision": revision(service),
        "model": model.source,
        "served_name": service.served_name,
        "max_model_len": model.max_model_len,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "activation_quantization": model.activation_quantization,
        # Rounded up: one core too many for a moment costs less than an idle core, because a
        # request is rarely computed on a prefill and a decode worker at the same time.
        "threads": max(1, -(-machine.cores // (prefill + decode))),
        "block_size": engine.block_size,
        "kv_cache_memory": engine.kv_cache_memory,
        "max_batched_tokens": engine.max_batched_tokens,
        "max_running_requests": engine.max_running_requests,
        "prefix_caching": engine.prefix_caching,
        "speculative_method": engine.speculative.method,
        "num_speculative_tokens": engine.speculative.most_tokens,
        "drain_deadline": service.spec.rollout.drain_deadline,
    }
    roles: tuple[tuple[Literal["prefill", "decode"], int], ...] = (
        ("prefill", prefill),
        ("decode", decode),
    )
    for role, replicas in roles:
        for index in range(replicas):
            worker_id = f"{service.name}-{role}-{index}"
            yield Process(worker_id, role, {"worker_id": worker_id, "role": role, **common})


def _problems(service: ModelService, machine: Machine) -> Iterator[str]:
    """What a cluster will honor and this runtime cannot."""
    spec = service.spec
    scheme = spec.model.source.partition("://")[0]
    if scheme not in ("bundled", "file"):
        yield (
            f"spec.model.source: {scheme}:// is not available on the local runtime; "
            "use file:///path/to/model or bundled://smollm2-135m-instruct"
        )
    if spec.model.quantization == "fp8":
        yield _unavailable("model.quantization", "fp8", "none, int8 or int4")
    if spec.engine.type != "native":
        yield _unavailable("engine.type", spec.engine.type, "native")
    yield from _role_problems("prefill", spec.prefill)
    yield from _role_problems("decode", spec.decode)
    if spec.router.initial_replicas != 1:
        yield _unavailable("router.replicas", spec.router.initial_replicas, "1")
    if spec.decode.scaling is None and spec.decode.initial_replicas == 0:
        yield "spec.decode.replicas: 0 leaves nothing that could answer; use 1 or more"
    yield from _size_problems(service, machine)


def _role_problems(role: str, spec: Role) -> Iterator[str]:
    if spec.scaling is not None:
        yield f"spec.{role}.scaling: not available on the local runtime; use spec.{role}.replicas"
    for name, size in spec.parallelism.model_dump().items():
        if size != 1:
            yield _unavailable(f"{role}.parallelism.{name}", size, "1")


def _size_problems(service: ModelService, machine: Machine) -> Iterator[str]:
    spec = service.spec
    workers = spec.prefill.initial_replicas + spec.decode.initial_replicas
    if workers > _MOST_WORKERS:
        yield (
            f"spec.prefill.replicas, spec.decode.replicas: {workers} workers are too many for "
            f"one machine; use at most {_MOST_WORKERS} together"
        )
    elif workers * spec.engine.kv_cache_memory > machine.memory:
        yield (
            f"spec.engine.kvCacheMemory: {workers} workers with "
            f"{format_bytes(spec.engine.kv_cache_memory)} each need more than this machine's "
            f"{format_bytes(machine.memory)} of memory; use a smaller size or fewer replicas"
        )


def _unavailable(field: str, value: object, instead: str) -> str:
    return f"spec.{field}: {value} is not available on the local runtime; use {instead}"


def _notes(service: ModelService) -> Iterator[str]:
    spec = service.spec
    for role, part in (("prefill", spec.prefill), ("decode", spec.decode), ("router", spec.router)):
        for field in ("resources", "accelerator", "template"):
            if getattr(part, field, None) is not None:
                yield f"spec.{role}.{field} describes pods and has no effect on the local runtime"
    if spec.objectives.ttft_p95 is not None or spec.objectives.itl_p95 is not None:
        yield "spec.objectives steer autoscaling and have no effect on the local runtime"
