"""Requests as the API takes them: schemas, limits, sampling, seeds, keys."""

import json
from collections import Counter
from typing import Any

import pytest
from pydantic import BaseModel

from helpers.fake_dispatcher import CARD
from kvasir.proto.sampling import SamplingParams
from kvasir.router.api.auth import ANYONE, Keys, cache_salt
from kvasir.router.api.body import parse
from kvasir.router.api.errors import ApiError
from kvasir.router.api.openapi import document
from kvasir.router.api.schemas import ChatRequest, CompletionRequest
from kvasir.router.api.validate import (
    chat_sampling,
    check_chat,
    check_completion,
    child_seed,
    completion_sampling,
)
from kvasir.router.config import Limits

CHAT: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": "smollm2", "prompt": "Hi"}


def _chat(**fields: Any) -> ChatRequest:
    body = parse(json.dumps(CHAT | fields).encode(), ChatRequest, Limits())
    assert isinstance(body, ChatRequest), body
    return body


def _text(**fields: Any) -> CompletionRequest:
    body = parse(json.dumps(TEXT | fields).encode(), CompletionRequest, Limits())
    assert isinstance(body, CompletionRequest), body
    return body


def _refused(schema: type[BaseModel], fields: dict[str, Any]) -> ApiError:
    base = CHAT if schema is ChatRequest else TEXT
    error = parse(json.dumps(base | fields).encode(), schema, Limits())
    assert isinstance(error, ApiError)
    assert error.status == 400
    return error


@pytest.mark.parametrize(
    ("fields", "param", "phrase"),
    [
        ({"temperature": 2.1}, "temperature", "less than or equal to 2, not 2.1"),
        ({"temperature": "1"}, "temperature", "not '1'"),
        ({"temperature": float("inf")}, "temperature", "finite"),
        ({"n": 1.5}, "n", "integer"),
        ({"n": True}, "n", "not true"),
        ({"stream": 1}, "stream", "boolean"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": 2**64}, "seed", "less than or equal"),
        ({"presence_penalty": -3}, "presence_penalty", "-2"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "that of 5 is not one"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias", "that of 5"),
        ({"logit_bias": {"5": "1"}}, "logit_bias", "that of 5"),
        ({"logit_bias": {"5": True}}, "logit_bias", "that of 5"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "not 'x'"),
        ({"logit_bias": {"{0}": 1}}, "logit_bias", "not '{0}'"),
        ({"logit_bias": [1]}, "logit_bias", "must be an object"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "at most 300"),
        ({"messages": CHAT["messages"] * 1025}, "messages", "at most 1024"),
        ({"stop": ["a", 1]}, "stop[1]", "string"),
        ({"messages": []}, "messages", "messages must have at least 1 item(s)"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'user'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "text parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            'parts like {"type": "text", "text": "..."}: this',
        ),
        ({"surprise": 1}, "surprise", "not a known field"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "not a known field"),
        ({"model": None}, "model", "not null"),
    ],
)
def test_a_bad_chat_field_is_named(fields: dict[str, Any], param: str, phrase: str) -> None:
    error = _refused(ChatRequest, fields)
    assert error.param == param
    assert phrase in error.message


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        ["a"] * 65,
        [[1]] * 65,
        [1, "a"],
        ["a", 1],
        [[1], "a"],
        [True],
        [[1.0]],
        5,
        None,
        {"a": 1},
        [1, None],
    ],
)
def test_a_prompt_of_another_form_is_refused(prompt: object) -> None:
    assert _refused(CompletionRequest, {"prompt": prompt}).param == "prompt"


def test_the_four_forms_of_a_prompt() -> None:
    assert _text(prompt="a").prompt == ["a"]
    assert _text(prompt=["a", "b"]).prompt == ["a", "b"]
    assert _text(prompt=[1, 2]).prompt == [[1, 2]]
    assert _text(prompt=[[1], [2]]).prompt == [[1], [2]]


