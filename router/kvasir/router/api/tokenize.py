"""POST /tokenize and /detokenize: the same way from text to tokens that prompts take."""

from aiohttp import web

from kvasir.router.api import body as bodies
from kvasir.router.api.context import API, Api
from kvasir.router.api.errors import ApiError, invalid
from kvasir.router.api.responses import Text, Tokens
from kvasir.router.api.schemas import DetokenizeRequest, TokenizeRequest
from kvasir.router.api.served import Served
from kvasir.router.api.validate import check_ids


async def tokenize(request: web.Request) -> web.StreamResponse | ApiError:
    api = request.app[API]
    body = await bodies.read(request, TokenizeRequest, api.config.limits)
    if isinstance(body, ApiError):
        return body
    served = await api.served.resolve(body.model)
    if isinstance(served, ApiError):
        return served
    ids = await _ids(api, served, body)
    if isinstance(ids, ApiError):
        return ids
    tokens: Tokens = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": served.card.max_model_len,
    }
    return web.json_response(tokens)


async def _ids(api: Api, served: Served, body: TokenizeRequest) -> list[int] | ApiError:
    special = body.add_special_tokens is not False
    if body.prompt is not None and body.messages is None:
        return await api.served.text_ids(served, body.prompt, add_special_tokens=special)
    if body.messages is not None and body.prompt is None:
        return await api.served.chat_ids(served, body.messages, add_special_tokens=special)
    return invalid("prompt", "or messages is required, and not both")


async def detokenize(request: web.Request) -> web.StreamResponse | ApiError:
    api = request.app[API]
    body = await bodies.read(request, DetokenizeRequest, api.config.limits)
    if isinstance(body, ApiError):
        return body
    served = await api.served.resolve(body.model)
    if isinstance(served, ApiError):
        return served
    if error := check_ids("tokens", body.tokens, served.card):
        return error
    text: Text = {"prompt": served.tokenizer.decode(body.tokens)}
    return web.json_response(text)
