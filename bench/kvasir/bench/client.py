"""One streamed request to an OpenAI-compatible server, timed; never raises for what a server does.

A request is complete only if its status is 200, it streamed a finish reason and ended with
``[DONE]``. Everything else is a failure of a named kind; nothing is retried.
"""

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from kvasir.bench.sse import SseParser
from kvasir.bench.stats import Record
from kvasir.bench.workload import Prompt, RequestSpec

Api = Literal["completions", "chat"]

WORKER_HEADER = "x-kvasir-decode-worker"
_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what all of them have in common.

    ``url`` is the server's root, without ``/v1``. ``timeout_s`` bounds one whole request.
    """

    url: str
    model: str
    api: Api = "completions"
    api_key: str | None = None
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = True
    seed: int = 0

    @property
    def endpoint(self) -> str:
        path = "chat/completions" if self.api == "chat" else "completions"
        return f"{self.url}/v1/{path}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, spec: RequestSpec) -> dict[str, Any]:
        """JSON of the request; ``ignore_eos`` is sent only if set, as not every server has it."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": spec.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": _text(spec.prompt)}]
        else:
            body["prompt"] = spec.prompt.text or list(spec.prompt.token_ids)
        return body


@dataclass(slots=True)
class _Stream:
    """What a stream has brought so far."""

    token_times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finished: bool = False
    done: bool = False
    error: str | None = None

    def take(self, data: str, now: float) -> None:
        """Account for one event that arrived at ``now``."""
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if event.get("error"):
            self.error = str(event["error"])
            return
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            ends = choice.get("finish_reason") is not None
            # A last token without text of its own (half a character, say) still ends the answer.
            if text or (ends and not self.token_times):
                self.token_times.append(now)
            self.finished |= ends


async def send(
    http: aiohttp.ClientSession,
    target: Target,
    spec: RequestSpec,
    due: float,
    clock: Callable[[], float],
) -> Record:
    """Send one request and follow its stream to the end. ``due`` is on ``clock``."""
    sent = clock()
    stream = _Stream()
    worker = ""
    failure, message = None, ""
    try:
        async with (
            asyncio.timeout(target.timeout_s),
            http.post(target.endpoint, json=target.body(spec), headers=target.headers) as response,
        ):
            worker = response.headers.get(WORKER_HEADER, "")
            if response.status != 200:
                failure, message = f"http {response.status}", await response.text()
            else:
                parser = SseParser()
                async for chunk in response.content.iter_any():
                    now = clock()
                    for data in parser.feed(chunk):
                        stream.take(data, now)
                failure, message = _verdict(stream)
    except TimeoutError:
        failure, message = "timeout", f"not complete after {target.timeout_s:g} s"
    except aiohttp.ClientConnectorError as error:
        failure, message = "connect", why_unreachable(error)
    except aiohttp.ClientError as error:
        failure, message = "connection lost", f"{type(error).__name__}: {error}"
    except ValueError as error:
        failure, message = "bad event", str(error)
    usage = stream.usage
    details = usage.get("prompt_tokens_details") or {}
    return Record(
        due=due,
        sent=sent,
        end=clock(),
        token_times=tuple(stream.token_times),
        input_tokens=usage.get("prompt_tokens") or 0,
        output_tokens=usage.get("completion_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
        worker=worker,
        failure=failure,
        message=message[:_MESSAGE_CHARS],
    )


def why_unreachable(error: aiohttp.ClientConnectorError) -> str:
    """The system's own words, such as ``Connection refused``."""
    cause = error.os_error
    # Below 0 are errors of name resolution, which bring their text.
    if cause.errno is not None and cause.errno > 0:
        return os.strerror(cause.errno)
    return cause.strerror or str(cause)


def _verdict(stream: _Stream) -> tuple[str | None, str]:
    """Why a stream that ended is no complete answer; (None, "") if it is one."""
    if stream.error is not None:
        return "error event", stream.error
    if not (stream.finished and stream.done):
        return "truncated", "the stream ended without a finish reason and [DONE]"
    if not stream.usage:
        return "no usage", "the server sent no usage, so its tokens cannot be counted"
    return None, ""


def _text(prompt: Prompt) -> str:
    if prompt.token_ids:
        raise ValueError("a chat message is text: token-id prompts need the completions API")
    return prompt.text
