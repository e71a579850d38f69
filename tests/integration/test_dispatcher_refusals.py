"""Workers that refuse, and the limits of waiting."""

import asyncio
from collections.abc import Callable
from typing import Literal

import pytest

from helpers.dispatcher_stage import PROMPT, Stage, collect, generation, refusal, tokens, until
from helpers.fake_script import Script, expected_tokens
from helpers.fake_worker import FakeWorker
from kvasir.proto.errors import Reason, Refusal
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.router import serving as serving_module
from kvasir.router.config import Disaggregation
from kvasir.router.contracts import Finished, FinishReason, GenerationEvent, Refused


def always(reason: Reason) -> Callable[[pb.Submit], Refusal | None]:
    return lambda _: Refusal(reason, "as scripted")


async def test_retryable_refusal_goes_to_another_worker(stage: Stage) -> None:
    full = await stage.worker("w0", script=Script(refuse=always(Reason.QUEUE_FULL)))
    await stage.worker("w1")
    dispatcher = await stage.dispatcher(ready=2)
    for i in range(8):
        events = await collect(dispatcher, generation(f"r{i}", prompt=(i, 1, 2), max_tokens=2))
        assert events[-1] == Finished(FinishReason.LENGTH)
    assert full.submits
    assert stage.metric("retries_total") == len(full.submits)


async def test_all_full_passes_the_refusal_on(stage: Stage) -> None:
    workers = [
        await stage.worker(f"w{i}", script=Script(refuse=always(Reason.QUEUE_FULL)))
        for i in range(2)
    ]
    dispatcher = await stage.dispatcher(ready=2)
    events = await collect(dispatcher, generation())
    assert refusal(events).refusal.reason is Reason.QUEUE_FULL
    assert refusal(events).retry_after is not None
    assert [len(w.submits) for w in workers] == [1, 1]


async def test_a_bad_request_is_passed_on_and_opens_no_breaker(stage: Stage) -> None:
    worker = await stage.worker("w0", script=Script(refuse=always(Reason.CONTEXT_LENGTH_EXCEEDED)))
    dispatcher = await stage.dispatcher()
    for i in range(20):
        events = await collect(dispatcher, generation(f"r{i}"))
        assert refusal(events) == Refused(Refusal(Reason.CONTEXT_LENGTH_EXCEEDED, "as scripted"))
    assert dispatcher.ready()
    assert len(worker.submits) == 20


async def test_an_internal_error_opens_the_breaker(stage: Stage) -> None:
    await stage.worker("w0", script=Script(refuse=always(Reason.INTERNAL)))
    dispatcher = await stage.dispatcher()
    events = await collect(dispatcher, generation())
    assert refusal(events).refusal.reason is Reason.INTERNAL
    assert not dispatcher.ready()
    await until(dispatcher.ready)


async def replay_to_a_full_worker(
    stage: Stage, replay_timeout: float
) -> tuple[FakeWorker, asyncio.Task[list[GenerationEvent]]]:
    """A generation whose worker died after some tokens, and the full worker that is left."""
    dying = await stage.worker("w0", script=Script(step_seconds=0.005, die_after_tokens=5))
    dispatcher = await stage.dispatcher(no_worker_timeout=0.1, replay_timeout=replay_timeout)
    serving = asyncio.create_task(collect(dispatcher, generation(max_tokens=30)))
    await until(lambda: not dying.running)
    return await stage.worker("w1", script=Script(refuse=always(Reason.QUEUE_FULL))), serving


async def test_a_replay_outlasts_a_full_queue(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_module, "REPLAY_BACKOFF", 0.01)
    full, serving = await replay_to_a_full_worker(stage, replay_timeout=60.0)
    await until(lambda: len(full.submits) > 2 * serving_module.MAX_REFUSALS)
    full.script.refuse = lambda _: None
    assert tokens(await serving) == expected_tokens(PROMPT, 5, 30)


async def test_a_replay_that_is_always_refused_ends_in_time(stage: Stage) -> None:
    full, serving = await replay_to_a_full_worker(stage, replay_timeout=2.0)
    events = await serving
    assert len(full.submits) > 1
    assert len(tokens(events)) >= 5
    assert refusal(events).refusal.reason is Reason.NO_CAPACITY
    assert "waited 2 s" in refusal(events).refusal.message


