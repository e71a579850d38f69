"""Two pools with speculation on: what clients see is what they see without, but in fewer steps."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from e2e.conftest import worker
from kvasir.bench.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = (
    "Deliveries:\nAnna brought 12 crates to the mill.\nBruno brought 40 crates to the mill.\n"
    "Carla brought 7 crates to the mill.\n\nThe same list again:\nAnna brought 12 crates"
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def speculating() -> AsyncIterator[Stack]:
    workers = [
        worker("prefill-s", role="prefill", speculative_method="ngram"),
        worker("decode-s", role="decode", speculative_method="ngram"),
    ]
    async with Stack(workers) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def drafting(speculating: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{speculating.url}/v1", api_key="unused", max_retries=0, timeout=120
    ) as opened:
        yield opened


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0},
        {"temperature": 0.7, "seed": 4},
        {"temperature": 0, "stop": ["7 crates"]},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.9, "seed": 9, "n": 3},
        {"temperature": 0, "frequency_penalty": 0.3},
    ],
    ids=str,
)
async def test_answers_are_those_without_speculation(
    client: openai.AsyncOpenAI, drafting: openai.AsyncOpenAI, asked: dict[str, Any]
) -> None:
    ours, theirs = [
        await each.completions.create(model="smollm2", prompt=PROMPT, max_tokens=32, **asked)
        for each in (client, drafting)
    ]
    assert [choice.text for choice in theirs.choices] == [choice.text for choice in ours.choices]
    for mine, other in zip(ours.choices, theirs.choices, strict=True):
        assert mine.finish_reason == other.finish_reason
        if mine.logprobs is not None:
            assert other.logprobs is not None
            assert mine.logprobs.tokens == other.logprobs.tokens
            assert mine.logprobs.text_offset == other.logprobs.text_offset
            assert mine.logprobs.token_logprobs == pytest.approx(
                other.logprobs.token_logprobs, abs=1e-3
            )
    assert ours.usage is not None
    assert theirs.usage is not None
    assert ours.usage.completion_tokens == theirs.usage.completion_tokens


async def test_a_stream_has_fewer_chunks_than_tokens(
    drafting: openai.AsyncOpenAI, speculating: Stack
) -> None:
    stream = await drafting.completions.create(
        model="smollm2",
        prompt=PROMPT,
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 40
    assert sum(bool(chunk.choices and chunk.choices[0].text) for chunk in chunks) < 40
    await speculating.wait_idle()
    metrics = await speculating.worker_metrics("decode-s")
    accepted = metrics.total("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= metrics.total("vllm:spec_decode_num_draft_tokens_total")
    assert metrics.total("vllm:spec_decode_num_drafts_total") > 0
    (row,) = [w for w in await speculating.worker_rows() if w["worker_id"] == "decode-s"]
    assert row["accepted_tokens"] == accepted
    assert row["draft_tokens"] == metrics.total("vllm:spec_decode_num_draft_tokens_total")
