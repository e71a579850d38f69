"""When services are reconciled. Times are fractions of a second, and only orders are asserted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kvasir.operator.cluster.queue import Key, Queue, StepError

A, B = Key("n", "a"), Key("n", "b")


class Steps:
    """Records steps; each takes as long as the test lets it."""

    def __init__(self) -> None:
        self.begun: list[Key] = []
        self.running: list[Key] = []
        self.overlaps = 0
        self.go = asyncio.Event()
        self.go.set()
        self.answers: list[float | Exception | None] = []

    async def __call__(self, key: Key) -> float | None:
        self.overlaps += key in self.running
        self.begun.append(key)
        self.running.append(key)
        try:
            await self.go.wait()
            answer = self.answers.pop(0) if self.answers else None
            if isinstance(answer, Exception):
                raise answer
            return answer
        finally:
            self.running.remove(key)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.begun) < count:
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running(steps: Steps, at_once: int = 8) -> AsyncIterator[Queue]:
    queue = Queue(steps, settle=0.02, at_once=at_once, longest=0.05)
    task = asyncio.create_task(queue.run())
    try:
        yield queue
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_burst_is_one_step() -> None:
    steps = Steps()
    async with running(steps) as queue:
        for _ in range(50):
            queue.add(A)
        queue.add(B)
        await steps.until(2)
        await asyncio.sleep(0.1)
    assert sorted(steps.begun) == [A, B]
    assert len(queue) == 0


async def test_a_change_during_a_step_calls_another_after_it() -> None:
    steps = Steps()
    steps.go.clear()
    async with running(steps) as queue:
        queue.add(A)
        await steps.until(1)
        queue.add(A)
        await asyncio.sleep(0.1)
        assert steps.begun == [A]
        steps.go.set()
        await steps.until(2)
    assert steps.overlaps == 0


async def test_a_slow_service_holds_no_other_up() -> None:
    steps = Steps()
    steps.go.clear()
    async with running(steps) as queue:
        queue.add(A)
        await steps.until(1)
        queue.add(B)
        await steps.until(2)
    assert steps.begun == [A, B]


async def test_failures_are_tried_again_and_hold_no_other_up() -> None:
    steps = Steps()
    steps.answers = [StepError("nobody answers"), RuntimeError("broken"), 0.01, None]
    async with running(steps) as queue:
        queue.add(A)
        await steps.until(4)
        await asyncio.sleep(0.1)
        assert steps.begun == [A] * 4
        queue.add(B)
        await steps.until(5)


async def test_only_so_many_steps_at_once() -> None:
    steps = Steps()
    steps.go.clear()
    async with running(steps, at_once=2) as queue:
        for number in range(5):
            queue.add(Key("n", str(number)))
        await steps.until(2)
        await asyncio.sleep(0.05)
        assert len(steps.running) == 2
        steps.go.set()
        await steps.until(5)