async def test_draining_worker_refuses_and_another_one_serves(stage: Stage) -> None:
    draining = await stage.worker("w0", script=Script(refuse=always(Reason.DRAINING)))
    dispatcher = await stage.dispatcher()
    draining.info.draining = True
    serving = asyncio.create_task(collect(dispatcher, generation()))
    await asyncio.sleep(0.3)
    await stage.worker("w1")
    assert tokens(await serving) == expected_tokens(PROMPT, 5, 20)
    states = {w.worker_id: w.state for w in dispatcher.workers()}
    assert states == {"w0": "draining", "w1": "ready"}


# --- limits --------------------------------------------------------------------------------


async def test_no_worker_in_time(stage: Stage) -> None:
    dispatcher = await stage.dispatcher(ready=0, no_worker_timeout=0.3)
    assert not dispatcher.ready()
    assert dispatcher.model() is None
    assert await dispatcher.tokenizer_files() is None
    events = await collect(dispatcher, generation())
    assert refusal(events).refusal.reason is Reason.NO_CAPACITY
    assert refusal(events).retry_after is not None
    assert held(stage) == (0, 0)


def held(stage: Stage) -> tuple[float | None, float | None]:
    """Held requests that need decode and prefill workers."""
    decode = stage.metric("held_requests", role="decode")
    return decode, stage.metric("held_requests", role="prefill")


async def test_waits_for_the_first_worker(stage: Stage) -> None:
    dispatcher = await stage.dispatcher(ready=0)
    assert held(stage) == (0, 0)
    serving = asyncio.create_task(collect(dispatcher, generation()))
    await until(lambda: held(stage) == (1, 0))
    await stage.worker("w0")
    assert tokens(await serving) == expected_tokens(PROMPT, 5, 20)
    assert held(stage) == (0, 0)


async def test_held_requests_count_for_the_roles_that_they_need(stage: Stage) -> None:
    settings = Disaggregation(min_uncached_tokens=64)
    dispatcher = await stage.dispatcher(ready=0, disaggregation=settings)
    prompts = [tuple(range(length)) for length in (63, 64, 65)]
    waiting = [
        asyncio.create_task(collect(dispatcher, generation(f"r{i}", prompt=prompt)))
        for i, prompt in enumerate(prompts)
    ]
    await until(lambda: held(stage) == (3, 2))
    waiting[2].cancel()  # its client left
    await until(lambda: held(stage) == (2, 1))
    await stage.worker("w0")
    for events in await asyncio.gather(*waiting[:2]):
        assert isinstance(events[-1], Finished)
    assert held(stage) == (0, 0)


@pytest.mark.parametrize(("mode", "counted"), [("always", (1, 1)), ("never", (1, 0))])
async def test_held_requests_in_other_modes(
    stage: Stage, mode: Literal["always", "never"], counted: tuple[int, int]
) -> None:
    dispatcher = await stage.dispatcher(ready=0, disaggregation=Disaggregation(mode=mode))
    serving = asyncio.create_task(collect(dispatcher, generation(prompt=tuple(range(200)))))
    await until(lambda: held(stage) == counted)
    await stage.worker("w0")
    await serving


async def test_prefill_worker_alone_serves_nobody(stage: Stage) -> None:
    worker = await stage.worker("p0", role=pb.ROLE_PREFILL)
    dispatcher = await stage.dispatcher(no_worker_timeout=0.3)
    events = await collect(dispatcher, generation())
    assert refusal(events).refusal.reason is Reason.NO_CAPACITY
    assert worker.submits == []


async def test_role_change_takes_effect_with_the_next_report(stage: Stage) -> None:
    worker = await stage.worker("w0")
    dispatcher = await stage.dispatcher()
    worker.info.role = pb.ROLE_PREFILL
    await until(lambda: not dispatcher.ready())
    assert dispatcher.workers()[0].role == "prefill"
    worker.info.role = pb.ROLE_DECODE
    await until(dispatcher.ready)


async def test_queue_limit(stage: Stage) -> None:
    gate = asyncio.Event()
    await stage.worker("w0", script=Script(first_token_gate=gate))
    dispatcher = await stage.dispatcher(queue_limit=2)
    running = [asyncio.create_task(collect(dispatcher, generation(f"r{i}"))) for i in range(2)]
    await until(lambda: stage.metric("generations_in_flight") == 2)
    events = await collect(dispatcher, generation("r2"))
    assert refusal(events).refusal.reason is Reason.QUEUE_FULL
    gate.set()
    for events in await asyncio.gather(*running):
        assert events[-1] == Finished(FinishReason.LENGTH)
    assert (await collect(dispatcher, generation("r3")))[-1] == Finished(FinishReason.LENGTH)