def test_harmless_fields_are_accepted() -> None:
    _chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        prediction={"type": "content", "content": "x"},
    )
    _text(best_of=1, suffix="", user="u")


def test_null_means_the_default() -> None:
    nulls = dict.fromkeys(set(ChatRequest.model_fields) - set(CHAT))
    sampling = chat_sampling(_chat(**nulls), 10, CARD)
    plain = chat_sampling(_chat(), 10, CARD)
    assert isinstance(sampling, SamplingParams)
    assert isinstance(plain, SamplingParams)
    assert {**_fields(sampling), "seed": 0} == {**_fields(plain), "seed": 0}


def _fields(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in SamplingParams.__dataclass_fields__}


def test_text_parts_become_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = _chat(messages=[{"role": "user", "content": parts}])
    assert body.messages[0].content == "a\nb"


def test_an_answer_s_message_can_be_sent_back() -> None:
    echoed: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": None,
    }
    echoed |= {"annotations": [], "audio": None, "function_call": None}
    assert len(_chat(messages=[{"role": "user", "content": "Hi"}, echoed]).messages) == 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"model":' * 10_000,
        b'{"seed": ' + b"9" * 10_000 + b"}",
        b"\xef\xbb\xbf{}",
        json.dumps({f"f{i}": 1 for i in range(50_000)}).encode(),
    ],
)
def test_a_bad_body_is_one_clear_refusal(body: bytes) -> None:
    error = parse(body, ChatRequest, Limits())
    assert isinstance(error, ApiError)
    assert error.status == 400
    assert 0 < len(error.message) < 300


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 17}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ],
)
def test_limits_of_chat(fields: dict[str, Any], param: str) -> None:
    error = check_chat(_chat(**fields), Limits(), CARD)
    assert error is not None
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [49152]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_limits_of_completions(fields: dict[str, Any], param: str) -> None:
    error = check_completion(_text(**fields), Limits(), CARD)
    assert error is not None
    assert (error.status, error.param) == (400, param)


def test_what_is_at_the_limits_passes() -> None:
    limits = Limits()
    body = _chat(
        n=16, stop=["x" * 256] * 16, logit_bias={"49151": 100, "0": -100}, stop_token_ids=[49151]
    )
    assert check_chat(body, limits, CARD) is None
    assert check_completion(_text(prompt=[[0, 49151]], logprobs=20), limits, CARD) is None


@pytest.mark.parametrize(
    ("fields", "prompt_tokens", "expected"),
    [({}, 48, 2000), ({"max_tokens": 2000}, 48, 2000), ({"max_completion_tokens": 7}, 48, 7)],
)
def test_max_tokens_of_chat(fields: dict[str, Any], prompt_tokens: int, expected: int) -> None:
    sampling = chat_sampling(_chat(**fields), prompt_tokens, CARD)
    assert isinstance(sampling, SamplingParams)
    assert sampling.max_tokens == expected


def test_max_tokens_of_completions() -> None:
    for prompt_tokens, expected in ((10, 16), (2040, 8)):
        sampling = completion_sampling(_text(), prompt_tokens, CARD)
        assert isinstance(sampling, SamplingParams)
        assert sampling.max_tokens == expected


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_than_the_window_is_refused_with_the_numbers(name: str) -> None:
    error = chat_sampling(_chat(**{name: 2001}), 48, CARD)
    assert isinstance(error, ApiError)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", name)
    for number in ("2001", "48", "2048", "2000"):
        assert number in error.message


def test_logprobs_of_both_endpoints() -> None:
    def wanted(sampling: SamplingParams | ApiError) -> tuple[int | None, int | None]:
        assert isinstance(sampling, SamplingParams)
        return sampling.logprobs, sampling.prompt_logprobs

    assert wanted(chat_sampling(_chat(), 1, CARD)) == (None, None)
    assert wanted(chat_sampling(_chat(logprobs=True), 1, CARD)) == (0, None)
    assert wanted(chat_sampling(_chat(logprobs=True, top_logprobs=4), 1, CARD)) == (4, None)
    assert wanted(completion_sampling(_text(logprobs=0), 1, CARD)) == (0, None)
    assert wanted(completion_sampling(_text(logprobs=2, echo=True), 1, CARD)) == (2, 2)
    assert wanted(completion_sampling(_text(echo=True), 1, CARD)) == (None, None)


