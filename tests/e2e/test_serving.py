"""Load, prefix reuse, clients that leave: nothing leaks and nothing is lost."""

import asyncio

import aiohttp
import openai
import pytest

from kvasir.bench.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

BLOCK = 16


async def test_64_concurrent_requests_complete_and_free_their_blocks(
    client: openai.AsyncOpenAI, stack: Stack
) -> None:
    async def one(i: int) -> int:
        answer = await client.completions.create(
            model="smollm2",
            prompt=f"Item {i}. " + "Say something about this item. " * (i % 12),
            max_tokens=12,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    assert await asyncio.gather(*(one(i) for i in range(64))) == [12] * 64
    await stack.wait_idle()


async def test_a_repeated_prefix_is_cached(client: openai.AsyncOpenAI, stack: Stack) -> None:
    prefix = [(7 * i) % 40_000 + 100 for i in range(1000)]

    async def cached(tail: list[int]) -> int:
        answer = await client.completions.create(
            model="smollm2", prompt=prefix + tail, max_tokens=1, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 1000 + len(tail)
        details = answer.usage.prompt_tokens_details
        assert details is not None
        assert details.cached_tokens is not None
        return details.cached_tokens

    assert await cached([200, 201]) == 0
    assert await cached([300, 301]) >= 992 - BLOCK
    await stack.wait_idle()


async def test_cached_and_uncached_answers_are_equal(client: openai.AsyncOpenAI) -> None:
    prompt = "The lighthouse keeper wrote in his diary every evening. " * 12
    texts = []
    for _ in range(3):
        answer = await client.completions.create(
            model="smollm2", prompt=prompt, max_tokens=24, temperature=0
        )
        texts.append(answer.choices[0].text)
    assert len(set(texts)) == 1


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_stops_the_engine(
    http: aiohttp.ClientSession, stack: Stack, streaming: bool
) -> None:
    body = {
        "model": "smollm2",
        "prompt": "Once upon a time",
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": streaming,
    }
    request = asyncio.create_task(http.post("/v1/completions", json=body))

    async def running() -> int:
        return sum(int(row["running"]) for row in await stack.worker_rows())

    async with asyncio.timeout(30):
        while not await running():
            await asyncio.sleep(0.05)
    if streaming:
        (await request).close()
    else:
        request.cancel()
    await stack.wait_idle()  # 2,000 tokens would take far longer than its limit


async def test_salted_prompts_share_nothing(client: openai.AsyncOpenAI) -> None:
    prompt = [(11 * i) % 40_000 + 100 for i in range(200)]
    cached = []
    for salt in ("tenant-a", "tenant-b", "tenant-a"):
        answer = await client.completions.create(
            model="smollm2",
            prompt=prompt,
            max_tokens=1,
            temperature=0,
            extra_body={"cache_salt": salt},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, 0, 192]
