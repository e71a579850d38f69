"""The ModelService resource, kvasir.dev/v1alpha1: what a user writes, typed and validated.

One model for every runtime: a field that only a cluster can honor is valid here, and the
local runtime's plan refuses it. Unknown fields are errors. Objects are immutable, and an
object that exists is valid. Reading YAML and wording the errors is manifest.py's part.

Names are camelCase in YAML and snake_case here. Sizes are bytes, times seconds.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from kvasir.operator.fields import Amount, Duration, Size, Source, Text, refuse, rules

API_VERSION = "kvasir.dev/v1alpha1"
KIND = "ModelService"

DNS_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
DNS_LABEL_FORM = "use lowercase letters, digits and '-', with a letter or digit first and last"
LONGEST_NAME = 40
"""Pods are labeled <name>-<role>-<revision>, and a label value holds 63 characters."""

Name = Annotated[str, Text(DNS_LABEL, LONGEST_NAME, "a DNS-1123 label", DNS_LABEL_FORM)]
ServedName = Annotated[str, Text("[!-~]+", 253, "a model name", "use ASCII without spaces")]
ResourceName = Annotated[
    str,
    Text(
        "[a-z0-9.-]+/[A-Za-z0-9._-]+",
        253,
        "an extended resource",
        "write DOMAIN/NAME, as the device plugin of your accelerators names it",
    ),
]
Replicas = Annotated[int, Field(ge=0, le=1024)]
Amounts = Annotated[dict[str, Annotated[str | int, Amount()]], Field(max_length=16)]
Objective = Annotated[float, Duration("1ms", "1h")]


class Strict(BaseModel):
    """No conversions: ``replicas: "1"`` and ``replicas: true`` are errors, not one replica."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
    )


class Metadata(Strict):
    """What a user writes, and what an API server adds, so that its output can be run too."""

    name: Name
    generate_name: Any = None
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


_INT8_ACTIVATIONS_ALONE = (
    "activationQuantization int8 needs quantization int8; set both, or neither"
)


class Model(Strict):
    """The model that is served."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.activationQuantization == 'none' || self.quantization == 'int8'",
                _INT8_ACTIVATIONS_ALONE,
                ".activationQuantization",
            )
        )
    )

    source: Annotated[str, Source()]
    """Where the weights are: bundled://NAME, in the worker's image; pvc://CLAIM/PATH, in a
    PersistentVolumeClaim; or file:///PATH, for kvasir up alone: in a cluster use pvc. Not yet:
    hf://ORG/NAME@REVISION. A change rolls out new workers."""
    served_name: ServedName | None = None
    """Model name in API requests. Left out: the name of the ModelService."""
    max_model_len: Annotated[int, Field(ge=1, le=2**24)] = 2048
    """Longest prompt plus output, in tokens."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations. auto: bfloat16 where it is the faster one: on GPUs, and on
    x86 CPUs with AVX2; else float32."""
    quantization: Literal["none", "int8", "int4", "fp8"] = "none"
    """Type that weights are quantized to when they are loaded; activations stay in dtype. int8: a
    scale for each output. int4: a scale and a minimum for each 32 inputs. Not yet: fp8."""
    activation_quantization: Literal["none", "int8"] = "none"
    """int8: activations are quantized too, which is faster for many tokens at once, and less
    exact. Needs quantization int8."""

    @model_validator(mode="after")
    def _int8_both(self) -> "Model":
        if self.activation_quantization != "none" and self.quantization != "int8":
            raise refuse(_INT8_ACTIVATIONS_ALONE)
        return self


_DEFAULT_SPECULATIVE_TOKENS = 8
_NO_METHOD = (
    "numSpeculativeTokens needs a method; set method to ngram or draft, "
    "or remove numSpeculativeTokens"
)


class Speculative(Strict):
    """Speculative decoding."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.numSpeculativeTokens) || self.method != 'none'",
                _NO_METHOD,
                ".numSpeculativeTokens",
            )
        )
    )

    method: Literal["none", "ngram", "draft"] = "none"
    """Where drafted tokens come from: earlier text of the same request (ngram), or the model
    itself with layers left out (draft). Answers are the same with each."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=32)] | None = None
    """Most tokens drafted for a request in one step; fewer are where they would not pay. Needs a
    method. Left out: 8."""

    @model_validator(mode="after")
    def _tokens_of_a_method(self) -> "Speculative":
        if self.num_speculative_tokens is not None and self.method == "none":
            raise refuse(_NO_METHOD)
        return self

    @property
    def most_tokens(self) -> int:
        given = self.num_speculative_tokens
        return _DEFAULT_SPECULATIVE_TOKENS if given is None else given


class Engine(Strict):
    """What computes in each worker, and its limits."""

    type: Literal["native", "vllm"] = "native"
    """The inference engine. Not yet: vllm."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens in a KV block."""
    kv_cache_memory: Annotated[int, Size("1", "1Pi")] = Field(
        default="512Mi", validate_default=True
    )
    """Memory for the KV cache of each worker, such as 512Mi or 20Gi. Workers without an
    accelerator request it of the scheduler, and 1Gi beside it; see resources."""
    max_batched_tokens: Annotated[int, Field(ge=1, le=2**24)] = 512
    """Most tokens in one step of a worker."""
    max_running_requests: Annotated[int, Field(ge=1, le=2**16)] = 64
    """Most sequences in one step of a worker."""
    prefix_caching: bool = True
    """Whether equal prefixes of prompts are computed once and their KV blocks reused."""
    speculative: Speculative = Speculative()


