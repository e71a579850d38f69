"""Logprobs in the two shapes of the OpenAI API.

A token may be a part of a character. Chat answers say so with ``bytes``; the older
completions have only strings, in which OpenAI writes such a token as ``bytes:\\xe2\\x98``.
"""

from collections.abc import Sequence

from kvasir.router.api.choice import ScoredToken
from kvasir.router.api.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)
from kvasir.router.text.tokenizer import ModelTokenizer

_LOWEST = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot say."""


def chat_logprobs(tokens: Sequence[ScoredToken], tokenizer: ModelTokenizer) -> ChatLogprobs:
    content: list[ChatTokenLogprob] = []
    for token in tokens:
        if token.logprobs is None:
            continue
        content.append(
            {
                **_chat_token(token.token_id, token.logprobs.logprob, tokenizer),
                "top_logprobs": [
                    _chat_token(token_id, logprob, tokenizer)
                    for token_id, logprob in token.logprobs.top
                ],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[ScoredToken], tokenizer: ModelTokenizer
) -> CompletionLogprobs:
    out: CompletionLogprobs = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token in tokens:
        name = _legacy_name(tokenizer.bytes_of(token.token_id))
        out["tokens"].append(name)
        out["text_offset"].append(token.offset)
        if token.logprobs is None:
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            continue
        drawn = max(token.logprobs.logprob, _LOWEST)
        top = {
            _legacy_name(tokenizer.bytes_of(token_id)): max(logprob, _LOWEST)
            for token_id, logprob in token.logprobs.top
        }
        out["token_logprobs"].append(drawn)
        out["top_logprobs"].append(top | {name: drawn})
    return out


def _chat_token(token_id: int, logprob: float, tokenizer: ModelTokenizer) -> TopLogprob:
    raw = tokenizer.bytes_of(token_id)
    return {
        "token": raw.decode("utf-8", "replace"),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(raw),
    }


def _legacy_name(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
