"""KV transfers that break: each costs a recompute and nothing else."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from helpers.faulty_holder import Tamper, TearError, faulty_holder, stall
from helpers.local_worker import BLOCK_SIZE, local_worker, make_submit, router_session, token_ids
from helpers.transfer_pair import MAX_TOKENS, PROMPT, Pair, connected, expected, report
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.transfer.check import checksum
from kvasir.worker.transfer.frames import Frame


@pytest.fixture
async def impatient_pair() -> AsyncIterator[Pair]:
    """Gives a silent prefill worker up at once: only for tests in which it stays silent."""
    async with connected(transfer_stall_timeout=0.5) as pair:
        yield pair


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
