"""The two ways to offer load: a closed loop (concurrency) and an open loop (arrival times)."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvasir.bench.stats import Record
from kvasir.bench.workload import RequestSpec

Send = Callable[[RequestSpec, float], Coroutine[Any, Any, Record]]
"""Sends one request that is due at an instant of the clock, and says what became of it."""


async def closed_loop(
    specs: Sequence[RequestSpec],
    concurrency: int,
    send: Send,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Record]:
    """Keep ``concurrency`` requests in flight until all are done. The load adapts to the
    server: latencies say nothing about a fixed arrival rate."""
    waiting = deque(specs)
    records: list[Record] = []

    async def user() -> None:
        while waiting:
            spec = waiting.popleft()
            records.append(await send(spec, clock()))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(specs))):
            group.create_task(user())
    return records


async def open_loop(
    specs: Sequence[RequestSpec],
    send: Send,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Record]:
    """Send each request when it is due, whether or not earlier ones are done.

    The due instant, not the sending, starts a request's latency: if this generator falls
    behind, latencies grow by as much and ``Record.sent - Record.due`` tells by how much.
    """
    start = clock()
    tasks: list[asyncio.Task[Record]] = []
    async with asyncio.TaskGroup() as group:
        for spec in specs:
            due = start + spec.due
            wait = due - clock()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(send(spec, due)))
    return [task.result() for task in tasks]
