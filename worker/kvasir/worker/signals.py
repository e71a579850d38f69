"""What the scheduler has to tell a transfer while its request is still computed or received."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reserved:
    """For ReceiveSink.reserved."""

    request_id: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """For HoldSink.progress."""

    request_id: str
    computed_tokens: int


Signal = Reserved | Progress
