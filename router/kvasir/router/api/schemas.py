"""The JSON that the API takes: field names, types and fixed ranges.

Strict: no string passes for a number, unknown fields are refused by name. Fields of the
OpenAI API that would change the answer but are not supported are refused unless they say
what is done anyway; fields that only advise are accepted. What depends on the model is
checked in validate.py.

A body of many megabytes must not hold up the event loop: validation ends at the first fault,
and collections are measured (by the ``Limits`` in the validation context) before anything
in them is looked at.
"""

import re
from collections.abc import Callable, Sized
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvasir.router.config import Limits

_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1
_INT32_MAX = 2**31 - 1
_TOKEN_ID = re.compile(r"-?\d{1,12}", re.ASCII)
_MOST_BIAS = 100
_SHOWN = 40

UNKNOWN_FIELD = "unknown_field"
"""Type of the validation error whose context has the unknown ``field``."""


def _neutral(*values: object) -> Callable[[object], object]:
    """For a field that is not supported: only null and ``values``, which change nothing."""

    def check(value: object) -> object:
        if value is not None and value not in values:
            raise PydanticCustomError("unsupported", "is not supported by this server")
        return value

    return check


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _join_text_parts(content: object) -> object:
    """Text parts, one a line, as chat templates take text and not parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    lines = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise PydanticCustomError(
                "content",
                'must have only parts like {"type": "text", "text": "..."}: '
                "this model takes text alone",
            )
        lines.append(part["text"])
    return "\n".join(lines)


def _prompts(prompt: object, info: ValidationInfo) -> list[str] | list[list[int]]:
    """Any of the four forms of a completion's prompt, as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        if not prompt:
            raise PydanticCustomError("prompt", "must not be empty")
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return [prompt]
        _at_most(_limits(info).max_prompts, "prompts", prompt)
        if kinds == {str}:
            return prompt
        if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in prompt):
            return prompt
    raise PydanticCustomError(
        "prompt",
        "must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
    )


def _message_list(messages: object, info: ValidationInfo) -> object:
    if isinstance(messages, list):
        _at_most(_limits(info).max_messages, "messages", messages)
    return messages


def _logit_bias(bias: object, info: ValidationInfo) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, dict):
        raise PydanticCustomError("logit_bias", "must be an object of token ids and numbers")
    _at_most(_limits(info).max_logit_bias, "entries", bias)
    return {_token_id(key): _bias(key, value) for key, value in bias.items()}


def _token_id(key: str) -> int:
    if _TOKEN_ID.fullmatch(key):
        return int(key)
    raise PydanticCustomError(
        "logit_bias", "must have token ids as keys, not {key}", {"key": repr(key[:_SHOWN])}
    )


def _bias(key: str, value: object) -> float:
    number = float("nan") if isinstance(value, bool) else value
    if isinstance(number, int | float) and -_MOST_BIAS <= number <= _MOST_BIAS:
        return float(number)
    raise PydanticCustomError(
        "logit_bias",
        "must have numbers from -100 to 100 as values; that of {key} is not one",
        {"key": key},
    )


def _at_most(limit: int, what: str, items: Sized) -> None:
    if len(items) > limit:
        raise PydanticCustomError(
            "too_many",
            "must have at most {limit} {what}, not {count}",
            {"limit": limit, "what": what, "count": len(items)},
        )


def _limits(info: ValidationInfo) -> Limits:
    if not isinstance(info.context, Limits):
        raise TypeError("requests are validated with the router's Limits as context")
    return info.context


class Strict(BaseModel):
    """Refuses unknown fields by its own check, which ends at the first of them."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},
    )

    @model_validator(mode="after")
    def _no_unknown_fields(self) -> Self:
        for name in self.__pydantic_extra__ or ():
            raise PydanticCustomError(
                UNKNOWN_FIELD, "is not a known field; remove it", {"field": name}
            )
        return self


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted; chunks are never padded."""


class SamplingFields(Strict):
    """What chat and text completions have in common. null means the default."""

    model: str
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX)] | None = None
    """0 and -1: off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: Annotated[
        dict[int, float] | None,
        PlainValidator(_logit_bias, json_schema_input_type=dict[str, float] | None),
    ] = None
    seed: Annotated[int, Field(ge=_INT64_MIN, le=_UINT64_MAX)] | None = None
    stop: Annotated[
        Annotated[list[str], Field(fail_fast=True)] | None,
        BeforeValidator(_one_or_many, json_schema_input_type=str | list[str] | None),
    ] = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    use_beam_search: bool | None = None
    """The ``n`` best answers of a search with ``n`` beams, the best first."""
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    """Of a beam search: above 0, longer answers score better. Default 1."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with those of the same salt."""
    priority: Annotated[int, Field(ge=-_INT32_MAX - 1, le=_INT32_MAX)] | None = None
    """Lower runs first."""

    user: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    service_tier: str | None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message. Fields with only null allowed are those that clients echo from answers."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str,
        BeforeValidator(_join_text_parts, json_schema_input_type=str | list[TextPart]),
    ]
    name: str | None = None
    refusal: Annotated[Any, AfterValidator(_neutral())] = None
    annotations: Annotated[Any, AfterValidator(_neutral([]))] = None
    audio: Annotated[Any, AfterValidator(_neutral())] = None
    function_call: Annotated[Any, AfterValidator(_neutral())] = None
    tool_calls: Annotated[Any, AfterValidator(_neutral([]))] = None


Messages = Annotated[
    list[ChatMessage], Field(min_length=1, fail_fast=True), BeforeValidator(_message_list)
]


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    store: bool | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None

    tools: Annotated[Any, AfterValidator(_neutral([]))] = None
    tool_choice: Annotated[Any, AfterValidator(_neutral("none", "auto"))] = None
    functions: Annotated[Any, AfterValidator(_neutral([]))] = None
    function_call: Annotated[Any, AfterValidator(_neutral("none", "auto"))] = None
    response_format: Annotated[Any, AfterValidator(_neutral({"type": "text"}))] = None
    modalities: Annotated[Any, AfterValidator(_neutral(["text"]))] = None
    audio: Annotated[Any, AfterValidator(_neutral())] = None
    moderation: Annotated[Any, AfterValidator(_neutral())] = None
    reasoning_effort: Annotated[Any, AfterValidator(_neutral("none"))] = None
    verbosity: Annotated[Any, AfterValidator(_neutral("medium"))] = None
    web_search_options: Annotated[Any, AfterValidator(_neutral())] = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Annotated[
        list[str] | list[list[int]],
        PlainValidator(
            _prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
        ),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None

    best_of: Annotated[int, Field(ge=1)] | None = None
    """Accepted where it is ``n``, so that nothing is left out of the answer."""
    suffix: Annotated[Any, AfterValidator(_neutral(""))] = None


class TokenizeRequest(Strict):
    """POST /tokenize: of ``prompt`` and ``messages``, exactly one."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Default true."""


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
