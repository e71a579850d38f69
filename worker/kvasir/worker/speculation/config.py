"""How a worker speculates. Pure."""

from dataclasses import dataclass
from enum import Enum


class Method(Enum):
    """Where drafted tokens come from."""

    NGRAM = "ngram"
    """What followed the same tokens earlier in the sequence itself."""
    DRAFT = "draft"
    """The model itself with some of its layers left out; the runner drafts."""


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """``num_tokens`` is the most tokens drafted for a sequence in one step.

    ``adaptive``: draft only what is expected to pay; else always all that there is.
    """

    method: Method
    num_tokens: int
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, not {self.num_tokens}")
