"""Settings of a worker, validated at construction.

Sizes are bytes, times seconds. Every field's default is the sensible one for a small model
on a laptop; the operator passes what a ModelService says.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_THREADS = 1024
"""More than machines have cores; the thread library itself ends the process at far more."""


class WorkerConfig(BaseModel):
    """Everything that `kvasir-worker` takes; unknown keys are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    worker_id: Annotated[str, Field(min_length=1, max_length=253)]
    """Stable name, unique within the ModelService."""
    role: Literal["prefill", "decode", "both"] = "both"
    """What routers send here at first; changeable at run time with SetRole."""
    host: str = "127.0.0.1"
    """Address to listen on. Loopback, so that nothing is reachable by accident."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """gRPC port; 0 picks a free one, reported in the ready line."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """HTTP port of /metrics, /health and /ready; 0 picks a free one."""
    revision: str = "0"
    """Rollout revision; workers of different revisions exchange no KV."""

    model: str = "bundled://smollm2-135m-instruct"
    """bundled://NAME or file:///PATH (a .gguf file, or a folder in Hugging Face layout)."""
    model_source: Annotated[str, Field(max_length=1024)] = ""
    """What refusals call a model at file:///PATH: where it is from, to those who mounted it there.
    Empty: its path."""
    served_name: Annotated[str, Field(min_length=1, max_length=253)] = "smollm2"
    """Model name in API requests."""
    max_model_len: Annotated[int, Field(ge=1)] = 2048
    """Longest prompt plus output, in tokens."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 where it is the faster one (on GPUs and the CPU kernels), else float32."""
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    """What weights are rounded to when they are loaded; activations stay in ``dtype``."""
    activation_quantization: Literal["none", "int8"] = "none"
    """int8: activations too, which is faster for many tokens at once, and less exact. Needs
    quantization int8."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA when present."""
    threads: Annotated[int, Field(ge=0, le=MAX_THREADS)] = 0
    """CPU threads for computation; 0: the cores this process may use."""

    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens in a KV block: larger means shorter tables, but more waste and coarser sharing."""
    kv_cache_memory: Annotated[int, Field(ge=1)] = 512 * 1024**2
    """Bytes of KV cache."""
    max_batched_tokens: Annotated[int, Field(ge=1)] = 512
    """Tokens in one step: larger favours prefill throughput, smaller favours ITL."""
    max_running_requests: Annotated[int, Field(ge=1)] = 64
    """Sequences in one step."""
    max_waiting_requests: Annotated[int, Field(ge=1)] = 1024
    """Beyond this many queued requests the worker refuses with QUEUE_FULL."""
    prefix_caching: bool = True
    """Reuse the KV of equal prefixes."""
    speculative_method: Literal["none", "ngram", "draft"] = "none"
    """Where drafted tokens come from: earlier text of the same request, or the model itself
    with layers left out. Output is the same with each; drafts are made only where they pay."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=32)] = 8
    """Most tokens drafted for a sequence in one step."""
    draft_layers: Annotated[int, Field(ge=0)] = 0
    """Leading layers of the model that draft; 0: four of five."""

    transfer_timeout: Annotated[float, Field(gt=0)] = 120.0
    """Longest wait for a prefill worker before the prompt is computed here."""
    transfer_stall_timeout: Annotated[float, Field(gt=0)] = 10.0
    """Longest silence of a prefill worker that has begun to send: a frozen one is given up."""
    drain_deadline: Annotated[float, Field(ge=0)] = 300.0
    """Longest wait for accepted requests after SIGTERM."""
