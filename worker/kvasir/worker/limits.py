"""What a scheduler may take on: its settings, and the requests that it can never serve.

Pure: a request is judged by the settings alone, so any thread may ask, at any time.
"""

from dataclasses import dataclass
from typing import Protocol

from kvasir.proto.errors import Reason, Refusal
from kvasir.worker.config import WorkerConfig
from kvasir.worker.contracts import Request, Runner, Work
from kvasir.worker.speculation.config import Method, SpeculationConfig


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy of a scheduler; the fields mean what they mean in WorkerConfig.

    ``num_blocks`` is the runner's. ``max_model_len`` is the longest prompt plus output, in
    tokens. ``eos_token_ids`` end a generation unless the request ignores them.
    ``reserve_max_len`` gives each request blocks for the longest sequence at its admission: the
    baseline that `kvasir bench kv` compares paging with, for requests computed here only.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_batched_tokens: int = 512
    max_running_requests: int = 64
    max_waiting_requests: int = 1024
    eos_token_ids: frozenset[int] = frozenset()
    prefix_caching: bool = True
    reserve_max_len: bool = False
    speculation: SpeculationConfig | None = None

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "block_size",
            "max_model_len",
            "max_batched_tokens",
            "max_running_requests",
            "max_waiting_requests",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def peak_blocks(self, request: Request) -> int:
        """Blocks that the request holds at its longest. The last token needs no KV."""
        num_prompt = len(request.prompt_ids)
        if self.reserve_max_len:
            tokens = self.max_model_len
        elif request.work is Work.PREFILL:
            tokens = num_prompt + len(request.output_ids)
        else:
            tokens = min(num_prompt + request.sampling.max_tokens, self.max_model_len) - 1
        return -(-tokens // self.block_size)

    def refusal(self, request: Request) -> Refusal | None:
        """Why this request can never be served here, or None."""
        if not request.prompt_ids:
            return Refusal(
                Reason.INVALID_REQUEST, "The prompt is empty; send at least one token.", "prompt"
            )
        if request.sampling.max_tokens < 1:
            return Refusal(Reason.INVALID_REQUEST, "max_tokens must be at least 1.", "max_tokens")
        if request.skip_tokens % self.block_size:
            return Refusal(
                Reason.INVALID_REQUEST,
                f"skip_tokens must be a multiple of the block size, {self.block_size}.",
                "skip_tokens",
            )
        # A replay at the limit is finished at once; a prefill would still compute it.
        replayed = len(request.output_ids) if request.work is Work.PREFILL else 0
        if (length := len(request.prompt_ids) + replayed) >= self.max_model_len:
            return Refusal(
                Reason.CONTEXT_LENGTH_EXCEEDED,
                f"The prompt has {length} tokens, but prompt and output together "
                f"are limited to {self.max_model_len}; shorten the prompt to at most "
                f"{self.max_model_len - 1} tokens.",
                "prompt",
            )
        width = 1 if request.beam is None else request.beam.width
        if width > self.max_batched_tokens:
            return Refusal(
                Reason.INVALID_REQUEST,
                f"A step of this worker has {self.max_batched_tokens} tokens: too few for "
                f"{width} beams.",
                "n",
            )
        if (needed := width * self.peak_blocks(request)) > self.num_blocks:
            return Refusal(
                Reason.CONTEXT_LENGTH_EXCEEDED,
                f"Prompt and max_tokens need {needed} KV blocks of {self.block_size} tokens, but "
                f"this worker has {self.num_blocks}; shorten the prompt, lower max_tokens, or "
                f"raise the worker's KV cache memory.",
                "max_tokens",
            )
        return None


class Servable(Protocol):
    """What a scheduler needs to know of a loaded model."""

    @property
    def runner(self) -> Runner: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def max_model_len(self) -> int: ...


def scheduler_config(config: WorkerConfig, model: Servable) -> SchedulerConfig:
    """A worker's settings, with what its model says, for its scheduler."""
    speculation = None
    if config.speculative_method != "none":
        method = Method(config.speculative_method)
        speculation = SpeculationConfig(method, config.num_speculative_tokens)
    return SchedulerConfig(
        num_blocks=model.runner.num_blocks,
        block_size=config.block_size,
        max_model_len=model.max_model_len,
        max_batched_tokens=config.max_batched_tokens,
        max_running_requests=config.max_running_requests,
        max_waiting_requests=config.max_waiting_requests,
        eos_token_ids=model.eos_token_ids,
        prefix_caching=config.prefix_caching,
        speculation=speculation,
    )
