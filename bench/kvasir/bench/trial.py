"""Requests of differing lengths through our engine in this process, as one trial after another.

A trial has a scheduler of its own on a runner that all of them share, so that nothing but the
scheduler's settings differs between two. Owns the engine of a trial and ends it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvasir.bench.stats import Record, Spread, spread
from kvasir.bench.workload import RequestSpec
from kvasir.proto.sampling import SamplingParams
from kvasir.worker.contracts import Finish, KvEvent, Load, Output, Request, Runner
from kvasir.worker.engine import Engine
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.scheduler import Scheduler

_TIMEOUT_S = 900.0
_COMPLETE = (Finish.STOP, Finish.LENGTH)


def run_name(run: int, runs: int) -> str:
    """``run`` as people count, from 1; those below 0 are not measured."""
    return f"run {run + 1} of {runs}" if run >= 0 else "warm-up"


class TrialError(RuntimeError):
    """The engine failed or did not end; a trial has no figures then."""


@dataclass(slots=True)
class _Watched:
    """What has come of one request so far; instants are those of ``time.perf_counter``."""

    request_id: str
    spec: RequestSpec
    sent: float = 0.0
    end: float = 0.0
    token_times: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    failure: str | None = None
    begun: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def record(self) -> Record:
        return Record(
            due=self.sent,
            sent=self.sent,
            end=self.end,
            token_times=tuple(self.token_times),
            input_tokens=len(self.spec.prompt.token_ids),
            output_tokens=len(self.token_times),
            cached_tokens=self.cached_tokens,
            failure=self.failure,
        )


class Trial:
    """A running engine. Greedy outputs of exactly ``max_tokens`` tokens."""

    def __init__(self, runner: Runner, config: SchedulerConfig) -> None:
        self._engine = Engine(Scheduler(config), runner, self, on_fatal=self._on_fatal)
        self._watched: dict[str, _Watched] = {}
        self._fatal: BaseException | None = None

    def start(self) -> None:
        self._engine.start()

    def stop(self) -> None:
        self._engine.stop()

    def submit(self, spec: RequestSpec) -> str:
        """Hand over one request; returns its id for ``wait``, ``token_times`` and ``abort``."""
        watched = _Watched(str(len(self._watched)), spec)
        self._watched[watched.request_id] = watched
        params = SamplingParams(temperature=0.0, max_tokens=spec.max_tokens, ignore_eos=True)
        watched.sent = time.perf_counter()
        request = Request(watched.request_id, spec.prompt.token_ids, params)
        refusal = self._engine.submit(request, self)
        if refusal is not None:
            raise TrialError(refusal.message)
        return watched.request_id

    def wait(self, request_ids: Sequence[str]) -> list[Record]:
        """Wait until these requests have ended."""
        for request_id in request_ids:
            self._await(self._watched[request_id].done, f"request {request_id} to end")
        return [self._watched[request_id].record() for request_id in request_ids]

    def wait_first_token(self, request_ids: Sequence[str]) -> None:
        """Wait until each of these requests has a token."""
        for request_id in request_ids:
            self._await(self._watched[request_id].begun, f"the first token of {request_id}")

    def _await(self, event: threading.Event, what: str) -> None:
        if not event.wait(_TIMEOUT_S):
            raise TrialError(f"waited {_TIMEOUT_S:g} s for {what}")
        if self._fatal is not None:
            raise TrialError(f"the engine failed: {self._fatal!r}")

    def run(self, specs: Sequence[RequestSpec], batch: int | None = None) -> list[Record]:
        """All requests at once; or ``batch`` of them at a time, each batch to its very end."""
        size = batch or len(specs)
        records: list[Record] = []
        for first in range(0, len(specs), size):
            ids = [self.submit(spec) for spec in specs[first : first + size]]
            records += self.wait(ids)
        return records

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def load(self) -> Load:
        """The engine's gauges and counters, as of its last step."""
        return self._engine.load()

    def has_ended(self, request_id: str) -> bool:
        return self._watched[request_id].done.is_set()

    def token_times(self, request_id: str) -> tuple[float, ...]:
        """When each token has come so far."""
        return tuple(self._watched[request_id].token_times)

    # --- what the engine tells, on its own thread ---------------------------------------------

    def deliver(self, outputs: Sequence[Output]) -> None:
        now = time.perf_counter()
        for output in outputs:
            watched = self._watched[output.request_id]
            watched.token_times.extend([now] * len(output.token_ids))
            if watched.token_times or output.finish is not None:
                watched.begun.set()
            if output.prefill is not None:
                watched.cached_tokens = output.prefill.cached_tokens
            if output.finish is not None:
                watched.end = now
                if output.finish not in _COMPLETE:
                    watched.failure = output.finish.name.lower()
                watched.done.set()

    def on_kv_events(self, first_sequence: int, events: Sequence[KvEvent]) -> None:
        pass

    def on_load(self, load: Load) -> None:
        pass

    def _on_fatal(self, error: BaseException) -> None:
        self._fatal = error
        for watched in list(self._watched.values()):
            watched.begun.set()
            watched.done.set()


class _FewerBlocks:
    """A runner of whose cache only the first ``num_blocks`` blocks are used."""

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = runner.block_bytes
        self.execute = runner.execute
        self.read_blocks = runner.read_blocks
        self.write_blocks = runner.write_blocks


@contextmanager
def trial(runner: Runner, config: SchedulerConfig) -> Iterator[Trial]:
    """An engine with an empty cache, for one measurement.

    ``config`` may have fewer blocks than the runner: as if it had less memory.
    """
    running = Trial(_FewerBlocks(runner, config.num_blocks), config)
    running.start()
    try:
        yield running
    finally:
        running.stop()


def paired_ratios(values: Mapping[str, Sequence[float]], baseline: str) -> dict[str, Spread]:
    """By name: how the values of each run compare with those of the baseline in the same run."""
    return {
        name: spread([a / b for a, b in zip(series, values[baseline], strict=True)])
        for name, series in values.items()
    }


def in_turns(names: Sequence[str], run: int) -> list[str]:
    """The order of a run: whoever goes first changes from run to run."""
    return list(names)[:: 1 if run % 2 == 0 else -1]


Progress = Callable[[str], None]
