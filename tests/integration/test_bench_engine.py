"""Asking through the router for `kvasir bench engine`: what is timed, what counts as failed."""

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from itertools import pairwise

import psutil
import pytest

from helpers.fake_dispatcher import FakeDispatcher
from helpers.http_server import serving
from kvasir.bench.client import Target
from kvasir.bench.engine import RequestsFailedError
from kvasir.bench.through_router import LoopThread, RouterEngine
from kvasir.bench.timeline import Timeline
from kvasir.router.contracts import Generation

HELLO = 19556
FOX = (10813, 116, 228)
"""One character; its first two tokens have no text of their own."""
PROMPTS = [[5000, 5001, 5002], [6000, 6001]]


async def ask(url: str, model: str = "smollm2") -> Timeline:
    """Ask both prompts for four tokens."""
    process = psutil.Process(os.getpid())
    with LoopThread() as loop:
        engine = RouterEngine(loop, Target(url=url, model=model), process, process)
        timeline = await asyncio.to_thread(engine.generate, PROMPTS, 4)
        (cost,) = engine.costs
        assert cost.requests == len(PROMPTS)
        assert cost.wall_s > 0
        assert cost.client_s > 0
        assert cost.worker_s == pytest.approx(cost.router_s, abs=0.1), "both are this process"
        return timeline


async def test_every_token_of_every_request_has_a_time() -> None:
    dispatcher = FakeDispatcher(lambda _: [HELLO] * 9)
    async with serving(dispatcher) as url:
        timeline = await ask(url)
    assert [len(times) for times in timeline.times] == [4, 4]
    assert all(0 < a <= b for times in timeline.times for a, b in pairwise(times))
    assert sorted(generation.prompt_ids for generation in dispatcher.asked) == sorted(
        map(tuple, PROMPTS)
    )


async def test_tokens_that_bring_no_text_count_all_the_same() -> None:
    async with serving(FakeDispatcher(lambda _: [HELLO, *FOX])) as url:
        timeline = await ask(url)
    assert [len(times) for times in timeline.times] == [4, 4]
    first, *_, last = timeline.times[0]
    assert first <= last


async def test_a_short_answer_and_a_refused_request_have_failed() -> None:
    def script(generation: Generation) -> Sequence[int]:
        return [HELLO] * (4 if len(generation.prompt_ids) == 2 else 3)

    async with serving(FakeDispatcher(script)) as url:
        with pytest.raises(RequestsFailedError, match="1 requests failed: 3 tokens"):
            await ask(url)
        with pytest.raises(RequestsFailedError, match="2 requests failed: http 404"):
            await ask(url, model="other")


def test_what_nobody_waits_for_any_more_is_ended_with_the_thread() -> None:
    """As after Ctrl-C while processes start: whoever began them must come to end them."""
    begun, ended = threading.Event(), threading.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    with ThreadPoolExecutor(1) as pool:
        with LoopThread() as loop:
            answer = pool.submit(loop.run, endless())
            begun.wait()
        assert ended.is_set()
        with pytest.raises(CancelledError):
            answer.result()
