"""How the operator reaches the API server from its pod, and whether /readyz tells the truth."""

import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from cluster.certificates import Authority
from cluster.clients import Kubectl
from cluster.control_plane import ControlPlane
from cluster.processes import wait_until
from helpers.operator_daemon import Operator
from kvasir.operator.cluster.handlers import watched
from kvasir.operator.cluster.watches import Watches, in_cluster

SECONDS = 60
PODS = "/api/v1/pods"


class PlayedServer:
    """Answers every request with `status`, over TLS; remembers the tokens that it was shown."""

    def __init__(self) -> None:
        self.status = 200
        self.tokens: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.tokens.append(request.headers["Authorization"])
        return web.json_response({}, status=self.status)


@pytest_asyncio.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PlayedServer]:
    """With the environment and the account's folder, `tmp_path`, of a pod that is to use it."""
    authority = Authority()
    (tmp_path / "ca.crt").write_bytes(authority.certificate)
    (tmp_path / "token").write_text("first\n")
    certificate, key = authority.issue("server", (), ["127.0.0.1"]).write(tmp_path, "server")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    played = PlayedServer()
    app = web.Application()
    app.router.add_get("/{path:.*}", played.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(runner.addresses[0][1]))
    yield played
    await runner.cleanup()


async def test_a_pod_reaches_the_api_server_by_address_with_the_newest_token(
    server: PlayedServer, tmp_path: Path
) -> None:
    login = in_cluster(Watches([PODS]), tmp_path)
    assert login is not None
    async with login.aiohttp_session as session:
        await session.get(f"{login.server}{PODS}")
        (tmp_path / "token").write_text("second\n")  # as the kubelet does
        await session.get(f"{login.server}{PODS}")
    assert server.tokens == ["Bearer first", "Bearer second"]


def test_outside_a_pod_there_is_no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert in_cluster(Watches([]), tmp_path) is None


async def test_a_watch_is_open_from_its_answer_until_a_request_fails(
    server: PlayedServer, tmp_path: Path
) -> None:
    watches = Watches([PODS, "/api/v1/services"])
    login = in_cluster(watches, tmp_path)
    assert login is not None
    async with login.aiohttp_session as session:

        async def ask(path: str, watch: bool) -> None:
            query = {"watch": "true"} if watch else {}
            await session.get(f"{login.server}{path}", params=query)

        await ask("/api/v1/services", watch=True)
        assert watches.problem == f"watch of {PODS}: not open yet"
        await ask(PODS, watch=False)  # a list is no watch
        assert watches.problem == f"watch of {PODS}: not open yet"
        await ask(PODS, watch=True)
        assert watches.problem == ""
        await ask("/version", watch=False)
        server.status = 403
        await ask("/version", watch=False)
        assert watches.problem == ""
        await ask(PODS, watch=False)
        assert watches.problem == f"watch of {PODS}: HTTP 403"
        server.status = 200
        await ask(PODS, watch=True)
        assert watches.problem == ""
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"https://127.0.0.1:1{PODS}")
        assert watches.problem.startswith(f"watch of {PODS}: ClientConnectorError: ")


def test_what_is_watched() -> None:
    everywhere = set(watched([]))
    assert {PODS, "/apis/kvasir.dev/v1alpha1/modelservices"} <= everywhere
    two = set(watched(["a", "b"]))
    assert len(two) == 2 * len(everywhere)
    assert "/apis/apps/v1/namespaces/b/deployments" in two


def wait_readiness(operator: Operator, status: int, words: str) -> None:
    def seen() -> bool:
        try:
            found = operator.ask("/readyz")
        except OSError:
            return False
        return found[0] == status and words in found[1]

    operator.process.wait_until(seen, f"{status} {words}", SECONDS)


def test_readiness_follows_the_api_server(
    control_plane: ControlPlane, namespace: str, installed: None, tmp_path: Path
) -> None:
    config = control_plane.kubeconfig
    # One leads and, with so long a lease, goes on without the API server; the other one waits.
    leader = Operator(config, namespace, tmp_path / "leader.log", "--lease-seconds=300")
    lease = ("--lease-name=other", "--lease-seconds=12")
    waiting: list[Operator] = []
    try:
        wait_readiness(leader, 200, "ok")
        first = Operator(config, namespace, tmp_path / "first.log", *lease)
        waiting.append(first)
        first.wait_started(leader=1)
        second = Operator(config, namespace, tmp_path / "second.log", *lease)
        waiting.append(second)
        wait_readiness(second, 200, "ok")
        control_plane.api_server.kill()
        wait_readiness(leader, 503, "watch of /api")
        wait_readiness(second, 503, "no answer of the API server for 12 s")
        control_plane.api_server.start()
        control_plane.wait_ready()
        wait_readiness(leader, 200, "ok")
        wait_until(lambda: not first.process.running, "the first one lost its lease", SECONDS)
        wait_readiness(second, 200, "ok")
    finally:
        if not control_plane.api_server.running:
            control_plane.api_server.start()
            control_plane.wait_ready()
        for operator in (leader, *waiting):
            operator.process.kill()


def test_an_operator_without_its_resources_is_not_ready(
    control_plane: ControlPlane, kubectl: Kubectl, namespace: str, installed: None, tmp_path: Path
) -> None:
    """Those of a namespace that it may not read."""
    kubectl("create", "serviceaccount", "stranger", f"--namespace={namespace}")
    stranger = kubectl.service_account("stranger", namespace, tmp_path)
    rights = ("create", "rolebinding", "lease", "--clusterrole=cluster-admin")
    kubectl(*rights, f"--serviceaccount={namespace}:stranger", f"--namespace={namespace}")
    arguments = ("--namespace=default",)
    operator = Operator(stranger.kubeconfig, namespace, tmp_path / "operator.log", *arguments)
    try:
        wait_readiness(operator, 503, "/namespaces/default/")
    finally:
        operator.process.kill()
