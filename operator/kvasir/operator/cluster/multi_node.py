"""Workers that span nodes: groups of pods, kept by a LeaderWorkerSet. Pure.

A worker has tensor times pipeline ranks, with an accelerator each. More than the accelerators of
one pod make it a group: the leader is the worker to routers and operator, since only it has the
worker's labels, ports and probes; the others follow it. All pods of a group run the same command
with the same configuration, and learn who they are from what LeaderWorkerSet gives each container:
LWS_WORKER_INDEX (0: the leader), LWS_GROUP_SIZE and LWS_LEADER_ADDRESS. A group restarts as one.

Our own worker image computes on one accelerator, so that today such a worker takes an image of
the user's in ``spec.<role>.template`` (refusals.py). It gets ``tensor_parallel`` and
``pipeline_parallel`` in its configuration beside what every worker gets.

Reference: https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/
"""

from collections.abc import Iterator, Mapping

from kvasir.operator.cluster import names
from kvasir.operator.cluster.faults import Fault
from kvasir.operator.cluster.pods import Object, metadata
from kvasir.operator.modelservice import ModelService, Role
from kvasir.operator.workerpool import WorkerRole

KIND = "LeaderWorkerSet"

MISSING = Fault(
    "LeaderWorkerSetMissing",
    f"A worker that spans nodes needs the API {names.LEADER_WORKER_SET_API}, which this cluster "
    "does not have; install LeaderWorkerSet (https://lws.sigs.k8s.io), or give each pod as many "
    "accelerators (accelerator.count) as a worker has ranks (parallelism).",
)

_LONGEST_SET_NAME = 47
"""Pods are labeled with the name of their StatefulSet, of which each group has its own (5 more
characters), and the hash of its revision (11 more); a label value holds 63."""
_OF_LEADERS = ("ports", "startupProbe", "livenessProbe", "readinessProbe")
_LEADER_LABELS = (names.ROLE_LABEL, names.REVISION_LABEL)


def ranks(role: Role) -> int:
    """Processes that one worker computes with."""
    return role.parallelism.tensor * role.parallelism.pipeline


def pods_for_each_worker(role: Role) -> int:
    """1 for a worker that spans no nodes."""
    if role.accelerator is None:
        return 1
    return -(-ranks(role) // role.accelerator.count)


def problems(service: ModelService, name: WorkerRole, role: Role) -> Iterator[str]:
    """Why a worker of the role cannot be spread as the spec says, each with its fix."""
    if role.accelerator is None or pods_for_each_worker(role) == 1:
        return
    if ranks(role) % role.accelerator.count:
        yield (
            f"spec.{name}.parallelism: tensor times pipeline is {ranks(role)}, no multiple of the "
            f"{role.accelerator.count} accelerators of a pod; make it one, or change "
            f"spec.{name}.accelerator.count"
        )
    longest = _LONGEST_SET_NAME - len(names.deployment("", name, "0" * 10))
    if len(service.name) > longest:
        yield (
            f"metadata.name: {len(service.name)} characters; workers that span nodes leave room "
            f"for {longest}; choose a shorter name"
        )


def leader_worker_set(own: Object, template: Mapping[str, Object], size: int) -> Object:
    """Workers of ``size`` pods each, but for how many. ``template``: that of their leaders."""
    return {
        "apiVersion": names.LEADER_WORKER_SET_API,
        "kind": KIND,
        "metadata": own,
        "spec": {
            "startupPolicy": "LeaderCreated",  # a leader is ready only together with the others
            "leaderWorkerTemplate": {
                "size": size,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": template,
                "workerTemplate": _followers(template),
            },
        },
    }


def group_network_policy(
    service: ModelService, name: str, labels: Mapping[str, str], pod_revision: str
) -> Object:
    """Pods of these workers reach each other on every port: ranks choose theirs at run time.

    It adds to the policy of all workers, and lets nobody else in.
    """
    selected = {
        names.SERVICE_LABEL: service.name,
        names.POD_REVISION_LABEL: pod_revision,
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(service, name, labels),
        "spec": {
            "podSelector": {"matchLabels": selected},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": selected}}]}],
        },
    }


def _followers(template: Mapping[str, Object]) -> Object:
    """Like the leader, but found by no Service, budget or autoscaler, and asked by no probe."""
    labels = {
        key: value
        for key, value in template["metadata"]["labels"].items()
        if key not in _LEADER_LABELS
    }
    containers = [
        {key: value for key, value in each.items() if key not in _OF_LEADERS}
        if each.get("name") == "worker"
        else each
        for each in template["spec"]["containers"]
    ]
    return {
        **template,
        "metadata": {
            **template["metadata"],
            "labels": labels | {names.COMPONENT_LABEL: "follower"},
        },
        "spec": {**template["spec"], "containers": containers},
    }
