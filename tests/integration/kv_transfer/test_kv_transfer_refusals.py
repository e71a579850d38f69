"""Prefill requests that a worker refuses, and what it says."""

import grpc
import pytest

from helpers.local_worker import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    LocalWorker,
    local_worker,
    token_ids,
)
from helpers.transfer_pair import PROMPT, Pair, expected, prefill_request, raw_prefill, report
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.proto.v1 import kv_transfer_pb2 as kv_pb


async def refused(worker: LocalWorker, request: kv_pb.PrefillRequest) -> grpc.aio.AioRpcError:
    call = raw_prefill(worker)(request.SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    await worker.settled()
    return caught.value


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
