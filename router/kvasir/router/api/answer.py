"""From an HTTP request to its answer: what all endpoints that generate have in common.

    body -> served model -> planned prompts -> Plan -> respond

An endpoint adds its schema, how its prompts are planned, and the JSON of its answer.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

from kvasir.router.api import body as bodies
from kvasir.router.api.auth import cache_salt
from kvasir.router.api.beam import beam_of, check_beam
from kvasir.router.api.context import API, REQUEST_ID, TENANT, Api
from kvasir.router.api.errors import ApiError
from kvasir.router.api.plan import Common, Plan, PlannedPrompt
from kvasir.router.api.respond import AnswerFormat, respond
from kvasir.router.api.schemas import SamplingFields
from kvasir.router.api.served import Served
from kvasir.router.text.tokenizer import ModelTokenizer

Body = TypeVar("Body", bound=SamplingFields)


async def answer(
    request: web.Request,
    schema: type[Body],
    plan_prompts: Callable[[Api, Body, Served], Awaitable[list[PlannedPrompt] | ApiError]],
    form: Callable[[str, int, Body, ModelTokenizer], AnswerFormat],
) -> web.StreamResponse | ApiError:
    """One endpoint.

    Args:
        request: whose body is not yet read.
        schema: of the body.
        plan_prompts: checks the body beyond its schema; gives the prompts that it asks for.
        form: called with the request's id, the time of creation, the body and the tokenizer.
    """
    api = request.app[API]
    body = await bodies.read(request, schema, api.config.limits)
    if isinstance(body, ApiError):
        return body
    served = await api.served.resolve(body.model)
    if isinstance(served, ApiError):
        return served
    if error := check_beam(body):
        return error
    prompts = await plan_prompts(api, body, served)
    if isinstance(prompts, ApiError):
        return prompts
    common = Common(
        request_id=request[REQUEST_ID],
        n=body.n or 1,
        stops=tuple(body.stop or ()),
        cache_salt=cache_salt(request[TENANT], body.cache_salt),
        priority=body.priority or 0,
        beam=beam_of(body),
    )
    plan = Plan.of(common, prompts, served.tokenizer)
    answer_format = form(request[REQUEST_ID], int(api.clock()), body, served.tokenizer)
    return await respond(request, body, plan, answer_format)
