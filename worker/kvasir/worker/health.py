"""The worker's small HTTP server: /health, /ready and /metrics.

It runs in threads of its own, so that it answers even while the event loop or the engine does
not; that is what /health is for. No request reaches the engine from here.
"""

import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_SOCKET_TIMEOUT = 10.0
LOOP_PATIENCE = 30.0
STEP_PATIENCE = 300.0
"""Far beyond any honest step: 2048 tokens of a model of 7 billion parameters take a minute on a
few cores, and a restart in the middle would only begin the same step again."""


class Health:
    """Whether the process lives and may be sent requests. Any thread.

    ``beat`` is called by the event loop about once a second; a loop that has not beaten
    for ``LOOP_PATIENCE`` seconds is taken for hung, and so is an engine that has been at one
    step for ``STEP_PATIENCE``.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_beat = clock()
        self.ready = False
        self.step_seconds: Callable[[], float] = lambda: 0.0
        """How long the engine has been at its step; 0 while there is none, as while loading."""

    def beat(self) -> None:
        self._last_beat = self._clock()

    @property
    def alive(self) -> bool:
        hung = self._clock() - self._last_beat > LOOP_PATIENCE
        return not hung and self.step_seconds() <= STEP_PATIENCE


class HealthServer:
    """Serves ``health`` at once, and metrics from ``publish`` on."""

    def __init__(self, host: str, port: int, health: Health) -> None:
        """Bind and start answering. Raises OSError if the port cannot be had."""
        self.health = health
        self._registry = CollectorRegistry()
        self._server = _Server((host, port), self)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="kvasir-http", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def publish(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body for a GET."""
        match path.partition("?")[0]:
            case "/health":
                return _status(self.health.alive)
            case "/ready":
                return _status(self.health.ready and self.health.alive)
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry)
            case _:
                return HTTPStatus.NOT_FOUND, "text/plain", b""

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _status(good: bool) -> tuple[HTTPStatus, str, bytes]:
    return (HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE), "text/plain", b""


class _Server(ThreadingHTTPServer):
    """Daemon threads: a scraper that keeps its connection open does not keep the process."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], owner: HealthServer) -> None:
        self.owner = owner
        host, port = address
        # IPv4 or IPv6: what the host resolves to first.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, where = found[0]
        super().__init__((str(where[0]), int(where[1])), _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = _SOCKET_TIMEOUT
    server: _Server

    def do_GET(self) -> None:  # the name that http.server calls
        status, content_type, body = self.server.owner.answer(self.path)
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as in http.server
        """Probes come every few seconds; they are no news."""
