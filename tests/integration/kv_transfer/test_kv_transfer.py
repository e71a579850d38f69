"""KV transfer over real sockets, undisturbed; the RPC is the lease."""

import asyncio
from collections.abc import Sequence

import pytest

from helpers.fake_runner import FakeRunner
from helpers.faulty_holder import Tamper, faulty_holder
from helpers.local_worker import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    eventually,
    local_worker,
    make_submit,
    router_session,
    token_ids,
)
from helpers.transfer_pair import (
    MAX_TOKENS,
    PROMPT,
    Pair,
    expected,
    prefill_request,
    raw_prefill,
    report,
)
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.transfer.frames import Frame

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


def stopping_at(stop: int) -> tuple[asyncio.Event, Tamper]:
    """A holder's fault: frame ``stop`` never comes. The event says that it was due."""
    reached = asyncio.Event()

    async def hold(number: int, frame: Frame) -> list[Frame | bytes]:
        if number == stop:
            reached.set()
            await asyncio.Event().wait()
        return [frame]

    return reached, hold


# --- the RPC is the lease --------------------------------------------------------------------


async def test_an_abort_in_mid_transfer_frees_both_sides(pair: Pair) -> None:
    reached, hold_at_2 = stopping_at(2)
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
    reached, hold_at_2 = stopping_at(2)
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
