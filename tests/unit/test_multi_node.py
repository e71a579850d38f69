"""Workers that span nodes: their objects, what is seen of them, and how they shrink."""

from typing import Any

import pytest

from helpers.cluster_service import INSTALLATION, a_service, deployment, matches
from kvasir.operator.cluster import multi_node, names, objects
from kvasir.operator.cluster.drain import Drain, shrink
from kvasir.operator.cluster.faults import Fault
from kvasir.operator.cluster.observed import Deployment, Fleet, Observed, Pod, WorkerLoad, observe
from kvasir.operator.cluster.refusals import refusal
from kvasir.operator.modelservice import Role

OWN_IMAGE = {"spec": {"containers": [{"name": "worker", "image": "example.com/worker:1"}]}}


def role(tensor: int = 1, pipeline: int = 1, count: int = 8) -> dict[str, Any]:
    return {
        "parallelism": {"tensor": tensor, "pipeline": pipeline},
        "accelerator": {"resourceName": "example.com/npu", "count": count},
        "template": OWN_IMAGE,
    }


# --- objects ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "pipeline", "count", "pods"),
    [(1, 1, 1, 1), (8, 1, 8, 1), (4, 1, 8, 1), (16, 1, 8, 2), (8, 2, 8, 2), (2, 1, 1, 2)],
)
def test_a_worker_spans_nodes_when_its_ranks_exceed_a_pods_accelerators(
    tensor: int, pipeline: int, count: int, pods: int
) -> None:
    service = a_service(decode=role(tensor, pipeline, count))
    assert multi_node.pods_for_each_worker(service.spec.decode) == pods
    assert deployment(service)["kind"] == ("Deployment" if pods == 1 else "LeaderWorkerSet")


def test_without_accelerators_all_ranks_share_a_pod() -> None:
    spread = Role.model_validate({"parallelism": {"tensor": 4}})
    assert multi_node.pods_for_each_worker(spread) == 1


