"""pytest fixtures for tests that need a Kubernetes; tests/conftest.py makes them known.

- ``control_plane``: a real control plane on loopback, for the whole run.
- ``kubectl``: the administrator's kubectl there.
- ``node``: a node that `FakeNode` plays, with its rule reset for each test.
- ``namespace``: a namespace there of the test's own; deleted at its end.
- ``node_cluster``: a cluster with real nodes: made here, or the one of $KVASIR_E2E_KUBECONFIG.
- ``node_namespace``: a namespace there of the test's own; deleted at its end.

Binaries that the collected tests need are built before the first test runs, so that no test's
time limit covers a build.
"""

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cluster.binaries import CONTROL_PLANE, BinariesMissingError, find_binaries

if TYPE_CHECKING:
    from cluster.clients import Kubectl
    from cluster.control_plane import ControlPlane
    from cluster.fake_node import FakeNode
    from cluster.node_cluster import NodeCluster

_NOT_RUN = pytest.StashKey[str]()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Find or build what the collected tests need."""
    if session.config.option.collectonly:
        return
    used = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    names: set[str] = set()
    if "control_plane" in used:
        names.update(CONTROL_PLANE, ["helm"])
    if "node_cluster" in used:
        from cluster.node_cluster import needed_binaries

        names.update(needed_binaries())
    capture = session.config.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():
            find_binaries(sorted(names))
    except BinariesMissingError as error:
        pytest.exit(f"cluster: {error}", returncode=1)


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator["ControlPlane"]:
    from cluster.control_plane import control_plane as running

    with running(tmp_path_factory.mktemp("control-plane")) as plane:
        yield plane


@pytest.fixture(scope="session")
def kubectl(control_plane: "ControlPlane") -> "Kubectl":
    return control_plane.kubectl


@pytest.fixture(scope="session")
def _node(control_plane: "ControlPlane") -> Iterator["FakeNode"]:
    from cluster.fake_node import fake_node

    with fake_node(control_plane) as played:
        yield played


@pytest.fixture
def node(_node: "FakeNode") -> "FakeNode":
    from cluster.pod_status import READY, always

    _node.rule = always(READY)
    return _node


@pytest.fixture
def namespace(kubectl: "Kubectl") -> Iterator[str]:
    name = f"test-{secrets.token_hex(4)}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.fixture(scope="session")
def node_cluster(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator["NodeCluster"]:
    from cluster.node_cluster import node_cluster as running
    from cluster.node_cluster import why_not_here

    if reason := why_not_here():
        request.config.stash[_NOT_RUN] = reason
        pytest.skip(reason)
    with running(tmp_path_factory.mktemp("node-cluster")) as cluster:
        yield cluster


@pytest.fixture
def node_namespace(node_cluster: "NodeCluster") -> Iterator[str]:
    name = f"test-{secrets.token_hex(4)}"
    node_cluster.kubectl("create", "namespace", name)
    yield name
    node_cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say at the end, where nobody overlooks it, what did not run."""
    if reason := config.stash.get(_NOT_RUN, ""):
        terminalreporter.section("NOT RUN: real Kubernetes nodes", sep="!", red=True)
        terminalreporter.line(reason)
