"""Where generations go: KV events, disaggregation."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from helpers.dispatcher_stage import PROMPT, Stage, collect, generation, until
from helpers.fake_script import BLOCK_SIZE, Script
from kvasir.proto.blocks import block_hashes
from kvasir.proto.sampling import SamplingParams
from kvasir.proto.v1 import engine_pb2 as pb
from kvasir.router.config import Disaggregation
from kvasir.router.contracts import Finished, TokenEvent
from kvasir.router.speculation import SPECULATION_SECONDS


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


async def test_a_worker_with_another_model_is_told_apart_until_it_takes_over(stage: Stage) -> None:
    old = await stage.worker("old")
    dispatcher = await stage.dispatcher()
    other = await stage.worker("new", model="other")
    await until(lambda: [w.state for w in dispatcher.workers()] == ["ready", "incompatible"])
    assert dispatcher.workers()[1].reason == (
        f"has model 'other'; this router serves {old.info.model!r}"
    )
    await until(lambda: stage.metric("workers", state="incompatible") == 1)
    assert stage.metric("workers", state="ready") == 1
    await collect(dispatcher, generation("a"))
    assert (len(old.submits), len(other.submits)) == (1, 0)
    del stage.addresses["old"]
    stage.write_file()
    await until(lambda: [w.state for w in dispatcher.workers()] == ["ready"])
    assert dispatcher.workers()[0].reason == ""
    await collect(dispatcher, generation("b"))
    assert (len(old.submits), len(other.submits)) == (1, 1)


# --- disaggregation ------------------------------------------------------------------------


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
    sampling = SamplingParams(seed=1, max_tokens=2, prompt_logprobs=0)
    await collect(dispatcher, generation(prompt=LONG, sampling=sampling))
    assert not decode.submits[0].HasField("prefill")


@pytest.mark.parametrize("peer_fault", [True, False])
async def test_a_broken_transfer_opens_the_breaker_of_a_prefill_worker_at_fault(
    stage: Stage, peer_fault: bool
) -> None:
    await stage.worker("p0", role=pb.ROLE_PREFILL)
    script = Script(prefill_outcome=pb.PREFILL_OUTCOME_RECOMPUTED, peer_fault=peer_fault)
    decode = await stage.worker("d0", role=pb.ROLE_DECODE, script=script)
    dispatcher = await stage.dispatcher(ready=2)
    events = await collect(dispatcher, generation("a", prompt=LONG, max_tokens=2))
    first = events[0]
    assert isinstance(first, TokenEvent)
    assert first.prefill_worker is None
    other = tuple(reversed(LONG))
    await collect(dispatcher, generation("b", prompt=other, max_tokens=2))
    assert [s.HasField("prefill") for s in decode.submits] == [True, not peer_fault]


# --- groups --------------------------------------------------------------------------------


async def test_siblings_follow_each_other_and_leave_a_worker_that_refuses(stage: Stage) -> None:
    gate = asyncio.Event()
    workers = [await stage.worker(f"w{i}", script=Script(first_token_gate=gate)) for i in range(3)]
    dispatcher = await stage.dispatcher(ready=3)
    # Not a block long, so that no prefix draws them together.
    short = PROMPT[: BLOCK_SIZE - 1]
    serving = [
        asyncio.create_task(
            collect(dispatcher, generation(f"g-{i}", prompt=short, max_tokens=2, group="g"))
        )
        for i in range(6)
    ]
    await until(lambda: sum(len(worker.submits) for worker in workers) == 6)
    assert sorted(len(worker.submits) for worker in workers) == [0, 0, 6]
    assert {submit.group for worker in workers for submit in worker.submits} == {"g"}
    home = next(worker for worker in workers if worker.submits)
    await home.stop()
    gate.set()
    answers = await asyncio.gather(*serving)
    assert all(isinstance(events[-1], Finished) for events in answers)
    replayed = [len(worker.submits) for worker in workers if worker is not home]
    assert sorted(replayed) == [0, 6], "they move together"
    assert dispatcher._placer._homes == {}
