"""What a node that `FakeNode` plays reports of a pod: pure functions from pod and outcome."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.api import Object


@dataclass(frozen=True)
class Outcome:
    """What becomes of a pod on the node.

    Give `waiting` or `exit_code` for a container that does not run; `address` where something real
    listens for the pod (None: an address of the node's own range, where nothing listens).
    """

    ready: bool = True
    waiting: str = ""
    """Why containers do not run, such as ImagePullBackOff."""
    exit_code: int | None = None
    message: str = ""
    restarts: int = 0
    address: str | None = None
    stop_seconds: float = 0.0
    """How long the pod takes to end after its deletion; its grace period bounds it."""

    @property
    def runs(self) -> bool:
        return not self.waiting and self.exit_code is None


Rule = Callable[[Object], Outcome]
"""From a pod to what becomes of it; must depend on nothing but the pod."""

READY = Outcome()
NOT_READY = Outcome(ready=False)
IMAGE_PULL_FAILED = Outcome(
    ready=False, waiting="ImagePullBackOff", message='Back-off pulling image: "not found"'
)
CRASHED = Outcome(
    ready=False,
    waiting="CrashLoopBackOff",
    message="back-off restarting failed container",
    restarts=3,
)


def always(outcome: Outcome) -> Rule:
    """The rule that treats every pod alike."""

    def rule(pod: Object) -> Outcome:
        return outcome

    return rule


def crashed(exit_code: int, message: str) -> Outcome:
    """A container that keeps ending with `exit_code`, leaving `message` as its last words."""
    return replace(CRASHED, exit_code=exit_code, message=message)


def says_ready(pod: Object) -> bool:
    """Whether the pod's status, whoever wrote it last, says that it is Ready."""
    conditions = pod["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def pod_status(pod: Object, outcome: Outcome, host: str, address: str, now: str) -> Object:
    """The status that a kubelet would report; times are RFC 3339."""
    containers = [_container_status(pod, spec, outcome, now) for spec in pod["spec"]["containers"]]
    pulled = outcome.waiting != "ImagePullBackOff"
    status: Object = {
        "phase": "Running" if pulled else "Pending",
        "hostIP": host,
        "startTime": pod["status"].get("startTime", now),
        "conditions": [
            _condition(pod, "PodReadyToStartContainers", True, now),
            _condition(pod, "Initialized", True, now),
            _condition(pod, "ContainersReady", outcome.ready, now),
            _condition(pod, "Ready", outcome.ready, now),
        ],
        "containerStatuses": containers,
    }
    where = outcome.address or address
    return status | {"podIP": where, "podIPs": [{"ip": where}]}


def _container_status(pod: Object, spec: Object, outcome: Outcome, now: str) -> Object:
    status: Object = {
        "name": spec["name"],
        "image": spec["image"],
        "imageID": "",
        "ready": outcome.ready,
        "started": outcome.runs,
        "restartCount": outcome.restarts,
        "state": _state(pod, spec["name"], outcome, now),
    }
    if outcome.runs:
        digest = hashlib.sha256(f"{pod['metadata']['uid']}/{spec['name']}".encode()).hexdigest()
        status |= {"containerID": f"containerd://{digest}", "imageID": f"sha256:{digest}"}
    if outcome.exit_code is not None:
        status["lastState"] = {"terminated": _terminated(outcome, now)}
    return status


def _state(pod: Object, container: str, outcome: Outcome, now: str) -> Object:
    if outcome.waiting:
        return {"waiting": {"reason": outcome.waiting, "message": outcome.message}}
    if outcome.exit_code is not None:
        return {"terminated": _terminated(outcome, now)}
    for known in pod["status"].get("containerStatuses", []):
        if known["name"] == container and "running" in known["state"]:
            return {"running": known["state"]["running"]}
    return {"running": {"startedAt": now}}


def _terminated(outcome: Outcome, now: str) -> Object:
    assert outcome.exit_code is not None
    return {
        "exitCode": outcome.exit_code,
        "reason": "Error" if outcome.exit_code else "Completed",
        "message": outcome.message,
        "startedAt": now,
        "finishedAt": now,
    }


def _condition(pod: Object, kind: str, is_true: bool, now: str) -> Object:
    """A condition whose time of transition stays while its value does."""
    status = "True" if is_true else "False"
    for known in pod["status"].get("conditions", []):
        if known["type"] == kind and known["status"] == status:
            now = known["lastTransitionTime"]
    reason = {} if is_true or kind == "Initialized" else {"reason": "ContainersNotReady"}
    return {"type": kind, "status": status, "lastTransitionTime": now, **reason}
