"""``use_beam_search`` and ``n`` over HTTP, in front of a dispatcher that tests control."""

from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest

from helpers.bundled_tokenizer import IM_END, tokenizer
from helpers.fake_dispatcher import FakeDispatcher
from helpers.http_client import CHAT, TEXT, endless, post, says
from helpers.http_server import serving
from kvasir.router.contracts import (
    BeamSearch,
    Finished,
    FinishReason,
    Found,
    Generation,
    GenerationEvent,
    Hypothesis,
)

TEXTS = (" the best one", " one that is not so good")


class SearchingDispatcher(FakeDispatcher):
    """Finds ``TEXTS``, the first of them up to its end token."""

    async def _events(self, generation: Generation) -> AsyncGenerator[GenerationEvent, None]:
        assert generation.beam is not None
        first, second = (tuple(tokenizer().encode(text)) for text in TEXTS)
        yield Found(
            (
                Hypothesis((*first, IM_END), FinishReason.STOP, -0.5),
                Hypothesis(second, FinishReason.LENGTH, -0.75),
            ),
            16,
            "decode-0",
            "prefill-0",
        )
        yield Finished(FinishReason.STOP)


async def ask(fake: FakeDispatcher, path: str, body: dict[str, Any]) -> tuple[int, Any, Any]:
    async with serving(fake) as url, aiohttp.ClientSession(url) as session:
        return await post(session, path, body)


async def test_the_choices_are_what_one_search_found() -> None:
    fake = SearchingDispatcher(endless)
    request = TEXT | {"use_beam_search": True, "n": 2, "length_penalty": 0.5, "temperature": 0}
    status, headers, body = await ask(fake, "/v1/completions", request)
    assert status == 200
    choices = [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]]
    assert choices == [(0, TEXTS[0], "stop"), (1, TEXTS[1], "length")]
    (asked,) = fake.asked
    assert asked.beam == BeamSearch(2, 0.5)
    assert (asked.group, asked.sampling.temperature) == ("", 0)
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(asked.prompt_ids)
    assert usage["completion_tokens"] == sum(len(tokenizer().encode(t)) for t in TEXTS) + 1
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    assert headers["x-kvasir-prefill-worker"] == "prefill-0"
    assert fake.aborted == []


async def test_each_prompt_is_searched_for_itself() -> None:
    fake = SearchingDispatcher(endless)
    request = TEXT | {"use_beam_search": True, "n": 2, "prompt": ["one", "two more"]}
    _, _, body = await ask(fake, "/v1/completions", request)
    assert [choice["text"] for choice in body["choices"]] == [*TEXTS, *TEXTS]
    assert len(fake.asked) == 2
    assert body["usage"]["prompt_tokens"] == sum(len(asked.prompt_ids) for asked in fake.asked)


async def test_a_chat_may_search_as_well() -> None:
    fake = SearchingDispatcher(endless)
    _, _, body = await ask(fake, "/v1/chat/completions", CHAT | {"use_beam_search": True, "n": 2})
    assert [choice["message"]["content"] for choice in body["choices"]] == list(TEXTS)
    assert fake.asked[0].beam == BeamSearch(2, 1.0)


@pytest.mark.parametrize(
    ("fields", "param", "why"),
    [
        ({"stream": True}, "stream", "known at the end"),
        ({"temperature": 0.7}, "temperature", "draws nothing; leave it out or give 0"),
        ({"top_p": 0.9}, "top_p", "draws nothing"),
        ({"top_k": 5}, "top_k", "draws nothing"),
        ({"min_p": 0.1}, "min_p", "draws nothing"),
        ({"presence_penalty": 1}, "presence_penalty", "model's own probabilities"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "leave it out or give 1"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "model's own probabilities; leave it out"),
        ({"min_tokens": 2}, "min_tokens", "ends at a token"),
        ({"stop": ["x"]}, "stop", "ends at a token"),
        ({"echo": True}, "echo", "without the prompt"),
        ({"logprobs": 0}, "logprobs", "not the logprobs of its tokens"),
        ({"length_penalty": 11}, "length_penalty", ""),
        ({"use_beam_search": False, "length_penalty": 1.0}, "length_penalty", "needs use_beam"),
    ],
)
async def test_what_a_search_would_pass_over_is_refused(
    fields: dict[str, Any], param: str, why: str
) -> None:
    fake = SearchingDispatcher(endless)
    request = TEXT | {"use_beam_search": True} | fields
    status, _, body = await ask(fake, "/v1/completions", request)
    assert (status, body["error"]["param"]) == (400, param)
    assert why in body["error"]["message"]
    assert fake.asked == []


async def test_values_that_ask_for_nothing_pass() -> None:
    neutral = {
        "stream": False,
        "temperature": 0,
        "top_p": 1,
        "top_k": -1,
        "echo": False,
        "stop": [],
        "logit_bias": {},
    }
    fake = SearchingDispatcher(endless)
    status, _, _ = await ask(
        fake, "/v1/completions", TEXT | {"use_beam_search": True, "n": 2} | neutral
    )
    assert status == 200


async def test_choices_of_one_prompt_are_a_group() -> None:
    fake = FakeDispatcher(says("yes"))
    await ask(fake, "/v1/completions", TEXT | {"n": 2, "prompt": ["one", "two"]})
    groups = [asked.group for asked in fake.asked]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert all(groups)
    await ask(fake, "/v1/completions", TEXT)
    assert fake.asked[-1].group == ""
