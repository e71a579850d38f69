"""The engine with its real thread, a fake runner, and calls from other threads."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from helpers.engine_workload import BLOCK_SIZE, EOS, VOCAB_SIZE, make_request, remote_prefill
from helpers.fake_runner import FakeRunner, expected_tokens
from helpers.recorders import WAIT_SECONDS, Recorder, RecordingListener
from kvasir.proto.blocks import block_hashes
from kvasir.proto.errors import Reason
from kvasir.worker.contracts import (
    Finish,
    Output,
    PrefillOutcome,
    Request,
    Sampled,
    StepPlan,
    StepResult,
    Work,
)
from kvasir.worker.engine import Engine
from kvasir.worker.scheduler import Scheduler, SchedulerConfig


class GatedRunner(FakeRunner):
    """Waits before each step until ``gate`` is set."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, VOCAB_SIZE, EOS)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        if not self.gate.wait(WAIT_SECONDS):
            raise TimeoutError("the test never opened the gate")
        return super().execute(plan)


class Rig:
    """An engine with all that it talks to."""

    def __init__(self, num_blocks: int = 32, **config: object) -> None:
        settings: dict[str, object] = {"max_model_len": 500, "eos_token_ids": EOS} | config
        self.runner = GatedRunner(num_blocks)
        self.listener = RecordingListener()
        self.fatal: list[BaseException] = []
        self.failed = threading.Event()
        self.now = 0.0
        self.clock_reads = 0
        self.seconds = 0.0
        self.engine = Engine(
            Scheduler(SchedulerConfig(num_blocks, BLOCK_SIZE, **settings)),  # type: ignore[arg-type]  # by name
            self.runner,
            self.listener,
            clock=self._clock,
            stopwatch=lambda: self.seconds,
            on_fatal=self._on_fatal,
        )

    def submit(self, request: Request, sink: Recorder) -> None:
        assert self.engine.submit(request, sink) is None

    def settle(self) -> None:
        """Wait until nothing runs, waits or holds blocks."""
        self.listener.wait_load(lambda load: load.running == load.waiting == 0)
        assert self.engine.load().kv_blocks_used == 0

    def snapshot(self) -> Future[tuple[int, list[bytes]]]:
        told: Future[tuple[int, list[bytes]]] = Future()
        self.engine.snapshot(lambda sequence, hashes: told.set_result((sequence, hashes)))
        return told

    def _clock(self) -> float:
        self.clock_reads += 1
        return self.now

    def _on_fatal(self, error: BaseException) -> None:
        self.fatal.append(error)
        self.failed.set()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(num_blocks: int = 32, **config: object) -> Rig:
        rig = Rig(num_blocks, **config)
        made.append(rig)
        rig.engine.start()
        return rig

    yield make
    for rig in made:
        rig.runner.gate.set()
        rig.engine.stop()
        assert rig.fatal == []


def expected(request: Request) -> list[int]:
    return expected_tokens(request, VOCAB_SIZE, EOS)


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


