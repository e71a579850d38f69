"""The official `openai` client, unmodified, against the router's HTTP side."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from helpers.bundled_tokenizer import IM_END, tokenizer
from helpers.fake_dispatcher import FakeDispatcher
from helpers.http_server import serving
from kvasir.proto.errors import Reason, Refusal
from kvasir.router.api.validate import child_seed
from kvasir.router.contracts import Generation, Refused

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": [{"type": "text", "text": "Count."}]},
]
ANSWER = "One, two, three ☃ and 😀."


def answers(generation: Generation) -> list[int]:
    """Depends on the seed, as sampling does."""
    return [*tokenizer().encode(f"{ANSWER} {generation.sampling.seed}"), IM_END]


@asynccontextmanager
async def client(
    dispatcher: FakeDispatcher | None = None, key: str = "unused", **settings: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(dispatcher or FakeDispatcher(answers), **settings) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as made,
    ):
        yield made


async def test_chat() -> None:
    async with client() as api:
        answer = await api.chat.completions.create(
            model="smollm2", messages=MESSAGES, seed=1, user="me", metadata={"a": "b"}
        )
    assert answer.object == "chat.completion"
    assert answer.model == "smollm2"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", f"{ANSWER} 1")
    assert choice.finish_reason == "stop"
    assert answer.usage
    assert answer.usage.prompt_tokens_details
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_an_answer_can_be_sent_back_as_a_message() -> None:
    async with client() as api:
        first = await api.chat.completions.create(model="smollm2", messages=MESSAGES)
        message: Any = first.choices[0].message
        history = [*MESSAGES, message, {"role": "user", "content": "More."}]
        second = await api.chat.completions.create(model="smollm2", messages=history)
    assert first.usage
    assert second.usage
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


async def test_streamed_chat_with_usage() -> None:
    async with client() as api:
        stream = await api.chat.completions.create(
            model="smollm2",
            messages=MESSAGES,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == f"{ANSWER} 1"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage
    assert last.usage.completion_tokens == len(tokenizer().encode(f"{ANSWER} 1")) + 1


async def test_the_stream_helper_assembles_the_answer() -> None:
    """The client's own accumulator is the strictest reader of chunks."""
    async with (
        client() as api,
        api.chat.completions.stream(
            model="smollm2", messages=MESSAGES, seed=1, n=2, logprobs=True, top_logprobs=2
        ) as stream,
    ):
        answer = await stream.get_final_completion()
    texts = {choice.index: choice.message.content for choice in answer.choices}
    assert texts == {0: f"{ANSWER} 1", 1: f"{ANSWER} {child_seed(1, 1)}"}
    for choice in answer.choices:
        assert choice.logprobs
        assert choice.logprobs.content
        scored = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
        assert scored.decode() == f"{choice.message.content}<|im_end|>"


async def test_several_choices_and_a_seed_that_repeats_them() -> None:
    async with client() as api:

        async def texts(seed: int) -> list[str | None]:
            answer = await api.chat.completions.create(
                model="smollm2", messages=MESSAGES, n=2, seed=seed
            )
            assert [choice.index for choice in answer.choices] == [0, 1]
            return [choice.message.content for choice in answer.choices]

        first = await texts(3)
        assert first[0] != first[1]
        assert await texts(3) == first
        assert await texts(4) != first


@pytest.mark.parametrize("stop", [" three", [" three", "never"]])
async def test_stop(stop: str | list[str]) -> None:
    async with client() as api:
        chat = await api.chat.completions.create(model="smollm2", messages=MESSAGES, stop=stop)
        text = await api.completions.create(
            model="smollm2", prompt="Count", stop=stop, max_tokens=40
        )
    assert chat.choices[0].message.content == text.choices[0].text == "One, two,"
    assert chat.choices[0].finish_reason == text.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_the_limit_of_tokens_is_exact(name: str) -> None:
    limit: Any = {name: 3}
    async with client() as api:
        answer = await api.chat.completions.create(model="smollm2", messages=MESSAGES, **limit)
    assert answer.usage
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


