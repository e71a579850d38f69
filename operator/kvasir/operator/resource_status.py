"""The status of the resources, typed: what the operator writes and users read.

Numbers are those of the last reconciliation. Nothing reads a status to decide; what is decided
comes from the objects in the cluster. Dump with ``dump``, which gives what the API server takes.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from kvasir.operator.fields import Strict, Text

Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Reason = Annotated[
    str, Text("[A-Z][A-Za-z0-9]*", 64, "a reason", "write one word in CamelCase, such as AllReady")
]
Message = Annotated[str, Field(max_length=4096)]
Words = Annotated[str, Field(max_length=256)]


class _Status(Strict):
    """Built in code, by the names that Python has, and read back by those that YAML has."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)


class Condition(_Status):
    """One aspect of the state, as in every Kubernetes resource."""

    type: Literal["Ready", "Available", "Progressing", "Degraded"]
    """The aspect."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    reason: Reason
    """Cause of the last change, one word in CamelCase."""
    message: Message
    """The cause in a sentence, with the names of the objects that it is about."""
    last_transition_time: datetime
    """When status changed last."""
    observed_generation: Annotated[int, Field(ge=0)]
    """metadata.generation that the condition is about."""


Conditions = Annotated[
    list[Condition],
    Field(
        max_length=16,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
        },
    ),
]


class RoleStatus(_Status):
    """The pods of one role."""

    replicas: Count = 0
    """Pods that exist."""
    ready_replicas: Count = 0
    """Pods that take requests."""
    updated_replicas: Count = 0
    """Pods of the newest revision."""
    draining_replicas: Count = 0
    """Pods that finish their requests and then end."""
    revision: Annotated[str, Field(max_length=63)] | None = None
    """The newest revision."""


class Roles(_Status):
    """The pods of each role."""

    prefill: RoleStatus = RoleStatus()
    """Workers that compute prompts."""
    decode: RoleStatus = RoleStatus()
    """Workers that generate tokens."""
    router: RoleStatus = RoleStatus()
    """Routers, which take requests over HTTP."""


class LastDecision(_Status):
    """The last change of replicas that autoscaling decided, and why."""

    time: datetime
    """When it was decided."""
    role: Literal["prefill", "decode"]
    """The pool that it is about."""
    desired: Count
    """Replicas that it asks for."""
    reason: Annotated[str, Field(max_length=1024)]
    """Why, in a sentence."""
    limited_by: Words | None = None
    """What kept the number from being what the load asks for: min or max, that is minReplicas or
    maxReplicas; stabilization, its window; pending, pods that are not ready or find no node;
    badData, metrics that cannot be used. Left out: nothing did."""
    inputs: Annotated[dict[str, Words], Field(max_length=32)] = Field(default_factory=dict)
    """The signals that it rests on, by name, such as kvUsage, heldRequests,
    queuedPrefillTokens or ttftP95Seconds; unknown where there is no number."""


class ModelServiceStatus(_Status):
    """What there is. Written by the operator."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """metadata.generation that this status is about."""
    conditions: Conditions = Field(default_factory=list)
    """Ready sums up the others; conditions of features that are not used are absent."""
    roles: Roles = Roles()
    last_decision: LastDecision | None = None
    url: Annotated[str, Field(max_length=1024)] | None = None
    """Where the OpenAI HTTP API answers inside the cluster."""


class WorkerPoolStatus(_Status):
    """What there is. Written by the operator."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """metadata.generation that this status is about."""
    replicas: Count = 0
    """Workers that exist."""
    ready_replicas: Count = 0
    """Workers that take requests."""
    updated_replicas: Count = 0
    """Workers of the newest revision."""
    draining_replicas: Count = 0
    """Workers that finish their requests and then end."""
    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector of the workers' pods, for autoscalers that read the scale subresource."""


def dump(status: ModelServiceStatus | WorkerPoolStatus) -> dict[str, Any]:
    """The status as JSON objects; what is None is left out."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)
