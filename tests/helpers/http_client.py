"""Asks the router over HTTP as tests need it, and gives a fake dispatcher its words."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp

from helpers.bundled_tokenizer import IM_END, tokenizer
from helpers.fake_dispatcher import Script
from kvasir.router.contracts import Generation

CHAT: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "smollm2", "prompt": "Hi", "max_tokens": 64}
STORY = "Once upon a time, a small ☃ met a 😀 robot.\n\nThe end."


def says(text: str, *, end: bool = True) -> Script:
    ids = [*tokenizer().encode(text), *([IM_END] if end else [])]
    return lambda _: ids


def endless(_: Generation) -> list[int]:
    return [5000] * 2000


async def post(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> tuple[int, Any, Any]:
    async with session.post(url, json=body) as response:
        return response.status, response.headers, await response.json()


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    """The data of all events; JSON but for [DONE]."""
    text = await response.text()
    assert text.endswith("\n\n")
    data = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: ")
        assert "\n" not in block
        payload = block.removeprefix("data: ")
        data.append(payload if payload == "[DONE]" else json.loads(payload))
    return data


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 30
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come to pass"
        await asyncio.sleep(0.01)


async def raw_request(url: str, head: bytes) -> bytes:
    """Sends bytes as they are, which no client library would; gives the status line."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head)
    status = await asyncio.wait_for(reader.readline(), 30)
    writer.close()
    await writer.wait_closed()
    return status


async def raw_answer(url: str, data: bytes) -> tuple[int, dict[str, str], Any]:
    """Sends bytes as they are; gives status, headers (names in lower case) and the error."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    async with asyncio.timeout(30):
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
    writer.close()
    await writer.wait_closed()
    return int(status.split()[1]), headers, body["error"]
