"""The `kvasir-operator` process: its arguments, start-up, leadership, health and metrics.

0   stopped by SIGTERM or SIGINT
1   the lease was lost, or the watches ended: whatever starts it again makes it a candidate
2   could not start: one line on stderr says what to mend
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import web
from kubernetes.aio import client as kubernetes
from kubernetes.aio import config as kubernetes_config
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvasir.operator.cluster import handlers
from kvasir.operator.cluster.client import Cluster
from kvasir.operator.cluster.lease import Lease, LeaseLostError, lead
from kvasir.operator.cluster.objects import Installation
from kvasir.operator.cluster.queue import Queue
from kvasir.operator.cluster.reconcile import Reconciler
from kvasir.operator.cluster.rollout import PATIENCE
from kvasir.operator.cluster.watches import ACCOUNT, Watches
from kvasir.operator.cluster.watching import WatchingEndedError, watch
from kvasir.operator.cluster.workers import PodWorkers, Workers
from kvasir.proto.process import EVERY_ADDRESS, configure_logging, listen_everywhere

RECURSION_LIMIT = 30_000
"""Enough to read, and to copy, what the API server stores: it allows 10 000 levels of JSON. Reading
takes about 1.3 MB of the stack for those, of 8 MB that a thread has."""
_EXIT_STOPPED = 1
_EXIT_UNUSABLE = 2

_log = logging.getLogger("kvasir.operator")


class StartError(Exception):
    """Why the operator cannot start; the message names the argument and the fix."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the operator is told."""

    installation: Installation
    lease: Lease
    namespaces: tuple[str, ...] = ()
    """Whose ModelServices it keeps; none: those of all namespaces."""
    host: str = EVERY_ADDRESS
    port: int = 8080
    """Of /healthz, /readyz and /metrics."""
    room_patience: float = PATIENCE
    """Seconds without a place after which a new worker gets that of an old one."""


