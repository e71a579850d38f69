"""A real HTTP server that answers as a router does, with answers that the test chooses."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOO_LONG = {"message": "shorten the messages", "code": "context_length_exceeded"}


@dataclass
class RouterStub:
    """``get``: path to body; ``completions``: one list of raw SSE lines for each request.

    ``window``: the most messages of one request; a longer conversation is refused.
    ``api_key``: if set, requests without it are refused.
    """

    get: dict[str, Any] = field(default_factory=dict)
    completions: list[list[str]] = field(default_factory=list)
    status: int = 200
    window: int | None = None
    api_key: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""


def chunk(content: str) -> str:
    """One server-sent event with a piece of an answer."""
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': content}}]})}"


@contextmanager
def running(stub: RouterStub) -> Iterator[RouterStub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self._let_in():
                return
            self._send(200 if self.path in stub.get else 404, json.dumps(stub.get.get(self.path)))

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            request = json.loads(self.rfile.read(length))
            if not self._let_in():
                return
            stub.requests.append(request)
            if stub.window is not None and len(stub.requests[-1]["messages"]) > stub.window:
                self._send(400, json.dumps({"error": TOO_LONG}))
                return
            lines = stub.completions.pop(0)
            self._send(stub.status, "".join(f"{line}\n\n" for line in lines))

        def _let_in(self) -> bool:
            known = not stub.api_key or self.headers["Authorization"] == f"Bearer {stub.api_key}"
            if not known:
                self._send(401, json.dumps({"error": {"message": "send a valid API key"}}))
            return known

        def _send(self, status: int, body: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as inherited
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
