"""Choices and beams of one prompt, through the router and both pools."""

import asyncio

import openai
import pytest

from kvasir.bench.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = "The keeper of the lighthouse counted the ships that passed in the night. " * 8


async def test_choices_are_those_of_requests_of_their_own(
    client: openai.AsyncOpenAI, stack: Stack
) -> None:
    """The first choice has the request's own seed; all share the prompt's blocks."""

    async def ask(n: int) -> list[str]:
        answer = await client.completions.create(
            model="smollm2", prompt=PROMPT, max_tokens=12, temperature=0.8, seed=11, n=n
        )
        return [choice.text for choice in answer.choices]

    together = await ask(4)
    assert len(set(together)) > 1
    again, alone = await asyncio.gather(ask(4), ask(1))
    assert again == together
    assert alone == together[:1]
    await stack.wait_idle()


async def test_a_beam_search_gives_its_best(client: openai.AsyncOpenAI, stack: Stack) -> None:
    async def ask(n: int) -> list[str]:
        answer = await client.completions.create(
            model="smollm2",
            prompt=PROMPT + "In the morning",
            max_tokens=8,
            n=n,
            extra_body={"use_beam_search": True},
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 8 * n
        return [choice.text for choice in answer.choices]

    found = await ask(3)
    assert len(set(found)) == 3
    assert await ask(3) == found
    greedy = await client.completions.create(
        model="smollm2", prompt=PROMPT + "In the morning", max_tokens=8, temperature=0
    )
    assert await ask(1) == [greedy.choices[0].text], "one beam is greedy decoding"
    with pytest.raises(openai.BadRequestError, match="at most"):
        await ask(16 + 4)
    await stack.wait_idle()
