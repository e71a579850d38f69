"""How a worker drains: what it refuses, what it finishes, and when it ends."""

import asyncio

import grpc

from helpers.local_worker import (
    LocalWorker,
    RouterSession,
    eventually,
    local_worker,
    make_submit,
    router_session,
    token_ids,
)
from helpers.recorders import Recorder
from helpers.worker_service import PROMPT, GatedRunner, SlowRunner, expected
from kvasir.proto.sampling import SamplingParams
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.worker.contracts import Request, Work

# --- drain -----------------------------------------------------------------------------------


async def test_drain_refuses_new_and_finishes_accepted(
    worker: LocalWorker, session: RouterSession
) -> None:
    await session.send(submit=make_submit("before", PROMPT, max_tokens=200))
    await session.until(lambda: "before" in session.outputs)
    status = await worker.stub.Drain(pb.DrainRequest())
    assert status.draining
    await session.until(lambda: session.loads[-1].draining)
    await session.send(submit=make_submit("after", PROMPT))
    refused = await session.finished("after")
    assert refused[-1].refusal.reason == pb.REFUSAL_REASON_DRAINING
    assert token_ids(await session.finished("before")) == expected(PROMPT, 200)
    status = await worker.stub.Undrain(pb.UndrainRequest())
    assert not status.draining
    await session.send(submit=make_submit("again", PROMPT))
    assert token_ids(await session.finished("again")) == expected(PROMPT)


async def test_a_terminating_worker_delivers_all_before_it_stops() -> None:
    runner = SlowRunner()
    async with (
        local_worker(worker_id="slow", runner=runner) as worker,
        router_session(worker.stub) as session,
    ):
        await session.send(submit=make_submit("r", PROMPT, max_tokens=50))
        await session.until(lambda: "r" in session.outputs)
        await worker.server.drain(30)
        assert (await worker.stub.Undrain(pb.UndrainRequest())).draining
        await worker.server.stop()
        assert token_ids(await session.finished("r")) == expected(PROMPT, 50)
        assert await session.call.code() is grpc.StatusCode.OK


async def test_a_drain_ends_at_its_deadline() -> None:
    async with (
        local_worker(worker_id="slow", runner=SlowRunner()) as worker,
        router_session(worker.stub) as session,
    ):
        await session.send(submit=make_submit("r", PROMPT, max_tokens=340))
        await session.until(lambda: "r" in session.outputs)
        await worker.server.drain(0.05)
        assert worker.server.engine.load().running == 1


async def test_a_request_counts_from_its_acceptance_to_the_end_of_its_hold() -> None:
    """An operator that sees nothing running or waiting may end this worker."""
    runner = GatedRunner()
    async with local_worker(runner=runner) as worker, router_session(worker.stub) as session:

        async def seen() -> tuple[int, float]:
            status = await worker.stub.Drain(pb.DrainRequest())
            shown = sum(
                worker.metric(f"vllm:num_requests_{state}", model_name="smollm2")
                for state in ("running", "waiting")
            )
            return status.running + status.waiting, shown

        hold = Recorder()
        request = Request("lent", tuple(PROMPT), SamplingParams(max_tokens=1), work=Work.PREFILL)
        assert worker.server.engine.submit(request, hold) is None
        await session.send(submit=make_submit("r", PROMPT))
        await eventually(lambda: worker.server.engine.load().waiting == 2)
        assert await seen() == (2, 2)
        assert worker.metric("kvasir_worker_queued_prefill_tokens", model_name="smollm2") == 100
        runner.gate.set()
        await session.finished("r")
        await asyncio.to_thread(hold.wait_finished, "lent")
        await eventually(lambda: worker.server.engine.load().running == 1)
        assert await seen() == (1, 1)
        worker.server.engine.release("lent")
        await worker.settled()
        assert await seen() == (0, 0)
