"""Why pods do not run, as the scheduler and the kubelets say it: how that is read. Pure.

One word in CamelCase for each cause, which becomes the reason of a condition of the ModelService.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Object = Mapping[str, Any]

WRONG_CONFIGURATION = 2
"""Exit code of a worker or router that refuses its configuration."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a pod does not become ready without help. ``reason`` is one word in CamelCase."""

    reason: str
    message: str


def condition(item: Object, kind: str) -> Object:
    """One of an object's conditions; empty if it has none of the kind."""
    conditions = item.get("status", {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == kind), {})


_PULL_FAILURES = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
)
_CREATE_FAILURES = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)


def pod_fault(item: Object) -> Fault | None:
    """What the scheduler or a kubelet says of a pod; None if nothing is wrong."""
    scheduled = condition(item, "PodScheduled")
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return Fault("Unschedulable", scheduled.get("message", ""))
    status = item.get("status", {})
    for container in (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ):
        if fault := _container_fault(container):
            return fault
    return None


def _container_fault(container: Object) -> Fault | None:
    state = container.get("state", {})
    waiting, ended = state.get("waiting", {}), state.get("terminated", {})
    last = ended or container.get("lastState", {}).get("terminated", {})
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _PULL_FAILURES:
        return Fault("ImagePullFailed", message or f"image {container['image']}: {reason}")
    if reason in _CREATE_FAILURES:
        return Fault("ContainerNotCreated", message or reason)
    if not (ended or reason == "CrashLoopBackOff") or not last.get("exitCode"):
        return None
    words = (last.get("message") or "").strip() or message
    if last["exitCode"] == WRONG_CONFIGURATION:
        return Fault("ConfigurationRefused", words)
    cause = "OutOfMemory" if last.get("reason") == "OOMKilled" else "CrashLooping"
    return Fault(cause, f"exit code {last['exitCode']}" + (f": {words}" if words else ""))
