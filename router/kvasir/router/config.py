"""Settings of a router, validated at construction. Sizes are bytes, times seconds."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

ApiKey = Annotated[str, Field(pattern=r"^\S+$")]
"""Neither empty, which anyone could send, nor with white space, which no header would carry."""

_DNS_LABEL = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"


class Limits(BaseModel):
    """What one request may ask for. Beyond: 400, or 413 for the body."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_body_bytes: Annotated[int, Field(ge=1)] = 8 * 1024**2
    """Request body."""
    max_header_bytes: Annotated[int, Field(ge=1024)] = 16 * 1024
    """One header line."""
    max_n: Annotated[int, Field(ge=1)] = 16
    """Choices per prompt."""
    max_prompts: Annotated[int, Field(ge=1)] = 64
    """Prompts in one /v1/completions request."""
    max_stop_strings: Annotated[int, Field(ge=0)] = 16
    max_stop_length: Annotated[int, Field(ge=1)] = 256
    """Characters of one stop string."""
    max_logit_bias: Annotated[int, Field(ge=0)] = 300
    """Entries of logit_bias."""
    max_logprobs: Annotated[int, Field(ge=0)] = 20
    """Alternatives per token."""
    max_messages: Annotated[int, Field(ge=1)] = 1024
    template_timeout: Annotated[float, Field(gt=0)] = 2.0
    """Rendering the chat template."""
    head_timeout: Annotated[float, Field(gt=0)] = 15.0
    """From the opening of a connection, or the first byte of a later request, to the end of a
    request's head; beyond: the connection is closed."""
    body_timeout: Annotated[float, Field(gt=0)] = 30.0
    """From a request's head to the end of its body; beyond: 408."""
    write_timeout: Annotated[float, Field(gt=0)] = 60.0
    """How long a client may take nothing of what waits for it; beyond: the connection is
    closed, and what is generated for it is aborted."""


class Disaggregation(BaseModel):
    """When a prompt is computed on a prefill worker."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["auto", "always", "never"] = "auto"
    """auto: when at least ``min_uncached_tokens`` are uncached on the decode worker."""
    min_uncached_tokens: Annotated[int, Field(ge=1)] = 64


class Kubernetes(BaseModel):
    """Where in a cluster the workers are."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    namespace: Annotated[str, Field(pattern=_DNS_LABEL)]
    service: Annotated[str, Field(pattern=_DNS_LABEL)]
    """A headless Service with a port named ``grpc``; its EndpointSlices say who there is."""


class RouterConfig(BaseModel):
    """Everything that `kvasir-router` takes; unknown keys are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    router_id: Annotated[str, Field(min_length=1, max_length=253)] = "router-0"
    host: str = "127.0.0.1"
    """Address to listen on; * for all. Loopback, so that nothing is reachable by accident."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    workers_file: Path | None = None
    """JSON that the operator keeps up to date: {"workers": [{"id": ..., "address": "host:port"}]}.
    Written by rename, so that a reader never sees half of it."""
    kubernetes: Kubernetes | None = None
    """Instead of ``workers_file``: find the workers by asking the Kubernetes API."""
    limits: Limits = Limits()
    disaggregation: Disaggregation = Disaggregation()
    prefix_index_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024**2
    """Bound of the prefix index; the least recently used entries go first."""
    queue_limit: Annotated[int, Field(ge=1)] = 4096
    """Requests in flight in this router; beyond: 429."""
    no_worker_timeout: Annotated[float, Field(ge=0)] = 30.0
    """How long a new request waits for a worker to be ready; then 503."""
    replay_timeout: Annotated[float, Field(ge=0)] = 120.0
    """How long a request whose worker died waits for another; then an error event."""
    drain_linger: Annotated[float, Field(ge=0)] = 0.0
    """How long new requests are taken after SIGTERM: as long as it takes until nobody is sent
    here any more. Where the only clients are the user's own, no time."""
    drain_deadline: Annotated[float, Field(ge=0)] = 30.0
    """How long open requests may go on after that."""
    api_keys: tuple[ApiKey, ...] = ()
    """If any, each request needs one as a bearer token."""

    @model_validator(mode="after")
    def _one_way_to_find_workers(self) -> "RouterConfig":
        if (self.workers_file is None) == (self.kubernetes is None):
            raise ValueError("set exactly one of workers_file and kubernetes")
        return self
