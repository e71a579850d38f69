"""What the parts of the router say to each other.

    api/ (HTTP, text)  --Generation-->  Dispatcher (workers, tokens)
                       <--TokenEvent, Finished, Refused--

``api`` turns HTTP requests into token ids and token ids into text; it knows no workers.
The dispatcher chooses workers, submits, replays after a loss; it knows no HTTP and no text.
"""

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kvasir.proto.errors import Refusal
from kvasir.proto.sampling import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Results are ranked by the sum of their logprobs over length ** ``length_penalty``."""

    width: int
    length_penalty: float


@dataclass(frozen=True, slots=True)
class Generation:
    """One child of an API request: one prompt, one sequence of output tokens.

    ``request_id`` is made by the router and unique; a client's own id is only a label. The
    seed is always set, so that a replay draws the same tokens. Generations of one ``group``
    have the same prompt, and are kept together where that is possible; empty for none. With
    ``beam`` it gives one ``Found`` in place of all tokens.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: bytes = b""
    priority: int = 0
    group: str = ""
    beam: BeamSearch | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New output tokens, in order; each token of a request appears in exactly one event.

    The first event also tells who served the prompt. ``prefill_worker`` is None where the
    decode worker computed the prompt itself. ``prompt_logprobs`` has one entry per prompt
    token, None for the first token, and comes once, on the first event, if asked for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int | None = None
    decode_worker: str = ""
    prefill_worker: str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One output of a beam search, with its score."""

    token_ids: tuple[int, ...]
    reason: FinishReason
    score: float


@dataclass(frozen=True, slots=True)
class Found:
    """What a beam search has found, the best first; as many as it has beams."""

    hypotheses: tuple[Hypothesis, ...]
    cached_tokens: int | None
    decode_worker: str
    prefill_worker: str | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a served generation."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Refused:
    """The last event of a generation that is not (or no longer) served."""

    refusal: Refusal
    retry_after: float | None = None
    """Seconds after which it is worth trying again; for 429 and 503."""


GenerationEvent = TokenEvent | Found | Finished | Refused


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the router knows of the served model, from its workers."""

    name: str
    max_model_len: int
    vocab_size: int
    block_size: int
    tokenizer_hash: str


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as the router sees it now; a row of ``kvasir status``."""

    worker_id: str
    address: str
    role: str
    state: str
    """connecting, ready, incompatible, draining or lost."""
    reason: str = ""
    """Why it is incompatible: what follows the worker's name in a sentence."""
    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    kv_slots_filled: int = 0
    kv_slots_reserved: int = 0
    kv_slots_internal_waste: int = 0
    kv_slots_external_waste: int = 0
    kv_block_table_entries: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Dispatcher(Protocol):
    """Serves generations on the workers it knows of."""

    def generate(self, generation: Generation) -> AsyncGenerator[GenerationEvent, None]:
        """Serve one generation. Ends with Finished or Refused.

        Closing the generator early (``aclose``) aborts the generation on its worker.
        Survives the loss of the worker: prompt and tokens so far are submitted to another
        one, and the caller sees one unbroken sequence of tokens.
        """
        ...

    def held(self) -> AbstractContextManager[None]:
        """For a request that waits until there is a model: within it, the request counts as
        waiting for a worker, as generations do by themselves."""
        ...

    def model(self) -> ModelCard | None:
        """The served model; None while no worker has ever been seen."""
        ...

    async def tokenizer_files(self) -> dict[str, bytes] | None:
        """File name to content of the model's tokenizer; None while none is known."""
        ...

    def ready(self) -> bool:
        """Whether a new request could be served now."""
        ...

    def workers(self) -> list[WorkerStatus]: ...
