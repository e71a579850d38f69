"""The load of end-to-end tests finds every way in which an answer can be bad."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio
from aiohttp import web

from cluster import load_script
from cluster.load import Record

_SCRIPT = Path(load_script.__file__).read_text(encoding="utf-8")


def _event(text: str, finish: str | None = None) -> bytes:
    choice = {"delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


GOOD = [_event("A good "), _event("answer.", "stop"), b"data: [DONE]\n\n"]
STREAMS = {
    "good": GOOD,
    "no end": GOOD[:2],
    "no finish": [GOOD[0], GOOD[2]],
    "error": [GOOD[0], b'data: {"error": {"message": "worker lost"}}\n\n'],
    "no json": [b"data: {\n\n"],
}
ERRORS = {
    "no end": "the stream ended before [DONE]",
    "no finish": "no finish reason",
    "error": "event: {'message': 'worker lost'}",
    "refused": "HTTP 503: not now",
    "no json": "JSONDecodeError",
    "cut": "ClientPayloadError",
}


async def _answer(request: web.Request) -> web.StreamResponse:
    prompt = (await request.json())["messages"][0]["content"]
    if prompt == "refused":
        return web.Response(status=503, text="not now")
    response = web.StreamResponse(headers={"x-kvasir-decode-worker": "decode-0"})
    await response.prepare(request)
    for part in STREAMS.get(prompt, GOOD[:1]):
        await response.write(part)
    if prompt == "cut":
        assert request.transport is not None
        request.transport.abort()
    return response


@pytest_asyncio.fixture
async def url() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def _start(url: str, prompts: list[str], rounds: int | None) -> asyncio.subprocess.Process:
    order: dict[str, Any] = {"url": url, "model": "m", "users": 2, "max_tokens": 8}
    order |= {"prompts": prompts, "rounds": rounds}
    pipe = asyncio.subprocess.PIPE
    arguments = ("-c", _SCRIPT, json.dumps(order))
    return await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe)


async def test_each_kind_of_failure_is_told(url: str) -> None:
    process = await _start(url, ["good", *ERRORS], rounds=2)
    printed, _ = await process.communicate()
    assert process.returncode == 0
    records = [Record(**json.loads(line)) for line in printed.splitlines()]
    assert len(records) == 2 * (1 + len(ERRORS))
    for record in records:
        if record.prompt == "good":
            assert (record.error, record.text) == (None, "A good answer.")
            assert record.decode == "decode-0"
        else:
            assert ERRORS[record.prompt] in (record.error or "")


async def test_a_server_that_is_not_there_is_told() -> None:
    process = await _start("http://127.0.0.1:1", ["good"], rounds=1)
    printed, _ = await process.communicate()
    assert "ClientConnectorError" in json.loads(printed)["error"]


async def test_it_goes_on_until_its_input_ends(url: str) -> None:
    process = await _start(url, ["good"], rounds=None)
    assert process.stdout is not None
    lines = [await process.stdout.readline() for _ in range(20)]
    rest, _ = await process.communicate(b"")
    assert process.returncode == 0
    assert all(json.loads(line)["error"] is None for line in [*lines, *rest.splitlines()])
