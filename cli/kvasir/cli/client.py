"""HTTP to a router: JSON and server-sent events, synchronous, errors worded for people.

Plain http.client: no proxy settings interfere on loopback, and Ctrl-C closes the connection,
which makes the router abort the request.
"""

import http.client
import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import click

from kvasir.cli.errors import InvalidInput
from kvasir.operator.local.state import running_instances, state_root

_START = "start one with `kvasir up -f deploy/samples/01-minimal.yaml`, or give --url"

url_option = click.option(
    "--url", metavar="URL", help="Router, as http://HOST:PORT. Default: the one running here."
)


def find_url(url: str | None) -> str:
    """The router to talk to: ``url`` if given, else that of the only running instance."""
    if url is not None:
        return url
    instances = running_instances(state_root(os.environ))
    if not instances:
        raise click.ClickException(f"nothing is running; {_START}")
    if len(instances) > 1:
        running = ", ".join(f"{instance.name} on {instance.url}" for instance in instances)
        raise click.ClickException(f"several are running: {running}; choose one with --url")
    return instances[0].url


class RouterClient:
    """One router. Every method raises click.ClickException when it gives no good answer."""

    def __init__(self, url: str, *, timeout: float = 10.0) -> None:
        """``timeout``: longest silence, in seconds."""
        parts = urlsplit(url)
        try:
            self._port = parts.port
        except ValueError:
            self._port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or self._port == -1:
            raise InvalidInput(
                f"--url {url!r} is no address; write for example http://127.0.0.1:8000"
            )
        self.url = url.rstrip("/")
        self._host, self._prefix = parts.hostname, parts.path.rstrip("/")
        self._secure = parts.scheme == "https"
        self._timeout = timeout

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        with self._exchange("GET", path) as response:
            return self._json(response)

    def is_ready(self) -> bool:
        """Whether the router could serve a request now."""
        try:
            with self._exchange("GET", "/ready"):
                return True
        except click.ClickException:
            return False

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Any, None, None]:
        """POST, then the JSON of each server-sent event up to ``[DONE]``.

        Closing the iterator early closes the connection.
        """
        with self._exchange("POST", path, body) as response:
            for line in response:
                data = line.decode(errors="replace").strip()
                if not data.startswith("data:"):
                    continue
                data = data.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise click.ClickException(f"{self.url}: {_message(event)}")
                yield event
        raise click.ClickException(f"{self.url} ended the answer before it was complete; try again")

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(
                method,
                self._prefix + path,
                None if body is None else json.dumps(body),
                {} if body is None else {"Content-Type": "application/json"},
            )
            with connection.getresponse() as response:
                if response.status != http.HTTPStatus.OK:
                    raise click.ClickException(self._refusal(response))
                yield response
        except ConnectionRefusedError:
            raise click.ClickException(f"nothing answers on {self.url}; {_START}") from None
        except TimeoutError:
            raise click.ClickException(
                f"{self.url} was silent for {self._timeout:g} s; see `kvasir status` and its logs"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            problem = str(error) or type(error).__name__
            raise click.ClickException(f"connection to {self.url} failed: {problem}") from error
        finally:
            connection.close()

    def _json(self, response: http.client.HTTPResponse) -> Any:
        try:
            return json.loads(response.read())
        except ValueError:
            raise click.ClickException(f"{self.url} is no Kvasir router; check --url") from None

    def _refusal(self, response: http.client.HTTPResponse) -> str:
        try:
            message = _message(json.loads(response.read()))
        except ValueError:
            message = "no Kvasir router answers there; check --url"
        return f"{self.url}: {message} (HTTP {response.status})"


def _message(body: object) -> str:
    """The message of an OpenAI error object. Raises ValueError if it is none."""
    match body:
        case {"error": {"message": str(message)}}:
            return message
    raise ValueError("not an error object")
