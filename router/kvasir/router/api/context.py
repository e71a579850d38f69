"""What handlers share: the parts of one router's API, and what one request carries along."""

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from kvasir.router.api.auth import Keys
from kvasir.router.api.metrics import HttpMetrics
from kvasir.router.api.plan import Plan
from kvasir.router.api.served import ServedModel
from kvasir.router.config import RouterConfig
from kvasir.router.contracts import Dispatcher


@dataclass(slots=True)
class Api:
    """``clock`` gives seconds since the Unix epoch, and ``started`` is one of them.

    ``draining`` is set once, at the end.
    """

    config: RouterConfig
    dispatcher: Dispatcher
    served: ServedModel
    keys: Keys
    metrics: HttpMetrics
    clock: Callable[[], float]
    started: int
    draining: bool = False


API = web.AppKey("api", Api)

REQUEST_ID = web.RequestKey("request_id", str)
TENANT = web.RequestKey("tenant", bytes)
PLAN = web.RequestKey("plan", Plan)
