"""The Engine service over a real socket: sessions, refusals, drain, roles, health, metrics."""

import asyncio
import hashlib
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import grpc
import pytest

from helpers.fake_runner import FakeRunner, expected_tokens
from helpers.local_worker import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    LocalWorker,
    RouterSession,
    eventually,
    local_worker,
    make_submit,
    router_session,
    token_ids,
)
from helpers.recorders import Recorder
from kvasir.proto.blocks import block_hashes
from kvasir.proto.process import join_host_port
from kvasir.proto.sampling import SamplingParams
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1 import kv_transfer_pb2 as kv_pb
from kvasir.worker.contracts import Request, StepPlan, StepResult, Work
from kvasir.worker.health import LOOP_PATIENCE, STEP_PATIENCE, Health, HealthServer
from kvasir.worker.service import session as session_module

PROMPT = [3 * i % VOCAB_SIZE for i in range(50)]


def expected(prompt: list[int], max_tokens: int = 8) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    return expected_tokens(Request("any", tuple(prompt), sampling), VOCAB_SIZE)


class SlowRunner(FakeRunner):
    """A step takes 5 ms, as a real one might."""

    def __init__(self) -> None:
        super().__init__(256, BLOCK_SIZE, VOCAB_SIZE)

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(0.005)
        return super().execute(plan)


class GatedRunner(FakeRunner):
    """No step ends before the gate is open."""

    def __init__(self) -> None:
        super().__init__(256, BLOCK_SIZE, VOCAB_SIZE)
        self.gate = threading.Event()

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.gate.wait(60)
        return super().execute(plan)


@pytest.fixture
async def worker() -> AsyncIterator[LocalWorker]:
    async with local_worker() as worker:
        yield worker


@pytest.fixture
async def session(worker: LocalWorker) -> AsyncIterator[RouterSession]:
    async with router_session(worker.stub) as session:
        yield session


async def test_every_method_is_served(worker: LocalWorker) -> None:
    """The handlers are listed by hand, so compare them with the proto files."""
    for file in (pb.DESCRIPTOR, kv_pb.DESCRIPTOR):
        for service in file.services_by_name.values():
            for method in service.methods:
                multi: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
                multi = worker.channel.unary_stream(f"/{service.full_name}/{method.name}")
                assert await ending(multi(b"")) is not grpc.StatusCode.UNIMPLEMENTED, (
                    method.full_name
                )


class Readable(Protocol):
    async def read(self) -> object: ...


