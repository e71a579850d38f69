"""The next actions of a supervisor, as a table."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.operator.plan import Process
from kvasir.operator.supervision import (
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

DRAIN = 10.0
PREFILL = Process("p", "prefill", {})
DECODE = Process("d", "decode", {})
ROUTER = Process("r", "router", {})
ALL = (PREFILL, DECODE, ROUTER)


def running(process: Process, since: float = 0.0, stopped_at: float | None = None) -> Observed:
    return Observed(process.id, process.role == "router", since, stop_requested_at=stopped_at)


def exited(
    process: Process, at: float, code: int = 1, crashes: int = 1, ever_ready: bool = True
) -> Observed:
    return Observed(process.id, process.role == "router", 0.0, at, code, crashes, ever_ready)


def never_ready(process: Process, crashes: int) -> Observed:
    return exited(process, at=10, crashes=crashes, ever_ready=False)


@pytest.mark.parametrize(
    ("desired", "observed", "now", "expected"),
    [
        pytest.param(ALL, [], 0, [Start("p"), Start("d"), Start("r")], id="nothing runs"),
        pytest.param(ALL, [running(p) for p in ALL], 5, [], id="all run"),
        pytest.param(ALL, [running(DECODE), running(ROUTER)], 5, [Start("p")], id="one missing"),
        pytest.param((DECODE,), [exited(DECODE, at=10)], 10.4, [], id="waits after a crash"),
        pytest.param((DECODE,), [exited(DECODE, at=10)], 10.5, [Start("d")], id="waited"),
        pytest.param(
            (DECODE,), [exited(DECODE, at=10, crashes=3)], 11.9, [], id="waits longer each time"
        ),
        pytest.param(
            (DECODE,), [exited(DECODE, at=10, crashes=3)], 12, [Start("d")], id="waited longer"
        ),
        pytest.param(
            (DECODE,), [exited(DECODE, at=10, code=0)], 11, [Start("d")], id="exit 0 is no excuse"
        ),
        pytest.param(
            (DECODE,), [exited(DECODE, at=10, code=-9)], 11, [Start("d")], id="killed by a signal"
        ),
        pytest.param(
            (DECODE,), [exited(DECODE, at=10, code=2)], 99, [Fail("d")], id="configuration error"
        ),
        pytest.param(
            ALL, [exited(DECODE, at=10, code=2)], 99, [Fail("d")], id="failure starts nothing"
        ),
        pytest.param(
            (DECODE,), [never_ready(DECODE, 4)], 99, [Start("d")], id="four starts in vain"
        ),
        pytest.param(
            ALL,
            [running(PREFILL), replace(running(DECODE), failed_checks=2), running(ROUTER)],
            99,
            [],
            id="two failed checks may be bad luck",
        ),
        pytest.param(
            ALL,
            [running(PREFILL), replace(running(DECODE), failed_checks=3), running(ROUTER)],
            99,
            [Kill("d")],
            id="hung",
        ),
        pytest.param(
            (), [replace(running(DECODE), failed_checks=3)], 99, [Stop("d")], id="hung at the end"
        ),
        pytest.param((DECODE,), [never_ready(DECODE, 5)], 11, [Fail("d")], id="a fifth in vain"),
        pytest.param(
            (DECODE,), [exited(DECODE, at=10, crashes=9)], 99, [Start("d")], id="it once worked"
        ),
        pytest.param(
            (DECODE,),
            [replace(running(DECODE), crashes=5)],
            99,
            [],
            id="five crashes and running: not yet in vain",
        ),
        pytest.param(
            (DECODE, ROUTER),
            [running(p) for p in ALL],
            5,
            [Stop("p")],
            id="a surplus worker goes while the router stays",
        ),
        pytest.param((), [running(p) for p in ALL], 5, [Stop("r")], id="shutdown: router first"),
        pytest.param(
            (),
            [running(PREFILL), running(DECODE), running(ROUTER, stopped_at=5)],
            6,
            [],
            id="shutdown: workers wait for the router",
        ),
        pytest.param(
            (),
            [running(PREFILL), running(DECODE), exited(ROUTER, at=6, code=0)],
            6,
            [Stop("p"), Stop("d")],
            id="shutdown: then workers",
        ),
        pytest.param((), [running(DECODE, stopped_at=5)], 5 + DRAIN + 4.9, [], id="still has time"),
        pytest.param(
            (), [running(DECODE, stopped_at=5)], 5 + DRAIN + 5, [Kill("d")], id="out of time"
        ),
        pytest.param(
            (), [exited(DECODE, at=5)], 99, [], id="a crash during shutdown is left alone"
        ),
    ],
)
def test_next_actions(
    desired: tuple[Process, ...], observed: list[Observed], now: float, expected: list[Action]
) -> None:
    records = {record.id: record for record in observed}
    assert next_actions(desired, records, now, drain_deadline=DRAIN) == expected


def test_back_off_doubles_to_a_bound() -> None:
    delays = [restart_delay(crashes) for crashes in range(1, 9)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert restart_delay(10**6) == 30


def test_back_off_restarts_after_a_stable_minute() -> None:
    record = after_ready(after_start(None, DECODE, 0.0))
    assert record.crashes == 0
    for expected in (1, 2, 3):
        record = after_exit(record, 1, record.started_at + 59)
        assert record.crashes == expected
        record = after_start(record, DECODE, 1000.0 * expected)
    record = after_exit(record, 1, record.started_at + 60)
    assert record.crashes == 1


def test_minutes_of_loading_are_not_stable_running() -> None:
    record = None
    for start in range(5):
        assert not has_failed(record)
        record = after_start(record, DECODE, 1000.0 * start)
        record = after_exit(record, 1, record.started_at + 300)
    assert has_failed(record)
    assert not has_failed(after_start(record, DECODE, 9000.0))


@given(
    st.lists(st.sampled_from(["p", "d", "r"]), unique=True),
    st.lists(st.sampled_from(["crash", "tick"]), max_size=30),
)
def test_converges_from_anywhere(first: list[str], happenings: list[str]) -> None:
    """Whatever ran and crashed, carrying out the actions ends with exactly the desired set."""
    records = {p.id: after_ready(running(p)) for p in ALL if p.id in first}
    now = 0.0

    def carry_out(desired: tuple[Process, ...]) -> None:
        for action in next_actions(desired, records, now, drain_deadline=DRAIN):
            match action:
                case Start(id=name):
                    process = next(p for p in ALL if p.id == name)
                    assert name not in records or not records[name].running
                    records[name] = after_ready(after_start(records.get(name), process, now))
                case Stop(id=name):
                    records[name] = after_exit(records[name], 0, now)

    for happening in happenings:
        now += 1.0
        if happening == "crash" and "d" in records and records["d"].running:
            records["d"] = after_exit(records["d"], 1, now)
        carry_out((DECODE, ROUTER))
    for _ in range(3):
        now += 60.0
        carry_out((DECODE, ROUTER))
    assert {name for name, record in records.items() if record.running} == {"d", "r"}
    for _ in range(3):
        now += 1.0
        carry_out(())
    assert not any(record.running for record in records.values())
