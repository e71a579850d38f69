"""The HTTP server under the application: what happens before a handler and beside it.

aiohttp answers by itself where no handler is reached (bytes that are no HTTP, an unknown
Expect), and lets a client that reads nothing hold its connection for good. Here such answers
get the shape of the API's errors, and such connections an end. aiohttp has no setting for
either: ``Runner`` makes it use subclasses of its server and its ``RequestHandler``, which is
one connection. Metrics and the access log know only what reaches the middleware.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from kvasir.router.api.context import API, request_id
from kvasir.router.api.errors import http_error, internal, malformed
from kvasir.router.config import Limits

logger = logging.getLogger("kvasir.router.http")

_SEND_BUFFER = 128 * 1024
"""Bytes that the kernel is asked to hold for a client. By default it holds megabytes, and a
slow client could read for minutes before any of it shows here."""

_Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Runner(web.AppRunner):
    """A server for ``app``. A client that leaves cancels its handler, whatever it awaits."""

    def __init__(self, app: web.Application) -> None:
        super().__init__(app, shutdown_timeout=app[API].config.drain_deadline)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            _in_our_shape(made.request_handler), made.request_factory, self.app[API].config.limits
        )


class _Server(web.Server):
    """Makes the connections. ``make_request`` is the application's."""

    def __init__(self, handle: _Handle, make_request: Any, limits: Limits) -> None:
        super().__init__(handle, request_factory=make_request, handler_cancellation=True)
        self._limits = limits

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self._limits)


class _Connection(web.RequestHandler):
    """One connection of a client."""

    __slots__ = ("_stall", "_write_timeout")

    def __init__(self, server: web.Server, limits: Limits) -> None:
        options: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,
            "max_line_size": limits.max_header_bytes,
            "max_field_size": limits.max_header_bytes,
        }
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._write_timeout = limits.write_timeout
        self._stall: asyncio.TimerHandle | None = None
        """Runs while more waits for the client than the transport likes to hold."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer where no handler gives one: to bytes that are no HTTP, or to a defect."""
        given = request_id(request)
        if status < 500:
            # What follows the colon is the client's own bytes, a key perhaps.
            problem = (message or "").partition(":")[0].strip()
            logger.info("malformed request request_id=%s problem=%r", given, problem)
            error = malformed(problem)
        else:
            logger.error("request failed request_id=%s", given, exc_info=exc)
            error = internal()
        if request.writer.output_size > 0:
            raise ConnectionError("another answer has begun; this one cannot be sent")
        response = error.response({"x-request-id": given})
        response.force_close()
        return response

    # --- a client that takes nothing -------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """While writing is paused nothing is added, so less waiting means that some was taken."""
        if self.transport is not None:
            waiting = self.transport.get_write_buffer_size()
            loop = asyncio.get_running_loop()
            self._stall = loop.call_later(self._write_timeout, self._look, waiting)

    def _look(self, before: int) -> None:
        if self.transport is None:
            return
        if self.transport.get_write_buffer_size() < before:
            self._watch()
            return
        logger.warning(
            "client took nothing for %g s, closing its connection client=%s",
            self._write_timeout,
            self.peername,
        )
        self.transport.abort()

    def _stop_watching(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def _in_our_shape(handle: _Handle) -> _Handle:
    """Errors that aiohttp raises before the middleware is reached."""

    async def shaped(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handle(request)
        except web.HTTPException as error:
            code = error.reason.lower().replace(" ", "_")
            return http_error(error.status, code, error.text or error.reason).response()

    return shaped
