"""The ModelService resource, kvasir.dev/v1alpha1: what a user writes, typed and validated.

One model for every runtime: a field that only a cluster can honor is valid here, and the
local runtime's plan refuses it. Unknown fields are errors. Objects are immutable, and an
object that exists is valid. Reading YAML and wording the errors is manifest.py's part.

Names are camelCase in YAML and snake_case here. Sizes are bytes, times seconds.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from kvasir.operator.quantity import parse_bytes, parse_duration

API_VERSION = "kvasir.dev/v1alpha1"
KIND = "ModelService"


def _refuse(message: str) -> PydanticCustomError:
    # Braces would be read as placeholders of pydantic's message template.
    return PydanticCustomError("kvasir", "{message}", {"message": message})


def _to_bytes(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise _refuse("must be a size; write one such as 512Mi, 1Gi or 1.5G")
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise _refuse(f"{value!r} is not a size; {error}") from error


def _to_seconds(value: object) -> float:
    if not isinstance(value, str):
        raise _refuse(
            f"{value!r} has no unit; write a duration with its unit, such as 500ms, 300s or 5m"
        )
    try:
        return parse_duration(value)
    except ValueError as error:
        raise _refuse(f"{value!r} is not a duration; {error}") from error


_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_LONGEST_NAME = 40
"""Pods are labeled <name>-<role>-<revision>, and a label value holds 63 characters."""


def _to_name(value: object) -> str:
    if not isinstance(value, str):
        raise _refuse(f'must be text, got {value!r}; put it in quotes: "{value}"')
    if _DNS_LABEL.fullmatch(value) is None:
        raise _refuse(
            f"{value!r} is not a DNS-1123 label; use lowercase letters, digits and '-', "
            "with a letter or digit first and last"
        )
    if len(value) > _LONGEST_NAME:
        raise _refuse(f"has {len(value)} characters; use at most {_LONGEST_NAME}")
    return value


_SOURCES = {
    "bundled": (re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"), "bundled://smollm2-135m-instruct"),
    "hf": (
        re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII),
        "hf://org/name or hf://org/name@revision",
    ),
    "pvc": (re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/[^\s/]+)+/?"), "pvc://claim/path"),
    "file": (re.compile(r"/[^\0\n]+"), "file:///absolute/path"),
}


def _to_source(value: object) -> str:
    if not isinstance(value, str):
        raise _refuse("must be text; write for example bundled://smollm2-135m-instruct")
    scheme, separator, rest = value.partition("://")
    if not separator or scheme not in _SOURCES:
        forms = ", ".join(form for _, form in _SOURCES.values())
        raise _refuse(f"{value!r} has no known scheme; write one of {forms}")
    pattern, form = _SOURCES[scheme]
    if pattern.fullmatch(rest) is None:
        raise _refuse(f"{value!r} is incomplete or malformed; write {form}")
    return value


Bytes = Annotated[int, BeforeValidator(_to_bytes), Field(ge=1)]
Seconds = Annotated[float, BeforeValidator(_to_seconds)]
PositiveSeconds = Annotated[Seconds, Field(gt=0)]
Name = Annotated[str, BeforeValidator(_to_name)]
Replicas = Annotated[int, Field(ge=0, le=1024)]


class Strict(BaseModel):
    """No conversions: ``replicas: "1"`` and ``replicas: true`` are errors, not one replica."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, strict=True)


class Metadata(Strict):
    """What a user writes, and what an API server adds, so that its output can be run too."""

    name: Name
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    uid: Any = None
    resource_version: Any = None
    generation: Any = None
    creation_timestamp: Any = None
    deletion_timestamp: Any = None
    deletion_grace_period_seconds: Any = None
    finalizers: Any = None
    owner_references: Any = None
    managed_fields: Any = None


