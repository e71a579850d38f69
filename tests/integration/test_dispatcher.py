"""The dispatcher on real gRPC servers on loopback, undisturbed; and clients that leave."""

import asyncio
from contextlib import aclosing

import pytest

from helpers.dispatcher_stage import PROMPT, Stage, collect, generation, tokens, until
from helpers.fake_script import BLOCK_SIZE, Script, expected_tokens
from kvasir.proto.sampling import SamplingParams
from kvasir.router.contracts import Finished, FinishReason, TokenEvent


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
    assert stage.metric("generations_in_flight") == 0
    await until(lambda: stage.metric("worker_in_flight", worker="w0") == 0)


async def test_sampling_reaches_the_worker_and_logprobs_come_back(stage: Stage) -> None:
    worker = await stage.worker("w0")
    dispatcher = await stage.dispatcher()
    sampling = SamplingParams(
        seed=9,
        max_tokens=3,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        logit_bias={4: -1.5},
        stop_token_ids=frozenset({3}),
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


# --- leaving -------------------------------------------------------------------------------


async def test_closing_early_aborts(stage: Stage) -> None:
    worker = await stage.worker("w0", script=Script(step_seconds=0.01))
    dispatcher = await stage.dispatcher()
    async with aclosing(dispatcher.generate(generation(max_tokens=4000))) as stream:
        async for event in stream:
            assert isinstance(event, TokenEvent)
            break
    await until(lambda: worker.aborts == ["r1"])
    await until(lambda: not worker.live)
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
    await until(lambda: len(dispatcher.workers()) == 2)
    await until(lambda: dispatcher.workers()[1].state == "incompatible")
    for i in range(6):
        await collect(dispatcher, generation(f"r{i}", prompt=(i, 2), max_tokens=2))
    assert other.submits == []
