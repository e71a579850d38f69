"""What handlers share: the parts of one router's API, and what one request carries along."""

import uuid
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

    ``draining`` is set once, when the end begins: from then on answers close their connections.
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
"""Set for every request that reaches a handler; elsewhere use ``request_id``."""
TENANT = web.RequestKey("tenant", bytes)
PLAN = web.RequestKey("plan", Plan)


def request_id(request: web.BaseRequest) -> str:
    """The id that the router gives this request, made when it is first asked for."""
    if REQUEST_ID not in request:
        request[REQUEST_ID] = uuid.uuid4().hex
    return request[REQUEST_ID]
