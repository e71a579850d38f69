"""The HTTP server under the application: what happens before a handler and beside it.

aiohttp answers by itself where no handler is reached (bytes that are no HTTP, an unknown
Expect). It lets a client that reads nothing, or never completes a request's head, hold its
connection for good, and drops the answer to one that closes its side when it has sent all of its
request (https://github.com/aio-libs/aiohttp/issues/3659). Here such answers get the shape of the
API's errors, and such connections an end, or their answer. aiohttp has no setting for any of it:
``Runner`` makes it use subclasses of its server and its ``RequestHandler``, which is one
connection. Metrics and the access log know only what reaches the middleware.

When it stops, aiohttp discards what clients that it never told to leave send on connections that
they kept; here they are told first.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

from aiohttp import HttpVersion11, StreamReader, web

from kvasir.router.api.context import API, request_id
from kvasir.router.api.errors import http_error, internal, malformed
from kvasir.router.config import Limits

logger = logging.getLogger("kvasir.router.http")

_SEND_BUFFER = 128 * 1024
"""Bytes that the kernel is asked to hold for a client. By default it holds megabytes, and a
slow client could read for minutes before any of it shows here."""

_PROBE_SECONDS = 1.0
"""Between two looks whether a client that has closed its side still listens."""
_PROBE_BEFORE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""What means nothing before an answer: a client discards it if it waits for no such thing (RFC
9110, 15.2.1)."""
_PROBE_WITHIN = b"3\r\n:\n\n\r\n"
"""What means nothing in a stream of events, the only answers that are chunked: a comment."""

_DRAIN_POLL_SECONDS = 0.05
"""Between two looks which connections are idle or gone."""
_CUT_SECONDS = 1.0
"""How long aiohttp waits for a handler, before and after it cancels it, when the server ends."""

_Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Runner(web.AppRunner):
    """A server for ``app``. A client that leaves cancels its handler, whatever it awaits."""

    def __init__(self, app: web.Application) -> None:
        super().__init__(app, shutdown_timeout=_CUT_SECONDS)

    async def drain(self) -> None:
        """Serve on until nobody is sent here any more, then finish what is open.

        For ``drain_linger`` all goes on as before, but each answer tells the client to close its
        connection. Then the port closes, and for at most ``drain_deadline`` open requests go on.
        """
        api = self.app[API]
        api.draining = True
        await asyncio.sleep(api.config.drain_linger)
        for site in self.sites:
            await site.stop()
        server = cast("_Server", self.server)
        with suppress(TimeoutError):
            async with asyncio.timeout(api.config.drain_deadline):
                await server.empty(api.config.drain_linger)

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

    async def empty(self, patience: float) -> None:
        """Until there is no connection, closing those that were idle for ``patience`` seconds.

        One whose last answer did not yet tell the client to close is not idle for long when that
        answer ends: the client's next request may be under way.
        """
        while True:
            # First, since connections that are just being accepted are not seen yet.
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
            connections = cast("list[_Connection]", self.connections)
            if not connections:
                return
            for connection in connections:
                connection.close_if_idle(patience)


class _Connection(web.RequestHandler):
    """One connection of a client."""

    __slots__ = (
        "_body",
        "_head",
        "_head_timeout",
        "_last_use",
        "_probing",
        "_stall",
        "_write_timeout",
    )

    def __init__(self, server: web.Server, limits: Limits) -> None:
        options: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,
            "max_line_size": limits.max_header_bytes,
            "max_field_size": limits.max_header_bytes,
        }
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._head_timeout = limits.head_timeout
        self._head: asyncio.TimerHandle | None = None
        """Runs while the head of a request is due."""
        self._body: StreamReader | None = None
        """Of the last request whose head has come."""
        self._probing: asyncio.TimerHandle | None = None
        """Runs once the client has closed its side."""
        self._last_use = 0.0
        """When the client last sent something, or its answer was complete. Of the loop's clock."""
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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._last_use = asyncio.get_running_loop().time()
        self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in (self._head, self._probing):
            if timer is not None:
                timer.cancel()
        self._stop_watching()
        super().connection_lost(exc)

    @property
    def _unanswered(self) -> int:
        """Requests whose heads have come; one is being answered while none is waited for."""
        return len(self._messages) + (self._waiter is None)

    # --- a client that does not complete a head --------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._last_use = asyncio.get_running_loop().time()
        before = self._request_count
        super().data_received(data)
        if self._request_count > before:
            self._body = self._messages[-1][1]
            if self._head is not None:
                self._head.cancel()
                self._head = None
        elif self._head is None and not self._unanswered:
            self._await_head()

    def _await_head(self) -> None:
        loop = asyncio.get_running_loop()
        self._head = loop.call_later(self._head_timeout, self._give_up_head)

    def _give_up_head(self) -> None:
        self._head = None
        if not self._unanswered:
            logger.info(
                "no request's head in %g s, closing the connection client=%s",
                self._head_timeout,
                self.peername,
            )
            self.force_close()

    # --- a client that is to leave ---------------------------------------------------------

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        finished = await super().finish_response(request, resp, start_time)
        self._last_use = asyncio.get_running_loop().time()
        return finished

    def close_if_idle(self, seconds: float) -> None:
        """If no request is being answered and there was no use of it for so long."""
        unused = asyncio.get_running_loop().time() - self._last_use
        if not self._unanswered and unused >= seconds:
            self.force_close()

    # --- a client that closes its side and waits for the answer -----------------------------

    def eof_received(self) -> bool:  # type: ignore[override] # asyncio asks: keep the other side?
        complete = self._body is not None and self._body.is_eof()
        if self._probing is None and complete and self._unanswered:
            if self._unanswered == 1:
                self.close()  # after the answer
            self._probe()
        return self._probing is not None

    def _probe(self) -> None:
        """A client that has left answers whatever is sent to it with a reset, which is known the
        next time; one that has only closed its side does not."""
        if self.transport is None or self.transport.is_closing():
            return
        if not self._unanswered:
            self.force_close()
            return
        request = self._current_request
        if request is not None and not self.transport.get_write_buffer_size():
            if request.writer.output_size == 0 and request.version >= HttpVersion11:
                self.transport.write(_PROBE_BEFORE)
            elif request.writer.output_size and getattr(request.writer, "chunked", False):
                self.transport.write(_PROBE_WITHIN)
        self._probing = asyncio.get_running_loop().call_later(_PROBE_SECONDS, self._probe)

    # --- a client that takes nothing -------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

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
