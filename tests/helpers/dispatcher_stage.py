"""A dispatcher in front of fake workers: starts them, asks it, and takes its events apart."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

from prometheus_client import CollectorRegistry

from helpers.fake_script import Script
from helpers.fake_worker import FakeWorker
from kvasir.proto.sampling import SamplingParams
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.router.config import Disaggregation, RouterConfig
from kvasir.router.contracts import (
    Dispatcher,
    Generation,
    GenerationEvent,
    Refused,
    TokenEvent,
)
from kvasir.router.dispatcher import FleetDispatcher

PROMPT = tuple(range(100, 140))


def generation(
    request_id: str = "r1",
    *,
    prompt: tuple[int, ...] = PROMPT,
    max_tokens: int = 20,
    seed: int = 5,
    sampling: SamplingParams | None = None,
    group: str = "",
) -> Generation:
    sampling = sampling or SamplingParams(seed=seed, max_tokens=max_tokens)
    return Generation(request_id, prompt, sampling, group=group)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


class Stage:
    """Fake workers, their discovery file and a dispatcher; all closed at the end."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.file = folder / "workers.json"
        self.stack = stack
        self.registry = CollectorRegistry()
        self.addresses: dict[str, str] = {}

    def write_file(self) -> None:
        workers = [{"id": k, "address": v} for k, v in self.addresses.items()]
        temporary = self.file.with_suffix(".new")
        temporary.write_text(json.dumps({"workers": workers}))
        temporary.replace(self.file)

    async def worker(
        self,
        worker_id: str,
        role: pb.Role.ValueType = pb.ROLE_BOTH,
        script: Script | None = None,
        **info: object,
    ) -> FakeWorker:
        worker = FakeWorker(worker_id, role=role, script=script)
        for name, value in info.items():
            setattr(worker.info, name, value)
        await worker.start()
        self.stack.push_async_callback(worker.stop)
        self.addresses[worker_id] = worker.address
        self.write_file()
        return worker

    async def dispatcher(
        self,
        *,
        ready: int = 1,
        disaggregation: Disaggregation | None = None,
        queue_limit: int = 100,
        no_worker_timeout: float = 20.0,
        replay_timeout: float = 20.0,
    ) -> FleetDispatcher:
        config = RouterConfig(
            workers_file=self.file,
            disaggregation=disaggregation or Disaggregation(),
            queue_limit=queue_limit,
            no_worker_timeout=no_worker_timeout,
            replay_timeout=replay_timeout,
        )
        dispatcher = FleetDispatcher(config, self.registry)
        await dispatcher.start()
        self.stack.push_async_callback(dispatcher.close)
        await until(lambda: sum(w.state == "ready" for w in dispatcher.workers()) >= ready)
        return dispatcher

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"kvasir_router_{name}", labels)


async def collect(
    dispatcher: Dispatcher,
    request: Generation,
    on_event: Callable[[list[GenerationEvent]], Awaitable[None]] | None = None,
) -> list[GenerationEvent]:
    events: list[GenerationEvent] = []
    async with aclosing(dispatcher.generate(request)) as stream:
        async for event in stream:
            events.append(event)
            if on_event is not None:
                await on_event(events)
    return events


def tokens(events: list[GenerationEvent]) -> list[int]:
    return [t for event in events if isinstance(event, TokenEvent) for t in event.token_ids]


def refusal(events: list[GenerationEvent]) -> Refused:
    last = events[-1]
    assert isinstance(last, Refused)
    return last
