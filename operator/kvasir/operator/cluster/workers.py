"""The only module that talks to the workers and routers of a ModelService.

Whoever does not answer in time is absent from the answer; what that means is the plan's part.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import time
from typing import Protocol, TypeVar

import aiohttp
import grpc

from kvasir.operator.cluster.names import GRPC_PORT, HTTP_PORT, METRICS_PORT
from kvasir.operator.cluster.observed import Fleet, Pod, WorkerLoad
from kvasir.operator.signals import (
    RouterSample,
    Unreadable,
    WorkerSample,
    parse_router,
    parse_worker,
)
from kvasir.proto.process import join_host_port
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1 import engine_pb2_grpc as rpc

_TIMEOUT = 3.0
"""Seconds for each question."""

S = TypeVar("S", WorkerSample, RouterSample)

_log = logging.getLogger("kvasir.operator")


class Workers(Protocol):
    """Effects on, and answers of, what runs in the pods."""

    async def observe(self, pods: Sequence[Pod]) -> Fleet:
        """Asks all workers and routers among the pods, at the same time."""
        ...

    async def views(self, pods: Sequence[Pod]) -> Mapping[str, Mapping[str, str]]:
        """``Fleet.routers``: asks the routers among the pods."""
        ...

    async def scrape(
        self, pods: Sequence[Pod]
    ) -> tuple[dict[str, WorkerSample], dict[str, RouterSample]]:
        """Metrics of the ready workers and routers among the pods, by name."""
        ...

    async def drain(self, pod: Pod) -> None:
        """Tells a worker to refuse new requests. One that does not answer is told again later."""
        ...

    async def undrain(self, pod: Pod) -> None:
        """Tells a worker to accept requests again. One that does not answer needs no telling."""
        ...


@dataclass(frozen=True, slots=True)
class Ports:
    """Where pods listen; see names.py."""

    engine: int = GRPC_PORT
    metrics: int = METRICS_PORT
    http: int = HTTP_PORT


class PodWorkers:
    """The workers and routers at the pods' addresses. Close it when done."""

    def __init__(self, ports: Ports | None = None) -> None:
        self._ports = ports or Ports()
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT))

    async def close(self) -> None:
        await self._http.close()

    async def observe(self, pods: Sequence[Pod]) -> Fleet:
        workers, routers = _reachable(pods)
        loads, views = await asyncio.gather(
            asyncio.gather(*map(self._load, workers)), self.views(routers)
        )
        return Fleet(
            loads={pod.name: load for pod, load in zip(workers, loads, strict=True) if load},
            routers=views,
        )

    async def views(self, pods: Sequence[Pod]) -> Mapping[str, Mapping[str, str]]:
        _, routers = _reachable(pods)
        views = await asyncio.gather(*map(self._view, routers))
        return {
            pod.name: view for pod, view in zip(routers, views, strict=True) if view is not None
        }

    async def scrape(
        self, pods: Sequence[Pod]
    ) -> tuple[dict[str, WorkerSample], dict[str, RouterSample]]:
        workers, routers = _reachable([pod for pod in pods if pod.ready])
        of_workers, of_routers = await asyncio.gather(
            asyncio.gather(*(self._sample(p, self._ports.metrics, parse_worker) for p in workers)),
            asyncio.gather(*(self._sample(p, self._ports.http, parse_router) for p in routers)),
        )
        return (
            {pod.name: one for pod, one in zip(workers, of_workers, strict=True) if one},
            {pod.name: one for pod, one in zip(routers, of_routers, strict=True) if one},
        )

    async def drain(self, pod: Pod) -> None:
        try:
            async with grpc.aio.insecure_channel(self._engine(pod)) as channel:
                await rpc.EngineStub(channel).Drain(pb.DrainRequest(), timeout=_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            _log.warning("not told to drain worker=%s error=%s", pod.name, error.code().name)

    async def undrain(self, pod: Pod) -> None:
        try:
            async with grpc.aio.insecure_channel(self._engine(pod)) as channel:
                await rpc.EngineStub(channel).Undrain(pb.UndrainRequest(), timeout=_TIMEOUT)
        except grpc.aio.AioRpcError as error:
            _log.warning("not told to go on worker=%s error=%s", pod.name, error.code().name)

    async def _load(self, pod: Pod) -> WorkerLoad | None:
        """None: no answer, or one that leaves open whether requests run."""
        try:
            async with grpc.aio.insecure_channel(self._engine(pod)) as channel:
                info = await rpc.EngineStub(channel).GetInfo(pb.GetInfoRequest(), timeout=_TIMEOUT)
        except grpc.aio.AioRpcError:
            return None
        sample = await self._sample(pod, self._ports.metrics, parse_worker)
        if sample is None:
            return None
        running, waiting = sample.running, sample.waiting
        if not isinstance(running, float) or not isinstance(waiting, float):
            return None
        return WorkerLoad(int(running), int(waiting), info.draining)

    async def _sample(
        self, pod: Pod, port: int, parse: Callable[[str, float], S | Unreadable]
    ) -> S | None:
        try:
            text = await self._get(pod, port, "/metrics")
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        sample = parse(text, time())
        if isinstance(sample, Unreadable):
            _log.warning("metrics not readable pod=%s: %s", pod.name, sample.why)
            return None
        return sample

    async def _view(self, pod: Pod) -> dict[str, str] | None:
        """Worker to state, as a router sees it."""
        try:
            found = json.loads(await self._get(pod, self._ports.http, "/workers"))
            return {worker["worker_id"]: worker["state"] for worker in found}
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            return None

    async def _get(self, pod: Pod, port: int, path: str) -> str:
        url = f"http://{join_host_port(pod.address, port)}{path}"
        async with self._http.get(url, raise_for_status=True) as answer:
            return await answer.text()

    def _engine(self, pod: Pod) -> str:
        return join_host_port(pod.address, self._ports.engine)


def _reachable(pods: Sequence[Pod]) -> tuple[list[Pod], list[Pod]]:
    """Workers and routers that have an address."""
    alive = [pod for pod in pods if pod.address and not pod.terminating]
    return (
        [pod for pod in alive if pod.role != "router"],
        [pod for pod in alive if pod.role == "router"],
    )
