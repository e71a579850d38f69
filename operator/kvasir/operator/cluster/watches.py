"""How the watches reach the API server, and what is known of them: open, or not and why.

kopf keeps the watches and tells nobody how they fare. All its requests go through ``Watches``, an
aiohttp middleware, which notes what became of them. A watch counts as open from the answer to it
until a request for the same objects fails: kopf opens one that ends anew, and lists before that.
"""

import os
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path

import aiohttp
import kopf

from kvasir.proto.process import join_host_port

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""What the kubelet mounts into a pod: token, ca.crt and namespace."""

_NOT_YET = "not open yet"


class Watches:
    """State of the watches of the given paths, such as ``/api/v1/pods``."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._problems = dict.fromkeys(paths, _NOT_YET)

    @property
    def problem(self) -> str:
        """What is wrong with the watches, in one line; empty if all are open."""
        bad = sorted((path, why) for path, why in self._problems.items() if why)
        if not bad:
            return ""
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        return f"watch of {bad[0][0]}{more}: {bad[0][1]}"

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Pass the request on, and note what becomes of it."""
        path = request.url.path
        try:
            response = await handler(request)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            self._note(path, f"{type(error).__name__}: {error}")
            raise
        if response.status >= HTTPStatus.BAD_REQUEST:
            self._note(path, f"HTTP {response.status}")
        elif "watch" in request.url.query:
            self._note(path, "")
        return response

    def _note(self, path: str, problem: str) -> None:
        if path in self._problems:
            self._problems[path] = problem


def in_cluster(watches: Watches, account: Path = ACCOUNT) -> kopf.AiohttpSession | None:
    """As the pod's account; None outside a pod.

    The API server is named by its address, as the kubelet tells it: a name would need the
    cluster's DNS.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port or not (account / "token").exists():
        return None
    info = kopf.ConnectionInfo(
        server=f"https://{join_host_port(host, int(port))}", ca_path=account / "ca.crt"
    )
    return _session(info, _Token(account / "token"), watches)


def by_kubeconfig(watches: Watches, info: kopf.ConnectionInfo) -> kopf.AiohttpSession:
    """As the user of a kubeconfig, which kopf has read."""
    return _session(info, watches)


class _Token:
    """Adds the token to each request. The kubelet replaces the file long before it expires."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        request.headers["Authorization"] = f"Bearer {self._read()}"
        return await handler(request)

    def _read(self) -> str:
        return self._file.read_text(encoding="ascii").strip()


def _session(
    info: kopf.ConnectionInfo, *middlewares: aiohttp.ClientMiddlewareType
) -> kopf.AiohttpSession:
    connector = aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context())
    session = aiohttp.ClientSession(
        connector=connector,
        headers=info.as_http_headers(),
        middlewares=middlewares,
        proxy=info.proxy_url,
    )
    return kopf.AiohttpSession(server=info.server, aiohttp_session=session)
