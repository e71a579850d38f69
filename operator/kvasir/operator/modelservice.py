"""The ModelService resource, kvasir.dev/v1alpha1: what a user writes, typed and validated.

One model for every runtime: a field that only a cluster can honor is valid here, and the
local runtime's plan refuses it. Unknown fields are errors. Objects are immutable, and an
object that exists is valid. What a worker computes is in model_spec.py; reading YAML and wording
the errors is manifest.py's part.

Names are camelCase in YAML and snake_case here. Sizes are bytes, times seconds.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from kvasir.operator.fields import Amount, Duration, Strict, Text, refuse, rules
from kvasir.operator.model_spec import Engine, Model

API_VERSION = "kvasir.dev/v1alpha1"
KIND = "ModelService"

DNS_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
DNS_LABEL_FORM = "use lowercase letters, digits and '-', with a letter or digit first and last"
LONGEST_NAME = 40
"""Pods are labeled <name>-<role>-<revision>, and a label value holds 63 characters."""

Name = Annotated[str, Text(DNS_LABEL, LONGEST_NAME, "a DNS-1123 label", DNS_LABEL_FORM)]
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


class Metadata(Strict):
    """What a user writes, and what an API server adds, so that its output can be run too."""

    name: Name
    generate_name: Any = None
    namespace: str | None = None
    labels: dict[str, str] = Field(default={})
    annotations: dict[str, str] = Field(default={})
    uid: Any = None
    resource_version: Any = None
    generation: Any = None
    creation_timestamp: Any = None
    deletion_timestamp: Any = None
    deletion_grace_period_seconds: Any = None
    finalizers: Any = None
    owner_references: Any = None
    managed_fields: Any = None


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

    requests: Amounts = Field(default={})
    """What the scheduler sets aside for each container, by name of the resource."""
    limits: Amounts = Field(default={})
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
