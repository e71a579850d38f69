"""GET /health, /ready, /metrics, /workers and /openapi.json: for those who run the router."""

from dataclasses import asdict

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvasir.router.api.context import API
from kvasir.router.api.openapi import document

REGISTRY = web.AppKey("registry", CollectorRegistry)


async def health(_: web.Request) -> web.StreamResponse:
    """Alive, also while it drains. Restarting it would not bring workers back."""
    return web.Response()


async def ready(request: web.Request) -> web.StreamResponse:
    """Whether a request sent now would be served."""
    api = request.app[API]
    return web.Response(status=200 if api.dispatcher.ready() and not api.draining else 503)


async def metrics(request: web.Request) -> web.StreamResponse:
    data = generate_latest(request.app[REGISTRY])
    return web.Response(body=data, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def workers(request: web.Request) -> web.StreamResponse:
    return web.json_response([asdict(worker) for worker in request.app[API].dispatcher.workers()])


async def openapi(_: web.Request) -> web.StreamResponse:
    return web.json_response(document())
