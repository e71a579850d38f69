"""The engine with its real thread, a fake runner, and calls from other threads."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.engine_rig import Rig, expected, rigs
from helpers.engine_workload import BLOCK_SIZE, make_request
from helpers.recorders import WAIT_SECONDS, Recorder
from kvasir.proto.blocks import block_hashes
from kvasir.proto.errors import Reason
from kvasir.worker.contracts import Finish, Request, Work


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    with rigs() as make:
        yield make


def test_requests_from_many_threads_all_get_their_answers(make_rig: Callable[..., Rig]) -> None:
    rig, sink = make_rig(num_blocks=20, max_running_requests=8), Recorder()
    requests = [make_request(f"r{i}", [i % 3] * (5 + i % 9), 3 + i % 11) for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda request: rig.engine.submit(request, sink), requests)) == {None}
    sink.wait_finished(*(request.request_id for request in requests))
    for request in requests:
        assert sink.tokens(request.request_id) == expected(request)
    rig.settle()
    assert rig.listener.known == set(rig.snapshot().result(WAIT_SECONDS)[1])


def test_one_delivery_for_each_step_and_sink(make_rig: Callable[..., Rig]) -> None:
    rig, one, two = make_rig(), Recorder(), Recorder()
    rig.runner.gate.clear()
    rig.submit(make_request("first", range(3), 1), one)
    assert rig.runner.entered.wait(WAIT_SECONDS)
    for request_id, sink in (("a", one), ("b", two), ("c", one)):
        rig.submit(make_request(request_id, range(3), 2), sink)
    rig.runner.gate.set()
    one.wait_finished("a", "c")
    two.wait_finished("b")
    ids = [[output.request_id for output in batch] for batch in one.batches]
    assert ids == [["first"], ["a", "c"], ["a", "c"]]
    assert [len(batch) for batch in two.batches] == [1, 1]


def test_submitting_does_not_wait_for_a_step(make_rig: Callable[..., Rig]) -> None:
    rig, sink = make_rig(), Recorder()
    rig.runner.gate.clear()
    rig.submit(make_request("a", range(3), 1), sink)
    assert rig.runner.entered.wait(WAIT_SECONDS)
    rig.submit(make_request("b", range(3), 1), sink)  # returns although the step never ends
    assert sink.batches == []
    rig.runner.gate.set()
    sink.wait_finished("a", "b")


def test_refusals(make_rig: Callable[..., Rig]) -> None:
    rig, sink = make_rig(num_blocks=8, max_waiting_requests=2, max_running_requests=1), Recorder()
    rig.runner.gate.clear()
    rig.submit(make_request("a", range(3), 1), sink)
    assert rig.runner.entered.wait(WAIT_SECONDS)

    def reason(request: Request) -> Reason | None:
        refusal = rig.engine.submit(request, sink)
        return None if refusal is None else refusal.reason

    assert reason(make_request("a", range(3), 1)) is Reason.INVALID_REQUEST
    assert reason(make_request("x", range(500), 1)) is Reason.CONTEXT_LENGTH_EXCEEDED
    assert reason(make_request("x", range(30), 9)) is Reason.CONTEXT_LENGTH_EXCEEDED
    # "a" counts as waiting until the step that it is in has been told of.
    assert reason(make_request("b", range(3), 1)) is None
    assert reason(make_request("c", range(3), 1)) is Reason.QUEUE_FULL
    rig.engine.set_draining(True)
    assert reason(make_request("d", range(3), 1)) is Reason.DRAINING
    rig.runner.gate.set()
    sink.wait_finished("a", "b")
    rig.settle()
    assert reason(make_request("e", range(3), 1)) is Reason.DRAINING
    rig.engine.set_draining(False)
    assert reason(make_request("a", range(3), 1)) is None, "a finished id is free again"
    sink.wait(lambda: len(sink.outputs("a")) == 2)


@pytest.mark.parametrize("work", list(Work))
def test_the_load_tells_of_a_request_from_its_acceptance_on(
    make_rig: Callable[..., Rig], work: Work
) -> None:
    rig, sink = make_rig(), Recorder()
    rig.runner.gate.clear()
    rig.submit(make_request("busy", range(3), 9), sink)
    assert rig.runner.entered.wait(WAIT_SECONDS)
    assert (rig.engine.load().running, rig.engine.load().waiting) == (0, 1)
    rig.submit(make_request("a", range(7), 9, output_ids=(5,), work=work), sink)
    load = rig.engine.load()
    assert (load.running, load.waiting, load.queued_prefill_tokens) == (0, 2, 3 + 8)
    rig.runner.gate.set()
    sink.wait_finished("busy")
    rig.engine.abort("a")
    rig.settle()
    assert any((load.running, load.waiting) == (2, 0) for load in rig.listener.loads)


def test_the_time_with_work_is_counted_also_within_a_step(make_rig: Callable[..., Rig]) -> None:
    rig, sink = make_rig(), Recorder()
    rig.seconds = 5.0
    assert (rig.engine.load().busy_seconds, rig.engine.turn_seconds) == (0.0, 0.0)
    rig.runner.gate.clear()
    rig.submit(make_request("a", range(3), 1), sink)
    assert rig.runner.entered.wait(WAIT_SECONDS)
    rig.seconds = 7.0
    assert (rig.engine.load().busy_seconds, rig.engine.turn_seconds) == (2.0, 2.0)
    rig.runner.gate.set()
    sink.wait_finished("a")
    rig.settle()
    assert rig.snapshot().result(WAIT_SECONDS) is not None
    rig.engine.stop()
    rig.seconds = 9.0
    assert (rig.engine.load().busy_seconds, rig.engine.turn_seconds) == (2.0, 0.0)


@pytest.mark.parametrize("work", list(Work))
def test_an_abort_in_the_middle_frees_everything(make_rig: Callable[..., Rig], work: Work) -> None:
    rig, sink = make_rig(max_batched_tokens=4), Recorder()
    rig.runner.gate.clear()
    rig.engine.abort("a")
    rig.submit(make_request("a", range(10), 100, work=work), sink)
    if work is Work.RECEIVE:
        sink.wait(lambda: bool(sink.reservations))
    else:
        assert rig.runner.entered.wait(WAIT_SECONDS)
    rig.engine.abort("a")
    rig.engine.abort("a")
    rig.runner.gate.set()
    sink.wait_finished("a")
    assert [output.finish for output in sink.outputs("a")] == [Finish.ABORTED]
    rig.settle()
    rig.submit(make_request("a", range(10), 1), sink)
    sink.wait(lambda: len(sink.tokens("a")) == 1)


def test_releasing_a_hold_frees_its_id_and_blocks(make_rig: Callable[..., Rig]) -> None:
    rig, sink = make_rig(), Recorder()
    for _ in range(2):
        rig.submit(make_request("p", range(10), work=Work.PREFILL), sink)
        sink.wait_finished("p")
        rig.listener.wait_load(lambda load: load.kv_blocks_used == 3)
        refusal = rig.engine.submit(make_request("p", range(10)), sink)
        assert refusal is not None
        assert "still being served" in refusal.message
        rig.engine.release("p")
        rig.listener.wait_load(lambda load: load.kv_blocks_used == 0)
        sink.batches.clear()


def test_an_abort_sent_before_the_submit_does_not_touch_it(make_rig: Callable[..., Rig]) -> None:
    rig, sink = make_rig(), Recorder()
    rig.runner.gate.clear()
    rig.submit(make_request("a", range(3), 1), sink)
    assert rig.runner.entered.wait(WAIT_SECONDS)
    rig.engine.abort("b")
    rig.submit(make_request("b", range(3), 2), sink)
    rig.runner.gate.set()
    sink.wait_finished("a", "b")
    assert sink.finish("b") is Finish.LENGTH


def test_kv_events_are_numbered_and_a_snapshot_fits_them(make_rig: Callable[..., Rig]) -> None:
    rig, sink = make_rig(), Recorder()
    assert rig.snapshot().result(WAIT_SECONDS) == (0, [])
    for request_id, prompt in (("a", range(10)), ("b", range(20))):
        rig.submit(make_request(request_id, prompt, 1), sink)
        sink.wait_finished(request_id)
    rig.settle()
    sequence, hashes = rig.snapshot().result(WAIT_SECONDS)
    assert (sequence, set(hashes)) == (rig.listener.sequence, rig.listener.known)
    assert hashes == block_hashes(range(20), BLOCK_SIZE)
    assert sequence == 2


def test_a_snapshot_has_its_place_among_the_events(make_rig: Callable[..., Rig]) -> None:
    rig, sink = make_rig(num_blocks=12), Recorder()
    told: list[tuple[int, int]] = []
    all_told = threading.Event()

    def tell(sequence: int, _hashes: list[bytes]) -> None:
        told.append((sequence, rig.listener.sequence))
        if len(told) < 60:
            rig.engine.snapshot(tell)
        else:
            all_told.set()

    rig.runner.gate.clear()
    for i in range(60):
        rig.submit(make_request(f"r{i}", range(i, i + 9), 3), sink)
    rig.engine.snapshot(tell)
    rig.runner.gate.set()
    sink.wait_finished(*(f"r{i}" for i in range(60)))
    rig.settle()
    assert all_told.wait(WAIT_SECONDS)
    assert all(contained == delivered for contained, delivered in told)
    assert len({contained for contained, _ in told}) > 1
