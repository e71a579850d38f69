"""The next step from what runs to what should run. Pure: no I/O, no clock.

    next_actions(desired, observed, now) -> actions

Keeps no state, so a step can be computed again at any point. What is known of a process is
one record, ``Observed``; the ``after_`` functions make the next one of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvasir.operator.plan import Process

_BACKOFF_BASE = 0.5
_BACKOFF_CAP = 30.0
STABLE_AFTER = 60.0
"""Seconds of running after which earlier crashes no longer count."""
MOST_VAIN_STARTS = 5
"""Crashes in a row after which a process that was never ready is not started again: what
has never worked is not a crash that a restart mends."""
_KILL_GRACE = 5.0
"""Seconds that a process has beyond its drain deadline to leave by itself."""

MOST_FAILED_CHECKS = 3
"""Health checks failed in a row after which a process is taken for hung: as a kubelet does."""

EXIT_CONFIGURATION = 2
"""Exit code by which a process says that starting it again is no use."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One process that was started: what its supervisor knows. Times: seconds, one clock."""

    id: str
    is_router: bool
    started_at: float
    exited_at: float | None = None
    exit_code: int | None = None
    """As ``subprocess``: negative for a signal. None while it runs."""
    crashes: int = 0
    """Exits in a row without a stable minute between them."""
    ever_ready: bool = False
    """Whether this process, or an earlier one of its id, has said that it is ready."""
    stop_requested_at: float | None = None
    failed_checks: int = 0
    """In a row, until now."""

    @property
    def running(self) -> bool:
        return self.exited_at is None


@dataclass(frozen=True, slots=True)
class Start:
    id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask to drain and leave: SIGTERM."""

    id: str


@dataclass(frozen=True, slots=True)
class Kill:
    """The drain deadline is over, or it is hung and could drain nothing: SIGKILL."""

    id: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The process cannot be made to run, so nothing else is worth starting."""

    id: str


Action = Start | Stop | Kill | Fail


def after_start(previous: Observed | None, process: Process, now: float) -> Observed:
    """The record of a process that has just been started, perhaps again."""
    return Observed(
        process.id,
        process.role == "router",
        started_at=now,
        crashes=previous.crashes if previous else 0,
        ever_ready=previous is not None and previous.ever_ready,
    )


def after_ready(observed: Observed) -> Observed:
    """The record of a process that has just said that it is ready."""
    return replace(observed, ever_ready=True)


def after_exit(observed: Observed, exit_code: int, now: float) -> Observed:
    """The record of a process that was just seen to have ended."""
    # Minutes of loading are not stable running.
    stable = observed.ever_ready and now - observed.started_at >= STABLE_AFTER
    crashes = 1 if stable else observed.crashes + 1
    return replace(observed, exited_at=now, exit_code=exit_code, crashes=crashes)


def restart_delay(crashes: int) -> float:
    """Seconds to wait after that many crashes in a row: doubling, bounded."""
    # The exponent is bounded as well: 2.0 ** 1024 would overflow.
    return min(_BACKOFF_CAP, _BACKOFF_BASE * 2.0 ** min(crashes - 1, 16))


def next_actions(
    desired: Sequence[Process],
    observed: Mapping[str, Observed],
    now: float,
    *,
    drain_deadline: float,
) -> list[Action]:
    """What to do now so that exactly ``desired`` runs. Empty ``desired`` is a shutdown.

    A router that has to go goes first, and workers that have to go only when it has left:
    its open requests still need them.
    """
    if failed := [process for process in desired if has_failed(observed.get(process.id))]:
        return [Fail(process.id) for process in failed]
    actions: list[Action] = [
        Start(process.id) for process in desired if _is_due(observed.get(process.id), now)
    ]
    wanted = {process.id for process in desired}
    actions += [
        Kill(record.id)
        for record in observed.values()
        if record.running and record.id in wanted and record.failed_checks >= MOST_FAILED_CHECKS
    ]
    surplus = [record for record in observed.values() if record.running and record.id not in wanted]
    routers_first = any(record.is_router for record in surplus)
    for record in surplus:
        if record.stop_requested_at is None:
            if record.is_router or not routers_first:
                actions.append(Stop(record.id))
        elif now - record.stop_requested_at >= drain_deadline + _KILL_GRACE:
            actions.append(Kill(record.id))
    return actions


def has_failed(record: Observed | None) -> bool:
    """Whether starting the process again is no use: it said so, or it was never ready."""
    if record is None or record.running:
        return False
    vain = not record.ever_ready and record.crashes >= MOST_VAIN_STARTS
    return vain or record.exit_code == EXIT_CONFIGURATION


def _is_due(record: Observed | None, now: float) -> bool:
    if record is None:
        return True
    return record.exited_at is not None and now >= record.exited_at + restart_delay(record.crashes)
