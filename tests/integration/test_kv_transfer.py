"""KV transfer between two whole workers over gRPC, undisturbed and with every fault.

Whatever happens to the transfer, the tokens are those of one worker alone, the outcome is
counted under its name, and both pools are empty afterwards.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from helpers.fake_runner import SLOT_BYTES, FakeRunner, expected_tokens
from helpers.faulty_holder import PREFILL, Tamper, TearError, faulty_holder, stall
from helpers.local_worker import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    LocalWorker,
    RouterSession,
    eventually,
    local_worker,
    make_submit,
    router_session,
    token_ids,
)
from kvasir.proto.sampling import SamplingParams
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1 import kv_transfer_pb2 as kv_pb
from kvasir.worker.contracts import Request
from kvasir.worker.transfer import layout
from kvasir.worker.transfer.check import checksum
from kvasir.worker.transfer.frames import Frame

PROMPT = [7 * i % VOCAB_SIZE for i in range(102)]
MAX_TOKENS = 8


def expected(prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    return expected_tokens(Request("any", tuple(prompt), sampling), VOCAB_SIZE)


class Pair:
    """A decode worker, a prefill worker, and a router's session with the former."""

    def __init__(self, decode: LocalWorker, prefill: LocalWorker, session: RouterSession) -> None:
        self.decode = decode
        self.prefill = prefill
        self.session = session

    async def ask(
        self, request_id: str, prompt: list[int], peer: pb.PrefillPeer | None
    ) -> list[pb.SequenceOutput]:
        submit = make_submit(request_id, prompt, max_tokens=MAX_TOKENS, prefill=peer)
        await self.session.send(submit=submit)
        return await self.session.finished(request_id)

    async def settled(self) -> None:
        await self.decode.settled()
        await self.prefill.settled()


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames have the 4 blocks of one chunk, however many chunks are done at once."""
    monkeypatch.setattr(layout, "FRAME_BYTES", 4 * BLOCK_SIZE * SLOT_BYTES)


@asynccontextmanager
async def connected(**decode_settings: object) -> AsyncIterator[Pair]:
    async with (
        local_worker(worker_id="d", **decode_settings) as decode,  # type: ignore[arg-type]  # settings only
        local_worker(worker_id="p") as prefill,
        router_session(decode.stub) as session,
    ):
        yield Pair(decode, prefill, session)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with connected() as pair:
        yield pair


@pytest.fixture
async def impatient_pair() -> AsyncIterator[Pair]:
    """Gives a silent prefill worker up at once: only for tests in which it stays silent."""
    async with connected(transfer_stall_timeout=0.5) as pair:
        yield pair


def report(outputs: list[pb.SequenceOutput]) -> pb.PrefillReport:
    reports = [output.prefill for output in outputs if output.HasField("prefill")]
    assert len(reports) == 1
    return reports[0]


# --- undisturbed -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [6, 8, 100, 101, 102, 103])
async def test_a_remote_prefill_gives_the_tokens_of_a_local_one(pair: Pair, length: int) -> None:
    prompt = PROMPT[:length]
    outputs = await pair.ask("r", prompt, pair.prefill.peer())
    assert token_ids(outputs) == expected(prompt)
    assert report(outputs) == pb.PrefillReport(
        outcome=pb.PREFILL_OUTCOME_REMOTE, prefill_worker_id="p"
    )
    await pair.settled()
    blocks = -(-length // BLOCK_SIZE)
    num_bytes = blocks * pair.decode.model.runner.block_bytes
    assert pair.decode.transfers() == {"ok": 1}
    for times in ("queue", "compute"):
        assert pair.decode.metric(f"kvasir_kv_transfer_{times}_seconds_count") == 1
    assert pair.decode.metric("kvasir_kv_transfer_bytes_total", direction="received") == num_bytes
    assert pair.prefill.metric("kvasir_kv_transfer_bytes_total", direction="sent") == num_bytes
    computed = [
        worker.metric("kvasir_worker_prefill_tokens_total", model_name="smollm2")
        for worker in (pair.prefill, pair.decode)
    ]
    assert computed == [len(prompt), 0]
    ttft = pair.prefill.metric("vllm:time_to_first_token_seconds_count", model_name="smollm2")
    assert ttft == 1
    # The decode worker computed decode steps only: its prompt's KV all came.
    assert all(size == 1 for step in pair.decode.model.runner.steps for size in step.values())


async def test_only_what_is_missing_travels(pair: Pair) -> None:
    await pair.ask("first", PROMPT[:60], None)
    before = pair.decode.metric("kvasir_kv_transfer_bytes_total", direction="received")
    outputs = await pair.ask("second", PROMPT, pair.prefill.peer())
    assert token_ids(outputs) == expected(PROMPT)
    assert report(outputs).cached_tokens == 60
    after = pair.decode.metric("kvasir_kv_transfer_bytes_total", direction="received")
    missing = -(-len(PROMPT) // BLOCK_SIZE) - 60 // BLOCK_SIZE
    assert after - before == missing * pair.decode.model.runner.block_bytes
    await pair.settled()


async def test_what_the_prefill_worker_had_cached_is_reported(pair: Pair) -> None:
    async with router_session(pair.prefill.stub) as other:
        await other.send(submit=make_submit("warm", PROMPT[:80]))
        await other.finished("warm")
    outputs = await pair.ask("r", PROMPT, pair.prefill.peer())
    assert token_ids(outputs) == expected(PROMPT)
    assert report(outputs).cached_tokens == 80
    await pair.settled()


async def test_a_prompt_that_is_cached_is_not_asked_for(pair: Pair) -> None:
    await pair.ask("first", PROMPT, None)
    outputs = await pair.ask("second", PROMPT, pair.prefill.peer())
    assert token_ids(outputs) == expected(PROMPT)
    assert report(outputs).outcome == pb.PREFILL_OUTCOME_LOCAL
    assert report(outputs).prefill_worker_id == ""
    assert pair.decode.transfers() == {}
    await pair.settled()


async def test_a_worker_does_not_fetch_from_itself(pair: Pair) -> None:
    outputs = await pair.ask("r", PROMPT, pair.decode.peer())
    assert token_ids(outputs) == expected(PROMPT)
    assert report(outputs).outcome == pb.PREFILL_OUTCOME_LOCAL
    await pair.settled()


async def test_many_at_once(pair: Pair) -> None:
    prompts = {f"r{i}": [i, *PROMPT[: 20 + 3 * i]] for i in range(20)}
    for request_id, prompt in prompts.items():
        peer = pair.prefill.peer()
        await pair.session.send(
            submit=make_submit(request_id, prompt, max_tokens=MAX_TOKENS, prefill=peer)
        )
    for request_id, prompt in prompts.items():
        assert token_ids(await pair.session.finished(request_id)) == expected(prompt)
    await pair.settled()
    assert pair.decode.transfers() == {"ok": 20}


async def test_logprobs_of_the_first_token_come_along(pair: Pair) -> None:
    for request_id, peer in (("local", None), ("remote", pair.prefill.peer())):
        prompt = PROMPT if peer is None else PROMPT[1:]
        submit = make_submit(request_id, prompt, prefill=peer, logprobs=2)
        await pair.session.send(submit=submit)
    local = await pair.session.finished("local")
    remote = await pair.session.finished("remote")
    assert report(remote).outcome == pb.PREFILL_OUTCOME_REMOTE
    first = next(output for output in remote if output.token_ids)
    assert first.logprobs[0].rank == 1 + first.token_ids[0]
    assert len(first.logprobs[0].top_ids) == 2
    assert sum(len(o.logprobs) for o in local) == sum(len(o.logprobs) for o in remote)


async def test_a_replay_is_prefilled_remotely(pair: Pair) -> None:
    whole = expected(PROMPT)
    submit = make_submit("r", PROMPT, max_tokens=MAX_TOKENS, prefill=pair.prefill.peer())
    submit.output_token_ids.extend(whole[:3])
    await pair.session.send(submit=submit)
    outputs = await pair.session.finished("r")
    assert token_ids(outputs) == whole[3:]
    assert report(outputs).outcome == pb.PREFILL_OUTCOME_REMOTE


# --- faults in the stream --------------------------------------------------------------------


def change(at: int, **fields: object) -> Tamper:
    """Replace fields of one frame."""

    async def tamper(number: int, frame: Frame) -> list[Frame | bytes]:
        if number != at:
            return [frame]
        return [replace(frame, **fields)]  # type: ignore[arg-type]  # by field name

    return tamper


async def corrupt(number: int, frame: Frame) -> list[Frame | bytes]:
    payload = bytearray(frame.payload)
    payload[-1] ^= number == 2
    return [replace(frame, payload=memoryview(payload))]


async def shorten(number: int, frame: Frame) -> list[Frame | bytes]:
    payload = frame.payload[: -1 if number == 2 else None]
    return [replace(frame, payload=payload, checksum=checksum(payload))]


async def drop(number: int, frame: Frame) -> list[Frame | bytes]:
    return [] if number == 2 else [frame]


async def repeat(number: int, frame: Frame) -> list[Frame | bytes]:
    return [frame, frame] if number == 2 else [frame]


async def garble(number: int, frame: Frame) -> list[Frame | bytes]:
    return [b"\xff\xff" if number == 2 else frame]


async def tear(number: int, frame: Frame) -> list[Frame | bytes]:
    if number == 2:
        raise TearError
    return [frame]


async def end_early(number: int, frame: Frame) -> list[Frame | bytes]:
    return [frame] if number < 2 else []


async def go_on(_number: int, frame: Frame) -> list[Frame | bytes]:
    more = replace(frame, sequence=frame.sequence + 1, first_block=frame.first_block + 1)
    return [frame, more] if frame.result is not None else [frame]


async def stall_at_2(number: int, frame: Frame) -> list[Frame | bytes]:
    return await stall(number, frame) if number == 2 else [frame]


async def oversize(number: int, frame: Frame) -> list[Frame | bytes]:
    payload = memoryview(bytes(4 << 20))
    return [replace(frame, payload=payload) if number == 2 else frame]


@pytest.mark.parametrize(
    ("tamper", "outcome", "kept_frames"),
    [
        (corrupt, "checksum", 2),
        (change(2, epoch="another"), "epoch", 2),
        (shorten, "layout", 2),
        (change(2, sequence=7), "sequence", 2),
        (change(0, first_block=1), "sequence", 0),
        (drop, "sequence", 2),
        (repeat, "sequence", 3),
        (garble, "broken", 2),
        (tear, "broken", 2),
        (end_early, "broken", 2),
        (go_on, "sequence", 7),
        (oversize, "broken", 2),
    ],
)
async def test_a_fault_costs_a_recompute_and_nothing_else(
    pair: Pair, tamper: Tamper, outcome: str, kept_frames: int
) -> None:
    await check_fault(pair, tamper, outcome, kept_frames)


async def test_a_holder_that_falls_silent(impatient_pair: Pair) -> None:
    await check_fault(impatient_pair, stall_at_2, "timeout", 2)


async def check_fault(pair: Pair, tamper: Tamper, outcome: str, kept_frames: int) -> None:
    async with faulty_holder(pair.prefill.address, tamper) as address:
        outputs = await pair.ask("r", PROMPT, pair.prefill.peer(address=address))
        assert token_ids(outputs) == expected(PROMPT)
        assert report(outputs).outcome == pb.PREFILL_OUTCOME_RECOMPUTED
        assert report(outputs).peer_fault == (outcome != "layout")
        assert pair.decode.transfers() == {outcome: 1}
        # Whole blocks that came before the fault are kept: 16 tokens a frame.
        computed = sum(s["r"] for s in pair.decode.model.runner.steps) - (MAX_TOKENS - 1)
        usable = min(16 * kept_frames, (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE)
        assert computed == len(PROMPT) - usable
        await pair.settled()


async def test_a_holder_that_is_not_there(pair: Pair) -> None:
    async with faulty_holder(pair.prefill.address, stall) as address:
        pass
    outputs = await pair.ask("r", PROMPT, pair.prefill.peer(address=address))
    assert token_ids(outputs) == expected(PROMPT)
    assert pair.decode.transfers() == {"broken": 1}
    await pair.settled()


async def test_an_address_that_never_answers(impatient_pair: Pair) -> None:
    """It accepts the connection and says nothing, as a frozen process does."""

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        writer.close()

    pair = impatient_pair
    done = asyncio.Event()
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    outputs = await pair.ask("r", PROMPT, pair.prefill.peer(address=f"127.0.0.1:{port}"))
    assert token_ids(outputs) == expected(PROMPT)
    assert pair.decode.transfers() == {"timeout": 1}
    done.set()
    server.close()
    await server.wait_closed()
    await pair.settled()


async def test_a_transfer_that_takes_too_long() -> None:
    async def drip(_number: int, frame: Frame) -> list[Frame | bytes]:
        await asyncio.sleep(0.3)
        return [frame]

    async with (
        local_worker(worker_id="d", transfer_timeout=1.0) as decode,
        local_worker(worker_id="p") as prefill,
        router_session(decode.stub) as session,
        faulty_holder(prefill.address, drip) as address,
    ):
        pair = Pair(decode, prefill, session)
        outputs = await pair.ask("r", PROMPT, prefill.peer(address=address))
        assert token_ids(outputs) == expected(PROMPT)
        assert decode.transfers() == {"timeout": 1}
        await pair.settled()


async def test_an_error_on_this_side_accuses_nobody(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_num_bytes: int) -> None:
        raise RuntimeError("a bug in the receiver")

    monkeypatch.setattr(pair.decode.server.metrics, "transfer_received", fail)
    outputs = await pair.ask("r", PROMPT, pair.prefill.peer())
    assert token_ids(outputs) == expected(PROMPT)
    assert report(outputs).outcome == pb.PREFILL_OUTCOME_RECOMPUTED
    assert not report(outputs).peer_fault
    assert pair.decode.transfers() == {"internal": 1}
    assert "a bug in the receiver" in caplog.text
    await pair.settled()


async def test_a_deadline_that_cuts_a_transfer_short_accuses_nobody(pair: Pair) -> None:
    async with faulty_holder(pair.prefill.address, stall_at_2) as address:
        peer = pair.prefill.peer(address=address)
        submit = make_submit("r", PROMPT, max_tokens=MAX_TOKENS, prefill=peer)
        submit.deadline = time.time() + 1.0
        await pair.session.send(submit=submit)
        outputs = await pair.session.finished("r")
        assert report(outputs).outcome == pb.PREFILL_OUTCOME_RECOMPUTED
        assert not report(outputs).peer_fault
        assert pair.decode.transfers() == {"timeout": 1}
        await pair.settled()


# --- refusals --------------------------------------------------------------------------------


async def test_another_epoch_than_the_router_named(pair: Pair) -> None:
    outputs = await pair.ask("r", PROMPT, pair.prefill.peer(epoch="the-one-before"))
    assert token_ids(outputs) == expected(PROMPT)
    assert pair.decode.transfers() == {"epoch": 1}
    assert pair.prefill.model.runner.steps == []
    await pair.settled()


async def test_another_layout(pair: Pair) -> None:
    wider = pb.KvLayout(model_fingerprint="fake", dtype="u16", block_size=BLOCK_SIZE)
    async with local_worker(worker_id="q", layout=wider) as other:
        outputs = await pair.ask("r", PROMPT, other.peer())
        assert token_ids(outputs) == expected(PROMPT)
        assert not report(outputs).peer_fault
        assert pair.decode.transfers() == {"layout": 1}
        assert other.model.runner.steps == []


async def test_a_draining_holder(pair: Pair) -> None:
    await pair.prefill.stub.Drain(pb.DrainRequest())
    outputs = await pair.ask("r", PROMPT, pair.prefill.peer())
    assert token_ids(outputs) == expected(PROMPT)
    assert report(outputs).outcome == pb.PREFILL_OUTCOME_RECOMPUTED
    assert not report(outputs).peer_fault
    assert pair.decode.transfers() == {"refused": 1}
    await pair.settled()


def prefill_request(worker: LocalWorker) -> kv_pb.PrefillRequest:
    return kv_pb.PrefillRequest(
        request_id="r",
        token_ids=PROMPT,
        sampling=make_submit("r", PROMPT).sampling,
        layout=worker.model.layout,
        expected_epoch=worker.epoch,
    )


@pytest.mark.parametrize(
    ("field", "value", "code", "reason", "words"),
    [
        ("expected_epoch", "", "FAILED_PRECONDITION", "EPOCH_MISMATCH", "epoch"),
        ("num_cached_tokens", 3, "INVALID_ARGUMENT", "INVALID_REQUEST", "num_cached_tokens"),
        ("num_cached_tokens", 104, "INVALID_ARGUMENT", "INVALID_REQUEST", "num_cached_tokens"),
        ("num_output_tokens", 102, "INVALID_ARGUMENT", "INVALID_REQUEST", "prompt"),
        ("request_id", "", "INVALID_ARGUMENT", "INVALID_REQUEST", "request_id"),
    ],
)
async def test_a_refused_prefill_says_why(
    pair: Pair, field: str, value: object, code: str, reason: str, words: str
) -> None:
    request = prefill_request(pair.prefill)
    setattr(request, field, value)
    error = await refused(pair.prefill, request)
    assert error.code().name == code
    assert dict(error.trailing_metadata() or ())["kvasir-refusal"] == reason
    assert words in str(error.details())


async def test_a_refused_layout_names_the_field(pair: Pair) -> None:
    request = prefill_request(pair.prefill)
    request.layout.num_kv_heads = 3
    error = await refused(pair.prefill, request)
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "num_kv_heads" in str(error.details())


async def test_a_prompt_out_of_the_vocabulary(pair: Pair) -> None:
    request = prefill_request(pair.prefill)
    request.token_ids.append(VOCAB_SIZE)
    error = await refused(pair.prefill, request)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_prompt_that_is_too_long(pair: Pair) -> None:
    request = prefill_request(pair.prefill)
    request.token_ids.extend([1] * 400)
    error = await refused(pair.prefill, request)
    assert error.code() is grpc.StatusCode.OUT_OF_RANGE
    assert pair.prefill.model.runner.steps == []


async def test_a_refusal_is_logged_with_its_caller(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvasir.worker.transfer")
    request = prefill_request(pair.prefill)
    request.receiver_epoch = "epoch-of-the-caller"
    request.num_cached_tokens = 3
    await refused(pair.prefill, request)
    assert "request=r caller_epoch=epoch-of-the-caller" in caplog.text


async def refused(worker: LocalWorker, request: kv_pb.PrefillRequest) -> grpc.aio.AioRpcError:
    call = raw_prefill(worker)(request.SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    await worker.settled()
    return caught.value


def raw_prefill(worker: LocalWorker) -> grpc.aio.UnaryStreamMultiCallable[bytes, bytes]:
    return worker.channel.unary_stream(PREFILL)


# --- the RPC is the lease --------------------------------------------------------------------


async def test_an_abort_in_mid_transfer_frees_both_sides(pair: Pair) -> None:
    reached = asyncio.Event()

    async def hold_at_2(number: int, frame: Frame) -> list[Frame | bytes]:
        if number == 2:
            reached.set()
            await asyncio.Event().wait()
        return [frame]

    async with faulty_holder(pair.prefill.address, hold_at_2) as address:
        peer = pair.prefill.peer(address=address)
        await pair.session.send(submit=make_submit("r", PROMPT, prefill=peer))
        await reached.wait()
        assert pair.decode.server.engine.load().kv_blocks_used > 0
        assert pair.prefill.server.engine.load().kv_blocks_used > 0
        await pair.session.send(abort=pb.Abort(request_id="r"))
        outputs = await pair.session.finished("r")
        assert outputs[-1].finish_reason == pb.FINISH_REASON_ABORTED
        await pair.settled()
        assert pair.decode.transfers() == {"aborted": 1}


async def test_a_router_that_leaves_in_mid_transfer_frees_both_sides(pair: Pair) -> None:
    reached = asyncio.Event()

    async def hold_at_2(number: int, frame: Frame) -> list[Frame | bytes]:
        if number == 2:
            reached.set()
            await asyncio.Event().wait()
        return [frame]

    async with faulty_holder(pair.prefill.address, hold_at_2) as address:
        peer = pair.prefill.peer(address=address)
        async with router_session(pair.decode.stub) as other:
            await other.send(submit=make_submit("r", PROMPT, prefill=peer))
            await reached.wait()
        await pair.settled()
        assert pair.decode.transfers() == {"aborted": 1}


async def test_blocks_are_held_until_the_caller_is_done(pair: Pair) -> None:
    # Many more bytes than flow control lets pass unread, in frames of 1 MiB.
    runner = WideRunner(num_blocks=64)
    async with local_worker(worker_id="wide", runner=runner, max_batched_tokens=512) as holder:
        request = prefill_request(holder)
        call = raw_prefill(holder)(request.SerializeToString())
        assert isinstance(await call.read(), bytes)
        await eventually(lambda: holder.server.engine.load().kv_blocks_used == 26)
        call.cancel()
        await holder.settled()


async def test_a_caller_that_does_not_read_is_dropped_in_time() -> None:
    runner = WideRunner(num_blocks=64)
    async with local_worker(
        worker_id="wide", runner=runner, max_batched_tokens=512, transfer_timeout=1.0
    ) as holder:
        call = raw_prefill(holder)(prefill_request(holder).SerializeToString())
        assert isinstance(await call.read(), bytes)
        await holder.settled()
        call.cancel()


class WideRunner(FakeRunner):
    """Blocks of 2 MiB, so that a prompt is more than buffers on the way can hold."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, VOCAB_SIZE)

    @property
    def block_bytes(self) -> int:
        return 2 << 20

    def read_blocks(self, block_ids: Sequence[int], filled_tokens: int) -> memoryview:
        assert 0 < filled_tokens <= len(block_ids) * BLOCK_SIZE
        return memoryview(bytes(len(block_ids) * self.block_bytes))
