"""KvFrame on the wire, by hand: the same bytes as protobuf, without its copies.

Protobuf's own ``bytes`` field copies a payload twice on each side, which halves the speed
of a transfer. ``encode`` copies it once, into the message that gRPC sends; ``decode`` does
not copy it at all: the payload is a view of the message that gRPC received.

A peer's bytes are not trusted. ``decode`` either returns a frame equal to what protobuf
reads or raises ``FrameError``; it is stricter than protobuf in three ways that no honest
writer notices: a known field comes at most once, has its own wire type, and fits its width.
Unknown fields are skipped, so that a newer peer can add some. What the values mean is
checked by ``check.py``.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kvasir.proto.v1 import kv_transfer_pb2 as pb

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5

_SEQUENCE = pb.KvFrame.SEQUENCE_FIELD_NUMBER
_FIRST_BLOCK = pb.KvFrame.FIRST_BLOCK_FIELD_NUMBER
_BLOCK_COUNT = pb.KvFrame.BLOCK_COUNT_FIELD_NUMBER
_CHECKSUM = pb.KvFrame.CHECKSUM_FIELD_NUMBER
_EPOCH = pb.KvFrame.EPOCH_FIELD_NUMBER
_PAYLOAD = pb.KvFrame.PAYLOAD_FIELD_NUMBER
_RESULT = pb.KvFrame.RESULT_FIELD_NUMBER

_WIRE_TYPES = {
    _SEQUENCE: _VARINT,
    _FIRST_BLOCK: _VARINT,
    _BLOCK_COUNT: _VARINT,
    _CHECKSUM: _FIXED64,
    _EPOCH: _LENGTH,
    _PAYLOAD: _LENGTH,
    _RESULT: _LENGTH,
}
_MAX_FIELD_NUMBER = (1 << 29) - 1
_MAX_VARINT_BYTES = 10
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}


class FrameError(Exception):
    """The bytes are no KvFrame. The message says what is wrong with them."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One KvFrame of kv_transfer.proto; field meanings are given there."""

    sequence: int
    first_block: int
    block_count: int
    checksum: int
    epoch: str
    payload: memoryview
    result: pb.PrefillResult | None = None


def encode(frame: Frame) -> bytes:
    """The frame as protobuf writes it: fields in order, those at their default left out.

    Raises:
        ValueError: a number does not fit its field.
    """
    parts: list[bytes | memoryview] = []
    _put_uint32(parts, _SEQUENCE, frame.sequence)
    _put_uint32(parts, _FIRST_BLOCK, frame.first_block)
    _put_uint32(parts, _BLOCK_COUNT, frame.block_count)
    if frame.checksum:
        if not 0 < frame.checksum < 1 << 64:
            raise ValueError(f"checksum {frame.checksum} does not fit 64 bits")
        parts.append(_tag(_CHECKSUM, _FIXED64) + frame.checksum.to_bytes(8, "little"))
    _put_bytes(parts, _EPOCH, frame.epoch.encode())
    _put_bytes(parts, _PAYLOAD, frame.payload)
    if frame.result is not None:
        _put_bytes(parts, _RESULT, frame.result.SerializeToString(), keep_empty=True)
    return b"".join(parts)


def decode(data: bytes) -> Frame:
    """Read one message; the payload of the frame is a view of ``data``.

    Raises:
        FrameError: ``data`` is not a KvFrame.
    """
    numbers: dict[int, int] = {}
    spans: dict[int, memoryview] = {}
    view = memoryview(data)
    position = 0
    while position < len(view):
        key, position = _varint(view, position)
        number, wire_type = key >> 3, key & 7
        if not 1 <= number <= _MAX_FIELD_NUMBER:
            raise FrameError(f"field number {number} is out of range")
        if _WIRE_TYPES.get(number, wire_type) != wire_type:
            raise FrameError(f"field {number} has wire type {wire_type}")
        if number in numbers or number in spans:
            raise FrameError(f"field {number} comes twice")
        value, position = _field(view, position, wire_type)
        if number not in _WIRE_TYPES:
            continue
        if isinstance(value, int):
            numbers[number] = value
        else:
            spans[number] = value
    return Frame(
        sequence=_uint32(numbers, _SEQUENCE),
        first_block=_uint32(numbers, _FIRST_BLOCK),
        block_count=_uint32(numbers, _BLOCK_COUNT),
        checksum=numbers.get(_CHECKSUM, 0),
        epoch=_text(spans.get(_EPOCH, memoryview(b""))),
        payload=spans.get(_PAYLOAD, memoryview(b"")),
        result=_result(spans[_RESULT]) if _RESULT in spans else None,
    )


def _field(view: memoryview, position: int, wire_type: int) -> tuple[int | memoryview, int]:
    """One field's value (a view if it has a length), and where the next one begins."""
    if wire_type == _VARINT:
        return _varint(view, position)
    if wire_type == _LENGTH:
        length, position = _varint(view, position)
        end = position + length
        if end > len(view):
            raise FrameError(f"a field of {length} bytes runs past the end")
        return view[position:end], end
    if wire_type in _FIXED_SIZES:
        end = position + _FIXED_SIZES[wire_type]
        if end > len(view):
            raise FrameError("a fixed-width field runs past the end")
        return int.from_bytes(view[position:end], "little"), end
    raise FrameError(f"wire type {wire_type} is not used by KvFrame")


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(view[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value >= 1 << 64:
                raise FrameError("a varint is wider than 64 bits")
            return value, position + index + 1
    raise FrameError("a varint has no end")


def _uint32(numbers: dict[int, int], number: int) -> int:
    value = numbers.get(number, 0)
    if value >= 1 << 32:
        raise FrameError(f"field {number} is wider than 32 bits")
    return value


def _text(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise FrameError("the epoch is not UTF-8") from error


def _result(data: memoryview) -> pb.PrefillResult:
    try:
        return pb.PrefillResult.FromString(bytes(data))
    except DecodeError as error:
        raise FrameError("the result is not a PrefillResult") from error


def _tag(number: int, wire_type: int) -> bytes:
    return bytes(((number << 3) | wire_type,))


def _put_uint32(parts: list[bytes | memoryview], number: int, value: int) -> None:
    if not 0 <= value < 1 << 32:
        raise ValueError(f"field {number}: {value} does not fit 32 bits")
    if value:
        parts.append(_tag(number, _VARINT) + _varint_bytes(value))


def _put_bytes(
    parts: list[bytes | memoryview],
    number: int,
    data: bytes | memoryview,
    *,
    keep_empty: bool = False,
) -> None:
    if len(data) or keep_empty:
        parts.append(_tag(number, _LENGTH) + _varint_bytes(len(data)))
        parts.append(data)


def _varint_bytes(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
