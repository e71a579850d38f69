"""Prefill requests that a worker refuses, and what it says."""

from collections.abc import AsyncIterator

import grpc
import pytest

from helpers.fake_runner import SLOT_BYTES
from helpers.faulty_holder import PREFILL
from helpers.local_worker import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    LocalWorker,
    local_worker,
    make_submit,
    token_ids,
)
from helpers.transfer_pair import PROMPT, Pair, connected, expected, report
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1 import kv_transfer_pb2 as kv_pb
from kvasir.worker.transfer import layout


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames have the 4 blocks of one chunk, however many chunks are done at once."""
    monkeypatch.setattr(layout, "FRAME_BYTES", 4 * BLOCK_SIZE * SLOT_BYTES)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with connected() as pair:
        yield pair


def prefill_request(worker: LocalWorker) -> kv_pb.PrefillRequest:
    return kv_pb.PrefillRequest(
        request_id="r",
        token_ids=PROMPT,
        sampling=make_submit("r", PROMPT).sampling,
        layout=worker.model.layout,
        expected_epoch=worker.epoch,
    )


async def refused(worker: LocalWorker, request: kv_pb.PrefillRequest) -> grpc.aio.AioRpcError:
    call = raw_prefill(worker)(request.SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    await worker.settled()
    return caught.value


def raw_prefill(worker: LocalWorker) -> grpc.aio.UnaryStreamMultiCallable[bytes, bytes]:
    return worker.channel.unary_stream(PREFILL)


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
