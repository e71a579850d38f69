"""The load generator's loops, on a clock that only moves when told."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.bench.load import closed_loop, open_loop
from kvasir.bench.sse import SseParser
from kvasir.bench.stats import Record
from kvasir.bench.workload import Prompt, RequestSpec


def specs(*due: float) -> list[RequestSpec]:
    return [RequestSpec(Prompt(token_ids=(i,)), 1, at) for i, at in enumerate(due)]


class Server:
    """Answers when told to, and knows how many requests it has open."""

    def __init__(self) -> None:
        self.open = 0
        self.most_open = 0
        self.release = asyncio.Event()
        self.four_open = asyncio.Event()

    async def send(self, spec: RequestSpec, due: float) -> Record:
        loop = asyncio.get_running_loop()
        sent = loop.time()
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if self.open == 4:
            self.four_open.set()
        await self.release.wait()
        self.open -= 1
        return Record(due=due, sent=sent, end=loop.time(), input_tokens=spec.prompt.token_ids[0])


async def test_a_closed_loop_keeps_its_concurrency_and_no_more() -> None:
    server = Server()
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(closed_loop(specs(*[0.0] * 10), 3, server.send, loop.time))
    await asyncio.sleep(0.01)
    assert server.open == 3
    server.release.set()
    records = await running
    assert sorted(record.input_tokens for record in records) == list(range(10))
    assert server.most_open == 3


async def test_an_open_loop_never_waits_for_earlier_requests() -> None:
    server = Server()
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(open_loop(specs(0.0, 0.0, 0.01, 0.02), server.send, loop.time))
    await server.four_open.wait()  # none is answered, and still all are sent
    server.release.set()
    records = await running
    assert [round(record.due - records[0].due, 6) for record in records] == [0.0, 0.0, 0.01, 0.02]


async def test_a_late_generator_shows_as_lateness_and_in_latencies() -> None:
    now = 0.0

    async def send(spec: RequestSpec, due: float) -> Record:
        nonlocal now
        now += 1.0  # sending takes a second, so the second request leaves late
        return Record(due=due, sent=now, end=now, token_times=(now,))

    first, second = await open_loop(specs(0.0, 0.0), send, lambda: now)
    assert (first.sent - first.due, second.sent - second.due) == (1.0, 2.0)
    assert second.ttft == 2.0


async def test_what_send_raises_is_not_swallowed() -> None:
    async def send(spec: RequestSpec, due: float) -> Record:
        raise RuntimeError("a defect of ours")

    with pytest.raises(ExceptionGroup):
        await open_loop(specs(0.0), send)


@given(st.lists(st.text(alphabet="aö {}:\x20", min_size=1)), st.data())
def test_events_come_out_whole_however_the_bytes_are_cut(
    events: list[str], data: st.DataObject
) -> None:
    newline = data.draw(st.sampled_from(["\n", "\r\n"]))
    stream = "".join(
        f": comment{newline}data: {event}{newline}{newline}" for event in events
    ).encode()
    parser = SseParser()
    seen: list[str] = []
    while stream:
        cut = data.draw(st.integers(min_value=1, max_value=len(stream)))
        seen += parser.feed(stream[:cut])
        stream = stream[cut:]
    assert seen == events
