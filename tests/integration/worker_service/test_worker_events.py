"""KV events over a real socket, and routers that read slowly."""

import asyncio
from collections.abc import Callable

import grpc
import pytest

from helpers.local_worker import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    LocalWorker,
    RouterSession,
    local_worker,
    make_submit,
    router_session,
    token_ids,
)
from helpers.recorders import Recorder
from helpers.worker_service import PROMPT, ending, expected
from kvasir.proto.blocks import block_hashes
from kvasir.proto.sampling import SamplingParams
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.contracts import Request
from kvasir.worker.service import session as session_module

# --- KV events -------------------------------------------------------------------------------


async def test_events_and_snapshot_tell_the_same(
    worker: LocalWorker, session: RouterSession
) -> None:
    await session.send(submit=make_submit("r", PROMPT))
    tokens = PROMPT + token_ids(await session.finished("r"))
    await session.send(snapshot_request=pb.SnapshotRequest())
    await session.until(lambda: bool(session.snapshots))
    stored = {
        block
        for batch in session.events
        for event in batch.events
        for block in event.stored.block_hashes
    }
    whole = set(block_hashes(tokens[:-1], BLOCK_SIZE))
    assert stored == whole
    assert set(session.snapshots[0].block_hashes) == whole
    assert session.snapshots[0].last
    last = session.events[-1]
    assert session.snapshots[0].sequence == last.first_sequence + len(last.events) - 1
    assert session.events[0].first_sequence == 1


async def test_a_snapshot_may_be_larger_than_what_may_be_left_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "_SNAPSHOT_HASHES", 10)
    async with (
        local_worker(max_session_bytes=5000) as worker,
        router_session(worker.stub) as session,
    ):
        for number in range(5):
            prompt = [number, *([1] * 200)]
            await session.send(submit=make_submit(f"r{number}", prompt, max_tokens=1))
            await session.finished(f"r{number}")
        await session.send(snapshot_request=pb.SnapshotRequest())
        await session.until(lambda: bool(session.snapshots) and session.snapshots[-1].last)
        assert len(session.snapshots) == 25
        assert sum(len(part.block_hashes) for part in session.snapshots) == 5 * 50
        assert sum(part.ByteSize() for part in session.snapshots) > 5000
        assert [part.last for part in session.snapshots] == [False] * 24 + [True]


async def test_a_snapshot_comes_before_the_events_that_follow_it(
    worker: LocalWorker, session: RouterSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the loop takes to look at the snapshot that it has asked for."""
    engine = worker.server.engine
    snapshot = engine.snapshot

    def slow_snapshot(tell: Callable[[int, list[bytes]], None]) -> None:
        snapshot(tell)
        sink = Recorder()
        sampling = SamplingParams(temperature=0, max_tokens=1)
        assert engine.submit(Request("meanwhile", tuple(PROMPT), sampling), sink) is None
        sink.wait_finished("meanwhile")

    monkeypatch.setattr(engine, "snapshot", slow_snapshot)
    await session.send(snapshot_request=pb.SnapshotRequest())
    await session.until(lambda: bool(session.events))
    assert next(kind for kind in session.order if kind.startswith("kv_")) == "kv_snapshot"
    assert session.snapshots == [pb.KvSnapshot(sequence=0, last=True)]


async def test_a_snapshot_of_nothing(session: RouterSession) -> None:
    await session.send(snapshot_request=pb.SnapshotRequest())
    await session.until(lambda: bool(session.snapshots))
    assert session.snapshots == [pb.KvSnapshot(sequence=0, last=True)]


# --- slow routers ----------------------------------------------------------------------------


async def test_a_router_that_does_not_read_costs_only_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with local_worker(max_session_bytes=100_000) as worker:
        call = worker.stub.Session()
        await call.write(pb.RouterMessage(hello=pb.Hello(router_id="slow")))
        await call.read()
        async with router_session(worker.stub) as session:
            number = 0
            # Prompt logprobs make large outputs; nobody reads them.
            while "ended" not in caplog.text and number < 2000:
                prompt = [number % VOCAB_SIZE, *([1] * 300)]
                submit = make_submit(
                    f"s{number}", prompt, max_tokens=1, logprobs=20, prompt_logprobs=20
                )
                await call.write(pb.RouterMessage(submit=submit))
                number += 1
                await asyncio.sleep(0.002)
            await session.send(submit=make_submit("r", PROMPT))
            assert token_ids(await session.finished("r")) == expected(PROMPT)
            assert await ending(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        await worker.settled()
