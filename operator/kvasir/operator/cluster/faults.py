"""Why pods do not run, as the scheduler and the kubelets say it: how that is read. Pure.

One word in CamelCase for each cause, which becomes the reason of a condition of the ModelService.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvasir.operator.cluster.names import ROLE_LABEL

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
    scheduled = _unschedulable(item)
    if scheduled is not None:
        return Fault("Unschedulable", scheduled.get("message", ""))
    for container in _containers(item):
        if fault := _container_fault(container, item):
            return fault
    return None


def unplaced_since(item: Object) -> str | None:
    """Since when the scheduler finds no place for a pod; None if that is not so."""
    return (_unschedulable(item) or {}).get("lastTransitionTime")


def _unschedulable(item: Object) -> Object | None:
    scheduled = condition(item, "PodScheduled")
    unschedulable = scheduled.get("status") == "False" and (
        scheduled.get("reason") == "Unschedulable"
    )
    return scheduled if unschedulable else None


def _containers(item: Object) -> tuple[Object, ...]:
    status = item.get("status", {})
    return (
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    )


def _container_fault(container: Object, pod: Object) -> Fault | None:
    state = container.get("state", {})
    waiting, ended = state.get("waiting", {}), state.get("terminated", {})
    last = ended or container.get("lastState", {}).get("terminated", {})
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _PULL_FAILURES:
        return Fault("ImagePullFailed", message or f"image {container['image']}: {reason}")
    if reason in _CREATE_FAILURES:
        return Fault("ContainerNotCreated", message or reason)
    if not last.get("exitCode") or container.get("ready") or _was_ready(state, pod):
        return None
    words = (last.get("message") or "").strip()
    if last["exitCode"] == WRONG_CONFIGURATION:
        return Fault("ConfigurationRefused", words)
    if last.get("reason") == "OOMKilled":
        return Fault("OutOfMemory", _out_of_memory(container["name"], pod))
    return Fault("CrashLooping", f"exit code {last['exitCode']}" + (f": {words}" if words else ""))


def _was_ready(state: Object, pod: Object) -> bool:
    """Whether a container that runs has been ready in this run: then it works again.

    Until then it has the fault that ended it last. It is tried again and again, and between two
    ends it looks like one that starts.
    """
    begun = state.get("running", {}).get("startedAt")
    changed = condition(pod, "Ready").get("lastTransitionTime")
    if begun is None or changed is None:
        return False
    return datetime.fromisoformat(changed) > datetime.fromisoformat(begun)


def _out_of_memory(name: str, pod: Object) -> str:
    """What to change, in terms of the ModelService."""
    spec = pod["spec"]
    containers = (*(spec.get("initContainers") or ()), *spec.get("containers", ()))
    own: Object = next((each for each in containers if each["name"] == name), {})
    limit = ((own.get("resources") or {}).get("limits") or {}).get("memory")
    resources = f"spec.{(pod['metadata'].get('labels') or {}).get(ROLE_LABEL)}.resources"
    if limit is None:
        return (
            f"container {name} was killed since its node ran out of memory; it has no limit. "
            f"Set {resources}.requests.memory to what it takes"
        )
    return (
        f"container {name} was killed at its memory limit of {limit}; "
        f"raise {resources}.limits.memory, or lower spec.engine.kvCacheMemory"
    )
