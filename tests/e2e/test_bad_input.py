"""Bad input: a clear error that names the field, and a living server behind it."""

import io
from typing import Any

import aiohttp
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 2,
}
TEXT: dict[str, Any] = {"model": "smollm2", "prompt": "Hi", "max_tokens": 2}

CASES = [
    ("chat/completions", CHAT | {"messages": []}, 400, "messages"),
    ("chat/completions", CHAT | {"messages": "hello"}, 400, "messages"),
    ("chat/completions", CHAT | {"temperature": -1}, 400, "temperature"),
    ("chat/completions", CHAT | {"temperature": "hot"}, 400, "temperature"),
    ("chat/completions", CHAT | {"n": 1000}, 400, "n"),
    ("chat/completions", CHAT | {"n": 0}, 400, "n"),
    ("chat/completions", CHAT | {"stop": ["x"] * 1000}, 400, "stop"),
    ("chat/completions", CHAT | {"logit_bias": {"999999": 1}}, 400, "logit_bias"),
    ("chat/completions", CHAT | {"logit_bias": {"5": 1000}}, 400, "logit_bias"),
    ("chat/completions", CHAT | {"model": "other"}, 404, "model"),
    ("chat/completions", CHAT | {"max_tokens": 0}, 400, "max_tokens"),
    ("chat/completions", CHAT | {"top_p": 0}, 400, "top_p"),
    ("chat/completions", CHAT | {"surprise": 1}, 400, "surprise"),
    ("chat/completions", CHAT | {"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
    ("chat/completions", CHAT | {"repetition_penalty": 1e-38}, 400, "repetition_penalty"),
    ("chat/completions", {"model": "smollm2"}, 400, "messages"),
    ("completions", TEXT | {"prompt": ""}, 400, "prompt"),
    ("completions", TEXT | {"prompt": []}, 400, "prompt"),
    ("completions", TEXT | {"prompt": [999_999]}, 400, "prompt"),
    ("completions", TEXT | {"prompt": [-1]}, 400, "prompt"),
    ("completions", TEXT | {"prompt": "word " * 4000}, 400, "prompt"),
    ("completions", TEXT | {"max_tokens": 1_000_000}, 400, "max_tokens"),
    ("completions", TEXT | {"logprobs": 1000}, 400, "logprobs"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), CASES)
async def test_a_bad_field_is_named(
    http: aiohttp.ClientSession, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    async with http.post(f"/v1/{path}", json=body) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (status, param), error
        assert error["message"]
    await _lives(http)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"{not json", 400),
        (b"\xff\xfe", 400),
        (b"[]", 400),
        (b"", 400),
        (b"[" * 100_000, 400),
        (b'{"model": "smollm2", "prompt": "' + b"x" * 40_000_000 + b'"}', 413),
    ],
    ids=["malformed", "not-utf8", "not-an-object", "empty", "deep", "40MB"],
)
async def test_a_bad_body_is_refused(http: aiohttp.ClientSession, data: bytes, status: int) -> None:
    headers = {"Content-Type": "application/json"}
    async with http.post("/v1/completions", data=io.BytesIO(data), headers=headers) as response:
        assert response.status == status
        assert (await response.json())["error"]["message"]
    await _lives(http)


async def _lives(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json=TEXT) as response:
        assert response.status == 200, await response.text()
