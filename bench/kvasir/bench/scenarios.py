"""Six ways to serve the same prompts, each of which must give the same tokens.

Each scenario starts its own stack, asks every prompt, and returns the answers together with
the evidence that what it is about really happened: blocks transferred, prefixes hit, requests
preempted, workers killed. A scenario without its evidence has tested nothing and fails.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvasir.bench.ask import Answer, Asker
from kvasir.bench.stack import Stack
from kvasir.worker.config import WorkerConfig

_POLL_S = 0.01
_WAVE = 5
"""Requests in flight around one fault."""
_TOKENS_BEFORE_KILL = 2
_BLOCK = 16
_SERVED_NAME = "model"

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Setup:
    """What all scenarios have in common. ``kv_bytes_per_token`` is of the float32 cache."""

    model: str
    max_tokens: int
    longest_prompt: int
    kv_bytes_per_token: int

    def worker(self, worker_id: str, **fields: Any) -> WorkerConfig:
        settings = {
            "model": self.model,
            "served_name": _SERVED_NAME,
            "dtype": "float32",
            "threads": 1,
            "block_size": _BLOCK,
            "max_model_len": self.longest,
            "kv_cache_memory": self.kv_memory(*[self.longest] * 8),
            "max_batched_tokens": 256,
            "drain_deadline": 20.0,
            **fields,
        }
        return WorkerConfig.model_validate({"worker_id": worker_id, **settings})

    @property
    def longest(self) -> int:
        return self.longest_prompt + self.max_tokens

    def kv_memory(self, *lengths: int) -> int:
        """Bytes of KV cache for sequences of these lengths at once."""
        blocks = sum(-(-length // _BLOCK) for length in lengths)
        return blocks * _BLOCK * self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Outcome:
    """``evidence`` counts what must have happened; any 0 in it fails the scenario."""

    answers: list[Answer]
    evidence: Mapping[str, int]
    faults: int = 0


Kill = Callable[[Sequence[Answer]], Awaitable[str | None]]
"""Kills a worker if the answers say that the moment is right; which one, else None."""

Arm = Callable[[Stack], Awaitable[Kill]]
"""Called before each wave."""

Scenario = Callable[[Setup, Prompts], Awaitable[Outcome]]


async def alone(setup: Setup, prompts: Prompts) -> Outcome:
    """One worker does all, without prefix cache; four requests at a time share its steps."""
    workers = [setup.worker("both-0", prefix_caching=False)]
    async with _session() as http, Stack(workers) as stack:
        answers = await _ask_all(_asker(setup, http, stack), prompts, concurrency=4)
        return Outcome(answers, {"answers": len(answers)})


async def disaggregated(setup: Setup, prompts: Prompts) -> Outcome:
    """Every prompt is computed on a prefill worker and its KV moves to the decode worker."""
    async with _session() as http, _split_stack(setup, decoders=1) as stack:
        answers = await _ask_all(_asker(setup, http, stack), prompts, concurrency=4)
        moved = await _transfers(stack, "decode-0", "ok")
        return Outcome(answers, {"transfers": moved})


async def warm_prefix(setup: Setup, prompts: Prompts) -> Outcome:
    """Every prompt is asked twice; the second answers, from the cache, are the ones judged."""
    memory = setup.kv_memory(*(len(prompt) + setup.max_tokens for prompt in prompts))
    async with _session() as http, Stack([setup.worker("both-0", kv_cache_memory=memory)]) as stack:
        asker = _asker(setup, http, stack)
        await _ask_all(asker, prompts, concurrency=4)
        answers = await _ask_all(asker, prompts, concurrency=4)
        hit = sum(answer.cached_tokens > 0 for answer in answers)
        return Outcome(answers, {"prompts with cached prefix": hit})


async def preempted(setup: Setup, prompts: Prompts) -> Outcome:
    """A KV cache that holds the two longest prompts, which come first, and one block more (without
    it the second is not admitted): when both have grown, one has to go. The rest then competes."""
    by_length = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    first, rest = by_length[:2], by_length[2:]
    memory = setup.kv_memory(*(len(prompts[i]) for i in first), 1)
    # Without prefix cache: shared blocks would leave room.
    worker = setup.worker("both-0", kv_cache_memory=memory, prefix_caching=False)
    answers = [Answer() for _ in prompts]
    async with _session() as http, Stack([worker]) as stack:
        asker = _asker(setup, http, stack)
        async with asyncio.TaskGroup() as group:
            for i in first:
                group.create_task(asker.ask(prompts[i], answers[i]))
            await _until_first_token([answers[i] for i in first])
            for i in rest:
                group.create_task(asker.ask(prompts[i], answers[i]))
        metrics = await stack.worker_metrics("both-0")
        return Outcome(answers, {"preemptions": int(metrics.total("vllm:num_preemptions_total"))})


async def decode_killed(setup: Setup, prompts: Prompts) -> Outcome:
    """kill -9 of a decode worker that is streaming, once for every few prompts."""

    async def arm(stack: Stack) -> Kill:
        async def kill(answers: Sequence[Answer]) -> str | None:
            for answer in answers:
                victim = answer.decode_worker
                if len(answer.tokens) >= _TOKENS_BEFORE_KILL and not answer.finished:
                    stack.kill(victim, signal.SIGKILL)
                    return victim
            return None

        return kill

    async with _session() as http, _split_stack(setup, decoders=2) as stack:
        answers, faults = await _waves(_asker(setup, http, stack), stack, prompts, arm)
        replays = int((await stack.router_metrics()).total("kvasir_router_replays_total"))
        return Outcome(answers, {"faults": faults, "replays": replays}, faults)


async def prefill_killed(setup: Setup, prompts: Prompts) -> Outcome:
    """kill -9 of the prefill worker when the first part of a wave's KV has arrived."""

    async def received(stack: Stack) -> float:
        metrics = await stack.worker_metrics("decode-0")
        return metrics.total("kvasir_kv_transfer_bytes_total", direction="received")

    async def arm(stack: Stack) -> Kill:
        before = await received(stack)

        async def kill(answers: Sequence[Answer]) -> str | None:
            if await received(stack) <= before or all(answer.tokens for answer in answers):
                return None
            stack.kill("prefill-0", signal.SIGKILL)
            return "prefill-0"

        return kill

    # Small steps, so that a prompt's KV comes in many frames.
    async with _session() as http, _split_stack(setup, decoders=1, prefill_step=32) as stack:
        answers, faults = await _waves(_asker(setup, http, stack), stack, prompts, arm)
        broken = await _transfers(stack, "decode-0", "broken")
        return Outcome(answers, {"faults": faults, "recomputed": broken}, faults)


