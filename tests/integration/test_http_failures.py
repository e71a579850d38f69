"""Generations that fail, clients that leave or are slow."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.fake_dispatcher import CARD, FakeDispatcher
from helpers.http_client import STORY, TEXT, endless, events, post, says, until
from helpers.http_server import serving
from kvasir.proto.errors import Reason, Refusal
from kvasir.router.contracts import Generation, GenerationEvent, Refused


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("crash", [False, True])
async def test_a_failure_in_mid_stream_is_an_error_event_and_no_clean_finish(
    n: int, crash: bool
) -> None:
    refused = Refused(Refusal(Reason.NO_CAPACITY, "the worker is gone"))
    fake = FakeDispatcher(says(STORY))
    if crash:
        fake.crash_after = 3
    else:
        fake.refuse_after, fake.refused = 3, refused
    async with (
        serving(fake) as url,
        aiohttp.ClientSession(url) as session,
        session.post("/v1/completions", json=TEXT | {"stream": True, "n": n}) as response,
    ):
        assert response.status == 200
        *chunks, last = await events(response)
    assert last["error"]["code"] == ("internal_error" if crash else "no_capacity")
    assert "told to fail" not in last["error"]["message"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    await until(lambda: not fake.live)


@pytest.mark.parametrize("n", [1, 2])
async def test_a_failure_without_stream_is_a_500_and_the_server_lives(n: int) -> None:
    fake = FakeDispatcher(says(STORY), crash_after=3)
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        status, _, body = await post(session, "/v1/completions", TEXT | {"n": n})
        assert (status, body["error"]["code"]) == (500, "internal_error")
        assert not fake.live
        fake.crash_after = None
        assert (await post(session, "/v1/completions", TEXT))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens_first", [0, 1], ids=["queued", "running"])
async def test_a_client_that_leaves_aborts_its_generations(
    stream: bool, n: int, tokens_first: int
) -> None:
    fake = FakeDispatcher(endless, gate=asyncio.Event())
    if not tokens_first:
        fake = _Queued(endless)
    async with serving(fake) as url:
        async with aiohttp.ClientSession(url) as session:
            request = TEXT | {"stream": stream, "n": n, "max_tokens": 2000}
            call = asyncio.create_task(post(session, "/v1/completions", request))
            await until(lambda: len(fake.live) == n and fake.sent_tokens >= tokens_first * n)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await until(lambda: not fake.live)
        assert len(fake.aborted) == n


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_how_each_generation_ended_is_counted(n: int, stream: bool) -> None:
    fake = FakeDispatcher(says(STORY))

    async def counted(session: aiohttp.ClientSession) -> dict[str, float]:
        async with session.get("/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        return {
            sample.labels["outcome"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == "kvasir_router_generations_total"
        }

    async with serving(fake) as url, aiohttp.ClientSession(url) as session:

        async def ask(**body: object) -> None:
            request = TEXT | {"n": n, "stream": stream} | body
            async with session.post("/v1/completions", json=request) as response:
                await response.read()

        await ask()
        assert await counted(session) == {"stop": n}
        await ask(stop=["met a"])
        assert await counted(session) == {"stop": 2 * n}, "a stop string is the answer's end"
        await ask(max_tokens=2)
        assert await counted(session) == {"stop": 2 * n, "length": n}
        fake.script, fake.gate = endless, asyncio.Event()
        leaving = asyncio.create_task(ask(max_tokens=2000))
        await until(lambda: len(fake.live) == n and fake.sent_tokens >= n)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: not fake.live)
        assert (await counted(session))["client_gone"] == n
        fake.gate = None
        fake.refuse_after, fake.refused = 0, Refused(Refusal(Reason.NO_CAPACITY, "none"))
        await ask()
        assert (await counted(session))["no_capacity"] >= 1
        fake.refuse_after, fake.crash_after = None, 0
        await ask()
        assert (await counted(session))["internal"] >= 1


class _Queued(FakeDispatcher):
    """Accepts, and gives no event for as long as it is asked."""

    async def _events(self, generation: Generation) -> AsyncGenerator[GenerationEvent, None]:
        await asyncio.Event().wait()
        async for event in super()._events(generation):
            yield event


_ENDLESS = 2_000_000


def _without_end() -> FakeDispatcher:
    return FakeDispatcher(lambda _: [5000] * _ENDLESS, card=replace(CARD, max_model_len=_ENDLESS))


@asynccontextmanager
async def _streaming(url: str) -> AsyncIterator[asyncio.StreamReader]:
    """An endless stream over a socket of its own; it is read as the test reads it."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps(TEXT | {"stream": True, "max_tokens": _ENDLESS - 100}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await reader.readline()
    try:
        yield reader
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_slow_client_holds_back_its_generation() -> None:
    """Nothing is read: the sockets fill up, and then no more tokens are taken."""
    fake = _without_end()
    async with serving(fake) as url:
        async with _streaming(url):
            before = -1
            async with asyncio.timeout(60):
                while fake.sent_tokens != before:
                    before = fake.sent_tokens
                    await asyncio.sleep(1.0)
            assert 0 < fake.sent_tokens < _ENDLESS // 2
        await until(lambda: not fake.live)


async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    fake = _without_end()
    async with serving(fake, limits={"write_timeout": 0.5}) as url, _streaming(url) as reader:
        await until(lambda: not fake.live)
        assert len(fake.aborted) == 1
        async with asyncio.timeout(30):
            while await reader.read(65536):
                pass  # what the sockets still hold; then the end


async def test_a_slow_client_that_takes_something_is_served() -> None:
    fake = _without_end()
    async with serving(fake, limits={"write_timeout": 1.5}) as url, _streaming(url) as reader:
        for _ in range(40):
            await asyncio.sleep(0.1)
            assert await reader.read(65536)
        assert fake.live
