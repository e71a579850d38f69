"""Pods of the workers that a ModelService is given."""

from typing import Any

from helpers.cluster_service import deployment
from kvasir.operator.modelservice import ModelService
from kvasir.operator.workerpool import WorkerRole


def pod(service: ModelService, role: WorkerRole = "decode") -> dict[str, Any]:
    spec: dict[str, Any] = deployment(service, role)["spec"]["template"]["spec"]
    return spec


def container(service: ModelService, role: WorkerRole = "decode") -> dict[str, Any]:
    only: dict[str, Any] = pod(service, role)["containers"][0]
    return only
