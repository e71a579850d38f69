"""The router finds workers by the EndpointSlices of a real API server, and outlives it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cluster.api import ApiClient
from cluster.control_plane import ControlPlane
from helpers.dispatcher_stage import PROMPT, Stage, collect, generation, tokens, until
from helpers.fake_script import Script, expected_tokens
from helpers.fake_worker import FakeWorker
from kvasir.router import kube_discovery
from kvasir.router.config import Kubernetes, RouterConfig
from kvasir.router.contracts import Finished, FinishReason, GenerationEvent
from kvasir.router.discovery import SourceError, WorkerAddress
from kvasir.router.dispatcher import FleetDispatcher
from kvasir.router.kube_discovery import KubernetesWorkers

SERVICE = "chat-workers"
READY = {"ready": True, "serving": True, "terminating": False}
NOT_READY = {"ready": False, "serving": False, "terminating": False}
TERMINATING = {"ready": False, "serving": True, "terminating": True}
PATH = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"


def endpoint_slice(worker: str, port: int, conditions: dict[str, bool]) -> dict[str, Any]:
    """One endpoint. The API server refuses loopback addresses, but not loopback's name."""
    pod = {"kind": "Pod", "name": worker}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": worker, "labels": {"kubernetes.io/service-name": SERVICE}},
        "addressType": "FQDN",
        "endpoints": [
            {"addresses": ["worker.localhost"], "conditions": conditions, "targetRef": pod}
        ],
        "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}],
    }


