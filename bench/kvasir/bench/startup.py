"""`kvasir bench startup`: how soon a worker is ready, and what its memory holds.

Each run is a new worker process behind a router. Its resident size is read when it is ready, and
again after it has served requests that fill its largest step.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import aiohttp
import psutil

from kvasir.bench.stack import Stack, StackError
from kvasir.bench.stats import Spread, spread
from kvasir.bench.trial import Progress
from kvasir.worker.config import WorkerConfig

_RESIDENT = "process_resident_memory_bytes"
_HELD = "kvasir_worker_memory_bytes"
_REQUESTS = 16
_OUTPUT = 32
_VOCABULARY = 128
"""Token ids below this are drawn: every model has them. The first few may be special."""


@dataclass(frozen=True, slots=True)
class Start:
    """One start. Sizes are bytes; ``serving`` is the resident size after requests.

    ``computes``: with what, and how, as the worker has said; see Process.computes.
    """

    ready_s: float
    weights: int
    kv: int
    resident: int
    serving: int
    computes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Figure:
    """All runs: seconds from the birth of the process to its ready line, and bytes.

    ``other`` is what is resident beside weights and KV, ``other_serving`` the same after requests.
    """

    ready_s: Spread
    weights: Spread
    kv: Spread
    resident: Spread
    other: Spread
    serving: Spread
    other_serving: Spread


def summarize(starts: Sequence[Start]) -> Figure:
    """The figure of one start or more."""
    return Figure(
        ready_s=spread([start.ready_s for start in starts]),
        weights=spread([start.weights for start in starts]),
        kv=spread([start.kv for start in starts]),
        resident=spread([start.resident for start in starts]),
        other=spread([start.resident - start.weights - start.kv for start in starts]),
        serving=spread([start.serving for start in starts]),
        other_serving=spread([start.serving - start.weights - start.kv for start in starts]),
    )


async def measure(worker: WorkerConfig, runs: int, seed: int, progress: Progress) -> list[Start]:
    """One start after the other.

    Raises:
        RefusedStartError: the worker refused its configuration.
        StackError: the worker did not start, or a request failed.
    """
    starts = []
    for run in range(runs):
        progress(f"start {run + 1} of {runs}")
        async with Stack([worker]) as stack:
            starts.append(await _start(stack, worker, Random(f"{seed}/{run}")))
    return starts


def born(pid: int) -> float:
    """When a process was started, in seconds since the Unix epoch, to the kernel's tick of 10 ms.

    psutil counts from the time of the last boot, which Linux tells in whole seconds. By the clock
    that runs since then, the process's age is known without it.
    """
    since_boot = psutil.Process(pid).create_time() - psutil.boot_time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


async def _start(stack: Stack, worker: WorkerConfig, random: Random) -> Start:
    name = worker.worker_id
    birth = born(stack.worker(name).pid)
    ready = (stack.folder / f"{name}.state.json").stat().st_mtime
    before = await stack.worker_metrics(name)
    await _serve(stack, worker, random)
    after = await stack.worker_metrics(name)
    return Start(
        ready_s=ready - birth,
        weights=int(before.total(_HELD, part="weights")),
        kv=int(before.total(_HELD, part="kv")),
        resident=int(before.total(_RESIDENT)),
        serving=int(after.total(_RESIDENT)),
        computes=stack.worker(name).computes(),
    )


async def _serve(stack: Stack, worker: WorkerConfig, random: Random) -> None:
    length = min(worker.max_batched_tokens, worker.max_model_len - _OUTPUT)
    bodies = [
        {
            "model": worker.served_name,
            "prompt": random.choices(range(3, _VOCABULARY), k=length),
            "max_tokens": _OUTPUT,
            "ignore_eos": True,
        }
        for _ in range(_REQUESTS)
    ]
    async with aiohttp.ClientSession() as http:

        async def ask(body: dict[str, object]) -> None:
            async with http.post(f"{stack.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise StackError(f"a request failed: {await response.text()}")

        await asyncio.gather(*map(ask, bodies))
