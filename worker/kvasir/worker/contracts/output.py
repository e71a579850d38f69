"""Engine -> service: news of one request, and where they go."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from kvasir.proto.errors import Refusal
from kvasir.proto.sampling import TokenLogprobs


class Finish(Enum):
    STOP = auto()
    LENGTH = auto()
    ABORTED = auto()
    REFUSED = auto()


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One result of a beam search; ``score`` is the sum of logprobs over length ** penalty."""

    token_ids: tuple[int, ...]
    finish: Finish
    score: float


class PrefillOutcome(Enum):
    LOCAL = auto()
    REMOTE = auto()
    RECOMPUTED = auto()


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """How the prompt's KV came to be; sent with the first output of a request.

    ``peer_fault`` (RECOMPUTED only): the prefill worker is at fault, not this one or the request.
    """

    cached_tokens: int
    outcome: PrefillOutcome
    peer_fault: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """News of one request after one step; ``finish`` is set exactly once, on the last."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    refusal: Refusal | None = None
    prefill: PrefillReport | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    hypotheses: tuple[Hypothesis, ...] = ()
    """Of a beam search, the best first; on the last output only, which has no other tokens."""


class OutputSink(Protocol):
    """Where a request's outputs go. Called on the engine thread; must not block."""

    def deliver(self, outputs: Sequence[Output]) -> None:
        """All news of one step for the requests submitted with this sink, in one call."""
        ...


class ReceiveSink(OutputSink, Protocol):
    """Sink of Work.RECEIVE requests: told when blocks are reserved and KV may flow."""

    def reserved(self, request_id: str, num_cached_tokens: int) -> None:
        """Blocks for the whole prompt are reserved; the first ``num_cached_tokens`` (whole
        blocks) came from this worker's own cache. Answer with Engine.commit_blocks,
        then Engine.finish_receive or Engine.fail_receive."""
        ...


class HoldSink(OutputSink, Protocol):
    """Sink of Work.PREFILL requests: told as KV becomes ready to read."""

    def progress(self, request_id: str, computed_tokens: int) -> None:
        """KV of the first ``computed_tokens`` tokens is in the cache; told at admission too,
        when that may be none. Read it with Engine.read_blocks; Engine.release ends the
        hold."""
        ...
