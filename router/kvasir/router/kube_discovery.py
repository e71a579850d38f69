"""Which workers there are, in a cluster: the EndpointSlices of their headless Service.

    list --> watch --> watch ... (resumed where the last one ended)
     ^         |
     +---------+  anything fails: list again, after a pause that grows

Invariants
- A worker is its pod: the pod's name is the worker's id.
- What accepts requests is what the endpoint says: ready, and not terminating. A worker that
  does not stays listed as long as its pod exists, so that what it computes for us goes on.
- While the API server cannot be asked, the last list stays in force and ``current`` is false.

Must not: reach workers by the Service's address, or decide anything about them.

Reference: https://kubernetes.io/docs/concepts/services-networking/endpoint-slices/
"""

import asyncio
import json
import logging
import os
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from aiohttp import ClientError, ClientResponse

from kvasir.proto.process import join_host_port
from kvasir.router.config import Kubernetes
from kvasir.router.discovery import SourceError, WorkerAddress
from kvasir.router.worker_link import report_crash

if TYPE_CHECKING:
    from kubernetes.aio.client import Configuration, DiscoveryV1Api

log = logging.getLogger("kvasir.router")

Slice = Mapping[str, Any]

PORT_NAME = "grpc"

WATCH_SECONDS = 30
"""The server ends a watch after this, so that one that hangs shows soon: see PATIENCE."""
PATIENCE = 10.0
"""How much later than due an answer may come."""
BACKOFF_FIRST = 0.2
BACKOFF_MAX = 10.0


def workers_in(slices: Iterable[Slice]) -> tuple[WorkerAddress, ...]:
    """The workers that EndpointSlices name, by id.

    An endpoint may be in two slices: for a moment, or since its pod has two addresses. Then it
    accepts requests if both say so, and IPv4 is taken.
    """
    found: dict[str, WorkerAddress] = {}
    for each in sorted(slices, key=lambda each: (each["addressType"], each["metadata"]["name"])):
        for worker in _workers_of(each):
            known = found.setdefault(worker.worker_id, worker)
            if not worker.accepts:
                found[worker.worker_id] = replace(known, accepts=False)
    return tuple(found[worker_id] for worker_id in sorted(found))


def _workers_of(each: Slice) -> Iterator[WorkerAddress]:
    ports = (port["port"] for port in each.get("ports") or () if port.get("name") == PORT_NAME)
    number = next(ports, None)
    if number is None:
        return
    for endpoint in each.get("endpoints") or ():
        pod = endpoint.get("targetRef") or {}
        if pod.get("kind") == "Pod":
            conditions = endpoint.get("conditions") or {}
            # A condition that is absent is unknown, which the API asks to take for ready.
            ready = conditions.get("ready", True) and not conditions.get("terminating", False)
            address = join_host_port(endpoint["addresses"][0], number)
            yield WorkerAddress(pod["name"], address, ready)


