"""Carries out a local plan: observe, decide (supervision.next_actions), act; again and again.

Owns the processes, their records and the router's workers file. All methods are for the
main thread. The runtime prints nothing: ``step`` returns what happened as events.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import assert_never

from kvasir.operator.local.health import AS_IN_PODS, HealthCheck, Timing
from kvasir.operator.local.state import (
    Instance,
    ProcessRecord,
    ProcessState,
    StateDirectory,
    record_of,
)
from kvasir.operator.local.supervisor import (
    CommandBuilder,
    Supervised,
    component_command,
    earlier_log,
)
from kvasir.operator.plan import LocalPlan, Process
from kvasir.operator.refusal import in_terms_of_the_spec
from kvasir.operator.supervision import (
    EXIT_CONFIGURATION,
    Action,
    Fail,
    Kill,
    Observed,
    Start,
    Stop,
    after_exit,
    after_ready,
    after_start,
    has_failed,
    next_actions,
    restart_delay,
)


@dataclass(frozen=True, slots=True)
class PhaseChanged:
    id: str
    phase: str
    detail: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A process ended. ``restart_in``: seconds; None if it is not started again."""

    id: str
    exit_code: int
    last_line: str
    restart_in: float | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A process cannot be made to run; the runtime stops. ``message`` says why.

    ``invalid``: the process refused what the ModelService asks for.
    """

    id: str
    message: str
    invalid: bool


@dataclass(frozen=True, slots=True)
class Hung:
    """A process no longer answers its health check, and was killed for that."""

    id: str


Event = PhaseChanged | Exited | Failed | Hung


@dataclass(frozen=True, slots=True)
class ProcessView:
    """A process as shown to people."""

    id: str
    role: str
    phase: str
    """starting, loading, ready, draining, or restarting while it waits to be started again."""
    detail: str = ""


class LocalRuntime:
    """One instance of a plan. Call ``step`` every tenth of a second until ``finished``."""

    def __init__(
        self,
        plan: LocalPlan,
        directory: StateDirectory,
        *,
        url: str,
        command: CommandBuilder = component_command,
        health: Timing = AS_IN_PODS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The caller holds the directory's lock as long as the runtime exists."""
        self._plan = plan
        self._desired: tuple[Process, ...] = plan.processes
        self._directory = directory
        self._url = url
        self._command = command
        self._health = health
        self._clock = clock
        self._observed: dict[str, Observed] = {}
        self._children: dict[str, Supervised] = {}
        self._states: dict[str, ProcessState | None] = {}
        self._checks: dict[str, HealthCheck] = {}
        self._published: list[dict[str, str]] | None = None
        for process in plan.processes:
            _keep_one_earlier_log(directory, process.id)

    @property
    def ready(self) -> bool:
        """Whether every process of the plan says that it is ready."""
        return bool(self._desired) and all(view.phase == "ready" for view in self.view())

    @property
    def finished(self) -> bool:
        """Whether the runtime was told to stop and nothing runs any more."""
        return not self._desired and not any(self._running())

    def view(self) -> list[ProcessView]:
        """Every process of the plan, in its order."""
        return [self._view(process) for process in self._plan.processes]

    def step(self) -> list[Event]:
        """Observe, decide and act once. Does not block."""
        events: list[Event] = list(self._observe())
        now = self._clock()
        for action in next_actions(
            self._desired, self._observed, now, drain_deadline=self._plan.drain_deadline
        ):
            events += self._act(action, now)
        self._publish()
        return events

    def stop(self) -> None:
        """Want nothing to run: the next steps stop the router, then the workers."""
        self._desired = ()

    def kill(self) -> None:
        """End everything at once and wait until it has ended."""
        self.stop()
        running = list(self._running())
        for child in running:
            child.kill()
        for child in running:
            child.wait()
        list(self._observe())

    def _running(self) -> Iterator[Supervised]:
        for process_id, record in self._observed.items():
            if record.running:
                yield self._children[process_id]

    def _observe(self) -> Iterator[Event]:
        now = self._clock()
        for child in list(self._running()):
            process_id = child.process.id
            exit_code = child.exit_code()
            if exit_code is not None:
                yield self._record_exit(child, exit_code, now)
                continue
            state = child.state()
            before = self._states.get(process_id)
            self._states[process_id] = state
            if state and state.phase == "ready":
                self._observed[process_id] = after_ready(self._observed[process_id])
            self._check_health(process_id, state)
            child.limit_log()
            if state and (before is None or before.phase != state.phase):
                yield PhaseChanged(process_id, state.phase, state.detail)

    def _check_health(self, process_id: str, state: ProcessState | None) -> None:
        """While it says that it is ready: what starts has its own time, what drains a deadline."""
        if state is None or state.phase != "ready":
            self._end_check(process_id)
            return
        check = self._checks.get(process_id)
        if check is None:
            check = self._checks[process_id] = HealthCheck(state.health_address, self._health)
        self._observed[process_id] = replace(
            self._observed[process_id], failed_checks=check.failures
        )

    def _end_check(self, process_id: str) -> None:
        check = self._checks.pop(process_id, None)
        if check is not None:
            check.stop()
            self._observed[process_id] = replace(self._observed[process_id], failed_checks=0)

    def _record_exit(self, child: Supervised, exit_code: int, now: float) -> Exited:
        process_id = child.process.id
        self._end_check(process_id)
        record = after_exit(self._observed[process_id], exit_code, now)
        self._observed[process_id] = record
        self._states[process_id] = None
        wanted = any(process.id == process_id for process in self._desired)
        restarts = wanted and not has_failed(record)
        restart_in = restart_delay(record.crashes) if restarts else None
        return Exited(process_id, exit_code, child.last_line(), restart_in)

    def _act(self, action: Action, now: float) -> Iterator[Event]:
        match action:
            case Start(id=process_id):
                self._start(process_id, now)
            case Stop(id=process_id):
                self._children[process_id].terminate()
                self._observed[process_id] = replace(
                    self._observed[process_id], stop_requested_at=now
                )
            case Kill(id=process_id):
                self._children[process_id].kill()
                if self._observed[process_id].failed_checks:
                    self._end_check(process_id)
                    yield Hung(process_id)
            case Fail(id=process_id):
                yield self._failure(process_id)
                self.stop()
            case _:
                assert_never(action)

    def _failure(self, process_id: str) -> Failed:
        """In the process's own last words, if it had any."""
        record, last_line = self._observed[process_id], self._children[process_id].last_line()
        if record.exit_code == EXIT_CONFIGURATION:
            return Failed(process_id, in_terms_of_the_spec(last_line), invalid=True)
        last_words = last_line or f"exit code {record.exit_code}"
        why = f"given up after {record.crashes} crashes, never ready: {last_words}"
        return Failed(process_id, why, invalid=False)

    def _start(self, process_id: str, now: float) -> None:
        process = next(process for process in self._desired if process.id == process_id)
        self._children[process_id] = Supervised(process, self._directory, self._command)
        self._observed[process_id] = after_start(self._observed.get(process_id), process, now)
        self._directory.write_instance(
            Instance(
                name=self._plan.name,
                url=self._url,
                supervisor=_this_process(),
                processes=tuple(child.record for child in self._running()),
            )
        )

    def _publish(self) -> None:
        """Tell the router which workers there are.

        A draining worker stays: it still serves what it has accepted, and says itself that
        it takes nothing new.
        """
        workers = [
            {"id": process.id, "address": state.address}
            for process in self._plan.processes
            if process.role != "router"
            and (state := self._states.get(process.id))
            and state.phase in ("ready", "draining")
        ]
        if workers != self._published:
            self._directory.write_json(self._directory.workers_file, {"workers": workers})
            self._published = workers

    def _view(self, process: Process) -> ProcessView:
        state = self._states.get(process.id)
        record = self._observed.get(process.id)
        if state is not None:
            return ProcessView(process.id, process.role, state.phase, state.detail)
        ended = record is not None and not record.running
        return ProcessView(process.id, process.role, "restarting" if ended else "starting")


def _this_process() -> ProcessRecord:
    return record_of("kvasir up", os.getpid())


def _keep_one_earlier_log(directory: StateDirectory, process_id: str) -> None:
    log = directory.log_file(process_id)
    if log.exists():
        log.replace(earlier_log(log))