async def ending(call: Readable) -> grpc.StatusCode:
    """Read to the end, and say how it ended."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


# --- information -----------------------------------------------------------------------------


async def test_info(worker: LocalWorker) -> None:
    info = await worker.stub.GetInfo(pb.GetInfoRequest())
    assert info.worker_id == "w"
    assert info.epoch == worker.epoch
    assert info.role == pb.ROLE_BOTH
    assert info.layout == worker.model.layout
    assert (info.vocab_size, info.max_model_len) == (VOCAB_SIZE, MAX_MODEL_LEN)
    assert info.kv_blocks_total == 256
    assert info.version


async def test_the_tokenizer_comes_in_bounded_chunks(worker: LocalWorker) -> None:
    files: dict[str, bytes] = {}
    async for chunk in worker.stub.GetTokenizer(pb.GetTokenizerRequest()):
        assert len(chunk.data) <= 256 * 1024
        files[chunk.name] = files.get(chunk.name, b"") + chunk.data
    assert files == worker.model.tokenizer_files
    info = await worker.stub.GetInfo(pb.GetInfoRequest())
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(len(name).to_bytes(8, "little") + name.encode())
        digest.update(len(data).to_bytes(8, "little") + data)
    assert info.tokenizer_hash == digest.hexdigest()


async def test_the_role_can_change(worker: LocalWorker, session: RouterSession) -> None:
    info = await worker.stub.SetRole(pb.SetRoleRequest(role=pb.ROLE_PREFILL))
    assert info.role == pb.ROLE_PREFILL
    await session.until(lambda: session.loads[-1].role == pb.ROLE_PREFILL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stub.SetRole(pb.SetRoleRequest())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# --- sessions --------------------------------------------------------------------------------


async def test_a_session_opens_with_the_worker_s_info(session: RouterSession) -> None:
    assert session.opened is not None
    assert session.opened.info.worker_id == "w"
    assert not session.opened.HasField("refusal")
    await session.until(lambda: bool(session.loads))
    assert session.loads[0].kv_blocks_total == 256
    assert session.order[0] == "opened"


async def test_another_epoch_is_refused(worker: LocalWorker) -> None:
    async with router_session(worker.stub, expected_epoch="before") as session:
        assert session.opened is not None
        assert session.opened.refusal.reason == pb.REFUSAL_REASON_EPOCH_MISMATCH
        assert await session.call.code() is grpc.StatusCode.OK


async def test_the_right_epoch_is_not(worker: LocalWorker) -> None:
    async with router_session(worker.stub, expected_epoch=worker.epoch) as session:
        assert session.opened is not None
        assert not session.opened.HasField("refusal")


async def test_hello_must_come_first(worker: LocalWorker) -> None:
    call = worker.stub.Session()
    await call.write(pb.RouterMessage(submit=make_submit("r", PROMPT)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_requests_are_served(worker: LocalWorker, session: RouterSession) -> None:
    prompts = {f"r{i}": [i, *PROMPT[i:]] for i in range(10)}
    for request_id, prompt in prompts.items():
        await session.send(submit=make_submit(request_id, prompt))
    for request_id, prompt in prompts.items():
        outputs = await session.finished(request_id)
        assert token_ids(outputs) == expected(prompt)
        assert outputs[-1].finish_reason == pb.FINISH_REASON_LENGTH
        first = outputs[0].prefill
        assert first.outcome == pb.PREFILL_OUTCOME_LOCAL
    await worker.settled()
    assert worker.metric("vllm:time_to_first_token_seconds_count", model_name="smollm2") == 10
    assert worker.metric("vllm:inter_token_latency_seconds_count", model_name="smollm2") == 70
    assert worker.metric("vllm:generation_tokens_total", model_name="smollm2") == 80


async def test_generated_tokens_are_those_of_all_hypotheses(
    worker: LocalWorker, session: RouterSession
) -> None:
    submit = make_submit("r", PROMPT, max_tokens=6)
    submit.beam.width = 3
    await session.send(submit=submit)
    *_, last = await session.finished("r")
    assert [len(hypothesis.token_ids) for hypothesis in last.hypotheses] == [6, 6, 6]
    assert worker.metric("vllm:generation_tokens_total", model_name="smollm2") == 18
    assert worker.metric("vllm:time_to_first_token_seconds_count", model_name="smollm2") == 0


async def test_one_batch_tells_of_all_sequences_of_a_step() -> None:
    runner = GatedRunner()
    async with local_worker(runner=runner) as worker, router_session(worker.stub) as session:
        for i in range(4):
            await session.send(submit=make_submit(f"r{i}", [i], max_tokens=50))
        await session.send(submit=make_submit("bad", []))
        await session.finished("bad")  # so the four before it are with the engine
        batches = session.order.count("step")
        runner.gate.set()
        for i in range(4):
            await session.finished(f"r{i}")
        batches = session.order.count("step") - batches
        # The first step may have begun before the other requests came.
        assert len(runner.steps) in (50, 51)
        assert batches == len(runner.steps)


async def test_two_routers_get_their_own(worker: LocalWorker, session: RouterSession) -> None:
    async with router_session(worker.stub) as other:
        await session.send(submit=make_submit("a", PROMPT))
        await other.send(submit=make_submit("b", PROMPT[1:]))
        assert token_ids(await session.finished("a")) == expected(PROMPT)
        assert token_ids(await other.finished("b")) == expected(PROMPT[1:])
        assert set(session.outputs) == {"a"}
        assert set(other.outputs) == {"b"}


async def test_a_router_cannot_abort_another_s_request() -> None:
    async with (
        local_worker(runner=SlowRunner()) as worker,
        router_session(worker.stub) as session,
        router_session(worker.stub) as other,
    ):
        await session.send(submit=make_submit("a", PROMPT, max_tokens=100))
        await session.until(lambda: "a" in session.outputs)
        await other.send(abort=pb.Abort(request_id="a"))
        await other.send(submit=make_submit("b", PROMPT, max_tokens=1))
        await other.finished("b")
        assert token_ids(await session.finished("a")) == expected(PROMPT, 100)


async def test_an_abort_ends_one_request() -> None:
    async with (
        local_worker(runner=SlowRunner()) as worker,
        router_session(worker.stub) as session,
    ):
        await session.send(submit=make_submit("a", PROMPT, max_tokens=340))
        await session.send(submit=make_submit("b", PROMPT, max_tokens=50))
        await session.until(lambda: "a" in session.outputs)
        await session.send(abort=pb.Abort(request_id="a"))
        await session.send(abort=pb.Abort(request_id="never-was"))
        assert (await session.finished("a"))[-1].finish_reason == pb.FINISH_REASON_ABORTED
        assert token_ids(await session.finished("b")) == expected(PROMPT, 50)
        await worker.settled()


async def test_a_broken_session_aborts_its_requests() -> None:
    runner = SlowRunner()
    async with local_worker(runner=runner) as worker:
        async with router_session(worker.stub) as session:
            await session.send(submit=make_submit("a", PROMPT, max_tokens=340))
            await session.until(lambda: "a" in session.outputs)
        await worker.settled()
        assert len(runner.steps) < 340


@pytest.mark.parametrize(
    ("param", "submit"),
    [
        ("prompt", make_submit("bad", [])),
        ("prompt", make_submit("bad", [VOCAB_SIZE])),
        ("prompt", make_submit("bad", [1] * MAX_MODEL_LEN)),
        ("max_tokens", make_submit("bad", PROMPT, max_tokens=0)),
        ("temperature", make_submit("bad", PROMPT, temperature=-1)),
        ("temperature", make_submit("bad", PROMPT, temperature=math.nan)),
        ("top_p", make_submit("bad", PROMPT, top_p=0)),
        ("presence_penalty", make_submit("bad", PROMPT, presence_penalty=math.inf)),
        ("prefill.address", make_submit("bad", PROMPT, prefill=pb.PrefillPeer(address="x"))),
    ],
)
async def test_a_bad_request_is_refused_and_the_next_one_served(
    session: RouterSession, param: str, submit: pb.Submit
) -> None:
    await session.send(submit=submit)
    outputs = await session.finished("bad")
    assert outputs[-1].finish_reason == pb.FINISH_REASON_REFUSED
    assert outputs[-1].refusal.param == param
    assert outputs[-1].refusal.message
    await session.send(submit=make_submit("good", PROMPT))
    assert token_ids(await session.finished("good")) == expected(PROMPT)


@pytest.mark.parametrize(
    ("max_tokens", "replayed"), [(4, 4), (4, 9), (1000, MAX_MODEL_LEN - 50), (1000, MAX_MODEL_LEN)]
)
async def test_a_replay_at_its_limit_ends_with_length(
    worker: LocalWorker, session: RouterSession, max_tokens: int, replayed: int
) -> None:
    """Whether by max_tokens or by the model's length; even beyond, after a change of limits."""
    submit = make_submit("r", PROMPT, max_tokens=max_tokens)
    submit.output_token_ids.extend([1] * replayed)
    await session.send(submit=submit)
    (output,) = await session.finished("r")
    assert output == pb.SequenceOutput(request_id="r", finish_reason=pb.FINISH_REASON_LENGTH)
    assert worker.model.runner.steps == []
    await worker.settled()


