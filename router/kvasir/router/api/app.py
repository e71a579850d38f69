"""Builds the router's HTTP application: routes to handlers, and their lifetime.

Adds no behavior of its own: what a route does is in its handler, what all have in common in
the middleware.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry

from kvasir.router.api import chat, completions, models, status, tokenize
from kvasir.router.api.auth import Keys
from kvasir.router.api.context import API, Api
from kvasir.router.api.errors import ApiError
from kvasir.router.api.metrics import HttpMetrics
from kvasir.router.api.middleware import add_request_id, close_if_draining, frame
from kvasir.router.api.served import BuildTokenizer, ServedModel
from kvasir.router.config import RouterConfig
from kvasir.router.contracts import Dispatcher
from kvasir.router.text.tokenizer import ModelTokenizer

ApiHandler = Callable[[web.Request], Awaitable[web.StreamResponse | ApiError]]


def build_app(
    config: RouterConfig,
    dispatcher: Dispatcher,
    registry: CollectorRegistry,
    *,
    clock: Callable[[], float] = time.time,
    build_tokenizer: BuildTokenizer = ModelTokenizer.from_files,
) -> web.Application:
    """The application; needs a running event loop."""
    app = web.Application(middlewares=[frame])
    app[API] = Api(
        config=config,
        dispatcher=dispatcher,
        served=ServedModel(config, dispatcher, build_tokenizer),
        keys=Keys(config.api_keys),
        metrics=HttpMetrics(registry),
        clock=clock,
        started=int(clock()),
    )
    app[status.REGISTRY] = registry
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(close_if_draining)
    app.cleanup_ctx.append(_served_model)
    app.add_routes(
        [
            web.post("/v1/chat/completions", _handler(chat.create)),
            web.post("/v1/completions", _handler(completions.create)),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{model:.+}", _handler(models.get_model)),
            web.post("/tokenize", _handler(tokenize.tokenize)),
            web.post("/detokenize", _handler(tokenize.detokenize)),
            web.get("/health", status.health),
            web.get("/ready", status.ready),
            web.get("/metrics", status.metrics),
            web.get("/workers", status.workers),
            web.get("/openapi.json", status.openapi),
        ]
    )
    return app


def _handler(handler: ApiHandler) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        result = await handler(request)
        return result.response() if isinstance(result, ApiError) else result

    return handle


async def _served_model(app: web.Application) -> AsyncIterator[None]:
    served = app[API].served
    preparing = asyncio.create_task(served.prepare())
    yield
    preparing.cancel()
    await asyncio.gather(preparing, return_exceptions=True)
    served.close()
