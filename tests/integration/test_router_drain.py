"""What clients see of a `kvasir-router` process that is told to stop while they use it."""

import asyncio
import json
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from helpers.bundled_tokenizer import tokenizer_files
from helpers.dispatcher_stage import Stage, until
from helpers.fake_script import Script

LINGER = 1.5
TEXT = {"model": "fake", "prompt": "Hi", "max_tokens": 4, "ignore_eos": True}
LONG = TEXT | {"stream": True, "max_tokens": 200}
"""Takes 4 s, longer than LINGER."""


@dataclass
class Router:
    process: Process
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class Routers:
    """Starts routers in front of one fake worker; kills at the end those that still run."""

    def __init__(self, folder: Path, stage: Stage) -> None:
        self._folder = folder
        self._stage = stage
        self._started = 0

    async def start(self, **settings: Any) -> Router:
        self._started += 1
        folder = self._folder / str(self._started)
        folder.mkdir()
        config, state = folder / "router.json", folder / "state.json"
        base = {"workers_file": str(self._stage.file), "port": 0, "drain_linger": LINGER}
        config.write_text(json.dumps(base | settings))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvasir.router.main"),
            *("--config", str(config), "--state-file", str(state)),
        )
        self._stage.stack.push_async_callback(_end, process)
        await until(lambda: _phase(state) == "ready", 60)
        host, port = json.loads(state.read_text())["address"].split(":")
        router = Router(process, host, int(port))
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            while await _status(http, f"{router.url}/ready") != 200:
                await asyncio.sleep(0.05)
            async with http.post(f"{router.url}/v1/completions", json=TEXT) as answer:
                assert answer.status == 200
        return router


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _phase(state: Path) -> str | None:
    return json.loads(state.read_text())["phase"] if state.exists() else None


async def _status(http: aiohttp.ClientSession, url: str) -> int:
    async with http.get(url) as answer:
        return answer.status


@asynccontextmanager
async def _routers(folder: Path) -> AsyncIterator[Routers]:
    async with AsyncExitStack() as stack:
        stage = Stage(folder, stack)
        script = Script(step_seconds=0.02, tokenizer_files=tokenizer_files())
        await stage.worker("w0", script=script, vocab_size=49152)
        yield Routers(folder, stage)


# --- a handover under load ---------------------------------------------------------------------


class _Service(AbstractResolver):
    """One name for whichever router gets new connections now, as a Service is."""

    def __init__(self, router: Router) -> None:
        self.router = router

    async def resolve(self, host: str, *_: object, **__: object) -> list[ResolveResult]:
        found = ResolveResult(
            hostname=host,
            host=self.router.host,
            port=self.router.port,
            family=socket.AF_INET,
            proto=0,
            flags=socket.AI_NUMERICHOST,
        )
        return [found]

    async def close(self) -> None:
        pass


@dataclass
class _Count:
    answers: int = 0
    farewells: int = 0
    """Answers that told the client to close its connection."""


async def _ask_on(service: _Service, body: dict[str, Any], count: _Count) -> None:
    """One request after another without a pause; raises at the first that fails."""
    connector = aiohttp.TCPConnector(resolver=service, use_dns_cache=False)
    async with aiohttp.ClientSession("http://service", connector=connector) as http:
        while True:
            async with http.post("/v1/completions", json=body) as answer:
                text = await answer.text()
            assert answer.status == 200, text
            assert not body.get("stream") or text.endswith("data: [DONE]\n\n")
            count.answers += 1
            count.farewells += answer.headers.get("Connection") == "close"


