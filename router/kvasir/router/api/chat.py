"""POST /v1/chat/completions."""

from collections.abc import Sequence

from aiohttp import web

from kvasir.router.api.answer import answer
from kvasir.router.api.choice import Delta
from kvasir.router.api.context import Api
from kvasir.router.api.errors import ApiError
from kvasir.router.api.logprobs import chat_logprobs
from kvasir.router.api.plan import PlannedPrompt
from kvasir.router.api.responses import (
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Usage,
)
from kvasir.router.api.schemas import ChatRequest
from kvasir.router.api.served import Served
from kvasir.router.api.validate import chat_sampling, check_chat, check_window
from kvasir.router.text.tokenizer import ModelTokenizer


async def create(request: web.Request) -> web.StreamResponse | ApiError:
    return await answer(request, ChatRequest, _prompts, ChatFormat)


async def _prompts(api: Api, body: ChatRequest, served: Served) -> list[PlannedPrompt] | ApiError:
    if error := check_chat(body, api.config.limits, served.card):
        return error
    ids = await api.served.chat_ids(served, body.messages)
    if isinstance(ids, ApiError):
        return ids
    if error := check_window("messages", len(ids), served.card):
        return error
    sampling = chat_sampling(body, len(ids), served.card)
    if isinstance(sampling, ApiError):
        return sampling
    return [PlannedPrompt(tuple(ids), sampling)]


class ChatFormat:
    """The JSON of one chat completion."""

    def __init__(
        self, request_id: str, created: int, body: ChatRequest, tokenizer: ModelTokenizer
    ) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._created = created
        self._model = body.model
        self._scored = bool(body.logprobs)
        self._tokenizer = tokenizer
        self._begun: set[int] = set()

    def chunks(self, delta: Delta) -> list[ChatChunk]:
        """A choice begins with a chunk of its own that has the role alone, as OpenAI's do:
        the official client counts logprobs twice that come with a choice's first chunk."""
        chunks = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            begin: ChatChunkChoice = {
                "index": delta.index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            chunks.append(self._chunk(begin))
        if delta.text or delta.tokens or delta.finish_reason:
            choice: ChatChunkChoice = {
                "index": delta.index,
                "delta": {"content": delta.text} if delta.text else {},
                "logprobs": self._logprobs(delta) if delta.tokens else None,
                "finish_reason": delta.finish_reason,
            }
            chunks.append(self._chunk(choice))
        return chunks

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        return {**self._chunk(), "usage": usage}

    def whole(self, choices: Sequence[Delta], usage: Usage) -> ChatCompletion:
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._logprobs(choice),
                    "finish_reason": choice.finish_reason or "stop",
                }
                for choice in choices
            ],
            "usage": usage,
        }

    def _chunk(self, *choices: ChatChunkChoice) -> ChatChunk:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": list(choices),
        }

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return chat_logprobs(delta.tokens, self._tokenizer) if self._scored else None