class _RefusedError(Exception):
    """The API server answered with a Status instead of what it was asked for."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        super().__init__(f"{status.get('code')}: {status.get('message')}")
        self.status = status.get("code")


class KubernetesWorkers:
    """The workers behind one Service, kept up to date by a watch. See discovery.WorkerSource."""

    def __init__(self, where: Kubernetes, rng: random.Random | None = None) -> None:
        self._where = where
        self._rng = rng or random.Random()  # noqa: S311 - spreads retries; no secret
        self._slices: dict[str, Slice] = {}
        self._last: tuple[WorkerAddress, ...] | None = None
        self._changed = False
        self._current = False
        self._complaint = ""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to watch. Raises SourceError if it is not known how to reach an API server."""
        configuration = await _configuration()
        self._task = asyncio.create_task(self._run(configuration), name="endpoint-slices")
        self._task.add_done_callback(report_crash)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def current(self) -> bool:
        return self._current

    def poll(self) -> tuple[WorkerAddress, ...] | None:
        """The new list if there is one; None while the last one is still in force."""
        if not self._changed:
            return None
        self._changed = False
        workers = workers_in(self._slices.values())
        if workers == self._last:
            return None
        self._last = workers
        return workers

    # --- list and watch --------------------------------------------------------------------

    async def _run(self, configuration: "Configuration") -> None:
        from kubernetes.aio.client import ApiClient, DiscoveryV1Api
        from kubernetes.aio.config import ConfigException

        # The last two: a token that cannot be read any longer, and an answer that was cut off.
        unavailable = (
            *(_RefusedError, ClientError, TimeoutError, OSError),
            *(ConfigException, ValueError),
        )
        failures = 0
        async with ApiClient(configuration) as client:
            api = DiscoveryV1Api(client)
            while True:
                try:
                    await self._follow(api)
                    failures = 0
                except unavailable as error:
                    failures = 1 if self._current else failures + 1
                    self._current = False
                    self._complain(error)
                pause = min(BACKOFF_FIRST * 2**failures, BACKOFF_MAX)
                await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))

    async def _follow(self, api: "DiscoveryV1Api") -> None:
        """List, then watch. Returns when the watch cannot be resumed; raises when it broke."""
        async with self._answer(api, PATIENCE) as answer:
            listed = json.loads(await answer.read())
        self._slices = {item["metadata"]["name"]: item for item in listed.get("items") or ()}
        self._changed, self._current, self._complaint = True, True, ""
        version = listed["metadata"]["resourceVersion"]
        while version:
            version = await self._watch(api, version)
            await asyncio.sleep(BACKOFF_FIRST)

    async def _watch(self, api: "DiscoveryV1Api", version: str) -> str:
        """One watch to its end. The version to resume it from; empty if that one has expired."""
        watch = self._answer(
            api,
            WATCH_SECONDS + PATIENCE,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_SECONDS,
        )
        try:
            async with watch as answer:
                async for line in answer.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _RefusedError(event["object"])
                    version = self._take(event["type"], event["object"])
        except _RefusedError as refusal:
            if refusal.status != HTTPStatus.GONE:
                raise
            return ""
        return version

    def _take(self, kind: str, item: Slice) -> str:
        name = item["metadata"].get("name")
        if kind == "DELETED":
            self._slices.pop(name, None)
        elif kind != "BOOKMARK":
            self._slices[name] = item
        self._changed = True
        version: str = item["metadata"]["resourceVersion"]
        return version

    @asynccontextmanager
    async def _answer(
        self, api: "DiscoveryV1Api", patience: float, **query: Any
    ) -> AsyncIterator[ClientResponse]:
        """An answer that may take ``patience`` seconds in all, its body included.

        Raises _RefusedError, ClientError, TimeoutError or OSError.
        """
        response = await api.list_namespaced_endpoint_slice_without_preload_content(
            self._where.namespace,
            label_selector=f"kubernetes.io/service-name={self._where.service}",
            _request_timeout=patience,
            **query,
        )
        async with response:
            if response.status != HTTPStatus.OK:
                raise _RefusedError({"code": response.status, "message": await response.text()})
            yield response

    def _complain(self, error: Exception) -> None:
        """Once for each new reason: retries are frequent."""
        reason = str(error) or type(error).__name__
        if reason != self._complaint:
            self._complaint = reason
            log.warning(
                "endpoint slices cannot be read, keeping the last list service=%s reason=%s",
                f"{self._where.namespace}/{self._where.service}",
                reason,
            )


async def _configuration() -> "Configuration":
    """How to reach the API server: as a pod does, or else by $KUBECONFIG or ~/.kube/config."""
    from kubernetes.aio import config
    from kubernetes.aio.client import Configuration

    configuration = Configuration()
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(configuration)
        else:
            await config.load_kube_config(
                os.environ.get("KUBECONFIG", "~/.kube/config"), client_configuration=configuration
            )
    except (config.ConfigException, OSError) as error:
        raise SourceError(
            f"kubernetes: no way to an API server ({error}); "
            "run in a pod with a service account token, or set KUBECONFIG"
        ) from error
    return configuration
