"""The WorkerPool resource, kvasir.dev/v1alpha1: how many workers one role of a service has.

The operator creates one for each role of a ModelService, under the stable name <service>-<role>,
so that ``kubectl scale``, HPA and KEDA have something to write to. What the workers are like is
the ModelService's part alone.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict

from kvasir.operator.fields import Strict, Text, rules
from kvasir.operator.modelservice import (
    DNS_LABEL,
    DNS_LABEL_FORM,
    LONGEST_NAME,
    Metadata,
    Name,
    Replicas,
)

KIND = "WorkerPool"

WorkerRole = Literal["prefill", "decode"]
PoolName = Annotated[
    str,
    Text(DNS_LABEL, LONGEST_NAME + len("-prefill"), "a DNS-1123 label", DNS_LABEL_FORM),
]

_FIXED = "cannot be changed; the operator keeps one WorkerPool for each role of a ModelService"
_NAME = "must be spec.modelService, a hyphen and spec.role"


class PoolMetadata(Metadata):
    name: PoolName


class PoolSpec(Strict):
    """What is wanted."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("self.modelService == oldSelf.modelService", _FIXED, ".modelService"),
            ("self.role == oldSelf.role", _FIXED, ".role"),
        )
    )

    model_service: Name
    """The ModelService, in the same namespace, whose workers these are."""
    role: WorkerRole
    """What the workers do: prefill computes prompts, decode generates tokens."""
    replicas: Replicas
    """How many workers there should be. Write it by kubectl scale, an HPA or KEDA."""


class WorkerPool(Strict):
    """The workers of one role of a ModelService, to be scaled. Created by the operator."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.metadata.name == self.spec.modelService + '-' + self.spec.role",
                _NAME,
                ".metadata.name",
            )
        )
    )

    api_version: Literal["kvasir.dev/v1alpha1"]
    kind: Literal["WorkerPool"]
    metadata: PoolMetadata
    spec: PoolSpec
    status: Any = None
    """Written by the operator alone; see resource_status.py."""

    @property
    def name(self) -> str:
        return self.metadata.name