def main() -> int:
    """Entry point; returns the exit code."""
    configure_logging()
    try:
        return asyncio.run(_serve_pods(parse(sys.argv[1:])))
    except StartError as error:
        print(f"kvasir-operator: {error}", file=sys.stderr)  # noqa: T201 - the one line for people
        return _EXIT_UNUSABLE


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command line."""
    parser = argparse.ArgumentParser(
        prog="kvasir-operator", description="Keep the ModelServices of a Kubernetes cluster."
    )
    add = parser.add_argument
    add("--namespace", action="append", default=[], help="keep only this one; may be repeated")
    add("--worker-image", required=True, help="image of workers")
    add("--router-image", required=True, help="image of routers")
    add(
        "--metrics-from",
        action="append",
        default=[],
        metavar="NAMESPACE",
        help="let the pods of a namespace read the metrics of workers; may be repeated",
    )
    add("--host", default=EVERY_ADDRESS, help="address of health and metrics; *: all there are")
    add("--port", type=int, default=8080, help="port of health and metrics (%(default)s)")
    add("--lease-namespace", help="where the leader's Lease is; default: the operator's own")
    add("--lease-name", default="kvasir-operator", help="its name (%(default)s)")
    add("--lease-seconds", type=float, default=15.0, help="a leader silent for so long is replaced")
    add(
        "--room-patience",
        type=float,
        default=PATIENCE,
        metavar="SECONDS",
        help="how long new workers may find no place before old ones give them theirs "
        "(%(default)g); more than it takes to add a node, where nodes are added on demand",
    )
    found = parser.parse_args(arguments)
    own = _own_namespace()
    lease_namespace = found.lease_namespace or own
    if lease_namespace is None:
        raise StartError("--lease-namespace: needed outside a cluster; name a namespace")
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{uuid.uuid4()}"
    return Options(
        installation=Installation(
            found.worker_image, found.router_image, own, tuple(found.metrics_from)
        ),
        lease=Lease(lease_namespace, found.lease_name, identity, found.lease_seconds),
        namespaces=tuple(found.namespace),
        host=found.host,
        port=found.port,
        room_patience=found.room_patience,
    )


async def serve(options: Options, workers: Workers) -> int:
    """Keep ModelServices until a signal comes; returns the exit code.

    Raises:
        StartError: there is no way to an API server, or the port is taken.
    """
    sys.setrecursionlimit(RECURSION_LIMIT)
    work = asyncio.ensure_future(_work(options, workers))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Until it leads: from then on kopf, which ends by itself.
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        return 0
    except (LeaseLostError, WatchingEndedError) as error:
        _log.error("%s", error)
        return _EXIT_STOPPED
    return 0


async def _serve_pods(options: Options) -> int:
    workers = PodWorkers()
    try:
        return await serve(options, workers)
    finally:
        await workers.close()


async def _work(options: Options, workers: Workers) -> None:
    """Serve health and metrics, become the leader, and keep ModelServices until cancelled."""
    metrics = CollectorRegistry()
    leading = Gauge("kvasir_operator_leader", "1 if this operator acts", registry=metrics)
    async with Cluster(await _api(), metrics) as cluster:
        health = _Health(cluster, options)
        reconciler = Reconciler(
            cluster, workers, options.installation, metrics, patience=options.room_patience
        )

        async def keep() -> None:
            leading.set(1)
            health.watches = Watches(handlers.watched(options.namespaces))
            queue = Queue(reconciler)
            registry = handlers.registry(queue, health.watches)
            await watch(queue, registry, options.namespaces, options.lease.identity)

        async with _served(options, metrics, health):
            await lead(cluster, options.lease, keep)


class _Health:
    """Whether this operator does its work, or could take it over: what /readyz tells."""

    def __init__(self, cluster: Cluster, options: Options) -> None:
        self._cluster = cluster
        self._silence = options.lease.duration
        self.watches: Watches | None = None
        """Of the leader; None while another one leads."""

    @property
    def problem(self) -> str:
        """Empty if there is none."""
        # The lease is asked for several times within its duration, by leader and others alike.
        if self._cluster.silent_for > self._silence:
            return f"no answer of the API server for {self._silence:g} s"
        return "" if self.watches is None else self.watches.problem


@asynccontextmanager
async def _served(
    options: Options, metrics: CollectorRegistry, health: _Health
) -> AsyncIterator[None]:
    """Health and metrics over HTTP, also of an operator that waits to lead."""

    async def alive(_: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.StreamResponse:
        if problem := health.problem:
            return web.Response(text=f"{problem}\n", status=HTTPStatus.SERVICE_UNAVAILABLE)
        return web.Response(text="ok\n")

    async def expose(_: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=generate_latest(metrics), headers=headers)

    app = web.Application()
    app.add_routes(
        [web.get("/healthz", alive), web.get("/readyz", ready), web.get("/metrics", expose)]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        if options.host == EVERY_ADDRESS:
            await web.SockSite(runner, listen_everywhere(options.port)).start()
        else:
            await web.TCPSite(runner, options.host, options.port).start()
    except OSError as error:
        await runner.cleanup()
        raise StartError(f"--port {options.port}: {error.strerror}; choose another") from error
    try:
        yield
    finally:
        await runner.cleanup()


async def _api() -> kubernetes.ApiClient:
    """The API server of the pod's own cluster, or the one that $KUBECONFIG names."""
    configuration = kubernetes.Configuration()
    try:
        if _own_namespace() is not None:
            kubernetes_config.load_incluster_config(client_configuration=configuration)
        else:
            await kubernetes_config.load_kube_config(client_configuration=configuration)
    except kubernetes_config.ConfigException as error:
        raise StartError(f"no cluster: {error}; set KUBECONFIG") from error
    return kubernetes.ApiClient(configuration)


def _own_namespace() -> str | None:
    """The pod's namespace; None outside a cluster."""
    try:
        return (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