def test_the_set_has_the_size_of_a_worker_and_restarts_it_as_one() -> None:
    made = deployment(a_service(decode=role(tensor=16, pipeline=2)))
    assert made["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert made["spec"]["replicas"] == 2
    template = made["spec"]["leaderWorkerTemplate"]
    assert (template["size"], template["restartPolicy"]) == (4, "RecreateGroupOnPodRestart")
    for part in ("leaderTemplate", "workerTemplate"):
        (container,) = template[part]["spec"]["containers"]
        assert container["image"] == "example.com/worker:1"
        assert container["resources"]["limits"] == {"example.com/npu": "8"}


def test_followers_run_what_leaders_run_but_are_not_found_or_asked() -> None:
    service = a_service(decode=role(tensor=16))
    template = deployment(service)["spec"]["leaderWorkerTemplate"]
    leader, follower = template["leaderTemplate"], template["workerTemplate"]
    labels = follower["metadata"]["labels"]
    for selector in (
        names.selector(service.name, "worker"),  # of the Service and the NetworkPolicy
        names.role_selector(service.name, "decode"),  # of the budget and autoscalers
    ):
        assert matches(selector, leader["metadata"]["labels"])
        assert not matches(selector, labels)
    assert labels[names.SERVICE_LABEL] == service.name
    (main,), (other,) = leader["spec"]["containers"], follower["spec"]["containers"]
    left_out = {"ports", "startupProbe", "livenessProbe", "readinessProbe"}
    assert main.keys() - other.keys() == left_out
    assert all(main[key] == value for key, value in other.items())


def test_the_pods_of_a_group_reach_each_other_and_nobody_else_comes_in() -> None:
    service = a_service(decode=role(tensor=16))
    revision = objects.worker_revision(service, "decode", INSTALLATION)
    config_map, policy = revision.companions
    assert config_map["kind"] == "ConfigMap"
    # What goes with a revision has its name: plan.py keeps and deletes it by that.
    assert policy["metadata"]["name"] == revision.name
    selector = policy["spec"]["podSelector"]["matchLabels"]
    (rule,) = policy["spec"]["ingress"]
    assert rule == {"from": [{"podSelector": {"matchLabels": selector}}]}
    template = revision.deployment(1)["spec"]["leaderWorkerTemplate"]
    for part in ("leaderTemplate", "workerTemplate"):
        assert matches(selector, template[part]["metadata"]["labels"])
    (alone,) = objects.worker_revision(service, "prefill", INSTALLATION).companions
    assert alone["kind"] == "ConfigMap"


def test_a_worker_is_told_how_it_is_spread() -> None:
    service = a_service(decode=role(tensor=8, pipeline=2))
    text = objects.worker_revision(service, "decode", INSTALLATION).config_map["data"]
    assert '"tensor_parallel": 8' in text["worker.json"]
    assert '"pipeline_parallel": 2' in text["worker.json"]
    text = objects.worker_revision(service, "prefill", INSTALLATION).config_map["data"]
    assert "_parallel" not in text["worker.json"]


# --- refusals -----------------------------------------------------------------------------------


def test_with_our_own_image_a_worker_is_not_spread_yet() -> None:
    refused = refusal(a_service(decode=role(tensor=16) | {"template": {}}))
    assert refused is not None
    (problem,) = refused.problems
    assert problem == (
        "spec.decode.parallelism.tensor: 16 is not served yet; "
        "use 1, or a worker image of your own in the role's template"
    )
    assert refusal(a_service(decode=role(tensor=16))) is None


def test_ranks_fill_pods() -> None:
    refused = refusal(a_service(prefill=role(tensor=12)))
    assert refused is not None
    (problem,) = refused.problems
    assert problem.startswith("spec.prefill.parallelism: tensor times pipeline is 12, no multiple")
    assert problem.endswith("change spec.prefill.accelerator.count")


@pytest.mark.parametrize(("worker", "longest"), [("prefill", 28), ("decode", 29)])
def test_names_of_a_groups_pods_fit_in_labels(worker: str, longest: int) -> None:
    def refused(length: int) -> bool:
        service = a_service(**{worker: role(tensor=16)})
        named = service.metadata.model_copy(update={"name": "a" * length})
        return refusal(service.model_copy(update={"metadata": named})) is not None

    assert not refused(longest)
    assert refused(longest + 1)
    hashed = f"{'a' * longest}-{worker}-{'0' * 10}-1023-{'h' * 10}"
    assert len(hashed) == 63


# --- observed -----------------------------------------------------------------------------------


def pod(index: int, place: int, **changes: Any) -> dict[str, Any]:
    """Pod ``place`` of worker ``index``."""
    follows = place > 0
    labels = {
        names.SERVICE_LABEL: "chat",
        names.POD_REVISION_LABEL: "r",
        names.COMPONENT_LABEL: "follower" if follows else "worker",
        names.GROUP_INDEX_LABEL: str(index),
        names.GROUP_KEY_LABEL: f"key-{index}",
        **({} if follows else {names.ROLE_LABEL: "decode"}),
    }
    metadata = {
        "name": f"chat-decode-r-{index}" + (f"-{place}" if follows else ""),
        "labels": labels,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": "n"},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    } | changes


UNSCHEDULABLE = {
    "spec": {},
    "status": {
        "conditions": [
            {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "no place",
            }
        ]
    },
}


def test_a_worker_is_its_leader_with_the_troubles_of_all() -> None:
    items = [pod(0, 0), pod(0, 1), pod(1, 0), pod(1, 1, **UNSCHEDULABLE), pod(1, 2)]
    first, second = observe(items, "chat").pods_of("decode")
    assert (first.name, first.ordinal, first.deployment) == ("chat-decode-r-0", 0, "chat-decode-r")
    assert (first.ready, first.scheduled, first.fault) == (True, True, None)
    assert (second.ordinal, second.ready, second.scheduled) == (1, False, False)
    assert second.fault == Fault("Unschedulable", "no place")


def test_a_set_is_observed_like_a_deployment() -> None:
    made = deployment(a_service(decode=role(tensor=16)))
    (seen,) = observe([made], made["metadata"]["ownerReferences"][0]["uid"]).of("decode")
    assert (seen.name, seen.replicas, seen.ordered) == (made["metadata"]["name"], 2, True)


# --- shrinking ----------------------------------------------------------------------------------

NOW, DEADLINE = 1000.0, 300.0
BUSY, IDLE = WorkerLoad(3, 0, draining=False), WorkerLoad(0, 0, draining=False)
FINISHING, DRAINED = WorkerLoad(1, 0, draining=True), WorkerLoad(0, 0, draining=True)


def shrunk(target: int, *workers: tuple[int, WorkerLoad]) -> tuple[int, Drain]:
    """Workers by their place and load; those that drain were told a second ago."""
    pods = [
        Pod(
            f"w{place}",
            "decode",
            "d",
            ready=True,
            ordinal=place,
            draining_since=NOW - 1 if load.draining else None,
        )
        for place, load in workers
    ]
    loads = {f"w{place}": load for place, load in workers}
    observed = Observed(objects={}, pods=tuple(pods), fleet=Fleet(loads, {}))
    whole = Deployment("d", "decode", replicas=3, kind="LeaderWorkerSet")
    return shrink(whole, target, observed, NOW, DEADLINE)


def test_the_last_one_drains_even_if_it_is_the_busiest() -> None:
    assert shrunk(2, (0, IDLE), (1, IDLE), (2, BUSY)) == (
        3,
        Drain(begin=("w2",), waiting=("w2",)),
    )


def test_an_earlier_one_waits_for_a_later_one() -> None:
    size, drain = shrunk(1, (0, IDLE), (1, DRAINED), (2, FINISHING))
    assert size == 3
    assert (drain.completed, drain.waiting) == (("w1",), ("w2",))
    assert shrunk(1, (0, IDLE), (1, FINISHING), (2, DRAINED))[0] == 2
    assert shrunk(1, (0, IDLE), (1, DRAINED), (2, DRAINED))[0] == 1


def test_a_worker_that_is_being_made_anew_does_not_cost_another_one() -> None:
    # Two of three are there; the missing one comes back in its place.
    size, drain = shrunk(2, (1, IDLE), (2, BUSY))
    assert (size, drain.begin) == (3, ("w2",))


def test_a_drain_of_one_that_is_needed_again_is_called_off() -> None:
    assert shrunk(3, (0, IDLE), (1, IDLE), (2, FINISHING)) == (3, Drain(cancel=("w2",)))