async def test_an_unknown_message_is_ignored(session: RouterSession) -> None:
    await session.call.write(pb.RouterMessage())
    await session.send(hello=pb.Hello(router_id="again"))
    await session.send(submit=make_submit("r", PROMPT))
    assert token_ids(await session.finished("r")) == expected(PROMPT)


async def test_the_load_is_reported_while_idle(session: RouterSession) -> None:
    await session.until(lambda: len(session.loads) >= 3)
    assert session.loads[-1].running == 0


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


# --- drain -----------------------------------------------------------------------------------


async def test_drain_refuses_new_and_finishes_accepted(
    worker: LocalWorker, session: RouterSession
) -> None:
    await session.send(submit=make_submit("before", PROMPT, max_tokens=200))
    await session.until(lambda: "before" in session.outputs)
    status = await worker.stub.Drain(pb.DrainRequest())
    assert status.draining
    await session.until(lambda: session.loads[-1].draining)
    await session.send(submit=make_submit("after", PROMPT))
    refused = await session.finished("after")
    assert refused[-1].refusal.reason == pb.REFUSAL_REASON_DRAINING
    assert token_ids(await session.finished("before")) == expected(PROMPT, 200)
    status = await worker.stub.Undrain(pb.UndrainRequest())
    assert not status.draining
    await session.send(submit=make_submit("again", PROMPT))
    assert token_ids(await session.finished("again")) == expected(PROMPT)


async def test_a_terminating_worker_delivers_all_before_it_stops() -> None:
    runner = SlowRunner()
    async with (
        local_worker(worker_id="slow", runner=runner) as worker,
        router_session(worker.stub) as session,
    ):
        await session.send(submit=make_submit("r", PROMPT, max_tokens=50))
        await session.until(lambda: "r" in session.outputs)
        await worker.server.drain(30)
        assert (await worker.stub.Undrain(pb.UndrainRequest())).draining
        await worker.server.stop()
        assert token_ids(await session.finished("r")) == expected(PROMPT, 50)
        assert await session.call.code() is grpc.StatusCode.OK


async def test_a_drain_ends_at_its_deadline() -> None:
    async with (
        local_worker(worker_id="slow", runner=SlowRunner()) as worker,
        router_session(worker.stub) as session,
    ):
        await session.send(submit=make_submit("r", PROMPT, max_tokens=340))
        await session.until(lambda: "r" in session.outputs)
        await worker.server.drain(0.05)
        assert worker.server.engine.load().running == 1


