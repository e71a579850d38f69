"""Hand-written KvFrame bytes against protobuf's own, and what counts as an honest stream."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvasir.proto.v1 import engine_pb2, kv_transfer_pb2
from kvasir.worker.transfer.check import Expected, Fault, FrameCheck, Outcome, checksum
from kvasir.worker.transfer.frames import Frame, FrameError, decode, encode
from kvasir.worker.transfer.holder import Span, spans
from kvasir.worker.transfer.layout import (
    FRAME_BYTES,
    blocks_per_frame,
    layout_mismatch,
    max_frame_bytes,
    num_blocks,
)

uint32s = st.integers(0, 2**32 - 1)
results = st.builds(
    kv_transfer_pb2.PrefillResult,
    token_id=uint32s,
    logprobs=st.none()
    | st.builds(
        engine_pb2.TokenLogprobs,
        logprob=st.floats(width=32, allow_nan=False),
        rank=uint32s,
        top_ids=st.lists(uint32s, max_size=3),
    ),
    holder_cached_tokens=uint32s,
    queue_seconds=st.floats(allow_nan=False),
)
frames = st.builds(
    Frame,
    sequence=uint32s,
    first_block=uint32s,
    block_count=uint32s,
    checksum=st.integers(0, 2**64 - 1),
    epoch=st.text(),
    payload=st.binary(max_size=300).map(memoryview),
    result=st.none() | results,
)


def as_proto(frame: Frame) -> kv_transfer_pb2.KvFrame:
    return kv_transfer_pb2.KvFrame(
        sequence=frame.sequence,
        first_block=frame.first_block,
        block_count=frame.block_count,
        checksum=frame.checksum,
        epoch=frame.epoch,
        payload=bytes(frame.payload),
        result=frame.result,
    )


@given(frames)
@example(Frame(0, 0, 0, 0, "", memoryview(b""), kv_transfer_pb2.PrefillResult()))
def test_encodes_the_bytes_that_protobuf_encodes(frame: Frame) -> None:
    assert encode(frame) == as_proto(frame).SerializeToString(deterministic=True)


@given(frames)
def test_decodes_what_protobuf_encodes(frame: Frame) -> None:
    assert decode(as_proto(frame).SerializeToString()) == frame


@given(frames, st.randoms(use_true_random=False))
def test_accepts_fields_in_any_order_and_unknown_ones(frame: Frame, random: object) -> None:
    fields = [
        kv_transfer_pb2.KvFrame(sequence=frame.sequence).SerializeToString(),
        kv_transfer_pb2.KvFrame(payload=bytes(frame.payload)).SerializeToString(),
        kv_transfer_pb2.KvFrame(epoch=frame.epoch).SerializeToString(),
        b"\x78\x01",  # field 15, a varint
        b"\x82\x01\x03abc",  # field 16, three bytes
        b"\x8d\x01abcd",  # field 17, fixed32
        b"\x91\x01abcdefgh",  # field 18, fixed64
    ]
    random.shuffle(fields)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    decoded = decode(b"".join(fields))
    assert (decoded.sequence, decoded.epoch) == (frame.sequence, frame.epoch)
    assert decoded.payload == frame.payload


@given(st.binary(max_size=100))
def test_any_bytes_are_a_frame_or_a_frame_error(data: bytes) -> None:
    try:
        frame = decode(data)
    except FrameError:
        return
    assert encode(frame) == known_fields(data)


@given(frames, st.data())
def test_a_damaged_frame_is_what_protobuf_reads_or_a_frame_error(
    frame: Frame, data: st.DataObject
) -> None:
    damaged = bytearray(encode(frame) + b"\x08\x00")
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(bytes(damaged))
    except FrameError:
        return
    assert encode(decoded) == known_fields(bytes(damaged))


def known_fields(data: bytes) -> bytes:
    """What protobuf reads, as bytes, because NaN equals nothing."""
    message = kv_transfer_pb2.KvFrame.FromString(data)
    message.DiscardUnknownFields()
    return message.SerializeToString(deterministic=True)


def test_the_payload_is_not_copied() -> None:
    data = encode(Frame(1, 2, 3, 4, "e", memoryview(b"x" * 1000)))
    assert decode(data).payload.obj is data


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\x08", "no end"),
        (b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "no end"),
        (b"\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", "wider than 64"),
        (b"\x08\x80\x80\x80\x80\x10", "wider than 32"),
        (b"\x08\x01\x08\x01", "twice"),
        (b"\x0a\x01a", "wire type 2"),
        (b"\x32\x05abc", "past the end"),
        (b"\x21abc", "past the end"),
        (b"\x2a\x01\xff", "UTF-8"),
        (b"\x3a\x01\xff", "PrefillResult"),
        (b"\x00\x01", "out of range"),
        (b"\x7b", "not used"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, complaint: str) -> None:
    with pytest.raises(FrameError, match=complaint):
        decode(data)


@pytest.mark.parametrize(("sequence", "check"), [(2**32, 1), (-1, 1), (1, 2**64), (1, -1)])
def test_a_number_that_does_not_fit_is_not_sent(sequence: int, check: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode(Frame(sequence, 1, 1, check, "e", memoryview(b"")))


# --- an honest stream: blocks 2, 3, 4 of 8 bytes each, in two frames ---------------------------

EXPECTED = Expected(
    epoch="e1",
    first_block=2,
    end_block=5,
    block_bytes=8,
    missing_tokens=11,
    vocab_size=100,
    wants_logprobs=False,
)


def frame_of(
    sequence: int,
    first_block: int,
    data: bytes,
    result: kv_transfer_pb2.PrefillResult | None = None,
) -> Frame:
    payload = memoryview(data)
    count = len(data) // EXPECTED.block_bytes
    return Frame(sequence, first_block, count, checksum(payload), "e1", payload, result)


FIRST = frame_of(0, 2, bytes(range(16)))
LAST = frame_of(1, 4, b"lastlast", kv_transfer_pb2.PrefillResult(token_id=7))


def test_an_honest_stream_is_believed() -> None:
    check = FrameCheck(EXPECTED)
    assert check.check(FIRST) is None
    assert not check.complete
    assert check.check(LAST) is None
    assert check.complete


LOGPROBS = engine_pb2.TokenLogprobs(logprob=-1)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("frame", "outcome"),
    [
        (replace(LAST, sequence=2), Outcome.SEQUENCE),
        (replace(LAST, sequence=0), Outcome.SEQUENCE),
        (replace(LAST, epoch="e2"), Outcome.EPOCH),
        (replace(LAST, first_block=3), Outcome.SEQUENCE),
        (replace(LAST, first_block=5), Outcome.SEQUENCE),
        (replace(LAST, block_count=0), Outcome.SEQUENCE),
        (replace(LAST, block_count=2), Outcome.SEQUENCE),
        (replace(LAST, block_count=2**32 - 1), Outcome.SEQUENCE),
        (replace(LAST, payload=LAST.payload[:-1]), Outcome.LAYOUT),
        (replace(LAST, payload=memoryview(b"lastlost")), Outcome.CHECKSUM),
        (replace(LAST, checksum=0), Outcome.CHECKSUM),
        (replace(LAST, result=None), Outcome.SEQUENCE),
        (replace(LAST, result=kv_transfer_pb2.PrefillResult(token_id=100)), Outcome.BROKEN),
        (
            replace(LAST, result=kv_transfer_pb2.PrefillResult(holder_cached_tokens=11)),
            Outcome.BROKEN,
        ),
        (replace(LAST, result=kv_transfer_pb2.PrefillResult(logprobs=LOGPROBS)), Outcome.BROKEN),
        (replace(LAST, result=kv_transfer_pb2.PrefillResult(queue_seconds=-1)), Outcome.BROKEN),
        (replace(LAST, result=kv_transfer_pb2.PrefillResult(compute_seconds=NAN)), Outcome.BROKEN),
        (replace(LAST, result=kv_transfer_pb2.PrefillResult(compute_seconds=INF)), Outcome.BROKEN),
    ],
)
def test_any_departure_is_a_fault(frame: Frame, outcome: Outcome) -> None:
    check = FrameCheck(EXPECTED)
    assert check.check(FIRST) is None
    fault = check.check(frame)
    assert isinstance(fault, Fault)
    assert fault.outcome is outcome


def test_an_early_result_is_a_fault() -> None:
    fault = FrameCheck(EXPECTED).check(replace(FIRST, result=LAST.result))
    assert fault is not None
    assert fault.outcome is Outcome.SEQUENCE


def test_logprobs_that_were_asked_for_must_come() -> None:
    check = FrameCheck(replace(EXPECTED, wants_logprobs=True))
    assert check.check(FIRST) is None
    fault = check.check(LAST)
    assert fault is not None
    assert fault.outcome is Outcome.BROKEN


def test_alternatives_must_have_a_logprob_each() -> None:
    check = FrameCheck(replace(EXPECTED, wants_logprobs=True))
    assert check.check(FIRST) is None
    uneven = engine_pb2.TokenLogprobs(top_ids=[1, 2], top_logprobs=[-1])
    fault = check.check(replace(LAST, result=kv_transfer_pb2.PrefillResult(logprobs=uneven)))
    assert fault is not None
    assert fault.outcome is Outcome.BROKEN


def test_nothing_may_follow_the_last_block() -> None:
    check = FrameCheck(EXPECTED)
    assert check.check(FIRST) is None
    assert check.check(LAST) is None
    fault = check.check(frame_of(2, 5, b"moremore"))
    assert fault is not None
    assert fault.outcome is Outcome.SEQUENCE


# --- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_bytes", "blocks"), [(1, FRAME_BYTES), (300_000, 3), (FRAME_BYTES, 1), (5_000_000, 1)]
)
def test_frames_are_about_a_mebibyte(block_bytes: int, blocks: int) -> None:
    assert blocks_per_frame(block_bytes) == blocks
    assert max_frame_bytes(block_bytes) > blocks * block_bytes


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 7))
def test_spans_cover_the_blocks_once(first: int, more: int, per_frame: int) -> None:
    cut = spans(first, first + more, per_frame)
    covered = [b for span in cut for b in range(span.first_block, span.first_block + span.count)]
    assert covered == list(range(first, first + more))
    assert all(1 <= span.count <= per_frame for span in cut)


def test_spans_by_example() -> None:
    assert spans(3, 8, 2) == [Span(3, 2), Span(5, 2), Span(7, 1)]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_num_blocks(tokens: int, blocks: int) -> None:
    assert num_blocks(tokens, 16) == blocks


def test_a_layout_mismatch_names_the_field() -> None:
    layout = engine_pb2.KvLayout(dtype="float32", num_layers=30, block_size=16)
    assert layout_mismatch(layout, layout) is None
    for field in engine_pb2.KvLayout.DESCRIPTOR.fields:
        other = engine_pb2.KvLayout()
        other.CopyFrom(layout)
        value: str | int = "other" if field.type == field.TYPE_STRING else 99
        setattr(other, field.name, value)
        assert field.name in str(layout_mismatch(layout, other))
