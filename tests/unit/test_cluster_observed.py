"""What is read of a cluster: why pods are not ready, and whether an object is as wanted."""

from typing import Any

import pytest

from kvasir.operator.cluster.difference import projection
from kvasir.operator.cluster.faults import Fault
from kvasir.operator.cluster.observed import observe


def pod(**status: Any) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {
                "kvasir.dev/modelservice": "s",
                "kvasir.dev/role": "decode",
                "kvasir.dev/pod-revision": "abc",
            },
        },
        "spec": {"nodeName": "n"},
        "status": status,
    }


def container(**state: Any) -> dict[str, Any]:
    return pod(containerStatuses=[{"name": "worker", "image": "i", **state}])


BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
REFUSED = {"terminated": {"exitCode": 2, "message": "bad: fix\n"}}
KILLED = {"exitCode": 137, "reason": "OOMKilled"}


@pytest.mark.parametrize(
    ("item", "fault"),
    [
        (pod(), None),
        (container(state={"running": {}}), None),
        (container(state={"waiting": {"reason": "ContainerCreating"}}), None),
        (
            pod(
                conditions=[
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/1 nodes",
                    }
                ]
            ),
            Fault("Unschedulable", "0/1 nodes"),
        ),
        (
            container(state={"waiting": {"reason": "ErrImagePull", "message": "no such image"}}),
            Fault("ImagePullFailed", "no such image"),
        ),
        (
            container(state={"waiting": {"reason": "InvalidImageName"}}),
            Fault("ImagePullFailed", "image i: InvalidImageName"),
        ),
        (
            container(state=BACK_OFF, lastState=REFUSED),
            Fault("ConfigurationRefused", "bad: fix"),
        ),
        (
            container(state=BACK_OFF, lastState={"terminated": {"exitCode": 139}}),
            Fault("CrashLooping", "exit code 139"),
        ),
        (
            container(state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
            Fault(
                "OutOfMemory",
                "container worker was killed since its node ran out of memory; it has no limit. "
                "Set spec.decode.resources.requests.memory to what it takes",
            ),
        ),
        (
            container(state={"waiting": {"reason": "ContainerCreating"}}, lastState=REFUSED),
            Fault("ConfigurationRefused", "bad: fix"),
        ),
        (container(state={"running": {}}, lastState=REFUSED, ready=True), None),
        (container(state={"running": {}}, lastState={"terminated": {"exitCode": 0}}), None),
    ],
)
def test_why_a_pod_does_not_become_ready(item: dict[str, Any], fault: Fault | None) -> None:
    (seen,) = observe([item], "s").pods
    assert seen.fault == fault
    assert seen.deployment == "s-decode-abc"


@pytest.mark.parametrize(
    ("unready_since", "told"), [("00:00:05", True), ("00:00:10", True), ("00:00:30", False)]
)
def test_a_fault_is_told_until_the_container_has_been_ready_again(
    unready_since: str, told: bool
) -> None:
    """It began anew at 00:00:10; a container that was ready since then works again."""
    item = container(
        ready=False,
        state={"running": {"startedAt": "2026-01-01T00:00:10Z"}},
        lastState=REFUSED,
    )
    changed = f"2026-01-01T{unready_since}Z"
    item["status"]["conditions"] = [
        {"type": "Ready", "status": "False", "lastTransitionTime": changed}
    ]
    (seen,) = observe([item], "s").pods
    assert (seen.fault is not None) is told


def test_a_container_that_needs_more_memory_than_its_limit_says_what_to_raise() -> None:
    item = container(state=BACK_OFF, lastState={"terminated": KILLED})
    item["spec"]["containers"] = [{"name": "worker", "resources": {"limits": {"memory": "2Gi"}}}]
    (seen,) = observe([item], "s").pods
    assert seen.fault == Fault(
        "OutOfMemory",
        "container worker was killed at its memory limit of 2Gi; "
        "raise spec.decode.resources.limits.memory, or lower spec.engine.kvCacheMemory",
    )


def test_a_drain_time_that_somebody_spoiled_counts_as_none() -> None:
    item = pod()
    item["metadata"]["annotations"] = {"kvasir.dev/draining-since": "yesterday"}
    (seen,) = observe([item], "s").pods
    assert seen.draining_since is None


@pytest.mark.parametrize(
    ("seen", "wanted", "equal"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 2}, {"a": 1}, False),
        ({}, {"a": 1}, False),
        ({"a": [{"x": 1, "y": 2}]}, {"a": [{"x": 1}]}, True),
        ({"a": [1, 2]}, {"a": [1]}, False),
        ({}, {"a": {}}, True),
        ({}, {"a": []}, True),
        ({"a": "b"}, {"a": {"b": 1}}, False),
        ({"a": 1}, {"a": [1]}, False),
    ],
)
def test_projection(seen: object, wanted: object, equal: bool) -> None:
    assert (projection(seen, wanted) == wanted) is equal