def test_invariants_are_checked_once_for_whatever_has_ended(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check looks at every block: not something for each command that an idle engine gets."""
    checks: list[Scheduler] = []
    check = Scheduler.check

    def counted(scheduler: Scheduler) -> None:
        checks.append(scheduler)
        check(scheduler)

    monkeypatch.setattr(Scheduler, "check", counted)
    rig, sink = make_rig(), Recorder()
    for round_ in (1, 2):
        rig.submit(make_request("r", range(6), 2), sink)
        sink.wait_finished("r")
        # The engine checks before it answers the second of these.
        for _ in range(20):
            rig.snapshot().result(WAIT_SECONDS)
        assert len(checks) == round_
        sink.batches.clear()


def test_a_deadline_wakes_a_sleeping_engine(make_rig: Callable[..., Rig]) -> None:
    rig, sink = make_rig(num_blocks=4), Recorder()
    rig.submit(make_request("hold", range(10), work=Work.PREFILL), sink)
    sink.wait_finished("hold")
    rig.now = 1000.0
    rig.submit(make_request("late", range(20, 30), 1, deadline=1000.05), sink)
    rig.listener.wait_load(lambda load: load.waiting == 1)
    rig.now = 1000.1  # the engine sleeps for the rest of the time, then looks at the clock
    sink.wait_finished("late")
    (output,) = sink.outputs("late")
    assert output.refusal is not None
    assert output.refusal.reason is Reason.DEADLINE_EXCEEDED
    rig.engine.release("hold")
    rig.settle()


def test_a_deadline_beyond_all_time_does_no_harm(make_rig: Callable[..., Rig]) -> None:
    rig, sink = make_rig(num_blocks=4), Recorder()
    rig.submit(make_request("hold", range(10), work=Work.PREFILL), sink)
    sink.wait_finished("hold")
    rig.submit(make_request("far", range(20, 30), 1, deadline=1e300), sink)
    rig.listener.wait_load(lambda load: load.waiting == 1)
    rig.engine.release("hold")
    sink.wait_finished("far")
    assert sink.finish("far") is Finish.LENGTH


def test_a_waiting_receive_does_not_spin(make_rig: Callable[..., Rig]) -> None:
    rig, sink = make_rig(), Recorder()
    request = make_request("r", range(6), 2, work=Work.RECEIVE)
    rig.submit(request, sink)
    sink.wait(lambda: sink.reservations == [("r", 0)])
    rig.listener.wait_load(lambda load: load.running == 1)
    time.sleep(0.05)  # time enough for thousands of idle steps
    assert rig.clock_reads < 10
    assert rig.runner.steps == []
    payload, sampled = remote_prefill(request)
    assert rig.engine.commit_blocks("r", 0, payload).result(WAIT_SECONDS)
    rig.engine.finish_receive("r", sampled, 0)
    sink.wait_finished("r")
    assert sink.tokens("r") == expected(request)
    assert rig.runner.steps == [{"r": 1}]


def test_wrong_block_ranges_go_back_to_the_caller(make_rig: Callable[..., Rig]) -> None:
    rig, sink = make_rig(), Recorder()
    request = make_request("r", range(6), 2, work=Work.RECEIVE)
    rig.submit(request, sink)
    sink.wait(lambda: bool(sink.reservations))
    payload, sampled = remote_prefill(request)
    with pytest.raises(ValueError, match="whole blocks"):
        rig.engine.commit_blocks("r", 0, payload[1:])
    with pytest.raises(ValueError, match="are not among 2"):
        rig.engine.commit_blocks("r", 1, payload).result(WAIT_SECONDS)
    assert not rig.engine.commit_blocks("gone", 0, payload).result(WAIT_SECONDS)
    assert rig.engine.read_blocks("gone", 0, 1).result(WAIT_SECONDS) is None
    rig.submit(make_request("p", range(6), work=Work.PREFILL), sink)
    sink.wait_finished("p")
    with pytest.raises(ValueError, match="computed"):
        rig.engine.read_blocks("p", 1, 2).result(WAIT_SECONDS)
    rig.engine.finish_receive("gone", sampled, 0)
    rig.engine.fail_receive("gone")
    rig.engine.fail_receive("r")
    sink.wait_finished("r")
    assert sink.tokens("r") == expected(request)
    rig.engine.release("p")
    rig.settle()


def test_stop_tells_all_and_later_calls_are_settled(make_rig: Callable[..., Rig]) -> None:
    rig, sink = make_rig(max_running_requests=2), Recorder()
    rig.submit(make_request("r", range(6), work=Work.RECEIVE), sink)
    sink.wait(lambda: bool(sink.reservations))
    rig.runner.gate.clear()
    running = make_request("run", range(6), 90)
    rig.submit(running, sink)
    assert rig.runner.entered.wait(WAIT_SECONDS)
    rig.submit(make_request("wait", range(6)), sink)
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(rig.engine.stop)
        while (refusal := rig.engine.submit(running, sink)) is None or (
            refusal.reason is not Reason.INTERNAL
        ):
            time.sleep(0.001)
        late = rig.engine.read_blocks("r", 0, 1)
        assert not stopping.done(), "the step is finished first"
        rig.runner.gate.set()
        stopping.result(WAIT_SECONDS)
    assert late.result(0) is None
    rig.engine.stop()
    for request_id in ("r", "run", "wait"):
        assert sink.finish(request_id) is Finish.ABORTED
    assert sink.tokens("run") == expected(running)[:1]
    payload, sampled = remote_prefill(make_request("r", range(6)))
    assert rig.engine.commit_blocks("r", 0, payload).result(0) is False
    assert rig.engine.read_blocks("r", 0, 1).result(0) is None
    assert not rig.snapshot().done(), "sinks are called on the engine thread, which is gone"
    rig.engine.finish_receive("r", sampled, 0)
    rig.engine.abort("r")
    refusal = rig.engine.submit(make_request("x", range(6)), sink)
    assert refusal is not None
    assert refusal.reason is Reason.INTERNAL
    assert rig.engine.load().kv_blocks_used == 0


def test_stop_before_start_tells_what_was_submitted() -> None:
    rig, sink = Rig(), Recorder()
    rig.submit(make_request("a", range(6)), sink)
    future = rig.snapshot()
    rig.engine.stop()
    assert sink.batches == [[Output("a", finish=Finish.ABORTED)]]
    assert future.result(0) == (0, [])


class ExplodingSink(Recorder):
    def deliver(self, outputs: Sequence[Output]) -> None:
        raise KeyError(f"a bug in a sink, told of {len(outputs)} outputs")


@pytest.mark.parametrize("cause", ["sink", "runner", "invariant"])
def test_what_breaks_on_the_engine_thread_is_fatal(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig()
    sink = ExplodingSink() if cause == "sink" else Recorder()

    def explode(*_: object) -> None:
        raise RuntimeError("a bug in the engine")

    if cause == "runner":
        monkeypatch.setattr(rig.runner, "execute", explode)
    elif cause == "invariant":
        monkeypatch.setattr(Scheduler, "check", explode)
    rig.submit(make_request("a", range(3), 1), sink)
    rig.engine.start()
    assert rig.failed.wait(WAIT_SECONDS)
    assert len(rig.fatal) == 1
    assert rig.engine.submit(make_request("b", range(3), 1), sink) is not None
    with pytest.raises((KeyError, RuntimeError), match="a bug"):
        rig.engine.read_blocks("a", 0, 1).result(0)
    rig.engine.stop()
    assert len(rig.fatal) == 1


def test_the_pool_and_the_runner_must_agree() -> None:
    with pytest.raises(ValueError, match="the runner has 4 blocks"):
        Engine(
            Scheduler(SchedulerConfig(5, BLOCK_SIZE, 10)),
            FakeRunner(4, BLOCK_SIZE),
            RecordingListener(),
            on_fatal=lambda _: None,
        )


# --- two engines -------------------------------------------------------------------------------


class Pump:
    """Carries KV from a holder to a receiver as a transfer service would, on threads of its own."""

    def __init__(
        self, holder: Rig, receiver: Rig, *, break_after_blocks: int | None = None
    ) -> None:
        self.holder = holder
        self.receiver = receiver
        self.break_after = break_after_blocks
        self.threads = ThreadPoolExecutor(8)
        self.requests: dict[str, Request] = {}
        self.sink = Recorder(on_reserved=self._on_reserved)
        self.holding = Recorder()

    def submit(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.receiver.submit(replace(request, work=Work.RECEIVE), self.sink)

    def close(self) -> None:
        self.threads.shutdown()

    def _on_reserved(self, request_id: str, num_cached_tokens: int) -> None:
        self.threads.submit(self._transfer, request_id, num_cached_tokens)

    def _transfer(self, request_id: str, cached: int) -> None:
        request = replace(self.requests[request_id], work=Work.PREFILL, skip_tokens=cached)
        self.holder.submit(request, self.holding)
        sent, total = cached // BLOCK_SIZE, len(request.prompt_ids) + len(request.output_ids)
        stop = -(-total // BLOCK_SIZE)
        while sent < stop:
            self._wait_ready(request_id, total, sent)
            if self.break_after is not None and sent - cached // BLOCK_SIZE >= self.break_after:
                self.receiver.engine.fail_receive(request_id)
                self.holder.engine.release(request_id)
                return
            payload = self.holder.engine.read_blocks(request_id, sent, 1).result(WAIT_SECONDS)
            assert payload is not None
            committed = self.receiver.engine.commit_blocks(request_id, sent, payload)
            if not committed.result(WAIT_SECONDS):
                self.holder.engine.release(request_id)
                return
            sent += 1
        self.holding.wait_finished(request_id)
        output = self.holding.outputs(request_id)[-1]
        assert output.prefill is not None
        self.receiver.engine.finish_receive(
            request_id, Sampled(output.token_ids[0]), max(output.prefill.cached_tokens - cached, 0)
        )
        self.holder.engine.release(request_id)

    def _wait_ready(self, request_id: str, total: int, block: int) -> None:
        self.holding.wait(lambda: self._ready(request_id, total) > block)

    def _ready(self, request_id: str, total: int) -> int:
        """Blocks that can be sent: full ones, and the last one when all is computed."""
        told = [tokens for name, tokens in self.holding.progressed if name == request_id]
        computed = max(told, default=0)
        return -(-total // BLOCK_SIZE) if computed == total else computed // BLOCK_SIZE


@pytest.mark.parametrize("break_after", [None, 0, 1, 2])
def test_two_engines_give_the_answers_of_one(
    make_rig: Callable[..., Rig], break_after: int | None
) -> None:
    holder = make_rig(num_blocks=24, max_batched_tokens=6)
    receiver = make_rig(num_blocks=16, max_batched_tokens=16)
    pump = Pump(holder, receiver, break_after_blocks=break_after)
    requests = [
        make_request(f"r{i}", [1] * 8 + [i] * (1 + i % 7), 2 + i % 9, output_ids=(3,) * (i % 2))
        for i in range(12)
    ]
    for request in requests:
        pump.submit(request)
    pump.sink.wait_finished(*(request.request_id for request in requests))
    pump.close()
    for request in requests:
        assert pump.sink.tokens(request.request_id) == expected(request)
    outcomes = {
        output.prefill.outcome
        for request in requests
        for output in pump.sink.outputs(request.request_id)
        if output.prefill is not None
    }
    assert (
        PrefillOutcome.RECOMPUTED if break_after == 0 else PrefillOutcome.REMOTE
    ) in outcomes or (break_after is not None)
    assert PrefillOutcome.LOCAL not in outcomes
    assert (PrefillOutcome.RECOMPUTED in outcomes) == (break_after is not None)
    holder.settle()
    receiver.settle()


def test_an_abort_during_a_transfer_frees_both_sides(make_rig: Callable[..., Rig]) -> None:
    holder, receiver = make_rig(max_batched_tokens=4), make_rig()
    pump = Pump(holder, receiver)
    holder.runner.gate.clear()
    pump.submit(make_request("r", range(30), 5))
    assert holder.runner.entered.wait(WAIT_SECONDS)
    receiver.engine.abort("r")
    receiver.settle()
    holder.runner.gate.set()
    pump.close()
    holder.settle()
    assert pump.sink.finish("r") is Finish.ABORTED