class Disaggregation(Strict):
    """When a prompt is computed by a prefill worker instead of the decode worker itself."""

    mode: Literal["auto", "always", "never"] = "auto"
    """auto: when at least minUncachedTokens of a prompt are uncached on the decode worker."""
    min_uncached_tokens: Annotated[int, Field(ge=1, le=2**24)] = 64
    """Shorter uncached prompts stay on the decode worker, since the transfer would cost more
    than it saves."""


_NOT_ORDERED = "minReplicas is more than maxReplicas; raise maxReplicas or lower minReplicas"


class Scaling(Strict):
    """Bounds within which the number of replicas follows the load."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("self.minReplicas <= self.maxReplicas", _NOT_ORDERED, ".minReplicas")
        )
    )

    min_replicas: Replicas
    """Fewest replicas; 0 lets an idle pool have none. Routers hold requests that come then until a
    worker is started for them."""
    max_replicas: Annotated[int, Field(ge=1, le=1024)]
    """Most replicas."""
    stabilization_window: Annotated[float, Duration("10s", "24h")] = Field(
        default="300s", validate_default=True
    )
    """How long fewer replicas must have been enough before one is taken away. More are added at
    once."""

    @model_validator(mode="after")
    def _ordered(self) -> "Scaling":
        if self.min_replicas > self.max_replicas:
            raise refuse(_NOT_ORDERED)
        return self


class Parallelism(Strict):
    """How one worker's model is spread over accelerators: tensor times pipeline ranks, one on each.
    More of them than accelerator.count make a worker span nodes, as several pods."""

    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks that share each layer. More than 1 needs a worker image of your own in the role's
    template; not yet with Kvasir's."""
    pipeline: Annotated[int, Field(ge=1, le=1024)] = 1
    """Stages that hold layers one after another. More than 1 needs a worker image of your own, as
    with tensor."""


class Resources(Strict):
    """A container's compute resources, as in a Pod."""

    requests: Amounts = {}
    """What the scheduler sets aside for each container, by name of the resource."""
    limits: Amounts = {}
    """What each container may use at most, by name of the resource."""


class Accelerator(Strict):
    """Accelerators of each pod: an extended resource of Kubernetes, of any vendor."""

    resource_name: ResourceName
    """DOMAIN/NAME, as the device plugin names the resource."""
    count: Annotated[int, Field(ge=1, le=64)] = 1
    """Accelerators of each pod. A worker with more ranks than that takes several pods, which needs
    LeaderWorkerSet in the cluster."""


class _Replicated(Strict):
    """Replicas, and the overlay on their pods."""

    replicas: Replicas | None = None
    """How many there are. Left out: 1, or what scaling decides."""
    resources: Resources | None = None
    """What each container requests and may use. Requests that neither this nor the template names
    are, for a worker, 100m of CPU and memory for a small model and its KV cache: 1Gi, and
    engine.kvCacheMemory unless the role has an accelerator; for a router 50m and 128Mi."""
    template: dict[str, Any] | None = None
    """Overlay on the pods: fields of a pod template, merged into the operator's own."""

    @property
    def initial_replicas(self) -> int:
        return 1 if self.replicas is None else self.replicas


_TWO_SOURCES_OF_REPLICAS = "replicas and scaling exclude each other; remove one of the two"


class Role(_Replicated):
    """A pool of workers with one role."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("!(has(self.replicas) && has(self.scaling))", _TWO_SOURCES_OF_REPLICAS, ".replicas")
        )
    )

    scaling: Scaling | None = None
    parallelism: Parallelism = Parallelism()
    accelerator: Accelerator | None = None

    @model_validator(mode="after")
    def _one_source_of_replicas(self) -> "Role":
        if self.replicas is not None and self.scaling is not None:
            raise refuse(_TWO_SOURCES_OF_REPLICAS)
        return self

    @property
    def initial_replicas(self) -> int:
        if self.scaling is not None:
            # A service that scales to zero still shows once, by a first worker, that it works.
            return max(1, self.scaling.min_replicas)
        return super().initial_replicas


class Router(_Replicated):
    """The routers, which take requests over HTTP and send them to workers."""

    replicas: Annotated[int, Field(ge=1, le=1024)] | None = None
    """How many there are; they do not follow the load. Left out: 1."""


class Objectives(Strict):
    """Latency that autoscaling aims at."""

    ttft_p95: Objective | None = None
    """Time to first token, 95th percentile, such as 500ms."""
    itl_p95: Objective | None = None
    """Inter-token latency, 95th percentile, such as 50ms."""


class Rollout(Strict):
    """How workers are replaced and removed."""

    drain_deadline: Annotated[float, Duration("1s", "24h")] = Field(
        default="300s", validate_default=True
    )
    """Longest wait for a worker's accepted requests before it is stopped."""


_NO_PREFILL = (
    "disaggregation.mode always needs a prefill worker; "
    "set prefill.replicas to 1 or more, or the mode to auto"
)


class Spec(Strict):
    """What is wanted."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.disaggregation.mode != 'always' || has(self.prefill.scaling) || "
                "!has(self.prefill.replicas) || self.prefill.replicas > 0",
                _NO_PREFILL,
                ".prefill.replicas",
            )
        )
    )

    model: Model
    engine: Engine = Engine()
    disaggregation: Disaggregation = Disaggregation()
    prefill: Role = Role()
    """The workers that compute prompts."""
    decode: Role = Role()
    """The workers that generate tokens; short prompts they compute themselves."""
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
            raise refuse(_NO_PREFILL)
        return self


class ModelService(Strict):
    """A large language model served by separate pools of prefill and decode workers behind
    routers with the OpenAI HTTP API."""

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
