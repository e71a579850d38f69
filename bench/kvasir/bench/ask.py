"""One greedy answer with the text of every token, followed as it streams.

Where ``client.py`` measures and never looks at the answer, this looks at every token and
tells its caller of each, so that a fault can be timed by it.
"""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvasir.bench.client import WORKER_HEADER
from kvasir.bench.sse import SseParser


@dataclass(slots=True)
class Answer:
    """``tokens`` grows while the answer streams. ``error`` is set if it did not end well."""

    tokens: list[str] = field(default_factory=list)
    cached_tokens: int = 0
    decode_worker: str = ""
    prefill_worker: str = ""
    finished: bool = False
    error: str | None = None

    def take(self, data: str) -> None:
        if data == "[DONE]":
            return
        event = json.loads(data)
        if event.get("error"):
            self.error = str(event["error"])
            return
        if usage := event.get("usage"):
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        for choice in event["choices"]:
            if logprobs := choice.get("logprobs"):
                self.tokens.extend(logprobs["tokens"])
            self.finished |= choice.get("finish_reason") is not None


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks one server for greedy continuations of token-id prompts."""

    http: aiohttp.ClientSession
    url: str
    model: str
    max_tokens: int
    timeout_s: float = 300.0

    async def ask(self, prompt_ids: tuple[int, ...], answer: Answer) -> None:
        """Fill ``answer``. What goes wrong is said in it, not raised."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt_ids),
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self.http.post(f"{self.url}/v1/completions", json=body) as response,
            ):
                if response.status != 200:
                    answer.error = f"http {response.status}: {await response.text()}"
                    return
                answer.decode_worker = response.headers.get(WORKER_HEADER, "")
                answer.prefill_worker = response.headers.get("x-kvasir-prefill-worker", "")
                parser = SseParser()
                async for chunk in response.content.iter_any():
                    for data in parser.feed(chunk):
                        answer.take(data)
        except (TimeoutError, aiohttp.ClientError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        if answer.error is None and not answer.finished:
            answer.error = "the stream ended without a finish reason"
