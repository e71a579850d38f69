"""What must be equal on both sides before one KV block may move, and how blocks are framed."""

from dataclasses import dataclass

from kvasir.proto.v1 import engine_pb2 as pb

FRAME_BYTES = 1 << 20
"""Frames of about 1 MiB moved fastest over gRPC on loopback; both 64 KiB and 16 MiB are slower."""

_FRAME_OVERHEAD = 64 * 1024
"""Room beside the payload: header, epoch and a result with its logprobs."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What this worker and the model are to a transfer."""

    epoch: str
    layout: pb.KvLayout
    block_bytes: int
    vocab_size: int


def blocks_per_frame(block_bytes: int) -> int:
    """How many blocks make a frame of about ``FRAME_BYTES``; at least one."""
    return max(1, FRAME_BYTES // block_bytes)


def max_frame_bytes(block_bytes: int) -> int:
    """No honest frame is longer; gRPC refuses one that is before it is allocated."""
    return blocks_per_frame(block_bytes) * block_bytes + _FRAME_OVERHEAD


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens, the last one perhaps in part."""
    return -(-num_tokens // block_size)


def layout_mismatch(ours: pb.KvLayout, theirs: pb.KvLayout) -> str | None:
    """The first field that differs, in words; None if the layouts are equal."""
    for field in pb.KvLayout.DESCRIPTOR.fields:
        own, other = getattr(ours, field.name), getattr(theirs, field.name)
        if own != other:
            return f"{field.name} is {own!r} here and {other!r} at the caller"
    return None
