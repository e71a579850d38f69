"""Sends the answer to a plan: whole, or as server-sent events while it is generated.

The head of a stream is sent with its first event. So a refusal before the first token is an
ordinary HTTP error, and the head can name the workers. After that, a failure is an error
event, and the stream ends without [DONE].
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from aiohttp import web

from kvasir.router.api import sse
from kvasir.router.api.choice import Delta
from kvasir.router.api.context import API, PLAN, REQUEST_ID, Api
from kvasir.router.api.errors import ApiError, internal
from kvasir.router.api.plan import Plan
from kvasir.router.api.responses import Usage
from kvasir.router.api.running import Batch, running
from kvasir.router.api.schemas import SamplingFields
from kvasir.router.contracts import Refused

logger = logging.getLogger(__name__)


class AnswerFormat(Protocol):
    """The JSON of one endpoint. One instance serves one request."""

    def chunks(self, delta: Delta) -> Sequence[Mapping[str, object]]:
        """Chunks of a stream; none if there is nothing to tell."""
        ...

    def usage_chunk(self, usage: Usage) -> Mapping[str, object]: ...

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Mapping[str, object]:
        """The answer to a request without ``stream``; ``choices`` by index."""
        ...


async def respond(
    request: web.Request, body: SamplingFields, plan: Plan, form: AnswerFormat
) -> web.StreamResponse | ApiError:
    """Generate and send; the client's leaving cancels this and aborts the generations."""
    request[PLAN] = plan
    api = request.app[API]
    try:
        if not body.stream:
            return await _whole(api, plan, form)
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return await _Stream(request, plan, form, include_usage=usage).send()
    finally:
        api.metrics.tokens(plan.usage())


async def _whole(api: Api, plan: Plan, form: AnswerFormat) -> web.StreamResponse | ApiError:
    parts: list[list[Delta]] = [[] for _ in plan.choices]
    async with running(api.dispatcher, plan, api.metrics) as batches:
        async for batch in batches:
            if refused := _refused(batch):
                return ApiError.of(refused.refusal, refused.retry_after)
            for delta in _deltas(batch):
                parts[delta.index].append(delta)
    answer = form.whole([_joined(deltas) for deltas in parts], plan.usage())
    return web.json_response(answer, headers=plan.served_by())


class _Stream:
    """One streamed answer."""

    def __init__(
        self, request: web.Request, plan: Plan, form: AnswerFormat, *, include_usage: bool
    ) -> None:
        self._request = request
        self._plan = plan
        self._form = form
        self._include_usage = include_usage
        self._response: web.StreamResponse | None = None

    async def send(self) -> web.StreamResponse | ApiError:
        error = await self._events()
        if self._response is None:
            return error or internal()
        if error is not None:
            await self._response.write(sse.event(error.body()))
        else:
            await self._response.write(self._ending())
        await self._response.write_eof()
        return self._response

    async def _events(self) -> ApiError | None:
        """Everything but the ending; an error if the answer is not complete."""
        api = self._request.app[API]
        try:
            async with running(api.dispatcher, self._plan, api.metrics) as batches:
                async for batch in batches:
                    if refused := _refused(batch):
                        return ApiError.of(refused.refusal, refused.retry_after)
                    await self._write(b"".join(map(self._encoded, _deltas(batch))))
        except ConnectionError:
            raise
        except Exception:
            logger.exception("generation failed request_id=%s", self._request[REQUEST_ID])
            return internal()
        return None

    def _encoded(self, delta: Delta) -> bytes:
        chunks = self._form.chunks(delta)
        if self._include_usage:
            chunks = [{**chunk, "usage": None} for chunk in chunks]
        return b"".join(map(sse.event, chunks))

    async def _write(self, data: bytes) -> None:
        """Send, once the client keeps up; nothing piles up here for one that does not."""
        if self._response is None:
            headers = {
                "Content-Type": sse.CONTENT_TYPE,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **self._plan.served_by(),
            }
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
        if data:
            await self._response.write(data)
            await self._request.writer.drain()

    def _ending(self) -> bytes:
        if not self._include_usage:
            return sse.DONE
        return sse.event(self._form.usage_chunk(self._plan.usage())) + sse.DONE


def _refused(batch: Batch) -> Refused | None:
    return next((item for item in batch if isinstance(item, Refused)), None)


def _deltas(batch: Batch) -> list[Delta]:
    return [item for item in batch if isinstance(item, Delta)]


def _joined(deltas: Sequence[Delta]) -> Delta:
    """All of a choice as one delta."""
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
    )
