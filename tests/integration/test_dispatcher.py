"""The dispatcher against real gRPC servers on loopback: streams, losses, refusals, limits."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from helpers.fake_worker import BLOCK_SIZE, FakeWorker, FinishStyle, Script, expected_tokens
from kvasir.proto.blocks import block_hashes
from kvasir.proto.errors import Reason, Refusal
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.router.config import Disaggregation, RouterConfig
from kvasir.router.contracts import (
    Dispatcher,
    Finished,
    FinishReason,
    Generation,
    GenerationEvent,
    Refused,
    Sampling,
    TokenEvent,
)
from kvasir.router.dispatcher import FleetDispatcher
from kvasir.router.prefix_index import SPECULATION_SECONDS

PROMPT = tuple(range(100, 140))


def generation(
    request_id: str = "r1",
    *,
    prompt: tuple[int, ...] = PROMPT,
    max_tokens: int = 20,
    seed: int = 5,
    deadline: float | None = None,
    sampling: Sampling | None = None,
) -> Generation:
    sampling = sampling or Sampling(seed=seed, max_tokens=max_tokens)
    return Generation(request_id, prompt, sampling, deadline=deadline)


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - any state may be waited for
            await asyncio.sleep(0.01)


class Stage:
    """Fake workers, their discovery file and a dispatcher; all closed at the end."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self.file = folder / "workers.json"
        self.stack = stack
        self.registry = CollectorRegistry()
        self.addresses: dict[str, str] = {}

    def write_file(self) -> None:
        workers = [{"id": k, "address": v} for k, v in self.addresses.items()]
        temporary = self.file.with_suffix(".new")
        temporary.write_text(json.dumps({"workers": workers}))
        temporary.replace(self.file)

    async def worker(
        self,
        worker_id: str,
        role: pb.Role.ValueType = pb.ROLE_BOTH,
        script: Script | None = None,
        **info: object,
    ) -> FakeWorker:
        worker = FakeWorker(worker_id, role=role, script=script)
        for name, value in info.items():
            setattr(worker.info, name, value)
        await worker.start()
        self.stack.push_async_callback(worker.stop)
        self.addresses[worker_id] = worker.address
        self.write_file()
        return worker

    async def dispatcher(
        self,
        *,
        ready: int = 1,
        disaggregation: Disaggregation | None = None,
        queue_limit: int = 100,
        no_worker_timeout: float = 20.0,
        replay_timeout: float = 20.0,
    ) -> FleetDispatcher:
        config = RouterConfig(
            workers_file=self.file,
            disaggregation=disaggregation or Disaggregation(),
            queue_limit=queue_limit,
            no_worker_timeout=no_worker_timeout,
            replay_timeout=replay_timeout,
        )
        dispatcher = FleetDispatcher(config, self.registry)
        await dispatcher.start()
        self.stack.push_async_callback(dispatcher.close)
        await until(lambda: sum(w.state == "ready" for w in dispatcher.workers()) >= ready)
        return dispatcher

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"kvasir_router_{name}", labels)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """Nothing of the test's own making may be left on the loop when it ends."""
    before = asyncio.all_tasks()
    async with AsyncExitStack() as stack:
        yield Stage(tmp_path, stack)
    before.update(task for task in [asyncio.current_task()] if task is not None)
    await until(lambda: asyncio.all_tasks() <= before, seconds=2)


async def collect(
    dispatcher: Dispatcher,
    request: Generation,
    on_event: Callable[[list[GenerationEvent]], Awaitable[None]] | None = None,
) -> list[GenerationEvent]:
    events: list[GenerationEvent] = []
    async with aclosing(dispatcher.generate(request)) as stream:
        async for event in stream:
            events.append(event)
            if on_event is not None:
                await on_event(events)
    return events


def tokens(events: list[GenerationEvent]) -> list[int]:
    return [t for event in events if isinstance(event, TokenEvent) for t in event.token_ids]


def refusal(events: list[GenerationEvent]) -> Refused:
    last = events[-1]
    assert isinstance(last, Refused)
    return last


# --- the undisturbed way --------------------------------------------------------------------


