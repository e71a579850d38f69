"""Which router a command talks to, and what it means when nothing answers there.

For every command that takes ``--url``. Messages end with the fix.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

from kvasir.operator.local.state import running_instances, state_root

START = "start one with `kvasir up -f deploy/samples/01-minimal.yaml`, or give --url"


class NoRouterError(Exception):
    """No router was named, and it is not one alone that runs here."""


def router_root(url: str) -> str:
    """``url`` without a last slash and without ``/v1``, which OpenAI clients want in theirs.

    Raises ValueError if it is no HTTP address.
    """
    try:
        parts = urlsplit(url)
        # Looking at the port is what checks it.
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"{url!r} is no address; write for example http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def running_router(environment: Mapping[str, str]) -> str:
    """The URL of the only instance that this user runs here. Raises NoRouterError."""
    instances = running_instances(state_root(environment))
    if not instances:
        raise NoRouterError(f"nothing is running; {START}")
    if len(instances) > 1:
        running = ", ".join(f"{instance.name} on {instance.url}" for instance in instances)
        raise NoRouterError(f"several are running: {running}; choose one with --url")
    return instances[0].url


def why_silent(url: str, environment: Mapping[str, str]) -> str:
    """What to tell a user when a connection to ``url`` was refused."""
    if any(instance.url == url for instance in running_instances(state_root(environment))):
        return f"{url} is starting, stopping or restarting; try again in a moment"
    return f"nothing answers on {url}; {START}"
