"""A small client for the Kubernetes API: JSON in, JSON out, over one kept-open connection.

For what kubectl is too slow for: playing a node, counting requests. Not thread-safe: one client
per thread.
"""

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

Object = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"

_REQUEST_TIMEOUT = 30.0


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {body.decode(errors='replace')}")
        self.status = status


class DisconnectedError(Exception):
    """The API server did not answer, or went away in the middle of an answer."""


@dataclass(frozen=True)
class Access:
    """Where an API server is, and who asks."""

    url: str
    authority: Path
    certificate: Path
    key: Path


class ApiClient:
    """Requests as one user. ``path`` is such as ``/api/v1/nodes``."""

    def __init__(self, access: Access, timeout: float = _REQUEST_TIMEOUT) -> None:
        context = ssl.create_default_context(cafile=str(access.authority))
        context.load_cert_chain(access.certificate, access.key)
        address = urlsplit(access.url)
        assert address.hostname is not None, f"no host in {access.url}"
        self._connection = http.client.HTTPSConnection(
            address.hostname, address.port, context=context, timeout=timeout
        )

    def get(self, path: str, **query: str) -> Object:
        return self._json("GET", path, query)

    def create(self, path: str, body: Object) -> Object:
        return self._json("POST", path, {}, body)

    def patch(self, path: str, body: Object, kind: str = MERGE_PATCH, **query: str) -> Object:
        return self._json("PATCH", path, query, body, kind)

    def delete(self, path: str, body: Object | None = None) -> Object:
        return self._json("DELETE", path, {}, body)

    def text(self, path: str) -> str:
        """A resource that is not JSON, such as ``/readyz`` or ``/metrics``."""
        return self._send("GET", path, {}).read().decode()

    def watch(self, path: str, **query: str) -> Iterator[Object]:
        """Events until the server ends the watch, which it does after ``timeoutSeconds``."""
        answer = self._send("GET", path, {"watch": "true", **query})
        try:
            while line := answer.readline():
                yield json.loads(line)
        except (OSError, http.client.HTTPException) as error:
            raise DisconnectedError(str(error)) from error
        finally:
            self.close()

    def interrupt(self) -> None:
        """End what another thread waits for here: it raises DisconnectedError."""
        # Below TLS, whose own way to shut down is not for two threads at a time.
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):  # closed already
                socket.socket.shutdown(self._connection.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._connection.close()

    def _json(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: Object | None = None,
        kind: str = "application/json",
    ) -> Object:
        answer = self._send(method, path, query, body, kind)
        try:
            found: Object = json.loads(answer.read())
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise DisconnectedError(str(error)) from error
        return found

    def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: Object | None = None,
        kind: str = "application/json",
    ) -> http.client.HTTPResponse:
        target = f"{path}?{urlencode(query)}" if query else path
        content = None if body is None else json.dumps(body)
        try:
            self._connection.request(method, target, content, {"Content-Type": kind})
            answer = self._connection.getresponse()
            if answer.status >= http.HTTPStatus.BAD_REQUEST:
                raise ApiError(answer.status, answer.read())
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise DisconnectedError(str(error)) from error
        return answer