async def test_streams_tokens_and_finish(stage: Stage) -> None:
    worker = await stage.worker("w0")
    dispatcher = await stage.dispatcher()
    events = await collect(dispatcher, generation())
    assert tokens(events) == expected_tokens(PROMPT, 5, 20)
    assert events[-1] == Finished(FinishReason.LENGTH)
    first = events[0]
    assert isinstance(first, TokenEvent)
    assert (first.cached_tokens, first.decode_worker, first.prefill_worker) == (0, "w0", None)
    assert worker.submits[0].request_id == "r1"
    assert worker.aborts == []
    assert stage.metric("generations_total", outcome="length") == 1
    assert stage.metric("generations_in_flight") == 0
    await until(lambda: stage.metric("worker_in_flight", worker="w0") == 0)


async def test_sampling_reaches_the_worker_and_logprobs_come_back(stage: Stage) -> None:
    worker = await stage.worker("w0")
    dispatcher = await stage.dispatcher()
    sampling = Sampling(
        seed=9,
        max_tokens=3,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        logit_bias={4: -1.5},
        stop_token_ids=(3,),
        logprobs=2,
        prompt_logprobs=1,
    )
    events = await collect(dispatcher, generation(sampling=sampling))
    sent = worker.submits[0].sampling
    assert (sent.temperature, sent.top_p, sent.top_k, sent.seed) == (0.5, 0.25, 7, 9)
    assert (dict(sent.logit_bias), list(sent.stop_token_ids)) == ({4: -1.5}, [3])
    first = events[0]
    assert isinstance(first, TokenEvent)
    assert len(first.prompt_logprobs) == len(PROMPT)
    assert first.prompt_logprobs[0] is None
    assert first.prompt_logprobs[1] is not None
    assert len(first.logprobs[0].top) == 2
    assert all(not e.prompt_logprobs for e in events[1:] if isinstance(e, TokenEvent))


async def test_stop_token_finishes_with_stop(stage: Stage) -> None:
    end = expected_tokens(PROMPT, 5, 4)[-1]
    await stage.worker("w0", script=Script(eos_token_id=end))
    dispatcher = await stage.dispatcher()
    events = await collect(dispatcher, generation())
    assert tokens(events) == expected_tokens(PROMPT, 5, 4)
    assert events[-1] == Finished(FinishReason.STOP)


async def test_model_tokenizer_and_status(stage: Stage) -> None:
    worker = await stage.worker("w0", script=Script(tokenizer_files={"a.json": b"x" * 3_000_000}))
    dispatcher = await stage.dispatcher()
    card = dispatcher.model()
    assert card is not None
    assert (card.name, card.block_size, card.max_model_len) == ("fake", BLOCK_SIZE, 4096)
    files = await asyncio.gather(*(dispatcher.tokenizer_files() for _ in range(3)))
    assert files == [{"a.json": b"x" * 3_000_000}] * 3
    assert worker.tokenizer_requests == 1
    status = dispatcher.workers()[0]
    assert (status.worker_id, status.role, status.state) == ("w0", "both", "ready")
    assert dispatcher.ready()


async def test_second_request_with_the_same_prefix_goes_to_the_same_worker(stage: Stage) -> None:
    workers = [await stage.worker(f"w{i}") for i in range(4)]
    dispatcher = await stage.dispatcher(ready=4)
    prompt = tuple(i % 900 for i in range(320))
    for i in range(4):
        events = await collect(dispatcher, generation(f"r{i}", prompt=(*prompt, i), max_tokens=2))
        first = events[0]
        assert isinstance(first, TokenEvent)
        assert first.cached_tokens == (320 if i else 0)
    assert sorted(len(w.submits) for w in workers) == [0, 0, 0, 4]


async def test_idle_workers_and_unique_prompts_use_all(stage: Stage) -> None:
    workers = [await stage.worker(f"w{i}") for i in range(4)]
    dispatcher = await stage.dispatcher(ready=4)
    for i in range(12):
        prompt = tuple((i * 37 + j) % 900 for j in range(64))
        await collect(dispatcher, generation(f"r{i}", prompt=prompt, max_tokens=2))
    assert min(len(w.submits) for w in workers) >= 2


async def test_sixty_four_at_once(stage: Stage) -> None:
    for i in range(3):
        await stage.worker(f"w{i}")
    dispatcher = await stage.dispatcher(ready=3)
    requests = [generation(f"r{i}", prompt=(i, i + 1, i + 2), seed=i) for i in range(64)]
    results = await asyncio.gather(*(collect(dispatcher, request) for request in requests))
    for i, events in enumerate(results):
        assert tokens(events) == expected_tokens((i, i + 1, i + 2), i, 20)


# --- losses ---------------------------------------------------------------------------------


