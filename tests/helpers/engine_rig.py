"""The engine with its real thread, a fake runner, and all that it talks to."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from helpers.engine_workload import BLOCK_SIZE, EOS, VOCAB_SIZE
from helpers.fake_runner import FakeRunner, expected_tokens
from helpers.recorders import WAIT_SECONDS, Recorder, RecordingListener
from kvasir.worker.contracts import Request, StepPlan, StepResult
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


@contextmanager
def rigs() -> Iterator[Callable[..., Rig]]:
    """Makes rigs that run, and at the end checks that nothing was fatal."""
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
