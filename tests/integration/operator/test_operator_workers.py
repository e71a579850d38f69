"""What the operator asks of workers and routers, over real sockets to real workers."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import generate_latest

from helpers.fake_runner import FakeRunner
from helpers.local_worker import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    LocalWorker,
    local_worker,
    make_submit,
    router_session,
)
from kvasir.operator.cluster.observed import Fleet, Pod, WorkerLoad
from kvasir.operator.cluster.workers import PodWorkers, Ports
from kvasir.worker.contracts import StepPlan, StepResult

WORKER = Pod("w", "decode", "d", ready=True, address="127.0.0.1")
ROUTER = Pod("r", "router", "s-router", ready=True, address="127.0.0.1")


class GatedRunner(FakeRunner):
    """Computes the first step, and the others when the gate opens: loads are told between steps."""

    def __init__(self) -> None:
        super().__init__(256, BLOCK_SIZE, VOCAB_SIZE)
        self.gate = threading.Event()
        self._steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self._steps += 1
        assert self._steps == 1 or self.gate.wait(60)
        return super().execute(plan)


@asynccontextmanager
async def served(
    path: str,
    body: bytes | list[dict[str, Any]],
    status: int = 200,
    address: str = "127.0.0.1",
) -> AsyncIterator[int]:
    """A port of this machine where a path answers."""

    async def answer(_: web.Request) -> web.StreamResponse:
        if isinstance(body, bytes):
            return web.Response(body=body, status=status)
        return web.json_response(body, status=status)

    app = web.Application()
    app.add_routes([web.get(path, answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address, 0)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def asking(**ports: int) -> AsyncIterator[PodWorkers]:
    workers = PodWorkers(Ports(**ports))
    try:
        yield workers
    finally:
        await workers.close()


async def observed(
    worker: LocalWorker, *, view: list[dict[str, Any]], address: str = "127.0.0.1"
) -> Fleet:
    metrics = generate_latest(worker.server.metrics.registry)
    async with (
        served("/metrics", metrics, address=address) as metrics_port,
        served("/workers", view, address=address) as http,
        asking(engine=worker.server.port, metrics=metrics_port, http=http) as workers,
    ):
        return await workers.observe([replace(each, address=address) for each in (WORKER, ROUTER)])


async def test_a_worker_is_told_and_says_what_it_has() -> None:
    runner = GatedRunner()
    view = [{"worker_id": "w", "state": "ready", "role": "decode"}]
    async with local_worker(runner=runner) as worker, router_session(worker.stub) as session:
        fleet = await observed(worker, view=view)
        assert fleet == Fleet({"w": WorkerLoad(0, 0, draining=False)}, {"r": {"w": "ready"}})
        await session.send(submit=make_submit("a", [1, 2, 3], max_tokens=4))
        await session.until(lambda: session.loads[-1].running + session.loads[-1].waiting == 1)
        async with asking(engine=worker.server.port) as workers:
            await workers.drain(WORKER)
        load = (await observed(worker, view=view)).loads["w"]
        assert (load.running + load.waiting, load.draining) == (1, True)
        runner.gate.set()
        await session.finished("a")
        await worker.settled()
        assert (await observed(worker, view=[])).loads["w"] == WorkerLoad(0, 0, draining=True)
        async with asking(engine=worker.server.port) as workers:
            await workers.undrain(WORKER)
        assert (await observed(worker, view=[])).loads["w"] == WorkerLoad(0, 0, draining=False)


async def test_pods_of_either_address_family_are_asked() -> None:
    async with local_worker(host="::1") as worker:
        view = [{"worker_id": "w", "state": "ready"}]
        fleet = await observed(worker, view=view, address="::1")
    assert fleet == Fleet({"w": WorkerLoad(0, 0, draining=False)}, {"r": {"w": "ready"}})


async def test_routers_alone_say_whom_they_see() -> None:
    view = [{"worker_id": "w", "state": "ready"}]
    async with served("/workers", view) as http, asking(http=http) as workers:
        silent = replace(ROUTER, name="silent", address="127.0.0.2")
        gone = replace(ROUTER, name="gone", terminating=True)
        assert await workers.views([WORKER, ROUTER, silent, gone]) == {"r": {"w": "ready"}}


async def test_metrics_of_ready_pods_are_scraped() -> None:
    async with local_worker() as worker:
        metrics = generate_latest(worker.server.metrics.registry)
        async with (
            served("/metrics", metrics) as port,
            asking(metrics=port, http=port) as workers,
        ):
            starting = Pod("x", "decode", "d", address="127.0.0.1")
            samples, routers = await workers.scrape([WORKER, ROUTER, starting])
    assert list(samples) == ["w"]
    assert samples["w"].running == 0.0
    assert list(routers) == ["r"]


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b'[{"id": "w"}]', b""])
async def test_an_answer_that_is_none_counts_as_silence(body: bytes) -> None:
    async with (
        local_worker() as worker,
        served("/metrics", b"no metrics at all {") as metrics,
        served("/workers", body) as http,
        asking(engine=worker.server.port, metrics=metrics, http=http) as workers,
    ):
        assert await workers.observe([WORKER, ROUTER]) == Fleet()


async def test_who_is_not_there_is_silent() -> None:
    async with (
        served("/nothing", b"") as port,
        asking(engine=port, metrics=port, http=port) as workers,
    ):
        assert await workers.observe([WORKER, ROUTER]) == Fleet()
        assert await workers.scrape([WORKER, ROUTER]) == ({}, {})
        await workers.drain(WORKER)
        await workers.undrain(WORKER)
        gone = Pod("g", "decode", "d", ready=True, address="127.0.0.1", terminating=True)
        assert await workers.observe([gone, Pod("n", "decode", "d")]) == Fleet()
