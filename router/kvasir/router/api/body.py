"""From an HTTP request's body to a validated schema object.

Refuses by media type and announced length before reading anything, reads no more and no
longer than the limits, parses nothing that is too intricate for the event loop, and turns the
validator's findings into one sentence that names the field.
"""

import asyncio
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from kvasir.router.api.errors import ApiError, http_error, invalid, too_large
from kvasir.router.api.schemas import UNKNOWN_FIELD
from kvasir.router.config import Limits

Schema = TypeVar("Schema", bound=BaseModel)
_MOST_FIELDS = 32 * 1024
"""Objects, arrays and fields of one body, together. A megabyte of them takes the parser a second,
and it holds the event loop; a request of 1024 messages has a tenth of them."""
_MOST_ITEMS = 512 * 1024
"""Commas of one body, which are cheaper: a prompt may be a list of token ids."""
_SHOWN_INPUT = 40
_OWN_WORDS = frozenset({"content", "prompt", "logit_bias"})
"""Errors of schemas.py that say all there is to say."""


async def read(request: web.Request, schema: type[Schema], limits: Limits) -> Schema | ApiError:
    """The body as ``schema``."""
    limit = limits.max_body_bytes
    if request.content_type != "application/json":
        return http_error(
            415,
            "unsupported_media_type",
            "send JSON with the header Content-Type: application/json",
        )
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        return http_error(415, "unsupported_media_type", "send the body without Content-Encoding")
    if (request.content_length or 0) > limit:
        return too_large(limit)
    try:
        async with asyncio.timeout(limits.body_timeout):
            body = await _bytes(request, limit)
    except TimeoutError:
        message = f"the request body was not complete after {limits.body_timeout:g} s"
        return http_error(408, "request_timeout", message)
    return too_large(limit) if body is None else parse(body, schema, limits)


async def _bytes(request: web.Request, limit: int) -> bytes | None:
    """The body; None if it is longer than ``limit`` bytes."""
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > limit:
            return None
    return bytes(body)


def parse(body: bytes, schema: type[Schema], limits: Limits) -> Schema | ApiError:
    if _is_intricate(body):
        return invalid(
            None,
            f"the body has more than {_MOST_FIELDS} objects, arrays and fields, or more than "
            f"{_MOST_ITEMS} items; send fewer, or long texts as strings",
        )
    try:
        return schema.model_validate_json(body, context=limits)
    except ValidationError as error:
        return _first_problem(error)


def _is_intricate(body: bytes) -> bool:
    """Whether parsing would take long, found out by counting alone; what strings say is no part."""
    if _within(body):
        return False
    # Without escapes, each quote begins or ends a string.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return plain.count(b'"') > 2 * _MOST_ITEMS or not _within(b"".join(plain.split(b'"')[::2]))


def _within(body: bytes) -> bool:
    fields = body.count(b"{") + body.count(b"[") + body.count(b":")
    return fields <= _MOST_FIELDS and body.count(b",") <= _MOST_ITEMS


def _first_problem(error: ValidationError) -> ApiError:
    """The validator's first finding, in the words of the API."""
    found = error.errors(include_url=False, include_input=False)[0]
    kind, location, reason = found["type"], found["loc"], found["msg"]
    if kind == "json_invalid":
        problem = reason.removeprefix("Invalid JSON: ")
        return invalid(None, f"the body is not valid JSON: {problem}")
    if kind == "model_type" and not location:
        return invalid(None, "the body must be a JSON object")
    problem = reason.replace("Input should be", "must be").replace("should have", "must have")
    if kind == "missing":
        problem = "is required"
    elif kind == "too_short":
        problem = f"must have at least {found['ctx']['min_length']} item(s)"
    elif kind == UNKNOWN_FIELD:
        location = (*location, found["ctx"]["field"][:_SHOWN_INPUT])
    elif problem.startswith("must be") and kind not in _OWN_WORDS:
        # The input is asked for only here: for other findings it can be the whole body.
        problem += f", not {_shown(error.errors(include_url=False)[0]['input'])}"
    return invalid(_path(location), problem)


def _path(location: tuple[int | str, ...]) -> str:
    """``messages[0].content`` of ("messages", 0, "content")."""
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path


def _shown(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float() | str():
            text = repr(value)
            return text if len(text) <= _SHOWN_INPUT else f"{text[:_SHOWN_INPUT]}..."
        case list():
            return "a list"
    return "an object"