async def test_kill_in_mid_stream_replays_on_another_worker(stage: Stage) -> None:
    scripts = [Script(step_seconds=0.005, die_after_tokens=8) for _ in range(2)]
    workers = [await stage.worker(f"w{i}", script=scripts[i]) for i in range(2)]
    dispatcher = await stage.dispatcher(ready=2)

    async def only_one_dies(events: list[GenerationEvent]) -> None:
        for worker in workers:
            if not worker.submits:
                worker.script.die_after_tokens = None

    events = await collect(dispatcher, generation(max_tokens=30), only_one_dies)
    assert tokens(events) == expected_tokens(PROMPT, 5, 30)
    assert events[-1] == Finished(FinishReason.LENGTH)
    assert sorted(worker.running for worker in workers) == [False, True]
    replay = next(w for w in workers if w.running).submits[0]
    assert len(replay.output_token_ids) >= 8
    assert list(replay.output_token_ids) == expected_tokens(PROMPT, 5, len(replay.output_token_ids))
    firsts = [e for e in events if isinstance(e, TokenEvent) and e.decode_worker]
    assert len(firsts) == 1
    assert stage.metric("replays_total") == 1


async def test_replay_waits_for_the_restarted_worker(stage: Stage) -> None:
    script = Script(step_seconds=0.005, die_after_tokens=5)
    worker = await stage.worker("w0", script=script)
    dispatcher = await stage.dispatcher()
    serving = asyncio.create_task(collect(dispatcher, generation(max_tokens=30)))
    await until(lambda: not worker.running)
    epoch = worker.info.epoch
    await asyncio.sleep(0.3)
    await worker.start()
    events = await serving
    assert worker.info.epoch != epoch
    assert tokens(events) == expected_tokens(PROMPT, 5, 30)
    assert events[-1] == Finished(FinishReason.LENGTH)


async def test_new_epoch_voids_the_prefix_index(stage: Stage) -> None:
    workers = [await stage.worker(f"w{i}") for i in range(2)]
    dispatcher = await stage.dispatcher(ready=2)
    prompt = tuple(i % 900 for i in range(320))
    await collect(dispatcher, generation("a", prompt=prompt, max_tokens=2))
    used = next(w for w in workers if w.submits)
    index = dispatcher._fleet.index
    chain = block_hashes(prompt, BLOCK_SIZE)
    await until(lambda: index.match(chain) == {used.info.worker_id: 20})
    await used.kill()
    await until(lambda: sum(w.state == "ready" for w in dispatcher.workers()) == 1)
    await used.start()
    await until(lambda: sum(w.state == "ready" for w in dispatcher.workers()) == 2)
    assert index.match(chain) == {}


async def test_replay_of_a_complete_answer_adds_nothing(stage: Stage) -> None:
    """Even a worker that parts the finish from the last token, and dies, makes no overrun."""
    script = Script(finish=FinishStyle.NEVER, die_after_tokens=6)
    worker = await stage.worker("w0", script=script)
    dispatcher = await stage.dispatcher()
    serving = asyncio.create_task(collect(dispatcher, generation(max_tokens=6)))
    await until(lambda: not worker.running)
    script.finish = FinishStyle.WITH_LAST_TOKEN
    await worker.start()
    events = await serving
    assert len(worker.submits[-1].output_token_ids) == 6
    assert tokens(events) == expected_tokens(PROMPT, 5, 6)
    assert events[-1] == Finished(FinishReason.LENGTH)


async def test_finish_in_a_message_of_its_own(stage: Stage) -> None:
    await stage.worker("w0", script=Script(finish=FinishStyle.ALONE))
    dispatcher = await stage.dispatcher()
    events = await collect(dispatcher, generation())
    assert tokens(events) == expected_tokens(PROMPT, 5, 20)
    assert events[-1] == Finished(FinishReason.LENGTH)


async def test_a_request_that_kills_every_worker_ends_in_an_error(stage: Stage) -> None:
    worker = await stage.worker("w0")

    def die(submit: pb.Submit) -> Refusal | None:
        worker.tokens_given = 0
        worker.script.die_after_tokens = 0
        return None

    worker.script.refuse = die
    worker.script.first_token_gate = asyncio.Event()
    dispatcher = await stage.dispatcher()
    serving = asyncio.create_task(collect(dispatcher, generation()))
    while not serving.done():
        await asyncio.sleep(0.02)
        if not worker.running:
            await worker.start()
    events = await serving
    assert refusal(events).refusal.reason is Reason.INTERNAL
    assert len(worker.submits) == 4


