"""The Engine service over a real socket: information, sessions, requests and refusals."""

import hashlib
import math

import grpc
import pytest

from helpers.local_worker import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    LocalWorker,
    RouterSession,
    local_worker,
    make_submit,
    router_session,
    token_ids,
)
from helpers.worker_service import PROMPT, GatedRunner, SlowRunner, ending, expected
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1 import kv_transfer_pb2 as kv_pb


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
