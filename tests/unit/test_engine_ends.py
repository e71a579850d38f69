"""The engine when it sleeps, stops or breaks."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.engine_rig import Rig, expected, rigs
from helpers.engine_workload import BLOCK_SIZE, make_request, remote_prefill
from helpers.fake_runner import FakeRunner
from helpers.recorders import WAIT_SECONDS, Recorder, RecordingListener
from kvasir.proto.errors import Reason
from kvasir.worker.contracts import Finish, Output, Work
from kvasir.worker.engine import Engine
from kvasir.worker.scheduler import Scheduler, SchedulerConfig


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    with rigs() as make:
        yield make


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
