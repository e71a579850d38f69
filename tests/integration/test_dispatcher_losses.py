"""Workers that die or fall silent in the middle: each token reaches the caller once."""

import asyncio
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.dispatcher_stage import PROMPT, Stage, collect, generation, refusal, tokens, until
from helpers.fake_script import BLOCK_SIZE, FinishStyle, Script, expected_tokens
from helpers.fake_worker import FakeWorker
from kvasir.proto.blocks import block_hashes
from kvasir.proto.errors import Reason, Refusal
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.router.config import Disaggregation
from kvasir.router.contracts import Finished, FinishReason, GenerationEvent, TokenEvent


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
    assert "4 workers were lost" in refusal(events).refusal.message
    assert len(worker.submits) == 4


async def test_what_was_beside_a_request_that_ends_its_workers_is_served(stage: Stage) -> None:
    """Six workers are left when it is a suspect: two for it, one for each of the others."""
    gate = asyncio.Event()
    workers = [await stage.worker(f"w{i}", script=Script(first_token_gate=gate)) for i in range(8)]
    kills: list[asyncio.Task[None]] = []

    def dies_of_poison(worker: FakeWorker) -> Callable[[pb.Submit], Refusal | None]:
        def accept(submit: pb.Submit) -> Refusal | None:
            if submit.request_id.startswith("poison"):
                kills.append(asyncio.create_task(worker.kill()))
            return None

        return accept

    for worker in workers:
        worker.script.refuse = dies_of_poison(worker)
    dispatcher = await stage.dispatcher(ready=8)
    others = [asyncio.create_task(collect(dispatcher, generation(f"r{i}"))) for i in range(4)]
    await until(lambda: sum(len(worker.live) for worker in workers) == 4)
    events = await collect(dispatcher, generation("poison"))
    await asyncio.gather(*kills)
    assert refusal(events).refusal.reason is Reason.INTERNAL
    assert sum(worker.running for worker in workers) == 4
    gate.set()
    for other in others:
        assert tokens(await other) == expected_tokens(PROMPT, 5, 20)


async def test_suspects_are_served_one_at_a_time(stage: Stage) -> None:
    gate = asyncio.Event()
    worker = await stage.worker("w0", script=Script(first_token_gate=gate))
    prefill = await stage.worker("p0", role=pb.ROLE_PREFILL)
    always = Disaggregation(mode="always")
    dispatcher = await stage.dispatcher(ready=2, disaggregation=always, replay_timeout=1.0)
    serving = [asyncio.create_task(collect(dispatcher, generation(f"r{i}"))) for i in range(3)]
    for losses in range(2):
        await until(lambda: len(worker.live) == 3)
        assert {s.prefill.worker_id for s in worker.submits[3 * losses :]} == {"p0"}
        await worker.kill()
        await worker.start()
    await until(lambda: len(worker.live) == 1)
    await asyncio.sleep(1.5)  # longer than a replay may wait for a worker
    assert len(worker.live) == 1
    gate.set()
    for other in serving:
        assert tokens(await other) == expected_tokens(PROMPT, 5, 20)
    assert [s.HasField("prefill") for s in worker.submits[6:]] == [False] * 3
    assert prefill.running
    assert dispatcher._fleet.quarantined == set()


async def test_the_loss_of_a_worker_that_was_leaving_counts_nothing(stage: Stage) -> None:
    gate = asyncio.Event()
    worker = await stage.worker("w0", script=Script(first_token_gate=gate))
    dispatcher = await stage.dispatcher()
    serving = asyncio.create_task(collect(dispatcher, generation()))
    for _ in range(5):
        await until(lambda: len(worker.live) == 1)
        worker.info.draining = True
        worker.report()
        await until(lambda: dispatcher.workers()[0].state == "draining")
        await worker.kill()
        worker.info.draining = False
        await worker.start()
    gate.set()
    assert tokens(await serving) == expected_tokens(PROMPT, 5, 20)


async def test_no_replay_in_time_is_an_error_not_a_finish(stage: Stage) -> None:
    await stage.worker("w0", script=Script(step_seconds=0.005, die_after_tokens=5))
    dispatcher = await stage.dispatcher(replay_timeout=0.5)
    events = await collect(dispatcher, generation(max_tokens=30))
    assert len(tokens(events)) >= 5
    assert refusal(events).refusal.reason is Reason.NO_CAPACITY
    assert refusal(events).retry_after is not None


async def test_replay_keeps_to_the_same_weights(stage: Stage) -> None:
    dying = await stage.worker("w0", script=Script(step_seconds=0.005))
    dispatcher = await stage.dispatcher(replay_timeout=1.5)
    serving = asyncio.create_task(collect(dispatcher, generation(max_tokens=4000)))
    await until(lambda: dying.tokens_given > 0)
    other = FakeWorker("w1")
    other.info.layout.model_fingerprint = "other weights"
    await other.start()
    stage.stack.push_async_callback(other.stop)
    stage.addresses["w1"] = other.address
    stage.write_file()
    await until(lambda: sum(w.state == "ready" for w in dispatcher.workers()) == 2)
    dying.script.die_after_tokens = 1
    events = await serving
    assert refusal(events).refusal.reason is Reason.NO_CAPACITY
    assert dispatcher.ready()
    assert other.submits == []


async def test_a_session_that_cannot_send_is_opened_again(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect on the sending side alone: what ran is replayed, and later ones are served."""
    stream_call = importlib.import_module("grpc.aio._call").StreamStreamCall
    write = stream_call.write
    defects = ["r2"]

    async def fail_once(call: object, message: pb.RouterMessage) -> None:
        if message.submit.request_id in defects:
            defects.clear()
            raise ValueError("cannot be sent")
        await write(call, message)

    monkeypatch.setattr(stream_call, "write", fail_once)
    worker = await stage.worker("w0", script=Script(step_seconds=0.01))
    dispatcher = await stage.dispatcher()
    running = asyncio.create_task(collect(dispatcher, generation(max_tokens=200)))
    await until(lambda: worker.tokens_given > 0)
    async with asyncio.timeout(30):
        events = await collect(dispatcher, generation("r2"))
    assert tokens(events) == expected_tokens(PROMPT, 5, 20)
    assert tokens(await running) == expected_tokens(PROMPT, 5, 200)
    (crash,) = [r for r in caplog.records if r.name == "kvasir.router" and r.exc_info]
    assert "task=write-w0" in crash.getMessage()


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