def test_seeds_of_children() -> None:
    for seed in (0, 1, 7, 2**64 - 1):
        children = [child_seed(seed, i) for i in range(100)]
        assert children[0] == seed
        assert max(Counter(children).values()) == 1
        assert all(0 <= child < 2**64 for child in children)
    # Fixed for good: a client's seed must give the same answer after an upgrade.
    assert child_seed(7, 1) == 0x4C98328926F4E88D


def test_a_negative_seed_and_none() -> None:
    negative = chat_sampling(_chat(seed=-1), 1, CARD)
    assert isinstance(negative, SamplingParams)
    assert negative.seed == 2**64 - 1
    drawn = [chat_sampling(_chat(), 1, CARD) for _ in range(5)]
    assert len({s.seed for s in drawn if isinstance(s, SamplingParams)}) == 5


def test_keys() -> None:
    keys = Keys(["alpha", "beta"])
    alpha, beta = keys.tenant("Bearer alpha"), keys.tenant("bearer beta")
    assert alpha
    assert beta
    assert alpha != beta
    for wrong in (None, "", "alpha", "Basic alpha", "Bearer", "Bearer ", "Bearer alph", "Bearer é"):
        assert keys.tenant(wrong) is None
    assert Keys([]).tenant(None) == ANYONE


def test_tenants_never_share_a_salt() -> None:
    keys = Keys(["alpha", "beta"])
    tenants = [keys.tenant("Bearer alpha"), keys.tenant("Bearer beta")]
    salts = {cache_salt(tenant, salt) for tenant in tenants if tenant for salt in (None, "a", "b")}
    assert len(salts) == 6
    assert cache_salt(ANYONE, None) == b""
    assert cache_salt(ANYONE, "a") == b"a"


def test_openapi_names_every_field() -> None:
    api = document()
    chat = api["components"]["schemas"]["ChatRequest"]["properties"]
    assert set(chat) == set(ChatRequest.model_fields)
    references: set[str] = set()

    def collect(node: object) -> None:
        if isinstance(node, dict):
            references.update(v for k, v in node.items() if k == "$ref")
            for value in node.values():
                collect(value)
        elif isinstance(node, list):
            for value in node:
                collect(value)

    collect(api)
    defined = {f"#/components/schemas/{name}" for name in api["components"]["schemas"]}
    assert references <= defined


@pytest.mark.parametrize(
    "flood",
    [
        '"messages": [' + "{}," * 50_000 + "{}]",
        '"x": ' + "[" * 40_000 + "]" * 40_000,
        ",".join(f'"{i}": 1' for i in range(40_000)),
        '"stop": [' + '"a",' * 600_000 + '"a"]',
        '"x": "\\\\", "y": [' + "[]," * 50_000 + "[]]",
    ],
    ids=["objects", "arrays", "fields", "items", "after a string that ends in a backslash"],
)
def test_a_body_of_very_many_small_things_is_not_parsed(
    flood: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompletionRequest, "model_validate_json", None)
    error = parse(f"{{{flood}}}".encode(), CompletionRequest, Limits())
    assert isinstance(error, ApiError)
    assert error.status == 400
    assert "more than 32768 objects, arrays and fields" in error.message


@pytest.mark.parametrize(
    "prompt",
    ['{"a": [1, 2]}, \\ " ' * 60_000, list(range(400_000)), '\\"' * 1_200_000],
    ids=["text that looks like JSON", "token ids", "escapes"],
)
def test_long_prompts_are_no_matter_of_counting(prompt: object) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    parsed = parse(body, CompletionRequest, Limits())
    assert isinstance(parsed, CompletionRequest)
    assert parsed.prompt == [prompt]
