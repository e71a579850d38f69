"""A ModelService on real nodes: chart, operator, workers, routers and model are what people get.

One service for all tests, each of which brings it to where it begins. What is claimed under load:
no request fails, and every answer is the text that the same prompt got when nothing else went on.
"""

import secrets
from collections.abc import Iterator

import pytest

from cluster.clients import CommandError
from cluster.installation import NAMESPACE, RELEASE, Installation, installed, kill_container
from cluster.load import Load, LoadClient, shortened
from cluster.node_cluster import NodeCluster
from cluster.processes import wait_until
from helpers.served_model import NAME, PROMPTS, ServedModel

SECONDS = 240
USERS = 6

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def installation(
    node_cluster: NodeCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    with installed(node_cluster, tmp_path_factory.mktemp("installation")) as release:
        yield release


@pytest.fixture(scope="module")
def model(node_cluster: NodeCluster, installation: Installation) -> Iterator[ServedModel]:
    namespace = f"test-{secrets.token_hex(4)}"
    node_cluster.kubectl("create", "namespace", namespace)
    try:
        served = ServedModel(node_cluster, installation, namespace)
        served.apply()
        served.wait_ready()
        yield served
    finally:
        node_cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="module")
def client(model: ServedModel, tmp_path_factory: pytest.TempPathFactory) -> LoadClient:
    return model.client(tmp_path_factory.mktemp("load"))


@pytest.fixture(scope="module")
def expected(client: LoadClient) -> dict[str, str]:
    """Each prompt's answer when nothing else is asked."""
    records = client.answers()
    assert [each.error for each in records] == [None] * len(PROMPTS)
    assert all(each.text for each in records)
    # A prompt that is new to the decode worker is computed by the other one.
    assert any(each.prefill for each in records)
    return {each.prompt: each.text for each in records}


def check(model: ServedModel, load: Load, expected: dict[str, str]) -> None:
    """No request failed, and every answer is the expected one."""
    assert not load.failed, f"{shortened(load.failed)}\n{model.explain()}"
    assert load.wrong(expected) == []
    assert len(load.records) >= USERS


def kill_at_work(model: ServedModel, load: Load) -> str:
    """The decode worker whose container was killed while requests went on at it.

    A worker may be between two requests just then, which is known only later: then it goes on
    with the one that is busiest by then.
    """
    for _ in range(5):
        victim = load.busiest(USERS)
        killed = kill_container(model.cluster, model.namespace, victim)
        load.wait_for_answers(2 * USERS)
        if load.in_flight(victim, killed):
            return victim
    raise AssertionError("no killed worker had requests")


def test_the_release_passes_its_own_test(
    node_cluster: NodeCluster, installation: Installation
) -> None:
    printed = node_cluster.helm("test", RELEASE, f"--namespace={NAMESPACE}", "--logs")
    assert "ready: 200" in printed


def test_it_answers_a_question(model: ServedModel, client: LoadClient) -> None:
    question = "What is the capital of France?"
    (answer,) = LoadClient(**{**vars(client), "prompts": (question,)}).answers()
    assert answer.error is None
    assert "Paris" in answer.text
    assert model.get("msvc", NAME)["status"]["url"] == f"http://{NAME}.{model.namespace}.svc"


def test_a_scaled_pool_is_ready_and_used(
    model: ServedModel, client: LoadClient, expected: dict[str, str]
) -> None:
    model.scale("decode", 3)
    workers = model.pod_names("decode")
    assert len(workers) == 3
    with client.load(USERS) as load:
        wait_until(
            lambda: load.workers() >= workers, "all are used", SECONDS, lambda: str(load.workers())
        )
    check(model, load, expected)


def test_no_request_fails_when_a_worker_is_killed(
    model: ServedModel, client: LoadClient, expected: dict[str, str]
) -> None:
    model.scale("decode", 3)
    other = min(model.pod_names("prefill"))
    with client.load(USERS) as load:
        load.wait_for_answers(2 * USERS)
        victim = kill_at_work(model, load)
        kill_container(model.cluster, model.namespace, other)
        load.wait_for_answers(2 * USERS)
        if model.cluster.made:  # elsewhere these pods were deleted, the nearest thing
            model.wait_restarted(victim)
            model.wait_restarted(other)
        load.wait_for_answers(USERS)
    check(model, load, expected)
    model.wait_ready()


