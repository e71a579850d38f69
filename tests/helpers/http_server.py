"""The router's HTTP side on a free port of loopback, in front of a given dispatcher."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from helpers.bundled_tokenizer import build_once
from kvasir.router.api.app import build_app
from kvasir.router.api.server import Runner
from kvasir.router.config import RouterConfig
from kvasir.router.contracts import Dispatcher


@asynccontextmanager
async def serving(dispatcher: Dispatcher, **settings: Any) -> AsyncIterator[str]:
    """Gives the base URL."""
    config = RouterConfig(workers_file=Path("unused.json"), port=0, **settings)
    app = build_app(config, dispatcher, CollectorRegistry(), build_tokenizer=build_once)
    runner = Runner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
