"""What the router answers over HTTP, in front of a dispatcher that tests control."""

import asyncio
from typing import Any

import aiohttp
import pytest

from helpers.bundled_tokenizer import VOCAB_SIZE, tokenizer
from helpers.fake_dispatcher import CARD, FakeDispatcher
from helpers.http_client import CHAT, STORY, TEXT, endless, events, post, says, until
from helpers.http_server import serving
from kvasir.router.api.validate import child_seed
from kvasir.router.contracts import Dispatcher, Generation


def test_the_fake_is_a_dispatcher() -> None:
    dispatcher: Dispatcher = FakeDispatcher(endless)
    assert dispatcher.ready()


async def test_a_whole_chat_answer() -> None:
    fake = FakeDispatcher(says(STORY), cached_tokens=16)
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        status, headers, body = await post(session, "/v1/chat/completions", CHAT | {"seed": 5})
    assert status == 200
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": STORY,
        "refusal": None,
    }
    assert body["choices"][0]["finish_reason"] == "stop"
    answer_tokens = len(tokenizer().encode(STORY)) + 1
    prompt_tokens = len(fake.asked[0].prompt_ids)
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert headers["x-kvasir-decode-worker"] == "decode-0"
    assert headers["x-kvasir-prefill-worker"] == "prefill-0"
    assert body["id"] == f"chatcmpl-{headers['x-request-id']}"
    asked = fake.asked[0]
    assert asked.request_id == f"{headers['x-request-id']}-0"
    assert asked.sampling.seed == 5
    assert asked.sampling.max_tokens == CARD.max_model_len - prompt_tokens
    assert not fake.aborted


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
async def test_a_stream_is_the_whole_answer_in_pieces(tokens_per_event: int) -> None:
    fake = FakeDispatcher(says(STORY), tokens_per_event=tokens_per_event)
    request = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    async with (
        serving(fake) as url,
        aiohttp.ClientSession(url) as session,
        session.post("/v1/chat/completions", json=request) as response,
    ):
        assert response.content_type == "text/event-stream"
        assert response.headers["x-kvasir-decode-worker"] == "decode-0"
        assert response.headers["x-request-id"]
        *chunks, usage, done = await events(response)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(tokenizer().encode(STORY)) + 1
    assert all(chunk["usage"] is None for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    pieces = [delta.get("content", "") for delta in deltas]
    assert "".join(pieces) == STORY
    assert not any("\ufffd" in piece for piece in pieces)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_event", [1, 7])
async def test_a_stop_string_ends_and_aborts(stream: bool, tokens_per_event: int) -> None:
    stop = "met a"
    fake = FakeDispatcher(says(STORY), tokens_per_event=tokens_per_event)
    request = TEXT | {"stop": [stop, "never"], "stream": stream}
    async with (
        serving(fake) as url,
        aiohttp.ClientSession(url) as session,
        session.post("/v1/completions", json=request) as response,
    ):
        if stream:
            *chunks, done = await events(response)
            assert done == "[DONE]"
        else:
            chunks = [await response.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == STORY[: STORY.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"
    assert fake.aborted == [fake.asked[0].request_id]
    assert not fake.live
    if not stream:
        before = STORY[: STORY.index(stop) + len(stop)]
        assert chunks[0]["usage"]["completion_tokens"] == len(tokenizer().encode(before))


async def test_a_held_back_false_start_is_shown_at_the_end() -> None:
    fake = FakeDispatcher(says("one two thr", end=False))
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        _, _, body = await post(session, "/v1/completions", TEXT | {"stop": "three"})
    assert body["choices"][0]["text"] == "one two thr"
    assert body["choices"][0]["finish_reason"] == "length"


async def test_min_tokens_keeps_stop_strings_from_ending_early() -> None:
    fake = FakeDispatcher(says("a b a b a b"))
    request = TEXT | {"stop": " b", "min_tokens": 3}
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        _, _, body = await post(session, "/v1/completions", request)
    assert body["choices"][0]["text"] == "a b a"


async def test_a_stop_token_s_text_is_not_shown() -> None:
    ids = tokenizer().encode("one two three")
    fake = FakeDispatcher(lambda _: ids)
    request = TEXT | {"stop_token_ids": [ids[-1]]}
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        _, _, body = await post(session, "/v1/completions", request)
    assert body["choices"][0]["text"] == "one two"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_run_side_by_side_under_their_own_ids_and_seeds(stream: bool) -> None:
    def by_seed(generation: Generation) -> list[int]:
        return tokenizer().encode(f"seed {generation.sampling.seed}")

    fake = FakeDispatcher(by_seed)
    request = TEXT | {"prompt": ["Hi", "Ho"], "n": 3, "seed": 9, "stream": stream}
    async with (
        serving(fake) as url,
        aiohttp.ClientSession(url) as session,
        session.post("/v1/completions", json=request) as response,
    ):
        request_id = response.headers["x-request-id"]
        chunks = (await events(response))[:-1] if stream else [await response.json()]
    texts = dict.fromkeys(range(6), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    seeds = [child_seed(9, child) for child in range(3)] * 2
    assert list(texts.values()) == [f"seed {seed}" for seed in seeds]
    assert sorted(g.request_id for g in fake.asked) == [f"{request_id}-{i}" for i in range(6)]
    if not stream:
        assert [choice["index"] for choice in chunks[0]["choices"]] == list(range(6))
        assert chunks[0]["usage"]["prompt_tokens"] == 2
    else:
        order = [chunk["choices"][0]["index"] for chunk in chunks]
        assert order != sorted(order)


async def test_chat_logprobs_have_the_bytes_of_parts_of_characters() -> None:
    fake = FakeDispatcher(says("a☃", end=False))
    request = CHAT | {"logprobs": True, "top_logprobs": 2}
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        _, _, body = await post(session, "/v1/chat/completions", request)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"] > 2
    assert bytes(b for token in content for b in token["bytes"]) == "a☃".encode()
    shown = [content[0], content[0]["top_logprobs"][0]]
    assert [token["token"] for token in shown] == ["a", "a"]
    assert all(len(token["top_logprobs"]) == 2 for token in content)


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs_with_echo(stream: bool) -> None:
    fake = FakeDispatcher(says(" there ☃ you", end=False))
    request = TEXT | {"prompt": "Hello", "echo": True, "logprobs": 3, "stream": stream}
    async with (
        serving(fake) as url,
        aiohttp.ClientSession(url) as session,
        session.post("/v1/completions", json=request) as response,
    ):
        chunks = (await events(response))[:-1] if stream else [await response.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(choice["text"] for choice in choices)
    assert text == "Hello there ☃ you"
    scores: dict[str, list[Any]] = {}
    for choice in choices:
        for key, values in choice["logprobs"].items():
            scores.setdefault(key, []).extend(values)
    assert scores["token_logprobs"][0] is None
    assert scores["top_logprobs"][0] is None
    assert all(len(top) == 3 for top in scores["top_logprobs"][1:])
    prompt_tokens = len(tokenizer().encode("Hello"))
    assert len(scores["tokens"]) == prompt_tokens + len(tokenizer().encode(" there ☃ you"))
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)


async def test_token_id_prompts_and_their_echo() -> None:
    ids = tokenizer().encode("One two")
    fake = FakeDispatcher(says(" three", end=False))
    request = TEXT | {"prompt": [ids, [1, *ids]], "echo": True}
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        _, _, body = await post(session, "/v1/completions", request)
    assert [c["text"] for c in body["choices"]] == [
        "One two three",
        "<|im_start|>One two three",
    ]
    assert [g.prompt_ids for g in fake.asked] == [tuple(ids), (1, *ids)]


async def test_sampling_fields_reach_the_dispatcher() -> None:
    fields = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": 2},
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "stop_token_ids": [3],
    }
    fake = FakeDispatcher(says(STORY))
    request = TEXT | fields | {"cache_salt": "s", "priority": -3}
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        assert (await post(session, "/v1/completions", request))[0] == 200
    asked = fake.asked[0]
    got = {name: getattr(asked.sampling, name) for name in fields}
    assert got == fields | {"logit_bias": {5: 2.0}, "stop_token_ids": frozenset({3})}
    assert (asked.cache_salt, asked.priority) == (b"s", -3)


async def test_chat_and_tokenize_agree_and_detokenize_goes_back() -> None:
    fake = FakeDispatcher(says("x"))
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        await post(session, "/v1/chat/completions", CHAT)
        _, _, tokens = await post(session, "/tokenize", {"messages": CHAT["messages"]})
        assert tuple(tokens["tokens"]) == fake.asked[0].prompt_ids
        assert tokens["count"] == len(tokens["tokens"])
        assert tokens["max_model_len"] == 2048
        _, _, text = await post(session, "/detokenize", {"tokens": tokens["tokens"]})
        _, _, again = await post(session, "/tokenize", {"prompt": text["prompt"]})
        assert again["tokens"] == tokens["tokens"]
        assert (await post(session, "/tokenize", {}))[0] == 400
        status, _, body = await post(session, "/detokenize", {"tokens": [VOCAB_SIZE]})
        assert (status, body["error"]["param"]) == (400, "tokens")


async def test_no_worker_is_a_503_with_retry_after() -> None:
    fake = FakeDispatcher(says("x"), card=None, is_ready=False)
    async with (
        serving(fake, no_worker_timeout=0.1) as url,
        aiohttp.ClientSession(url) as session,
    ):
        status, headers, body = await post(session, "/v1/completions", TEXT)
        assert (status, body["error"]["code"]) == (503, "no_capacity")
        assert int(headers["Retry-After"]) >= 1
        assert "waited 0.1 s" in body["error"]["message"]
        assert fake.held_requests == 0
        async with session.get("/health") as response:
            assert (response.status, await response.read()) == (200, b"")
        async with session.get("/ready") as response:
            assert response.status == 503
        async with session.get("/v1/models") as response:
            assert (await response.json())["data"] == []


async def test_a_model_that_comes_late_is_waited_for() -> None:
    fake = FakeDispatcher(says("x"), card=None)
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        call = asyncio.create_task(post(session, "/v1/completions", TEXT))
        await until(lambda: fake.held_requests == 1)
        fake.card = CARD
        assert (await call)[0] == 200
        assert fake.held_requests == 0


async def test_only_so_many_wait_for_a_model_and_one_that_leaves_makes_room() -> None:
    fake = FakeDispatcher(says("x"), card=None)
    async with serving(fake, queue_limit=2) as url, aiohttp.ClientSession(url) as session:
        calls = [asyncio.create_task(post(session, "/v1/completions", TEXT)) for _ in range(2)]
        await until(lambda: fake.held_requests == 2)
        status, headers, body = await post(session, "/v1/completions", TEXT)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert body["error"]["message"] == "2 requests wait for a worker; try again later."
        calls[0].cancel()
        await until(lambda: fake.held_requests == 1)
        last = asyncio.create_task(post(session, "/v1/completions", TEXT))
        await until(lambda: fake.held_requests == 2)
        fake.card = CARD
        assert [(await each)[0] for each in (calls[1], last)] == [200, 200]


async def test_a_template_that_does_not_end_is_a_400_and_blocks_nobody() -> None:
    fake = FakeDispatcher(says("x"))
    bomb = b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    fake.files = {**fake.files, "chat_template.jinja": bomb}
    limits = {"template_timeout": 3.0}
    async with serving(fake, limits=limits) as url, aiohttp.ClientSession(url) as session:
        call = asyncio.create_task(post(session, "/v1/chat/completions", CHAT))
        await asyncio.sleep(0.05)
        assert (await post(session, "/v1/completions", TEXT))[0] == 200
        assert not call.done()
        status, _, body = await call
    assert (status, body["error"]["param"]) == (400, "messages")
    assert "longer than 3 s" in body["error"]["message"]


async def test_a_model_without_a_template_says_so() -> None:
    fake = FakeDispatcher(says("x"))
    fake.files = {k: v for k, v in fake.files.items() if k != "chat_template.jinja"}
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        status, _, body = await post(session, "/v1/chat/completions", CHAT)
    assert status == 400
    assert "no chat template" in body["error"]["message"]


async def test_models_workers_metrics_and_openapi() -> None:
    fake = FakeDispatcher(says(STORY))
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        await post(session, "/v1/completions", TEXT)
        async with session.get("/v1/models/smollm2") as response:
            assert (await response.json())["id"] == "smollm2"
        async with session.get("/v1/models/a/b") as response:
            assert response.status == 404
        async with session.get("/workers") as response:
            (worker,) = await response.json()
            assert (worker["worker_id"], worker["role"]) == ("decode-0", "decode")
        async with session.get("/metrics") as response:
            text = await response.text()
            line = 'kvasir_router_http_requests_total{route="/v1/completions",status="200"} 1.0'
            assert line in text
            assert "kvasir_router_http_time_to_first_token_seconds_count 1.0" in text
            generated = len(tokenizer().encode(STORY)) + 1
            assert f'kvasir_router_http_tokens_total{{kind="generated"}} {generated}.0' in text
        async with session.get("/openapi.json") as response:
            assert "/v1/chat/completions" in (await response.json())["paths"]


async def test_the_log_has_the_label_and_no_line_of_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kvasir.router.access")
    async with serving(FakeDispatcher(says("x"))) as url, aiohttp.ClientSession(url) as session:
        headers = {"x-request-id": "mine 1;level=ERROR" + "x" * 200}
        async with session.post("/v1/completions", json=TEXT, headers=headers) as response:
            request_id = response.headers["x-request-id"]
            assert "mine" not in request_id
    (record,) = [r for r in caplog.records if r.name == "kvasir.router.access"]
    line = record.getMessage()
    assert line.startswith("POST /v1/completions status=200 ms=")
    assert f"request_id={request_id} label=mine_1_level_ERROR" in line
    assert "prompt_tokens=1 " in line
    assert "completion_tokens=2" in line
    assert len(line) < 300


async def test_two_requests_with_one_client_id_both_complete() -> None:
    fake = FakeDispatcher(says(STORY))
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        headers = {"x-request-id": "same"}

        async def ask() -> Any:
            async with session.post("/v1/completions", json=TEXT, headers=headers) as response:
                return (await response.json())["choices"][0]["text"]

        assert set(await asyncio.gather(ask(), ask())) == {STORY}
    assert len({generation.request_id for generation in fake.asked}) == 2
