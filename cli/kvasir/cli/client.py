"""HTTP to a router: JSON and server-sent events, synchronous, errors worded for people.

Plain http.client: no proxy settings interfere on loopback, and Ctrl-C closes the connection,
which makes the router abort the request.
"""

import functools
import http.client
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from kvasir.cli.errors import InvalidInput
from kvasir.operator.local.address import NoRouterError, router_root, running_router, why_silent

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RouterChoice:
    """Which router to talk to, as the user said it. ``url`` None: the only running instance."""

    url: str | None
    api_key: str | None

    def client(self, *, timeout: float = 10.0) -> "RouterClient":
        """``timeout``: longest silence, in seconds."""
        try:
            url = running_router(os.environ) if self.url is None else self.url
        except NoRouterError as error:
            raise click.ClickException(str(error)) from None
        return RouterClient(url, api_key=self.api_key, timeout=timeout)


def router_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Adds --url and --api-key; the command gets them as one argument, ``router``."""

    @click.option(
        "--url", metavar="URL", help="Router, as http://HOST:PORT. Default: the one running here."
    )
    @click.option(
        "--api-key",
        metavar="KEY",
        envvar="KVASIR_API_KEY",
        help="For a router that asks for one. Better in $KVASIR_API_KEY, where nobody sees it.",
    )
    @functools.wraps(command)
    def with_router(*, url: str | None, api_key: str | None, **options: Any) -> Result:
        return command(router=RouterChoice(url, api_key), **options)

    return with_router


class RefusedError(click.ClickException):
    """The router refused the request. ``code``: that of the OpenAI error object, if any."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class RouterClient:
    """One router. Every method raises click.ClickException when it gives no good answer."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 10.0) -> None:
        """``timeout``: longest silence, in seconds."""
        try:
            self.url = router_root(url)
        except ValueError as error:
            raise InvalidInput(f"--url {error}") from None
        if api_key is not None and api_key.split() != [api_key]:
            raise InvalidInput("--api-key must be one word; no router takes an empty or broken one")
        self._headers = {"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        parts = urlsplit(self.url)
        self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path
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
                    message, code = _error(event)
                    raise RefusedError(f"{self.url}: {message}", code)
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
                self._headers | ({} if body is None else {"Content-Type": b"application/json"}),
            )
            with connection.getresponse() as response:
                if response.status != http.HTTPStatus.OK:
                    raise self._refusal(response)
                yield response
        except ConnectionRefusedError:
            raise click.ClickException(why_silent(self.url, os.environ)) from None
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

    def _refusal(self, response: http.client.HTTPResponse) -> RefusedError:
        try:
            message, code = _error(json.loads(response.read()))
        except ValueError:
            message, code = "no Kvasir router answers there; check --url", None
        return RefusedError(f"{self.url}: {message} (HTTP {response.status})", code)


def _error(body: object) -> tuple[str, str | None]:
    """Message and code of an OpenAI error object. Raises ValueError if it is none."""
    match body:
        case {"error": {"message": str(message), "code": str(code)}}:
            return message, code
        case {"error": {"message": str(message)}}:
            return message, None
    raise ValueError("not an error object")