def test_no_request_fails_when_a_pool_is_scaled_down(
    model: ServedModel, client: LoadClient, expected: dict[str, str]
) -> None:
    model.scale("decode", 3)
    drained = model.events().count("DrainCompleted")
    with client.load(USERS) as load:
        wait_until(lambda: len(load.workers()) == 3, "all are used", SECONDS)
        model.scale("decode", 1)
        load.wait_for_answers(2 * USERS)
    check(model, load, expected)
    assert model.events().count("DrainCompleted") == drained + 2
    (left,) = model.pod_names("decode")
    assert load.records[-1].decode == left


def test_no_request_fails_in_a_rollout(
    model: ServedModel, client: LoadClient, expected: dict[str, str]
) -> None:
    old = model.pod_names("decode") | model.pod_names("prefill")
    with client.load(USERS) as load:
        model.apply(engine={"maxBatchedTokens": 96})
        model.wait_ready()
        load.wait_for_answers(2 * USERS)
    check(model, load, expected)
    new = model.pod_names("decode") | model.pod_names("prefill")
    assert not new & old
    assert load.workers() & old
    assert load.workers() & new


def test_no_request_fails_when_the_operator_is_killed_in_a_rollout(
    model: ServedModel,
    client: LoadClient,
    expected: dict[str, str],
    installation: Installation,
) -> None:
    old = model.pod_names("decode") | model.pod_names("prefill")
    with client.load(USERS) as load:
        model.apply(engine={"maxBatchedTokens": 64})
        wait_until(lambda: len(model.pods("decode")) > 1, "new workers", SECONDS, model.explain)
        kill_container(model.cluster, NAMESPACE, installation.pod())
        model.wait_ready()
        load.wait_for_answers(2 * USERS)
    check(model, load, expected)
    assert not (model.pod_names("decode") | model.pod_names("prefill")) & old


def test_load_adds_a_worker_and_its_absence_removes_it(
    model: ServedModel, client: LoadClient, expected: dict[str, str]
) -> None:
    scaling = {"minReplicas": 1, "maxReplicas": 2, "stabilizationWindow": "10s"}
    model.apply(decode={"replicas": None, "scaling": scaling})
    model.wait_ready()
    pool = f"wpool/{NAME}-decode"
    assert len(model.pods("decode")) == 1
    with client.load(3 * USERS) as load:
        model.wait("jsonpath={.status.readyReplicas}=2", pool)
        raised = model.decision()
        load.wait_for_answers(2 * USERS)
    check(model, load, expected)
    assert (raised["role"], raised["desired"]) == ("decode", 2)
    assert raised["reason"].startswith("Raise decode from 1 to 2: ")
    model.wait("jsonpath={.status.replicas}=1", pool)
    lowered = model.decision()
    assert (lowered["role"], lowered["desired"]) == ("decode", 1)
    assert lowered["reason"].startswith("Lower decode from 2 to 1: ")


def test_everything_goes_with_it(model: ServedModel) -> None:
    assert len(model.leftovers()) > 15
    model.run("delete", f"msvc/{NAME}", f"--timeout={SECONDS}s")
    model.wait_until_gone()


def test_without_its_operator_it_and_its_namespace_can_be_deleted(
    node_cluster: NodeCluster, node_namespace: str, installation: Installation
) -> None:
    """The operator is gone from here on: the last test of this file."""
    model = ServedModel(node_cluster, installation, node_namespace)
    model.apply()
    wait_until(
        lambda: bool(model.pods("decode") and model.pods("router")), "pods", SECONDS, model.explain
    )
    installation.uninstall()
    model.run("delete", f"msvc/{NAME}", f"--timeout={SECONDS}s")
    model.wait_until_gone()
    model.apply()  # which nobody looks at
    node_cluster.kubectl("delete", "namespace", node_namespace, f"--timeout={SECONDS}s")
    with pytest.raises(CommandError, match="not found"):
        node_cluster.kubectl("get", "namespace", node_namespace)