async def test_a_router_that_stops_under_load_loses_no_request(tmp_path: Path) -> None:
    async with _routers(tmp_path) as routers, asyncio.TaskGroup() as group:
        old = await routers.start()
        service = _Service(old)
        short = [_Count() for _ in range(4)]
        bodies = [TEXT, TEXT, TEXT, TEXT | {"stream": True}, LONG]
        users = [
            group.create_task(_ask_on(service, body, count))
            for body, count in zip(bodies, [*short, _Count()], strict=True)
        ]
        for _ in range(3):
            new = await routers.start()
            said = [count.farewells for count in short]
            old.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(LINGER / 2)  # not everyone has heard of it yet
            service.router = new
            assert await asyncio.wait_for(old.process.wait(), 60) == 0
            assert all(count.farewells > n for count, n in zip(short, said, strict=True))
            answered = [count.answers for count in short]
            await until(
                lambda before=answered: all(  # type: ignore[misc] # mypy knows no default's type
                    count.answers > n for count, n in zip(short, before, strict=True)
                )
            )
            old = new
        for user in users:
            assert not user.done()
            user.cancel()


# --- its steps ---------------------------------------------------------------------------------


class _Connection:
    """One connection, kept whatever the server says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, router: Router) -> "_Connection":
        return cls(*await asyncio.open_connection(router.host, router.port))

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Gives the head of the answer."""
        content = json.dumps(body).encode() if body else b""
        head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: x\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self.writer.write(head.encode() + content)
        return (await self.reader.readuntil(b"\r\n\r\n")).decode()

    async def closed(self) -> bool:
        return await self.reader.read() == b""

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


def _farewell(head: str, status: int) -> bool:
    return head.startswith(f"HTTP/1.1 {status} ") and "\r\nConnection: close\r\n" in head


async def test_the_steps_of_a_drain(tmp_path: Path) -> None:
    async with _routers(tmp_path) as routers, asyncio.timeout(120):
        router = await routers.start()
        idle, used, streaming = [await _Connection.open(router) for _ in range(3)]
        for connection in (idle, used):
            assert "Connection:" not in await connection.ask("/health")
        assert "Connection:" not in await streaming.ask("/v1/completions", LONG)
        router.process.send_signal(signal.SIGTERM)

        await _until_ready_is(router, 503)
        assert _farewell(await used.ask("/health"), 200)
        assert await used.closed()
        late = await _Connection.open(router)
        assert _farewell(await late.ask("/v1/completions", LONG), 200)

        assert await idle.closed()
        with pytest.raises(ConnectionRefusedError):
            await _Connection.open(router)
        assert (await late.reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        # Nothing has told this client, so that its next request may be under way.
        await streaming.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert _farewell(await streaming.ask("/v1/completions", TEXT), 200)
        assert await router.process.wait() == 0
        for connection in (idle, used, streaming, late):
            await connection.close()


async def _until_ready_is(router: Router, status: int) -> None:
    while True:
        connection = await _Connection.open(router)
        head = await connection.ask("/ready")
        await connection.close()
        if head.startswith(f"HTTP/1.1 {status} "):
            return
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("signals", [1, 2])
async def test_what_does_not_end_is_cut_off(tmp_path: Path, signals: int) -> None:
    """By the deadline, or a second signal."""
    settings = {"drain_linger": 0.2, "drain_deadline": 0.2} if signals == 1 else {}
    async with _routers(tmp_path) as routers, asyncio.timeout(120):
        router = await routers.start(**settings)
        client = await _Connection.open(router)
        await client.ask("/v1/completions", LONG | {"max_tokens": 4000})
        router.process.send_signal(signal.SIGTERM)
        if signals == 2:
            await _until_ready_is(router, 503)
            router.process.send_signal(signal.SIGTERM)
        assert await router.process.wait() == (0 if signals == 1 else 143)
        assert b"[DONE]" not in await client.reader.read()
        await client.close()


async def test_without_a_linger_idle_connections_do_not_keep_it(tmp_path: Path) -> None:
    """As on one machine, where the user waits for it to end."""
    async with _routers(tmp_path) as routers, asyncio.timeout(120):
        router = await routers.start(drain_linger=0.0, drain_deadline=3600.0)
        idle = await _Connection.open(router)
        await idle.ask("/health")
        router.process.send_signal(signal.SIGINT)
        assert await router.process.wait() == 0
        assert await idle.closed()
        await idle.close()