async def test_no_replay_in_time_is_an_error_not_a_finish(stage: Stage) -> None:
    await stage.worker("w0", script=Script(step_seconds=0.005, die_after_tokens=5))
    dispatcher = await stage.dispatcher(replay_timeout=0.5)
    events = await collect(dispatcher, generation(max_tokens=30))
    assert len(tokens(events)) >= 5
    assert refusal(events).refusal.reason is Reason.NO_CAPACITY
    assert refusal(events).retry_after is not None


async def test_replay_keeps_to_the_same_weights(stage: Stage) -> None:
    script = Script(step_seconds=0.005, die_after_tokens=5)
    await stage.worker("w0", script=script)
    dispatcher = await stage.dispatcher(replay_timeout=1.5)
    other = FakeWorker("w1")
    other.info.layout.model_fingerprint = "other weights"
    await other.start()
    stage.stack.push_async_callback(other.stop)
    serving = asyncio.create_task(collect(dispatcher, generation(max_tokens=30)))
    await asyncio.sleep(0.02)
    stage.addresses["w1"] = other.address
    stage.write_file()
    events = await serving
    assert refusal(events).refusal.reason is Reason.NO_CAPACITY
    assert other.submits == []


async def test_frozen_process_is_noticed_and_replayed(stage: Stage) -> None:
    """SIGSTOP: TCP stays open, nothing answers; pings find it out."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "helpers.fake_worker", "--id", "frozen", "--step-seconds", "0.02"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    try:
        assert process.stdout is not None
        stage.addresses["frozen"] = (await process.stdout.readline()).decode().strip()
        stage.write_file()
        dispatcher = await stage.dispatcher()
        helper = FakeWorker("helper")
        await helper.start()
        stage.stack.push_async_callback(helper.stop)

        async def freeze(events: list[GenerationEvent]) -> None:
            if len(events) == 5:
                process.send_signal(signal.SIGSTOP)
                stage.addresses["helper"] = helper.address
                stage.write_file()

        began = time.monotonic()
        events = await collect(dispatcher, generation(max_tokens=200), freeze)
        assert tokens(events) == expected_tokens(PROMPT, 5, 200)
        assert events[-1] == Finished(FinishReason.LENGTH)
        assert len(helper.submits) == 1
        assert time.monotonic() - began < 60
    finally:
        process.kill()
        await process.wait()


async def test_silent_worker_is_not_chosen(stage: Stage) -> None:
    worker = await stage.worker("w0")
    dispatcher = await stage.dispatcher()
    worker.frozen = True
    await until(lambda: not dispatcher.ready())
    assert dispatcher.workers()[0].state == "lost"
    worker.frozen = False
    await until(dispatcher.ready)
    assert tokens(await collect(dispatcher, generation())) == expected_tokens(PROMPT, 5, 20)


# --- KV events ------------------------------------------------------------------------------


async def test_gap_in_events_makes_one_resync(stage: Stage) -> None:
    worker = await stage.worker("w0")
    dispatcher = await stage.dispatcher()
    index = dispatcher._fleet.index
    await until(lambda: worker.snapshot_requests == 1)
    chain = [bytes([i]) * 32 for i in range(6)]
    worker.store(chain[:2])
    await until(lambda: index.match(chain) == {"w0": 2})
    worker.cache.update(dict.fromkeys(chain[2:4]))
    worker.lose_event()
    worker.store(chain[4:5])
    worker.store(chain[5:6])
    await until(lambda: index.match(chain) == {"w0": 6})
    assert worker.snapshot_requests == 2
    assert stage.metric("resyncs_total", worker="w0") == 1
    worker.clear()
    await until(lambda: index.match(chain) == {})


async def test_speculation_lasts_as_long_as_the_prompt_waits(stage: Stage) -> None:
    gate = asyncio.Event()
    await stage.worker("w0", script=Script(first_token_gate=gate))
    dispatcher = await stage.dispatcher()
    index = dispatcher._fleet.index
    chain = block_hashes(PROMPT, BLOCK_SIZE)
    serving = asyncio.create_task(collect(dispatcher, generation()))
    await asyncio.sleep(SPECULATION_SECONDS + 1)
    assert index.match(chain) == {"w0": len(chain)}
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    await until(lambda: index.match(chain) == {})


# --- refusals -------------------------------------------------------------------------------


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


async def test_a_replay_outlasts_a_full_queue(stage: Stage) -> None:
    dying = await stage.worker("w0", script=Script(step_seconds=0.005, die_after_tokens=5))
    dispatcher = await stage.dispatcher()
    full = FakeWorker("w1", script=Script(refuse=always(Reason.QUEUE_FULL)))
    await full.start()
    stage.stack.push_async_callback(full.stop)
    serving = asyncio.create_task(collect(dispatcher, generation(max_tokens=30)))
    await until(lambda: not dying.running)
    stage.addresses["w1"] = full.address
    stage.write_file()
    await until(lambda: len(full.submits) >= 2)
    full.script.refuse = lambda _: None
    assert tokens(await serving) == expected_tokens(PROMPT, 5, 30)


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


# --- limits ---------------------------------------------------------------------------------


async def test_no_worker_in_time(stage: Stage) -> None:
    dispatcher = await stage.dispatcher(ready=0, no_worker_timeout=0.3)
    assert not dispatcher.ready()
    assert dispatcher.model() is None
    assert await dispatcher.tokenizer_files() is None
    events = await collect(dispatcher, generation())
    assert refusal(events).refusal.reason is Reason.NO_CAPACITY
    assert refusal(events).retry_after is not None


async def test_waits_for_the_first_worker(stage: Stage) -> None:
    dispatcher = await stage.dispatcher(ready=0)
    serving = asyncio.create_task(collect(dispatcher, generation()))
    await asyncio.sleep(0.2)
    await stage.worker("w0")
    assert tokens(await serving) == expected_tokens(PROMPT, 5, 20)


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


async def test_deadline_while_running_aborts_on_the_worker(stage: Stage) -> None:
    worker = await stage.worker("w0", script=Script(step_seconds=0.02))
    dispatcher = await stage.dispatcher()
    events = await collect(dispatcher, generation(max_tokens=4000, deadline=time.time() + 0.5))
    assert tokens(events)
    assert refusal(events).refusal.reason is Reason.DEADLINE_EXCEEDED
    await until(lambda: worker.aborts == ["r1"])


async def test_deadline_while_waiting_for_a_worker(stage: Stage) -> None:
    dispatcher = await stage.dispatcher(ready=0)
    events = await collect(dispatcher, generation(deadline=time.time() + 0.3))
    assert refusal(events).refusal.reason is Reason.DEADLINE_EXCEEDED


# --- leaving --------------------------------------------------------------------------------


async def test_closing_early_aborts(stage: Stage) -> None:
    worker = await stage.worker("w0", script=Script(step_seconds=0.01))
    dispatcher = await stage.dispatcher()
    async with aclosing(dispatcher.generate(generation(max_tokens=4000))) as stream:
        async for event in stream:
            assert isinstance(event, TokenEvent)
            break
    await until(lambda: worker.aborts == ["r1"])
    await until(lambda: not worker.live)
    assert stage.metric("generations_total", outcome="client_gone") == 1
    await until(lambda: stage.metric("worker_in_flight", worker="w0") == 0)


async def test_cancelling_while_queued_aborts(stage: Stage) -> None:
    worker = await stage.worker("w0", script=Script(first_token_gate=asyncio.Event()))
    dispatcher = await stage.dispatcher()
    serving = asyncio.create_task(collect(dispatcher, generation()))
    await until(lambda: len(worker.live) == 1)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    await until(lambda: worker.aborts == ["r1"])


async def test_worker_that_leaves_the_list_finishes_but_gets_nothing_new(stage: Stage) -> None:
    leaving = await stage.worker("w0", script=Script(step_seconds=0.01))
    dispatcher = await stage.dispatcher()
    serving = asyncio.create_task(collect(dispatcher, generation(max_tokens=100)))
    await until(lambda: leaving.tokens_given > 3)
    del stage.addresses["w0"]
    stayed = await stage.worker("w1")
    await until(lambda: [w.worker_id for w in dispatcher.workers()] == ["w1"])
    await until(dispatcher.ready)
    await collect(dispatcher, generation("r2"))
    assert tokens(await serving) == expected_tokens(PROMPT, 5, 100)
    assert [s.request_id for s in leaving.submits] == ["r1"]
    assert [s.request_id for s in stayed.submits] == ["r2"]
    assert stage.metric("worker_in_flight", worker="w0") is None
    assert stage.metric("resyncs_total", worker="w0") is None


async def test_a_worker_with_another_name_at_the_address_is_refused(stage: Stage) -> None:
    worker = await stage.worker("w0")
    stage.addresses = {"w9": worker.address}
    stage.write_file()
    dispatcher = await stage.dispatcher(ready=0)
    await asyncio.sleep(0.5)
    assert not dispatcher.ready()
    assert dispatcher.workers()[0].state == "connecting"


async def test_worker_with_another_model_is_not_used(stage: Stage) -> None:
    await stage.worker("w0")
    dispatcher = await stage.dispatcher()
    other = await stage.worker("w1", model="other")
    await until(lambda: sum(w.state == "ready" for w in dispatcher.workers()) == 2)
    for i in range(6):
        await collect(dispatcher, generation(f"r{i}", prompt=(i, 2), max_tokens=2))
    assert other.submits == []


# --- disaggregation -------------------------------------------------------------------------

LONG = tuple(i % 900 for i in range(200))


async def test_long_prompts_name_a_prefill_worker(stage: Stage) -> None:
    prefill = await stage.worker("p0", role=pb.ROLE_PREFILL)
    decode = await stage.worker("d0", role=pb.ROLE_DECODE)
    dispatcher = await stage.dispatcher(ready=2)
    events = await collect(dispatcher, generation("long", prompt=LONG, max_tokens=3))
    first = events[0]
    assert isinstance(first, TokenEvent)
    assert (first.decode_worker, first.prefill_worker) == ("d0", "p0")
    peer = decode.submits[0].prefill
    assert (peer.worker_id, peer.address) == ("p0", prefill.address)
    assert peer.epoch == prefill.info.epoch
    await collect(dispatcher, generation("short", max_tokens=3))
    assert not decode.submits[1].HasField("prefill")
    await collect(dispatcher, generation("again", prompt=LONG, max_tokens=3))
    assert not decode.submits[2].HasField("prefill")
    assert prefill.submits == []
    assert stage.metric("disaggregated_total", decision="remote") == 1
    assert stage.metric("disaggregated_total", decision="local_cached") == 2


async def test_no_prefill_worker_of_another_revision(stage: Stage) -> None:
    await stage.worker("p0", role=pb.ROLE_PREFILL, revision="2")
    decode = await stage.worker("d0", role=pb.ROLE_DECODE)
    dispatcher = await stage.dispatcher(ready=2)
    await collect(dispatcher, generation(prompt=LONG, max_tokens=3))
    assert not decode.submits[0].HasField("prefill")
    assert stage.metric("disaggregated_total", decision="local_no_worker") == 1


async def test_never_and_always(stage: Stage) -> None:
    await stage.worker("p0", role=pb.ROLE_PREFILL)
    decode = await stage.worker("d0", role=pb.ROLE_DECODE)
    always_on = await stage.dispatcher(ready=2, disaggregation=Disaggregation(mode="always"))
    await collect(always_on, generation("a", max_tokens=2))
    assert decode.submits[0].HasField("prefill")
    stage.registry = CollectorRegistry()
    off = await stage.dispatcher(ready=2, disaggregation=Disaggregation(mode="never"))
    await collect(off, generation("b", prompt=LONG, max_tokens=2))
    assert not decode.submits[1].HasField("prefill")


async def test_prompt_logprobs_are_computed_where_they_are_reported(stage: Stage) -> None:
    await stage.worker("p0", role=pb.ROLE_PREFILL)
    decode = await stage.worker("d0", role=pb.ROLE_DECODE)
    dispatcher = await stage.dispatcher(ready=2)
    sampling = Sampling(seed=1, max_tokens=2, prompt_logprobs=0)
    await collect(dispatcher, generation(prompt=LONG, sampling=sampling))
    assert not decode.submits[0].HasField("prefill")


async def test_broken_transfer_opens_the_prefill_workers_breaker(stage: Stage) -> None:
    await stage.worker("p0", role=pb.ROLE_PREFILL)
    script = Script(prefill_outcome=pb.PREFILL_OUTCOME_RECOMPUTED)
    decode = await stage.worker("d0", role=pb.ROLE_DECODE, script=script)
    dispatcher = await stage.dispatcher(ready=2)
    events = await collect(dispatcher, generation("a", prompt=LONG, max_tokens=2))
    first = events[0]
    assert isinstance(first, TokenEvent)
    assert first.prefill_worker is None
    other = tuple(reversed(LONG))
    await collect(dispatcher, generation("b", prompt=other, max_tokens=2))
    assert [s.HasField("prefill") for s in decode.submits] == [True, False]
