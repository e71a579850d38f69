"""Runs the generations of a plan side by side and gives out what they add, as it comes.

Whatever ends the caller's interest (the answer is complete, an error, a client that left)
closes every generation, which aborts it on its worker, before this module lets go. At most
one event per choice waits for a slow reader; nothing else is buffered here.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from kvasir.router.api.choice import Choice, Delta
from kvasir.router.api.metrics import HttpMetrics
from kvasir.router.api.plan import Plan
from kvasir.router.contracts import (
    Dispatcher,
    Finished,
    Found,
    GenerationEvent,
    Refused,
    TokenEvent,
)

Batch = list[Delta | Refused]


@asynccontextmanager
async def running(
    dispatcher: Dispatcher, plan: Plan, metrics: HttpMetrics
) -> AsyncIterator[AsyncIterator[Batch]]:
    """Starts the plan; iterate over the result, which ends when all choices have."""
    streams = [
        _counted(_follow(dispatcher.generate(generation), choices, metrics), metrics)
        for generation, choices in plan.followed()
    ]
    async with AsyncExitStack() as stack:
        if len(streams) == 1:
            only = await stack.enter_async_context(aclosing(streams[0]))
            yield await stack.enter_async_context(aclosing(_one_by_one(only)))
        else:
            merged = _Merged(streams)
            stack.push_async_callback(merged.close)
            yield merged


async def _counted(
    stream: AsyncGenerator[Delta | Refused, None], metrics: HttpMetrics
) -> AsyncGenerator[Delta | Refused, None]:
    """The stream; its outcome is counted however it ends."""
    outcome: str | None = None
    try:
        async with aclosing(stream) as items:
            async for item in items:
                if isinstance(item, Refused):
                    outcome = item.refusal.reason.name.lower()
                else:
                    outcome = item.finish_reason
                yield item
    except (GeneratorExit, asyncio.CancelledError):
        outcome = outcome or "client_gone"
        raise
    finally:
        metrics.generation_ended(outcome or "internal")


async def _follow(
    generation: AsyncGenerator[GenerationEvent, None],
    choices: Sequence[Choice],
    metrics: HttpMetrics,
) -> AsyncGenerator[Delta | Refused, None]:
    """One generation until it ends, is refused, or a stop string ends it.

    It gives one choice, or as many as its beam search has found.
    """
    begin = time.monotonic()
    choice = choices[0]
    async with aclosing(generation) as events:
        async for event in events:
            if isinstance(event, Refused):
                yield event
                return
            if isinstance(event, Found):
                metrics.first_token(time.monotonic() - begin)
                for delta in _all_at_once(event, choices):
                    yield delta
                continue
            if isinstance(event, Finished):
                if choice.finish_reason is None:
                    yield choice.finish(event)
                return
            if not choice.completion_tokens:
                metrics.first_token(time.monotonic() - begin)
            yield choice.feed(event)
            if choice.finish_reason is not None:
                return
    raise RuntimeError(f"the generation of choice {choice.index} has no end")


def _all_at_once(found: Found, choices: Sequence[Choice]) -> Iterator[Delta]:
    for choice, hypothesis in zip(choices, found.hypotheses, strict=True):
        who = (found.cached_tokens, found.decode_worker, found.prefill_worker)
        yield choice.feed(TokenEvent(hypothesis.token_ids, (), *who))
        yield choice.finish(Finished(hypothesis.reason))


async def _one_by_one(stream: AsyncIterator[Delta | Refused]) -> AsyncGenerator[Batch, None]:
    async for item in stream:
        yield [item]


class _Merged:
    """Several streams as one; what has come in the meantime is given out together."""

    def __init__(self, streams: list[AsyncGenerator[Delta | Refused, None]]) -> None:
        self._queue: asyncio.Queue[Delta | Refused | Exception | None] = asyncio.Queue(len(streams))
        self._live = len(streams)
        self._pumps = [asyncio.create_task(self._pump(stream)) for stream in streams]

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, stream: AsyncGenerator[Delta | Refused, None]) -> None:
        """Ends with None, or with the exception that the reader is to see."""
        end: Exception | None = None
        async with aclosing(stream):
            try:
                async for item in stream:
                    await self._queue.put(item)
            except Exception as error:  # noqa: BLE001 - raised again by the reader
                end = error
        await self._queue.put(end)

    def __aiter__(self) -> "_Merged":
        return self

    async def __anext__(self) -> Batch:
        batch: Batch = []
        while self._live and not batch:
            self._take(await self._queue.get(), batch)
            while not self._queue.empty():
                self._take(self._queue.get_nowait(), batch)
        if not batch:
            raise StopAsyncIteration
        return batch

    def _take(self, item: Delta | Refused | Exception | None, batch: Batch) -> None:
        if isinstance(item, Exception):
            raise item
        if item is None:
            self._live -= 1
        else:
            batch.append(item)
