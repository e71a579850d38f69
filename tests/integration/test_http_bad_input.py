"""What the router refuses at its edge: each a clear error, and a living server behind it."""

import asyncio
import io
import json
from typing import Any

import aiohttp
import pytest

from helpers.bundled_tokenizer import VOCAB_SIZE
from helpers.fake_dispatcher import FakeDispatcher
from helpers.http_client import CHAT, STORY, TEXT, post, raw_answer, raw_request, says
from helpers.http_server import serving
from kvasir.proto.errors import Reason, Refusal
from kvasir.router.contracts import Refused


def _word(count: int) -> str:
    return "word " * count


BAD: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    ("chat/completions", CHAT | {"messages": []}, 400, "messages", "at least 1"),
    ("chat/completions", CHAT | {"messages": "hello"}, 400, "messages", "array"),
    ("chat/completions", CHAT | {"temperature": -1}, 400, "temperature", "not -1"),
    ("completions", TEXT | {"repetition_penalty": 0.009}, 400, "repetition_penalty", "0.01"),
    ("completions", TEXT | {"repetition_penalty": 10.1}, 400, "repetition_penalty", "10"),
    ("chat/completions", CHAT | {"n": 1000}, 400, "n", "at most 16"),
    ("chat/completions", CHAT | {"stop": ["x"] * 1000}, 400, "stop", "at most 16"),
    ("chat/completions", CHAT | {"logit_bias": {"999999": 1}}, 400, "logit_bias", "999999"),
    ("chat/completions", CHAT | {"model": "other"}, 404, "model", "smollm2"),
    ("chat/completions", CHAT | {"tools": [{}]}, 400, "tools", "not supported"),
    (
        "chat/completions",
        CHAT | {"messages": [{"role": "user", "content": _word(3000)}]},
        400,
        "messages",
        "2048",
    ),
    ("completions", TEXT | {"prompt": ""}, 400, "prompt", "empty"),
    ("completions", TEXT | {"prompt": [VOCAB_SIZE]}, 400, "prompt", "49152"),
    ("completions", TEXT | {"prompt": _word(3000)}, 400, "prompt", "2048"),
    ("completions", TEXT | {"prompt": _word(150_000)}, 400, "prompt", "2048"),
    ("completions", TEXT | {"prompt": [1] * 2048}, 400, "prompt", "2048"),
    ("completions", TEXT | {"max_tokens": 2048}, 400, "max_tokens", "at most 2047"),
    ("completions", TEXT | {"min_tokens": 65}, 400, "min_tokens", "64"),
    ("completions", {"prompt": "Hi"}, 400, "model", "required"),
]


async def test_bad_requests_are_named_and_the_server_lives() -> None:
    fake = FakeDispatcher(says("x"))
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        for path, request, status, param, phrase in BAD:
            got, headers, body = await post(session, f"/v1/{path}", request)
            error = body["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (got, error["param"]) == (status, param), error
            assert phrase in error["message"]
            assert headers["x-request-id"]
        assert not fake.asked
        assert (await post(session, "/v1/completions", TEXT))[0] == 200


@pytest.mark.parametrize(
    ("data", "headers", "status"),
    [
        (b"{not json", {}, 400),
        (b"\xff\xfe", {}, 400),
        (b"[]", {}, 400),
        (b"", {}, 400),
        (b"[" * 100_000, {}, 400),
        (json.dumps(TEXT).encode(), {"Content-Type": "text/plain"}, 415),
        (json.dumps(TEXT).encode(), {"Content-Encoding": "gzip"}, 415),
        (io.BytesIO(b"x" * 40_000_000), {}, 413),
    ],
    ids=["malformed", "utf8", "list", "empty", "deep", "type", "encoding", "40MB"],
)
async def test_bad_bodies(data: bytes | io.BytesIO, headers: dict[str, str], status: int) -> None:
    fake = FakeDispatcher(says("x"))
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        sent = {"Content-Type": "application/json"} | headers
        async with session.post("/v1/completions", data=data, headers=sent) as response:
            assert response.status == status
            assert (await response.json())["error"]["message"]
        assert (await post(session, "/v1/completions", TEXT))[0] == 200


async def test_a_large_body_is_refused_before_it_is_sent() -> None:
    """Only the head is sent: the answer must not wait for 40 MB that never come."""
    async with serving(FakeDispatcher(says("x"))) as url:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 40000000\r\n\r\n"
        )
        assert b" 413 " in await raw_request(url, head)