async def test_completions_of_every_form_of_prompt() -> None:
    ids = tokenizer().encode("Count")
    async with client() as api:
        for prompt, count in (("a", 1), (["a", "b"], 2), (ids, 1), ([ids, ids, ids], 3)):
            form: Any = prompt
            answer = await api.completions.create(
                model="smollm2", prompt=form, seed=1, max_tokens=40
            )
            assert [choice.text for choice in answer.choices] == [f"{ANSWER} 1"] * count
            assert [choice.index for choice in answer.choices] == list(range(count))


async def test_streamed_completion() -> None:
    async with client() as api:
        stream = await api.completions.create(
            model="smollm2", prompt="a", seed=1, max_tokens=40, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == f"{ANSWER} 1"


async def test_completion_logprobs_and_echo() -> None:
    async with client() as api:
        answer = await api.completions.create(
            model="smollm2", prompt="Count", logprobs=2, echo=True, max_tokens=4
        )
    (choice,) = answer.choices
    scores = choice.logprobs
    assert scores
    assert scores.tokens
    assert scores.text_offset
    assert scores.token_logprobs
    assert choice.text.startswith("Count")
    assert "".join(scores.tokens) == choice.text
    assert scores.text_offset[0] == 0
    assert scores.token_logprobs[-1] == -0.5


async def test_extensions_in_extra_body() -> None:
    fake = FakeDispatcher(answers)
    async with client(fake) as api:
        await api.chat.completions.create(
            model="smollm2",
            messages=MESSAGES,
            extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "cache_salt": "s"},
        )
        with pytest.raises(openai.BadRequestError, match="no_such_field"):
            await api.chat.completions.create(
                model="smollm2", messages=MESSAGES, extra_body={"no_such_field": 1}
            )
    asked = fake.asked[0]
    assert (asked.sampling.top_k, asked.sampling.min_p) == (5, 0.1)
    assert (asked.sampling.ignore_eos, asked.cache_salt) == (True, b"s")


async def test_errors_are_the_clients_own() -> None:
    async with client() as api:
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(model="other", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(model="smollm2", messages=MESSAGES, temperature=3)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as tools:
            await api.chat.completions.create(
                model="smollm2",
                messages=MESSAGES,
                tools=[{"type": "function", "function": {"name": "f"}}],
            )
        assert tools.value.param == "tools"
        with pytest.raises(openai.BadRequestError) as long:
            await api.completions.create(model="smollm2", prompt="word " * 3000)
        assert long.value.code == "context_length_exceeded"
    async with client(key="wrong", api_keys=("right",)) as api:
        with pytest.raises(openai.AuthenticationError):
            await api.models.list()
    async with client(key="right", api_keys=("right",)) as api:
        assert [model.id async for model in api.models.list()] == ["smollm2"]
        assert (await api.models.retrieve("smollm2")).id == "smollm2"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [(Reason.QUEUE_FULL, openai.RateLimitError), (Reason.DRAINING, openai.InternalServerError)],
)
async def test_refusals(reason: Reason, kind: type[openai.APIStatusError]) -> None:
    fake = FakeDispatcher(answers, refuse_after=0, refused=Refused(Refusal(reason, "not now")))
    async with client(fake) as api:
        with pytest.raises(kind) as refused:
            await api.chat.completions.create(model="smollm2", messages=MESSAGES, stream=True)
    assert refused.value.response.headers["Retry-After"] == "1"


async def test_a_failure_in_mid_stream_raises() -> None:
    fake = FakeDispatcher(
        answers, refuse_after=3, refused=Refused(Refusal(Reason.NO_CAPACITY, "worker gone"))
    )
    async with client(fake) as api:
        stream = await api.chat.completions.create(model="smollm2", messages=MESSAGES, stream=True)
        chunks = aiter(stream)
        for _ in range(1 + 3):  # the role, then a chunk a token
            await anext(chunks)
        with pytest.raises(openai.APIError, match="worker gone"):
            await anext(chunks)


async def test_64_requests_at_once() -> None:
    fake = FakeDispatcher(answers)
    async with client(fake) as api:

        async def ask(seed: int) -> str | None:
            answer = await api.chat.completions.create(
                model="smollm2", messages=MESSAGES, seed=seed
            )
            return answer.choices[0].message.content

        texts = await asyncio.gather(*(ask(seed) for seed in range(64)))
    assert texts == [f"{ANSWER} {seed}" for seed in range(64)]
    assert not fake.live
    assert not fake.aborted
