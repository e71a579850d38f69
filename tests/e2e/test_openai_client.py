"""The official `openai` client, unmodified, against the whole stack."""

import math

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from kvasir.bench.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

CAPITAL: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]
COUNT = "One, two, three, four, five, six,"


async def test_chat_gives_sensible_english(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="smollm2", messages=CAPITAL, temperature=0, max_completion_tokens=24
    )
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == "smollm2"


async def test_streamed_text_equals_the_whole(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(
        model="smollm2", messages=CAPITAL, temperature=0, max_tokens=32
    )
    stream = await client.chat.completions.create(
        model="smollm2",
        messages=CAPITAL,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert all(reason is None for reason in reasons[:-1])
    last = chunks[-1]
    assert not last.choices
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


async def test_completions_of_several_prompts(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="smollm2", prompt=[COUNT, "Monday, Tuesday,"], temperature=0, max_tokens=6
    )
    assert [c.index for c in answer.choices] == [0, 1]
    assert "seven" in answer.choices[0].text
    assert "Wednesday" in answer.choices[1].text


async def test_max_completion_tokens_is_exact(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Tell me a long story about a ship."}],
        max_completion_tokens=17,
        seed=1,
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 17
    assert answer.choices[0].finish_reason == "length"


async def test_n_choices_differ_and_a_seed_repeats_them(client: openai.AsyncOpenAI) -> None:
    async def sample() -> list[str]:
        answer = await client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Name an animal and describe it."}],
            n=2,
            seed=7,
            temperature=1,
            max_tokens=16,
        )
        assert sorted(c.index for c in answer.choices) == [0, 1]
        return [c.message.content or "" for c in sorted(answer.choices, key=lambda c: c.index)]

    first = await sample()
    assert first[0] != first[1]
    assert await sample() == first


async def test_stop_keeps_the_text_before_it(client: openai.AsyncOpenAI) -> None:
    free = await client.completions.create(
        model="smollm2", prompt=COUNT, temperature=0, max_tokens=24
    )
    stopped = await client.completions.create(
        model="smollm2", prompt=COUNT, temperature=0, max_tokens=24, stop=["nine"]
    )
    text = free.choices[0].text
    assert "nine" in text
    assert stopped.choices[0].text == text[: text.index("nine")]
    assert stopped.choices[0].finish_reason == "stop"


async def test_logprobs_are_a_distribution(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="smollm2",
        messages=CAPITAL,
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=5,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for token in logprobs.content:
        tops = [top.logprob for top in token.top_logprobs]
        assert len(tops) == 5
        assert tops == sorted(tops, reverse=True)
        assert token.logprob == tops[0]  # greedy
        assert sum(math.exp(p) for p in tops) <= 1 + 1e-4


async def test_errors_are_the_client_s_own_types(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="no-such-model", messages=CAPITAL)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="smollm2", messages=CAPITAL, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model="smollm2", prompt=[1] * 2048, max_tokens=1)
    assert long.value.code == "context_length_exceeded"


async def test_models_lists_the_served_one(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["smollm2"]


async def test_responses_name_who_served(client: openai.AsyncOpenAI, stack: Stack) -> None:
    prompt = "A prompt long enough to be worth a prefill worker. " * 20
    raw = await client.completions.with_raw_response.create(
        model="smollm2", prompt=prompt, max_tokens=2, temperature=0
    )
    assert raw.headers["x-request-id"]
    assert raw.headers["x-kvasir-decode-worker"] in ("decode-0", "decode-1")
    assert raw.headers["x-kvasir-prefill-worker"] == "prefill-0"
    metrics = await stack.worker_metrics(raw.headers["x-kvasir-decode-worker"])
    assert metrics
