"""A worker and a router as real processes, as an engine for `kvasir bench engine`.

The client runs in this process, in a thread of its own with an event loop, and reads streams as
any client would. Owns the processes and that thread, and ends both. What each answer cost in CPU
time is kept beside it.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import aiohttp
import psutil

from kvasir.bench.client import Target, send
from kvasir.bench.engine import RequestsFailedError
from kvasir.bench.stack import Stack
from kvasir.bench.stats import Record
from kvasir.bench.timeline import Timeline
from kvasir.bench.workload import Prompt, RequestSpec
from kvasir.worker.config import WorkerConfig

T = TypeVar("T")


class LoopThread:
    """A thread with an event loop; use as a context manager, which ends all work at its exit."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="client")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the loop to its end."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.run(_end_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_others() -> None:
    """Cancel what this loop still works on and wait for its end; Ctrl-C leaves it to go on."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Cost:
    """What ``requests`` at once took: seconds of the clock, and CPU seconds of each process.

    ``client_s`` counts only the thread that sends and reads.
    """

    requests: int
    wall_s: float
    worker_s: float
    router_s: float
    client_s: float


class RouterEngine:
    """One pool of one worker, asked over HTTP. See ``router_engine``."""

    def __init__(
        self, loop: LoopThread, target: Target, worker: psutil.Process, router: psutil.Process
    ) -> None:
        self._loop = loop
        self._target = target
        self._worker = worker
        self._router = router
        self.costs: list[Cost] = []
        """One for each ``generate``, in order."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        """As Generator. A token that came without text of its own counts at its stream's end."""
        specs = [RequestSpec(Prompt(tuple(prompt)), max_tokens) for prompt in prompts]
        records = self._loop.run(self._ask(specs))
        failures = [
            record.failure or f"{record.output_tokens} tokens"
            for record in records
            if record.failure is not None or record.output_tokens != max_tokens
        ]
        if failures:
            raise RequestsFailedError(failures)
        start = min(record.sent for record in records)
        return Timeline(tuple(_times(record, start) for record in records))

    async def _ask(self, specs: Sequence[RequestSpec]) -> list[Record]:
        """All requests at once, and what they cost."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        clock = time.perf_counter
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            worker, router = _cpu_seconds(self._worker), _cpu_seconds(self._router)
            client, start = time.thread_time(), clock()
            records = await asyncio.gather(
                *(send(http, self._target, spec, start, clock) for spec in specs)
            )
            self.costs.append(
                Cost(
                    requests=len(specs),
                    wall_s=clock() - start,
                    worker_s=_cpu_seconds(self._worker) - worker,
                    router_s=_cpu_seconds(self._router) - router,
                    client_s=time.thread_time() - client,
                )
            )
        return records


def _times(record: Record, start: float) -> tuple[float, ...]:
    """Seconds from ``start`` to each output token."""
    seen = [at - start for at in record.token_times]
    return (*seen, *[record.end - start] * (record.output_tokens - len(seen)))


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def router_engine(config: WorkerConfig) -> Iterator[RouterEngine]:
    """Start a worker of ``config`` and a router; end both afterwards.

    Raises:
        StackError: a process did not start, or did not end well.
    """
    with LoopThread() as loop:
        stack = Stack([config], router={"disaggregation": {"mode": "never"}})
        loop.run(stack.__aenter__())
        try:
            yield RouterEngine(
                loop,
                Target(url=stack.url, model=config.served_name),
                psutil.Process(stack.worker(config.worker_id).pid),
                psutil.Process(stack.router.pid),
            )
        except BaseException as error:
            loop.run(stack.__aexit__(type(error), error, error.__traceback__))
            raise
        loop.run(stack.__aexit__(None, None, None))
