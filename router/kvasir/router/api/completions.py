"""POST /v1/completions."""

from collections.abc import Sequence

from aiohttp import web

from kvasir.router.api.answer import answer
from kvasir.router.api.choice import Delta, Echo
from kvasir.router.api.context import Api
from kvasir.router.api.errors import ApiError
from kvasir.router.api.logprobs import completion_logprobs
from kvasir.router.api.plan import PlannedPrompt
from kvasir.router.api.responses import Completion, CompletionChoice, Usage
from kvasir.router.api.schemas import CompletionRequest
from kvasir.router.api.served import Served
from kvasir.router.api.validate import check_completion, check_window, completion_sampling
from kvasir.router.text.tokenizer import ModelTokenizer


async def create(request: web.Request) -> web.StreamResponse | ApiError:
    return await answer(request, CompletionRequest, _prompts, CompletionFormat)


async def _prompts(
    api: Api, body: CompletionRequest, served: Served
) -> list[PlannedPrompt] | ApiError:
    if error := check_completion(body, api.config.limits, served.card):
        return error
    prompts = []
    for prompt in body.prompt:
        planned = await _planned_prompt(api, body, prompt, served)
        if isinstance(planned, ApiError):
            return planned
        prompts.append(planned)
    return prompts


async def _planned_prompt(
    api: Api, body: CompletionRequest, prompt: str | list[int], served: Served
) -> PlannedPrompt | ApiError:
    ids = await api.served.text_ids(served, prompt) if isinstance(prompt, str) else prompt
    if isinstance(ids, ApiError):
        return ids
    if error := check_window("prompt", len(ids), served.card):
        return error
    sampling = completion_sampling(body, len(ids), served.card)
    if isinstance(sampling, ApiError):
        return sampling
    echo = None
    if body.echo:
        text = prompt if isinstance(prompt, str) else served.tokenizer.decode(prompt)
        echo = Echo(text, ids)
    return PlannedPrompt(tuple(ids), sampling, echo)


class CompletionFormat:
    """The JSON of one text completion."""

    def __init__(
        self, request_id: str, created: int, body: CompletionRequest, tokenizer: ModelTokenizer
    ) -> None:
        self._id = f"cmpl-{request_id}"
        self._created = created
        self._model = body.model
        self._scored = body.logprobs is not None
        self._tokenizer = tokenizer

    def chunks(self, delta: Delta) -> list[Completion]:
        if not (delta.text or delta.tokens or delta.finish_reason):
            return []
        return [self._completion([self._choice(delta)])]

    def usage_chunk(self, usage: Usage) -> Completion:
        return {**self._completion([]), "usage": usage}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> Completion:
        return {**self._completion([self._choice(c) for c in choices]), "usage": usage}

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _choice(self, delta: Delta) -> CompletionChoice:
        scores = completion_logprobs(delta.tokens, self._tokenizer) if self._scored else None
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": scores,
            "finish_reason": delta.finish_reason,
        }
