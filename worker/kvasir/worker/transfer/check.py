"""Whether a stream of frames may be believed: every rule in one place, without I/O.

A frame passes only if everything about it is as the request implies. So a stale, torn,
reordered or mismatched block is never written to the cache.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

import xxhash

from kvasir.worker.transfer.frames import Frame


class Outcome(StrEnum):
    """How a transfer ended: the closed set of values of ``kvasir_kv_transfer_total{outcome=}``."""

    OK = "ok"
    REFUSED = "refused"
    """The holder did not accept the request, for example because it drains."""
    CHECKSUM = "checksum"
    EPOCH = "epoch"
    """Another process answered than the one that the router named."""
    LAYOUT = "layout"
    """The holder's layout, or the size of its blocks, is not ours."""
    SEQUENCE = "sequence"
    """Frames or blocks out of order, missing, or more than asked for."""
    BROKEN = "broken"
    """The stream ended early, or carried something that is no frame."""
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    """The request went away here: its client left, or its deadline passed."""
    INTERNAL = "internal"
    """An error on this side."""


PEER_FAULTS = frozenset(
    {Outcome.BROKEN, Outcome.CHECKSUM, Outcome.EPOCH, Outcome.SEQUENCE, Outcome.TIMEOUT}
)
"""Outcomes that speak against the holder. A refusal is its right; layouts are a matter of both."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a stream is not believed."""

    outcome: Outcome
    message: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What the stream of one request must consist of.

    ``first_block`` up to but not including ``end_block`` of the request's block table are
    to be sent, ``block_bytes`` each. ``missing_tokens`` is how many tokens they hold.
    """

    epoch: str
    first_block: int
    end_block: int
    block_bytes: int
    missing_tokens: int
    vocab_size: int
    wants_logprobs: bool


class FrameCheck:
    """Checks the frames of one stream, in order."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._next_sequence = 0
        self._next_block = expected.first_block

    @property
    def complete(self) -> bool:
        """Whether every block has come."""
        return self._next_block == self._expected.end_block

    def check(self, frame: Frame) -> Fault | None:
        """None if the frame is the next one of an honest stream; then it counts as taken."""
        fault = self._order(frame) or self._content(frame)
        if fault is not None:
            return fault
        self._next_sequence += 1
        self._next_block += frame.block_count
        return self._result(frame)

    def _order(self, frame: Frame) -> Fault | None:
        if frame.sequence != self._next_sequence:
            return Fault(
                Outcome.SEQUENCE, f"frame {frame.sequence} came where {self._next_sequence} was due"
            )
        if frame.epoch != self._expected.epoch:
            return Fault(
                Outcome.EPOCH,
                f"epoch {frame.epoch!r} is not {self._expected.epoch!r}, the one named",
            )
        if frame.first_block != self._next_block:
            return Fault(
                Outcome.SEQUENCE, f"block {frame.first_block} came where {self._next_block} was due"
            )
        left = self._expected.end_block - self._next_block
        if not 1 <= frame.block_count <= left:
            return Fault(
                Outcome.SEQUENCE, f"a frame of {frame.block_count} blocks where {left} are left"
            )
        return None

    def _content(self, frame: Frame) -> Fault | None:
        due = frame.block_count * self._expected.block_bytes
        if len(frame.payload) != due:
            return Fault(
                Outcome.LAYOUT,
                f"{frame.block_count} blocks came as {len(frame.payload)} bytes, not {due}",
            )
        if checksum(frame.payload) != frame.checksum:
            return Fault(Outcome.CHECKSUM, f"checksum of frame {frame.sequence} does not match")
        return None

    def _result(self, frame: Frame) -> Fault | None:
        result = frame.result
        if (result is not None) != self.complete:
            where = "before the last block" if result is not None else "missing at the last block"
            return Fault(Outcome.SEQUENCE, f"the result is {where}")
        if result is None:
            return None
        if result.token_id >= self._expected.vocab_size:
            return Fault(Outcome.BROKEN, f"token {result.token_id} is out of the vocabulary")
        if result.HasField("logprobs") != self._expected.wants_logprobs:
            return Fault(Outcome.BROKEN, "logprobs of the first token are not as asked for")
        if len(result.logprobs.top_ids) != len(result.logprobs.top_logprobs):
            return Fault(Outcome.BROKEN, "the first token's alternatives and logprobs differ")
        if not all(0 <= s < math.inf for s in (result.queue_seconds, result.compute_seconds)):
            return Fault(Outcome.BROKEN, "the holder's times are not times")
        if result.holder_cached_tokens >= self._expected.missing_tokens:
            return Fault(Outcome.BROKEN, "more tokens were cached than there are")
        return None


def checksum(payload: memoryview | bytes) -> int:
    """xxh3-64 of a payload, as KvFrame carries it."""
    return xxhash.xxh3_64_intdigest(payload)