class Model(Strict):
    source: Annotated[str, BeforeValidator(_to_source)]
    """bundled://NAME, hf://ORG/NAME@REVISION, pvc://CLAIM/PATH or file:///PATH."""
    served_name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[^\s]+$")] | None = (
        None
    )
    """Model name in API requests; None: metadata.name."""
    max_model_len: Annotated[int, Field(ge=1, le=2**24)] = 2048
    """Longest prompt plus output, in tokens."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"


class Speculative(Strict):
    method: Literal["none", "ngram", "draft"] = "none"


class Engine(Strict):
    type: Literal["native", "vllm"] = "native"
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens in a KV block."""
    kv_cache_memory: Bytes = 512 * 1024**2
    """Per worker."""
    max_batched_tokens: Annotated[int, Field(ge=1, le=2**24)] = 512
    """Tokens in one step."""
    max_running_requests: Annotated[int, Field(ge=1, le=2**16)] = 64
    """Sequences in one step."""
    prefix_caching: bool = True
    speculative: Speculative = Speculative()


class Disaggregation(Strict):
    mode: Literal["auto", "always", "never"] = "auto"
    """auto: when at least ``min_uncached_tokens`` of a prompt are uncached on the decode worker."""
    min_uncached_tokens: Annotated[int, Field(ge=1, le=2**24)] = 64


class Scaling(Strict):
    min_replicas: Replicas
    max_replicas: Annotated[int, Field(ge=1, le=1024)]

    @model_validator(mode="after")
    def _ordered(self) -> "Scaling":
        if self.min_replicas > self.max_replicas:
            raise _refuse(
                f"minReplicas {self.min_replicas} is more than maxReplicas {self.max_replicas}; "
                "raise maxReplicas or lower minReplicas"
            )
        return self


class Parallelism(Strict):
    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    pipeline: Annotated[int, Field(ge=1, le=1024)] = 1


class Resources(Strict):
    """A container's resources; the API server checks the quantities."""

    requests: dict[str, str | int | float] = {}
    limits: dict[str, str | int | float] = {}


class Accelerator(Strict):
    """An extended resource of Kubernetes; no vendor's name is built in."""

    resource_name: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")]
    count: Annotated[int, Field(ge=1, le=64)] = 1


class _Replicated(Strict):
    """Replicas, fixed or scaled, and the overlay on their pods."""

    replicas: Replicas | None = None
    """None: 1, or what ``scaling`` decides."""
    scaling: Scaling | None = None
    resources: Resources | None = None
    template: dict[str, Any] | None = None
    """Pod template overlay."""

    @model_validator(mode="after")
    def _one_source_of_replicas(self) -> "_Replicated":
        if self.replicas is not None and self.scaling is not None:
            raise _refuse("replicas and scaling exclude each other; remove one of the two")
        return self

    @property
    def initial_replicas(self) -> int:
        if self.scaling is not None:
            return self.scaling.min_replicas
        return 1 if self.replicas is None else self.replicas


class Role(_Replicated):
    parallelism: Parallelism = Parallelism()
    accelerator: Accelerator | None = None


class Router(_Replicated):
    replicas: Annotated[int, Field(ge=1, le=1024)] | None = None


class Objectives(Strict):
    ttft_p95: PositiveSeconds | None = None
    """Time to first token, 95th percentile."""
    itl_p95: PositiveSeconds | None = None
    """Inter-token latency, 95th percentile."""


class Rollout(Strict):
    drain_deadline: Seconds = 300.0
    """Longest wait for a worker's accepted requests before it is stopped."""


class Spec(Strict):
    model: Model
    engine: Engine = Engine()
    disaggregation: Disaggregation = Disaggregation()
    prefill: Role = Role()
    decode: Role = Role()
    router: Router = Router()
    objectives: Objectives = Objectives()
    rollout: Rollout = Rollout()

    @model_validator(mode="after")
    def _prefill_exists_if_always_used(self) -> "Spec":
        if (
            self.disaggregation.mode == "always"
            and self.prefill.scaling is None
            and self.prefill.initial_replicas == 0
        ):
            raise _refuse(
                "disaggregation.mode always needs a prefill worker; "
                "set prefill.replicas to 1 or more, or the mode to auto"
            )
        return self


class ModelService(Strict):
    api_version: Literal["kvasir.dev/v1alpha1"]
    kind: Literal["ModelService"]
    metadata: Metadata
    spec: Spec
    status: Any = None
    """Written by the operator alone; never read from a file."""

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.metadata.name