SCENARIOS: Mapping[str, Scenario] = {
    "alone": alone,
    "disaggregated": disaggregated,
    "prefix cache warm": warm_prefix,
    "under preemption": preempted,
    "decode worker killed": decode_killed,
    "prefill worker killed": prefill_killed,
}


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


def _asker(setup: Setup, http: aiohttp.ClientSession, stack: Stack) -> Asker:
    return Asker(http, stack.url, _SERVED_NAME, setup.max_tokens)


def _split_stack(setup: Setup, decoders: int, prefill_step: int = 256) -> Stack:
    prefill = setup.worker("prefill-0", role="prefill", max_batched_tokens=prefill_step)
    decode = [setup.worker(f"decode-{i}", role="decode") for i in range(decoders)]
    return Stack([prefill, *decode], router={"disaggregation": {"mode": "always"}})


async def _transfers(stack: Stack, worker_id: str, outcome: str) -> int:
    metrics = await stack.worker_metrics(worker_id)
    return int(metrics.total("kvasir_kv_transfer_total", outcome=outcome))


async def _ask_all(asker: Asker, prompts: Prompts, concurrency: int) -> list[Answer]:
    answers = [Answer() for _ in prompts]
    slots = asyncio.Semaphore(concurrency)

    async def one(prompt: tuple[int, ...], answer: Answer) -> None:
        async with slots:
            await asker.ask(prompt, answer)

    async with asyncio.TaskGroup() as group:
        for prompt, answer in zip(prompts, answers, strict=True):
            group.create_task(one(prompt, answer))
    return answers


async def _until_first_token(answers: Sequence[Answer]) -> None:
    while True:
        if any(answer.tokens or answer.error for answer in answers):
            return
        await asyncio.sleep(_POLL_S)


async def _waves(
    asker: Asker, stack: Stack, prompts: Prompts, arm: Arm
) -> tuple[list[Answer], int]:
    """Ask in waves, each with one fault; the killed worker is started again between two waves."""
    answers = [Answer() for _ in prompts]
    faults = 0
    waves = -(-len(prompts) // _WAVE)
    for first in range(waves):  # every waves-th prompt, so that each wave has long ones
        wave = range(first, len(prompts), waves)
        kill = await arm(stack)
        async with asyncio.TaskGroup() as group:
            for i in wave:
                group.create_task(asker.ask(prompts[i], answers[i]))
            victim = await _fault([answers[i] for i in wave], kill)
        if victim is not None:
            faults += 1
            await stack.exited(victim)
            await stack.restart(victim)
    return answers, faults


async def _fault(answers: Sequence[Answer], kill: Kill) -> str | None:
    """Try until the fault is done, or the wave is over before its moment came."""
    while not all(answer.finished or answer.error for answer in answers):
        if (victim := await kill(answers)) is not None:
            return victim
        await asyncio.sleep(_POLL_S)
    return None