async def test_a_request_counts_from_its_acceptance_to_the_end_of_its_hold() -> None:
    """An operator that sees nothing running or waiting may end this worker."""
    runner = GatedRunner()
    async with local_worker(runner=runner) as worker, router_session(worker.stub) as session:

        async def seen() -> tuple[int, float]:
            status = await worker.stub.Drain(pb.DrainRequest())
            shown = sum(
                worker.metric(f"vllm:num_requests_{state}", model_name="smollm2")
                for state in ("running", "waiting")
            )
            return status.running + status.waiting, shown

        hold = Recorder()
        request = Request("lent", tuple(PROMPT), SamplingParams(max_tokens=1), work=Work.PREFILL)
        assert worker.server.engine.submit(request, hold) is None
        await session.send(submit=make_submit("r", PROMPT))
        await eventually(lambda: worker.server.engine.load().waiting == 2)
        assert await seen() == (2, 2)
        assert worker.metric("kvasir_worker_queued_prefill_tokens", model_name="smollm2") == 100
        runner.gate.set()
        await session.finished("r")
        await asyncio.to_thread(hold.wait_finished, "lent")
        await eventually(lambda: worker.server.engine.load().running == 1)
        assert await seen() == (1, 1)
        worker.server.engine.release("lent")
        await worker.settled()
        assert await seen() == (0, 0)


# --- health and metrics ----------------------------------------------------------------------


def get(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_either_address_family_is_served(host: str) -> None:
    server = HealthServer(host, 0, Health())
    try:
        url = f"http://{join_host_port(host, server.port)}/health"
        status = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).status)
        assert status == 200
    finally:
        await asyncio.to_thread(server.stop)
    async with local_worker(host=host) as worker:
        assert worker.server.port


def test_only_what_hangs_is_not_alive() -> None:
    now = step = 0.0
    health = Health(clock=lambda: now)
    health.step_seconds = lambda: step
    alive = [health.alive]
    now, step = LOOP_PATIENCE, STEP_PATIENCE
    alive.append(health.alive)
    now = LOOP_PATIENCE + 1
    alive.append(health.alive)
    health.beat()
    alive.append(health.alive)
    step = STEP_PATIENCE + 1
    alive.append(health.alive)
    assert alive == [True, True, False, True, False]


async def test_the_http_server(worker: LocalWorker, session: RouterSession) -> None:
    await session.send(submit=make_submit("r", PROMPT))
    await session.finished("r")
    now = 0.0
    health = Health(clock=lambda: now)
    server = HealthServer("127.0.0.1", 0, health)
    try:
        assert await asyncio.to_thread(get, server.port, "/health") == (200, b"")
        assert await asyncio.to_thread(get, server.port, "/ready") == (503, b"")
        health.ready = True
        assert await asyncio.to_thread(get, server.port, "/ready") == (200, b"")
        assert (await asyncio.to_thread(get, server.port, "/other"))[0] == 404
        server.publish(worker.server.metrics.registry)
        status, body = await asyncio.to_thread(get, server.port, "/metrics")
        assert status == 200
        now = 31.0
        assert await asyncio.to_thread(get, server.port, "/health") == (503, b"")
        assert await asyncio.to_thread(get, server.port, "/ready") == (503, b"")
    finally:
        await asyncio.to_thread(server.stop)
    text = body.decode()
    for line in (
        'vllm:num_requests_running{model_name="smollm2"} 0.0',
        'vllm:num_requests_waiting{model_name="smollm2"} 0.0',
        'vllm:kv_cache_usage_perc{model_name="smollm2"} 0.0',
        'kvasir_worker_kv_slots{model_name="smollm2",state="internal_waste"} 0.0',
        'kvasir_worker_kv_waste_ratio{model_name="smollm2"} 0.0',
        'kvasir_worker_kv_block_table_entries{model_name="smollm2"} 0.0',
        'vllm:prefix_cache_queries_total{model_name="smollm2"} 50.0',
        'vllm:prefix_cache_hits_total{model_name="smollm2"} 0.0',
        'vllm:num_preemptions_total{model_name="smollm2"} 0.0',
        'vllm:time_to_first_token_seconds_count{model_name="smollm2"} 1.0',
        'vllm:inter_token_latency_seconds_count{model_name="smollm2"} 7.0',
        'kvasir_worker_prefill_tokens_total{model_name="smollm2"} 50.0',
        'kvasir_kv_transfer_total{outcome="ok"} 0.0',
        'kvasir_kv_transfer_bytes_total{direction="sent"} 0.0',
        "kvasir_kv_transfer_seconds_count 0.0",
        "kvasir_kv_transfer_queue_seconds_count 0.0",
        "kvasir_kv_transfer_compute_seconds_count 0.0",
    ):
        assert f"\n{line}\n" in text
    assert 'vllm:cache_config_info{block_size="4",' in text
