"""Service -> engine: what a request asks for."""

from dataclasses import dataclass
from enum import Enum, auto

from kvasir.proto.sampling import SamplingParams


class Work(Enum):
    """What a request wants of this worker."""

    GENERATE = auto()
    """Prefill here and decode here."""
    RECEIVE = auto()
    """Reserve blocks, wait for a prefill worker's KV, then decode here."""
    PREFILL = auto()
    """Prefill here, sample one token, hold the blocks until released."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search with ``width`` beams; a positive ``length_penalty`` favors long outputs."""

    width: int
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request (one child of an ``n > 1`` request), validated.

    ``output_ids`` are tokens that an earlier worker has already given to the client; they
    are computed like prompt tokens but count as output for sampling and limits.
    ``deadline`` is seconds since the Unix epoch; None for none. ``skip_tokens`` (PREFILL
    only) is how many leading tokens the receiver already has; a multiple of the block size.
    Requests of one ``group`` have the same prompt, which is computed once for all of them if
    they meet here; empty for a request without siblings. With ``beam``, tokens are not drawn but
    searched for, ``sampling.logprobs`` says how many continuations of a beam are looked at, and
    nothing is told before the end.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids: tuple[int, ...] = ()
    cache_salt: bytes = b""
    priority: int = 0
    deadline: float | None = None
    work: Work = Work.GENERATE
    skip_tokens: int = 0
    group: str = ""
    beam: BeamParams | None = None
