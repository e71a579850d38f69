"""Same-prefix requests land together, unique ones spread: four real workers."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from e2e.conftest import worker
from kvasir.bench.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORKERS = 4
GROUPS = 8
PER_GROUP = 5
PREFIX = 160
TAIL = 16


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet() -> AsyncIterator[Stack]:
    workers = [worker(f"w{i}", role="both", kv_cache_memory=128 * 1024**2) for i in range(WORKERS)]
    async with Stack(workers) as running:
        yield running


async def ask(session: aiohttp.ClientSession, prompt: list[int]) -> tuple[str, int]:
    """Worker that served, and cached tokens."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    async with session.post("/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        details = answer["usage"]["prompt_tokens_details"]
        return response.headers["x-kvasir-decode-worker"], details["cached_tokens"]


async def test_unique_prompts_use_every_idle_worker(fleet: Stack) -> None:
    async with aiohttp.ClientSession(base_url=fleet.url) as session:
        served = [await ask(session, [1000 + i] * 40) for i in range(4 * WORKERS)]
    assert {name for name, _ in served} == {f"w{i}" for i in range(WORKERS)}


async def test_prefix_groups_hit_like_one_shared_cache(fleet: Stack) -> None:
    rng = random.Random(5)
    prefixes = [[rng.randrange(100, 40_000) for _ in range(PREFIX)] for _ in range(GROUPS)]
    prompts = [
        prefix + [rng.randrange(100, 40_000) for _ in range(TAIL)]
        for prefix in prefixes
        for _ in range(PER_GROUP)
    ]
    rng.shuffle(prompts)
    slots = asyncio.Semaphore(WORKERS)

    async def one(session: aiohttp.ClientSession, prompt: list[int]) -> tuple[str, int]:
        async with slots:
            return await ask(session, prompt)

    async with aiohttp.ClientSession(base_url=fleet.url) as session:
        served = await asyncio.gather(*(one(session, prompt) for prompt in prompts))
    total = len(prompts) * (PREFIX + TAIL)
    shared = GROUPS * (PER_GROUP - 1) * PREFIX / total
    hit = sum(cached for _, cached in served) / total
    assert hit >= shared - 0.05, (hit, shared)
    load = Counter(name for name, _ in served)
    assert max(load.values()) <= 1.5 * len(prompts) / WORKERS, load
