"""One stack for most tests: a prefill and two decode workers on the bundled model."""

from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest_asyncio

from kvasir.bench.stack import Stack
from kvasir.worker.config import WorkerConfig


def worker(worker_id: str, **fields: object) -> WorkerConfig:
    """A small float32 worker: equality of tokens is claimed for float32."""
    settings = {
        "dtype": "float32",
        "threads": 1,
        "kv_cache_memory": 192 * 1024**2,
        "max_batched_tokens": 256,
        **fields,
    }
    return WorkerConfig.model_validate({"worker_id": worker_id, **settings})


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack() -> AsyncIterator[Stack]:
    workers = [
        worker("prefill-0", role="prefill"),
        worker("decode-0", role="decode"),
        worker("decode-1", role="decode"),
    ]
    async with Stack(workers) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, unmodified; no retries, so that a first failure is seen."""
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=120
    ) as opened:
        yield opened


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def http(stack: Stack) -> AsyncIterator[aiohttp.ClientSession]:
    """Plain HTTP, for what the client would not send."""
    async with aiohttp.ClientSession(
        base_url=stack.url, timeout=aiohttp.ClientTimeout(total=120)
    ) as session:
        yield session
