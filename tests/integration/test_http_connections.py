"""Connections as no client library makes them: slow heads, half-closed ones, ones that are left."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from helpers.fake_dispatcher import FakeDispatcher
from helpers.http_client import STORY, TEXT, endless, says, until
from helpers.http_server import serving

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connection(url: str) -> AsyncIterator[Connection]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


def completion(version: str = "1.1", **fields: object) -> bytes:
    body = json.dumps(TEXT | fields).encode()
    head = (
        f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def rest(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes its side."""
    async with asyncio.timeout(30):
        return await reader.read()


# --- heads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("drip", [b"", b"X-Slow: 1\r\n"], ids=["silent", "slow"])
async def test_a_head_that_does_not_end_ends_the_connection(drip: bytes) -> None:
    async with (
        serving(FakeDispatcher(says(STORY)), limits={"head_timeout": 0.5}) as url,
        connection(url) as (reader, writer),
    ):
        if drip:
            writer.write(b"GET /health HTTP/1.1\r\n")
        async with asyncio.timeout(30):
            while not reader.at_eof():
                writer.write(drip)
                with suppress(TimeoutError, ConnectionError):
                    assert await asyncio.wait_for(reader.read(1), 0.1) == b""


async def test_the_limit_is_for_heads_alone() -> None:
    """Neither an answer that takes longer nor an idle connection is cut off by it."""
    fake = FakeDispatcher(says(STORY), gate=asyncio.Event(), tokens_per_event=1)
    async with (
        serving(fake, limits={"head_timeout": 0.3}) as url,
        connection(url) as (reader, writer),
    ):
        for _ in range(2):
            assert fake.gate is not None
            fake.gate.clear()
            writer.write(completion())
            await until(lambda: len(fake.live) == 1)
            await asyncio.sleep(0.6)
            fake.gate.set()
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            await reader.readuntil(b"}}}")
            await asyncio.sleep(0.6)


# --- closed sides ----------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closes_its_side_gets_its_answer(stream: bool, version: str) -> None:
    fake = FakeDispatcher(says(STORY), gate=asyncio.Event(), tokens_per_event=1)
    async with serving(fake) as url, connection(url) as (reader, writer):
        writer.write(completion(version, stream=stream))
        writer.write_eof()
        await until(lambda: len(fake.live) == 1)
        await asyncio.sleep(1.5)  # more than one look whether the client is there
        assert fake.gate is not None
        fake.gate.set()
        answer = await rest(reader)
    text = answer.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    assert text.startswith(f"HTTP/{version} 200 OK".encode())
    if stream and version == "1.1":
        head, _, body = text.partition(b"\r\n\r\n")
        assert b"Transfer-Encoding: chunked" in head
        assert b"\n:\n\n" in body
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        while body:
            size, _, body = body.partition(b"\r\n")
            body = body[int(size, 16) :].removeprefix(b"\r\n")
    else:
        assert text.endswith(b"data: [DONE]\n\n" if stream else b"}}}")
    assert fake.aborted == []


async def test_pipelined_requests_before_a_closed_side_are_answered() -> None:
    async with (
        serving(FakeDispatcher(says(STORY))) as url,
        connection(url) as (reader, writer),
    ):
        writer.write(completion() * 3)
        writer.write_eof()
        assert (await rest(reader)).count(b"HTTP/1.1 200 OK") == 3


@pytest.mark.parametrize("half_first", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_told_from_one_that_waits(
    stream: bool, half_first: bool
) -> None:
    """Both look the same at first: the server reads the end of the stream."""
    fake = FakeDispatcher(endless, gate=asyncio.Event())
    async with serving(fake) as url, connection(url) as (_, writer):
        writer.write(completion(stream=stream, max_tokens=2000))
        await until(lambda: fake.sent_tokens > 0)
        if half_first:
            writer.write_eof()
            await asyncio.sleep(1.5)
            assert fake.live
        writer.close()
        await until(lambda: not fake.live)
    assert len(fake.aborted) == 1


async def test_a_request_cut_short_is_no_request() -> None:
    fake = FakeDispatcher(says(STORY))
    async with serving(fake) as url, connection(url) as (reader, writer):
        writer.write(completion()[:-5])
        writer.write_eof()
        assert await rest(reader) == b""
        assert fake.asked == []
