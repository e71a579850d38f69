"""Around every request: its id, who asks, the shape of errors, the log line, the metrics."""

import asyncio
import logging
import re
import time

from aiohttp import web
from aiohttp.typedefs import Handler

from kvasir.proto.errors import Reason, Refusal
from kvasir.router.api.context import API, PLAN, REQUEST_ID, TENANT, request_id
from kvasir.router.api.errors import ApiError, http_error, internal

logger = logging.getLogger("kvasir.router.access")

_OPEN = frozenset({"/health", "/ready"})
"""Routes for everyone; all else, unknown paths included, needs a key if there are any."""
_QUIET = frozenset({"/health", "/ready", "/metrics", "/workers"})
_UNMATCHED = "unmatched"
_CLIENT_LEFT = 499
_LABEL = 64
_NOT_LABEL = re.compile(r"[^A-Za-z0-9._-]")


@web.middleware
async def frame(request: web.Request, handler: Handler) -> web.StreamResponse:
    api = request.app[API]
    request_id(request)
    route = _route(request)
    begin = time.monotonic()
    status = _CLIENT_LEFT
    api.metrics.in_flight.inc()
    try:
        response = await _answer(request, handler, route)
        status = response.status
        return response
    finally:
        seconds = time.monotonic() - begin
        api.metrics.in_flight.dec()
        api.metrics.request_done(route, status, seconds)
        _log(request, route, status, seconds)


async def _answer(request: web.Request, handler: Handler, route: str) -> web.StreamResponse:
    tenant = request.app[API].keys.tenant(request.headers.get("Authorization"))
    if tenant is None and route not in _OPEN:
        message = "send a valid API key in the header Authorization: Bearer KEY"
        return ApiError.of(Refusal(Reason.UNAUTHENTICATED, message)).response()
    request[TENANT] = tenant or b""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return http_error(404, "not_found", "there is no such path here").response()
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"this path takes {allowed}, not {request.method}"
        return http_error(405, "method_not_allowed", message).response({"Allow": allowed})
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        logger.exception("request failed request_id=%s", request[REQUEST_ID])
        return internal().response()


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """For streams too, whose head is sent long before their handler returns, and for what
    is answered before the middleware is reached."""
    response.headers["x-request-id"] = request_id(request)


async def close_if_draining(request: web.Request, response: web.StreamResponse) -> None:
    """Clients then send their next request over a new connection, to another router. One that
    is closed without a word loses what the client is just sending."""
    if request.app[API].draining:
        response.force_close()
        # aiohttp has decided upon this header before it asks here.
        response.headers["Connection"] = "close"


def _route(request: web.Request) -> str:
    """The route that will be run, which is what is guarded: no spelling of a path matters."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else _UNMATCHED


def _log(request: web.Request, route: str, status: int, seconds: float) -> None:
    level = logging.DEBUG if route in _QUIET else logging.INFO
    if not logger.isEnabledFor(level):
        return
    line = f"{request.method} {route} status={status} ms={seconds * 1000:.1f}"
    line += f" request_id={request[REQUEST_ID]}"
    if label := request.headers.get("x-request-id"):
        line += f" label={_NOT_LABEL.sub('_', label[:_LABEL])}"
    if plan := request.get(PLAN):
        usage = plan.usage()
        line += f" prompt_tokens={usage['prompt_tokens']}"
        line += f" cached_tokens={usage['prompt_tokens_details']['cached_tokens']}"
        line += f" completion_tokens={usage['completion_tokens']}"
    logger.log(level, line)
