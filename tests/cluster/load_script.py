"""Asks a ModelService without pause, until the standard input ends; then every request ends well.

Runs in a pod as ``python -c``, with what the router's image holds. One argument, JSON:
``{"url": ..., "model": ..., "users": 4, "prompts": [...], "max_tokens": 24, "rounds": null}``;
with ``rounds`` it ends by itself after so many answers to each prompt. Writes one line of JSON for
each request; ``error`` is null only for an answer that was complete.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import aiohttp

_SECONDS = 120
"""For one answer."""


async def ask(http: aiohttp.ClientSession, order: dict[str, Any], prompt: str) -> dict[str, Any]:
    """One streamed greedy answer, and what went wrong with it."""
    record: dict[str, Any] = {"prompt": prompt, "text": "", "error": None, "begun": time.time()}
    body = {
        "model": order["model"],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": order["max_tokens"],
        "temperature": 0,
        "stream": True,
    }
    try:
        async with http.post(f"{order['url']}/v1/chat/completions", json=body) as response:
            record["decode"] = response.headers.get("x-kvasir-decode-worker")
            record["prefill"] = response.headers.get("x-kvasir-prefill-worker")
            if response.status != 200:
                record["error"] = f"HTTP {response.status}: {await response.text()}"
            else:
                await _follow(response, record)
    except (OSError, TimeoutError, aiohttp.ClientError, ValueError) as error:
        record["error"] = f"{type(error).__name__}: {error}"
    record["seconds"] = time.time() - record["begun"]
    return record


async def _follow(response: aiohttp.ClientResponse, record: dict[str, Any]) -> None:
    """Until [DONE]; each event is one line."""
    finish = None
    async for line in response.content:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            record["error"] = None if finish else "no finish reason"
            return
        if not data:
            continue
        event = json.loads(data)
        if "error" in event:
            record["error"] = f"event: {event['error']}"
            return
        for choice in event["choices"]:
            record["text"] += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
    record["error"] = "the stream ended before [DONE]"


async def user(
    http: aiohttp.ClientSession, order: dict[str, Any], prompts: Iterator[str], end: asyncio.Event
) -> None:
    for prompt in prompts:
        if end.is_set():
            return
        record = await ask(http, order, prompt)
        print(json.dumps(record), flush=True)  # noqa: T201 - what this program is for


def watch_input(end: asyncio.Event) -> None:
    """Set ``end`` when the standard input ends."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin)
            end.set()

    loop.add_reader(sys.stdin, read)


async def main(order: dict[str, Any]) -> None:
    end = asyncio.Event()
    if order["rounds"] is None:
        prompts: Iterator[str] = itertools.cycle(order["prompts"])
        watch_input(end)
    else:
        prompts = iter(order["prompts"] * order["rounds"])
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as group:
        for _ in range(order["users"]):
            group.create_task(user(http, order, prompts, end))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