class Slices:
    """EndpointSlices of one namespace, one for each worker, as their controller would write."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self.where = Kubernetes(namespace=namespace, service=SERVICE)
        self._client = client
        self._path = PATH.format(namespace)

    def add(self, worker: FakeWorker, conditions: dict[str, bool] = READY) -> None:
        made = endpoint_slice(worker.info.worker_id, worker.port, conditions)
        self._client.create(self._path, made)

    def set(self, worker: FakeWorker, conditions: dict[str, bool]) -> None:
        made = endpoint_slice(worker.info.worker_id, worker.port, conditions)
        self._client.patch(
            f"{self._path}/{worker.info.worker_id}", {"endpoints": made["endpoints"]}
        )

    def reconnect(self) -> None:
        """After the API server was killed: the kept-open connection is no good."""
        self._client.close()

    def remove(self, worker: FakeWorker) -> None:
        self._client.delete(f"{self._path}/{worker.info.worker_id}")


@pytest.fixture
def slices(
    control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Slices]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig))
    # Such that a watch ends, and is resumed, several times in each test.
    monkeypatch.setattr(kube_discovery, "WATCH_SECONDS", 2)
    monkeypatch.setattr(kube_discovery, "PATIENCE", 2.0)
    client = control_plane.client()
    yield Slices(client, namespace)
    client.close()


async def dispatcher_of(stage: Stage, where: Kubernetes) -> FleetDispatcher:
    config = RouterConfig(kubernetes=where, no_worker_timeout=20.0)
    dispatcher = FleetDispatcher(config, stage.registry)
    await dispatcher.start()
    stage.stack.push_async_callback(dispatcher.close)
    return dispatcher


def states(dispatcher: FleetDispatcher) -> dict[str, str]:
    return {worker.worker_id: worker.state for worker in dispatcher.workers()}


async def served_by(dispatcher: FleetDispatcher, request_id: str) -> str:
    events = await collect(dispatcher, generation(request_id, max_tokens=3))
    assert events[-1] == Finished(FinishReason.LENGTH)
    return str(getattr(events[0], "decode_worker", None))


async def test_workers_appear_and_their_readiness_decides(stage: Stage, slices: Slices) -> None:
    first, second = await stage.worker("w0"), await stage.worker("w1")
    dispatcher = await dispatcher_of(stage, slices.where)
    assert not dispatcher.ready()
    slices.add(first)
    await until(lambda: states(dispatcher) == {"w0": "ready"})
    assert await served_by(dispatcher, "a") == "w0"

    slices.set(first, NOT_READY)
    slices.add(second, NOT_READY)
    await until(lambda: states(dispatcher) == {"w0": "draining", "w1": "draining"})
    assert not dispatcher.ready()
    slices.set(second, READY)
    await until(lambda: states(dispatcher) == {"w0": "draining", "w1": "ready"})
    assert await served_by(dispatcher, "b") == "w1"

    await asyncio.sleep(3)  # the watch ends, and is resumed without a new list
    slices.set(first, READY)
    slices.set(second, NOT_READY)
    await until(lambda: states(dispatcher) == {"w0": "ready", "w1": "draining"})
    assert await served_by(dispatcher, "c") == "w0"
    slices.remove(second)
    await until(lambda: states(dispatcher) == {"w0": "ready"})
    assert stage.metric("discovery_current") == 1


async def test_a_terminating_worker_finishes_what_it_has(stage: Stage, slices: Slices) -> None:
    first = await stage.worker("w0", script=Script(step_seconds=0.05))
    second = await stage.worker("w1")
    slices.add(first)
    dispatcher = await dispatcher_of(stage, slices.where)
    await until(dispatcher.ready)
    changes = 0

    async def disturb(events: list[GenerationEvent]) -> None:
        nonlocal changes
        if len(events) == 1:
            slices.set(first, TERMINATING)
            slices.add(second)
            await until(lambda: states(dispatcher) == {"w0": "draining", "w1": "ready"})
            assert await served_by(dispatcher, "other") == "w1"
            changes += 1
        elif changes == 1:
            slices.remove(first)  # as when its pod is deleted by force
            await until(lambda: states(dispatcher) == {"w1": "ready"})
            assert first.live
            changes += 1

    events = await collect(dispatcher, generation("long", max_tokens=200), disturb)
    assert tokens(events) == expected_tokens(PROMPT, 5, 200)
    assert changes == 2
    assert first.aborts == []
    assert [submit.request_id for submit in first.submits] == ["long"]
    assert stage.metric("replays_total") == 0


async def test_the_last_list_serves_while_the_api_server_is_gone(
    stage: Stage, slices: Slices, control_plane: ControlPlane
) -> None:
    first, second = await stage.worker("w0"), await stage.worker("w1")
    slices.add(first)
    dispatcher = await dispatcher_of(stage, slices.where)
    await until(dispatcher.ready)
    await until(lambda: stage.metric("discovery_current") == 1)

    control_plane.api_server.kill()
    await until(lambda: stage.metric("discovery_current") == 0)
    assert await served_by(dispatcher, "a") == "w0"
    control_plane.api_server.start()
    await asyncio.to_thread(control_plane.wait_ready)
    slices.reconnect()
    slices.add(second)
    await until(lambda: states(dispatcher) == {"w0": "ready", "w1": "ready"}, seconds=60)
    assert stage.metric("discovery_current") == 1


async def test_an_api_server_that_answers_nothing_is_noticed(
    stage: Stage, slices: Slices, control_plane: ControlPlane
) -> None:
    worker = await stage.worker("w0")
    slices.add(worker)
    dispatcher = await dispatcher_of(stage, slices.where)
    await until(dispatcher.ready)
    control_plane.api_server.pause()
    try:
        await until(lambda: stage.metric("discovery_current") == 0)
        assert await served_by(dispatcher, "a") == "w0"
    finally:
        control_plane.api_server.resume()
    await asyncio.to_thread(control_plane.wait_ready)
    await until(lambda: stage.metric("discovery_current") == 1, seconds=60)
    slices.set(worker, NOT_READY)
    await until(lambda: states(dispatcher) == {"w0": "draining"})


async def test_what_is_not_allowed_is_said_and_tried_again(
    stage: Stage,
    slices: Slices,
    control_plane: ControlPlane,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kubectl = control_plane.kubectl
    user, inside = "router@test", f"--namespace={slices.where.namespace}"
    monkeypatch.setenv("KUBECONFIG", str(control_plane.user_kubeconfig(user, [])))
    slices.add(await stage.worker("w0"))
    dispatcher = await dispatcher_of(stage, slices.where)
    await until(lambda: "403" in caplog.text)
    assert "endpointslices" in caplog.text
    assert states(dispatcher) == {}
    kubectl("create", "role", "r", "--verb=list,watch", "--resource=endpointslices", inside)
    kubectl("create", "rolebinding", "r", "--role=r", f"--user={user}", inside)
    await until(lambda: states(dispatcher) == {"w0": "ready"}, seconds=60)


async def test_without_a_way_to_an_api_server_the_router_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    source = KubernetesWorkers(Kubernetes(namespace="n", service="s"))
    with pytest.raises(SourceError, match="set KUBECONFIG"):
        await source.start()


# --- answers that a real API server gives too seldom for a test ----------------------------------


class ScriptedApi:
    """Answers each request with the next entry of its script: a status and lines of JSON."""

    def __init__(self, script: list[tuple[int, list[Any]]]) -> None:
        self._script = script
        self.watched_from: list[str | None] = []
        self.ended = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.watched_from.append(request.query.get("resourceVersion"))
        if not self._script:
            await self.ended.wait()
            return web.Response()
        status, lines = self._script.pop(0)
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        return web.Response(status=status, text=text)


def listed(version: str, *workers: str) -> dict[str, Any]:
    items = [endpoint_slice(worker, 50051, READY) for worker in workers]
    return {"metadata": {"resourceVersion": version}, "items": items}


def event(kind: str, version: str, worker: str) -> dict[str, Any]:
    item = endpoint_slice(worker, 50051, READY)
    item["metadata"]["resourceVersion"] = version
    return {"type": kind, "object": item}


GONE = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}
BOOKMARK = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "17"}}}


async def test_a_watch_is_resumed_and_one_that_expired_begins_with_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = ScriptedApi(
        [
            (200, [listed("5", "w0")]),
            (200, [event("ADDED", "7", "w1"), event("DELETED", "8", "w0"), BOOKMARK]),
            (200, [GONE]),
            (200, [listed("30", "w2")]),
            (410, [{"code": 410}]),
            (200, [listed("40", "w3")]),
            (200, [event("ADDED", "41", "w4"), '{"type": "DELE']),
            (500, ["broken"]),
            (200, [listed("50", "w5")]),
        ]
    )
    app = web.Application()
    app.router.add_get(PATH.format("n"), api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    config = {
        "clusters": [
            {"name": "c", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}
        ],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
        "current-context": "c",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(path))
    source = KubernetesWorkers(Kubernetes(namespace="n", service="s"))
    await source.start()
    found: list[tuple[WorkerAddress, ...]] = []

    def last() -> set[str]:
        if (workers := source.poll()) is not None:
            found.append(workers)
        return {worker.worker_id for worker in found[-1]} if found else set()

    try:
        await until(lambda: last() == {"w5"})
        await until(lambda: len(api.watched_from) == 10)
        assert source.current
        assert source.poll() is None
    finally:
        await source.close()
        api.ended.set()
        await runner.cleanup()
    assert api.watched_from == [None, "5", "17", None, "30", None, "40", None, None, "50"]