async def test_a_chunked_body_is_read_no_further_than_the_limit() -> None:
    produced = 0

    async def parts() -> Any:
        nonlocal produced
        while produced < 400:
            produced += 1
            yield b"x" * 100_000
            await asyncio.sleep(0)

    async with serving(FakeDispatcher(says("x"))) as url, aiohttp.ClientSession(url) as session:
        headers = {"Content-Type": "application/json"}
        async with session.post("/v1/completions", data=parts(), headers=headers) as response:
            assert response.status == 413


async def test_a_body_that_does_not_come_is_a_408() -> None:
    fake = FakeDispatcher(says("x"))
    async with serving(fake, limits={"body_timeout": 0.2}) as url:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 10\r\n\r\n{}"
        )
        status, headers, error = await raw_answer(url, head)
        assert status == 408
        assert error["code"] == "request_timeout"
        assert headers["x-request-id"]
        async with aiohttp.ClientSession(url) as session:
            assert (await post(session, "/v1/completions", TEXT))[0] == 200


_POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("data", "status", "phrase"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nExpect: bogus\r\n\r\n", 417, "bogus"),
        (b"GET /nothing HTTP/1.1\r\nHost: x\r\nExpect: bogus\r\n\r\n", 417, "bogus"),
        (_POST + b"Content-Length: abc\r\n\r\n{}", 400, "Content-Length"),
        (_POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n", 400, "chunk size"),
        (_POST + b"Authorization: Bearer " + b"k" * 20_000 + b"\r\n\r\n", 400, "16384 bytes"),
        (b"GET /" + b"k" * 20_000 + b" HTTP/1.1\r\n\r\n", 400, "16384 bytes"),
        (b"\x16\x03\x01\x00\xa5\x01\r\n\r\n", 400, "HTTPS"),
        (b"BREW /health HTTP/1.1\r\n\r\n", 400, "method"),
    ],
    ids=["expect", "expect, no path", "length", "chunk", "header", "path", "tls", "method"],
)
async def test_what_aiohttp_refuses_has_the_same_error_shape(
    data: bytes, status: int, phrase: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with serving(FakeDispatcher(says("x"))) as url:
        got, headers, error = await raw_answer(url, data)
        assert (got, set(error)) == (status, {"message", "type", "param", "code"})
        assert phrase in error["message"]
        assert headers["x-request-id"]
        assert b" 200 " in await raw_request(url, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert not any(record.exc_info for record in caplog.records)
    assert "kkkk" not in error["message"] + caplog.text


async def test_paths_and_methods_have_the_same_error_shape() -> None:
    async with serving(FakeDispatcher(says("x"))) as url, aiohttp.ClientSession(url) as session:
        async with session.get("/v1/nothing") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "not_found"
        async with session.get("/v1/completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            assert (await response.json())["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_early_refusal_is_an_http_error(stream: bool) -> None:
    refused = Refused(Refusal(Reason.QUEUE_FULL, "the queue is full"), 2.3)
    fake = FakeDispatcher(says(STORY), refuse_after=0, refused=refused)
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        status, headers, body = await post(session, "/v1/completions", TEXT | {"stream": stream})
    assert (status, headers["Retry-After"]) == (429, "3")
    assert body["error"]["code"] == "queue_full"


async def test_keys_are_needed_everywhere_but_for_health() -> None:
    fake = FakeDispatcher(says("x"))
    async with (
        serving(fake, api_keys=("alpha", "beta")) as url,
        aiohttp.ClientSession(url) as session,
    ):
        for path in ("/health", "/ready"):
            async with session.get(path) as response:
                assert response.status == 200
        for path in ("/v1/models", "/metrics", "/workers", "/openapi.json", "/nothing"):
            async with session.get(path) as response:
                assert response.status == 401, path
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        for target in (
            *("//health", "/health/", "/health/../v1/models", "/%68ealth/x", "/HEALTH"),
            *("/v1/models#/health", "/v1/models?/health", "/v1/models;/health", "*"),
            "http://x/v1/models",
        ):
            for host in ("x", "x/health", "health"):
                head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
                status = await raw_request(url, head)
                assert b" 401 " in status or b" 400 " in status, (target, host, status)
        for key in ("alpha", "beta"):
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post("/v1/completions", json=TEXT, headers=headers) as response:
                assert response.status == 200
    salts = [generation.cache_salt for generation in fake.asked]
    assert len(set(salts)) == 2
    assert all(salts)
