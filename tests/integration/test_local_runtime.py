"""The local runtime with real processes; stand-ins take the place of worker and router."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers import standin, standin_up
from kvasir.operator.local import supervisor
from kvasir.operator.local.health import Timing
from kvasir.operator.local.runtime import (
    Event,
    Exited,
    Failed,
    Hung,
    LocalRuntime,
    PhaseChanged,
)
from kvasir.operator.local.state import (
    AlreadyRunningError,
    Instance,
    ProcessRecord,
    StateDirectory,
    record_of,
    running_instances,
)
from kvasir.operator.plan import LocalPlan

PATIENCE = 60.0
"""Seconds before a test gives up; nothing here normally takes more than two or three."""

TESTS = Path(__file__).resolve().parents[1]
URL = "http://127.0.0.1:9"


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.02)


def step_until(
    runtime: LocalRuntime, condition: Callable[[list[Event]], bool], what: str
) -> list[Event]:
    events: list[Event] = []

    def done() -> bool:
        events.extend(runtime.step())
        return condition(events)

    wait_for(done, what)
    return events


@contextmanager
def runtime_of(
    tmp_path: Path, drain_deadline: float = 30.0, **behaviors: dict[str, Any]
) -> Iterator[LocalRuntime]:
    plan = standin.plan(tmp_path / "events", drain_deadline, **behaviors)
    directory = StateDirectory(tmp_path, plan.name)
    with directory.locked():
        quick = Timing(period=0.1, timeout=1.0)
        runtime = LocalRuntime(plan, directory, url=URL, command=standin.command, health=quick)
        try:
            yield runtime
        finally:
            runtime.kill()
            directory.remove_instance()


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "standin.py" in " ".join(p.cmdline())]


def happenings(tmp_path: Path) -> list[str]:
    return (tmp_path / "events").read_text().splitlines()


def workers_file(tmp_path: Path) -> list[dict[str, str]]:
    content = json.loads((tmp_path / "standin" / "workers.json").read_text())
    workers: list[dict[str, str]] = content["workers"]
    return workers


def test_starts_publishes_and_stops_in_order(tmp_path: Path) -> None:
    with runtime_of(tmp_path) as runtime:
        runtime.step()
        assert workers_file(tmp_path) == []
        assert not runtime.ready
        step_until(runtime, lambda _: runtime.ready, "ready")
        workers = workers_file(tmp_path)
        assert [worker["id"] for worker in workers] == ["standin-prefill-0", "standin-decode-0"]
        assert all(worker["address"].startswith("127.0.0.1:") for worker in workers)
        assert {view.phase for view in runtime.view()} == {"ready"}

        (instance,) = running_instances(tmp_path)
        assert instance.url == URL
        assert {record.pid for record in instance.processes} == {p.pid for p in children()}

        runtime.stop()
        events = step_until(runtime, lambda _: runtime.finished, "stopped")
        exits = [event for event in events if isinstance(event, Exited)]
        assert [(e.exit_code, e.restart_in) for e in exits] == [(0, None)] * 3
        assert exits[0].id == "standin-router-0"
    assert children() == []
    stopped = [line for line in happenings(tmp_path) if line.startswith("term")]
    assert stopped[0] == "term standin-router-0"
    assert sorted(stopped[1:]) == ["term standin-decode-0", "term standin-prefill-0"]
    assert workers_file(tmp_path) == []
    assert running_instances(tmp_path) == []


def test_a_worker_is_published_until_it_has_gone(tmp_path: Path) -> None:
    with runtime_of(tmp_path, decode={"rest": 1.0}) as runtime:
        step_until(runtime, lambda _: runtime.ready, "ready")
        decode = next(p for p in children() if "decode" in " ".join(p.cmdline()))
        decode.send_signal(signal.SIGTERM)
        events = step_until(
            runtime,
            lambda events: any(isinstance(e, PhaseChanged) for e in events),
            "draining is seen",
        )
        assert events[-1] == PhaseChanged("standin-decode-0", "draining", "draining now")
        assert len(workers_file(tmp_path)) == 2
        step_until(
            runtime, lambda events: any(isinstance(e, Exited) for e in events), "exit is seen"
        )
        assert [worker["id"] for worker in workers_file(tmp_path)] == ["standin-prefill-0"]


def test_a_frozen_process_is_killed_and_started_again(tmp_path: Path) -> None:
    with runtime_of(tmp_path) as runtime:
        step_until(runtime, lambda _: runtime.ready, "ready")
        decode = next(p for p in children() if "decode" in " ".join(p.cmdline()))
        decode.send_signal(signal.SIGSTOP)
        events = step_until(
            runtime, lambda events: any(isinstance(e, Exited) for e in events), "killed"
        )
        assert events == [
            Hung("standin-decode-0"),
            Exited("standin-decode-0", -signal.SIGKILL, "", 0.5),
        ]
        step_until(runtime, lambda _: runtime.ready, "ready again")
        assert decode not in children()
        settled = time.monotonic() + 1
        later = step_until(runtime, lambda _: time.monotonic() > settled, "some more checks")
        assert later == []


def test_logs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOG_LIMIT", 1000)
    with runtime_of(tmp_path, decode={"chatter": 2000}, prefill={"chatter": 999}) as runtime:
        log = tmp_path / "standin" / "standin-decode-0.log"
        earlier = log.with_name(f"{log.name}.1")
        step_until(runtime, lambda _: earlier.exists() and not log.stat().st_size, "put aside")
        assert earlier.read_text() == "x" * 2000
        decode = next(p for p in children() if "decode" in " ".join(p.cmdline()))
        decode.kill()
        # What it logs after its next start comes after the emptied part, at the file's beginning.
        earlier.unlink()
        step_until(runtime, lambda _: earlier.exists() and not log.stat().st_size, "put aside")
        assert earlier.read_text() == "x" * 2000
        assert sorted(path.name for path in log.parent.glob("*.log.1")) == [earlier.name]


def test_crash_is_restarted_with_back_off(tmp_path: Path) -> None:
    with runtime_of(tmp_path, decode={"crashes": 2}) as runtime:
        events = step_until(runtime, lambda _: runtime.ready, "ready after two crashes")
        exits = [event for event in events if isinstance(event, Exited)]
        assert exits == [
            Exited("standin-decode-0", 1, "out of luck", 0.5),
            Exited("standin-decode-0", 1, "out of luck", 1.0),
        ]
        assert happenings(tmp_path).count("start standin-decode-0") == 3
        assert happenings(tmp_path).count("start standin-prefill-0") == 1
        log = (tmp_path / "standin" / "standin-decode-0.log").read_text()
        assert log.count("out of luck") == 2


def test_a_killed_worker_leaves_the_file_and_comes_back_with_a_new_address(tmp_path: Path) -> None:
    with runtime_of(tmp_path) as runtime:
        step_until(runtime, lambda _: runtime.ready, "ready")
        before = {worker["id"]: worker["address"] for worker in workers_file(tmp_path)}
        next(p for p in children() if "prefill" in " ".join(p.cmdline())).kill()
        events = step_until(runtime, bool, "exit is seen")
        assert events == [Exited("standin-prefill-0", -signal.SIGKILL, "", 0.5)]
        assert [worker["id"] for worker in workers_file(tmp_path)] == ["standin-decode-0"]
        assert [view.phase for view in runtime.view()] == ["restarting", "ready", "ready"]
        step_until(runtime, lambda _: runtime.ready, "ready again")
        after = {worker["id"]: worker["address"] for worker in workers_file(tmp_path)}
        assert after["standin-decode-0"] == before["standin-decode-0"]
        assert after["standin-prefill-0"] != before["standin-prefill-0"]


def test_a_deleted_state_directory_stops_nothing(tmp_path: Path) -> None:
    with runtime_of(tmp_path) as runtime:
        step_until(runtime, lambda _: runtime.ready, "ready")
        for file in (tmp_path / "standin").iterdir():
            if file.name != "lock":
                file.unlink()
        victim = next(p for p in children() if "prefill" in " ".join(p.cmdline()))
        victim.kill()
        events = step_until(runtime, bool, "exit is seen")
        assert events == [Exited("standin-prefill-0", -signal.SIGKILL, "", 0.5)]
        step_until(
            runtime,
            lambda _: (tmp_path / "standin" / "standin-prefill-0.state.json").exists(),
            "it is started again",
        )


def test_configuration_error_stops_everything(tmp_path: Path) -> None:
    with runtime_of(tmp_path, decode={"exit_code": 2}) as runtime:
        events = step_until(runtime, lambda _: runtime.finished, "stopped")
        assert Failed("standin-decode-0", "spec.model.source: no such file", invalid=True) in events
        assert happenings(tmp_path).count("start standin-decode-0") == 1


def test_what_never_becomes_ready_is_given_up(tmp_path: Path) -> None:
    now = 0.0
    plan = standin.plan(tmp_path / "events", decode={"crashes": 99})
    directory = StateDirectory(tmp_path, plan.name)
    with directory.locked():
        runtime = LocalRuntime(plan, directory, url=URL, command=standin.command, clock=lambda: now)

        def finished(_: list[Event]) -> bool:
            nonlocal now
            if runtime.view()[1].phase == "restarting":
                now += 1.0
            return runtime.finished

        try:
            events = step_until(runtime, finished, "given up")
        finally:
            runtime.kill()
    (failed,) = [event for event in events if isinstance(event, Failed)]
    why = "given up after 5 crashes, never ready: out of luck"
    assert failed == Failed("standin-decode-0", why, invalid=False)
    exits = [event for event in events if isinstance(event, Exited)]
    waits = [event.restart_in for event in exits if event.id == failed.id]
    assert waits == [0.5, 1.0, 2.0, 4.0, None]
    assert happenings(tmp_path).count("start standin-decode-0") == 5


def test_deadline_kills_what_does_not_leave(tmp_path: Path) -> None:
    now = 0.0
    plan = standin.plan(tmp_path / "events", 10.0, decode={"stubborn": True})
    directory = StateDirectory(tmp_path, plan.name)
    with directory.locked():
        runtime = LocalRuntime(plan, directory, url=URL, command=standin.command, clock=lambda: now)
        try:
            step_until(runtime, lambda _: runtime.ready, "ready")
            runtime.stop()
            step_until(runtime, lambda _: "term standin-decode-0" in happenings(tmp_path), "asked")
            assert not runtime.finished
            now = 15.0
            events = step_until(runtime, lambda _: runtime.finished, "killed")
            assert Exited("standin-decode-0", -signal.SIGKILL, "", None) in events
        finally:
            runtime.kill()


def test_kill_ends_everything_at_once(tmp_path: Path) -> None:
    stubborn = {"stubborn": True}
    with runtime_of(tmp_path, prefill=stubborn, decode=stubborn, router=stubborn) as runtime:
        step_until(runtime, lambda _: runtime.ready, "ready")
        runtime.kill()
        assert runtime.finished
        assert children() == []


def test_a_state_file_of_an_earlier_process_is_not_believed(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path, "standin")
    with directory.locked():
        directory.write_json(directory.state_file("w"), {"pid": 1, "phase": "ready"})
        assert directory.read_state("w", 2) is None
        directory.state_file("w").write_text('{"pid": 2, "pha')
        assert directory.read_state("w", 2) is None


def test_earlier_log_is_kept_once(tmp_path: Path) -> None:
    for _ in range(2):
        with runtime_of(tmp_path, decode={"exit_code": 2}) as runtime:
            step_until(runtime, lambda _: runtime.finished, "stopped")
    logs = [tmp_path / "standin" / f"standin-decode-0.log{suffix}" for suffix in ("", ".1")]
    assert [log.read_text().count("no such file") for log in logs] == [1, 1]


def test_one_instance_per_name(tmp_path: Path) -> None:
    first, second = StateDirectory(tmp_path, "a"), StateDirectory(tmp_path, "a")
    with first.locked():
        with pytest.raises(AlreadyRunningError), second.locked():
            pass
        with StateDirectory(tmp_path, "b").locked():
            pass
    with second.locked():
        pass


def test_only_the_main_thread_may_start_processes(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("the parent-death signal exists on Linux only")
    code = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from helpers import standin\n"
        "from kvasir.operator.local.state import StateDirectory\n"
        "from kvasir.operator.local.supervisor import Supervised\n"
        "plan = standin.plan(Path('events'))\n"
        "directory = StateDirectory(Path(sys.argv[1]), 'x')\n"
        "def start():\n"
        "    try:\n"
        "        Supervised(plan.processes[0], directory, standin.command)\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
        "with directory.locked():\n"
        "    thread = threading.Thread(target=start)\n"
        "    thread.start()\n"
        "    thread.join()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "use the main one" in result.stdout


class Up:
    """A `kvasir up` on stand-ins, as a process of its own."""

    def __init__(self, tmp_path: Path, **behaviors: Any) -> None:
        self.root = tmp_path
        self.popen = subprocess.Popen(
            [sys.executable, standin_up.__file__, str(tmp_path), json.dumps(behaviors)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> list[psutil.Process]:
        """The children, once all three are ready."""
        wait_for(lambda: self._ready_states() == 3, "stand-ins are ready")
        (instance,) = running_instances(self.root)
        return [psutil.Process(record.pid) for record in instance.processes]

    def _ready_states(self) -> int:
        states = (self.root / "standin").glob("*.state.json")
        return sum('"ready"' in state.read_text() for state in states)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(TESTS)}


@contextmanager
def up(tmp_path: Path, **behaviors: Any) -> Iterator[Up]:
    process = Up(tmp_path, **behaviors)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.communicate()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_everything(tmp_path: Path, number: signal.Signals) -> None:
    with up(tmp_path) as process:
        processes = process.wait_ready()
        process.popen.send_signal(number)
        output, errors = process.popen.communicate(timeout=PATIENCE)
        assert process.popen.returncode == 0
        assert errors == ""
        assert output.count("Stopping") == 1
        assert "standin-decode-0: ready, ready now" in output
        assert gone(processes)
    assert running_instances(tmp_path) == []


def test_second_interrupt_kills(tmp_path: Path) -> None:
    with up(tmp_path, router={"stubborn": True}) as process:
        processes = process.wait_ready()
        process.popen.send_signal(signal.SIGINT)
        wait_for(lambda: "term standin-router-0" in happenings(tmp_path), "first is passed on")
        assert process.popen.poll() is None
        process.popen.send_signal(signal.SIGINT)
        process.popen.communicate(timeout=PATIENCE)
        assert process.popen.returncode == 0
        assert gone(processes)


def test_crash_is_announced_in_one_line(tmp_path: Path) -> None:
    with up(tmp_path, decode={"crashes": 1}) as process:
        process.wait_ready()
        process.popen.send_signal(signal.SIGINT)
        output, _ = process.popen.communicate(timeout=PATIENCE)
        expected = "standin-decode-0 exited with code 1 (out of luck); starting it again in 0.5 s"
        assert expected in output.splitlines()


def test_configuration_error_is_the_error_of_the_command(tmp_path: Path) -> None:
    with up(tmp_path, decode={"exit_code": 2}) as process:
        _, errors = process.popen.communicate(timeout=PATIENCE)
        assert process.popen.returncode == 2
        log = tmp_path / "standin" / "standin-decode-0.log"
        why = "spec.model.source: no such file"
        assert errors == f"kvasir: standin-decode-0: {why} (log: {log})\n"


_ON_TERMINAL = """
import os, sys
os.setsid()
terminal = os.open(sys.argv[1], os.O_RDWR)  # becomes the controlling terminal
for number in range(3):
    os.dup2(terminal, number)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def test_on_a_terminal(tmp_path: Path) -> None:
    """Ctrl-C typed on a terminal reaches the foreground processes; the order of stop is kept."""
    controller, terminal = os.openpty()
    shown = bytearray()
    command = [sys.executable, "-c", _ON_TERMINAL, os.ttyname(terminal)]
    process = subprocess.Popen(
        [*command, standin_up.__file__, str(tmp_path), "{}"],
        env={**environment(), "TERM": "xterm", "COLUMNS": "100"},
    )

    def shows(text: bytes) -> bool:
        while select.select([controller], [], [], 0)[0]:
            shown.extend(os.read(controller, 4096))
        return text in shown

    try:
        wait_for(lambda: shows(b"router-0   \x1b[32mready"), "live lines show a ready router")
        os.write(controller, b"\x03")
        wait_for(lambda: shows(b"Stopping") and process.poll() is not None, "it stops")
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        os.close(controller)
        os.close(terminal)
    stopped = [line for line in happenings(tmp_path) if line.startswith("term")]
    assert stopped[0] == "term standin-router-0"
    assert len(stopped) == 3


def test_kill_9_of_the_parent_leaves_no_process(tmp_path: Path) -> None:
    with up(tmp_path) as process:
        processes = process.wait_ready()
        process.popen.kill()
        process.popen.communicate(timeout=PATIENCE)
        if sys.platform != "linux":
            directory = StateDirectory(tmp_path, "standin")
            with directory.locked():
                directory.stop_leftovers()
        wait_for(lambda: gone(processes), "children die with their parent")


def sleeper(directory: Path) -> subprocess.Popen[bytes]:
    code = "import sys, time; print(flush=True); sys.stdout.close(); time.sleep(600)"
    command = [sys.executable, "-c", code, f"{directory}/w.state.json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    # Its command line is there to be seen only once exec is over.
    assert process.stdout is not None
    with process.stdout as output:
        output.readline()
    return process


def remember(directory: StateDirectory, *records: ProcessRecord) -> None:
    gone_supervisor = ProcessRecord("kvasir up", 2**22 + 1, 1.0)
    directory.write_instance(Instance("a", URL, gone_supervisor, records))


def test_leftovers_are_stopped(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path, "a")
    with directory.locked():
        process = sleeper(directory.path)
        try:
            leftover = psutil.Process(process.pid)
            remember(directory, record_of("w", process.pid))
            assert running_instances(tmp_path) == []
            assert directory.stop_leftovers() == ["w"]
            assert gone([leftover])
            assert directory.stop_leftovers() == []
        finally:
            process.kill()
            process.wait()


def test_innocent_processes_are_left_alone(tmp_path: Path) -> None:
    """A reused pid has another start time; a process of ours names our directory."""
    directory = StateDirectory(tmp_path, "a")
    with directory.locked():
        reused, foreign = sleeper(directory.path), sleeper(tmp_path / "b")
        try:
            earlier = record_of("w", reused.pid)
            remember(
                directory,
                replace(earlier, started=earlier.started - 5),
                record_of("v", foreign.pid),
            )
            assert directory.stop_leftovers() == []
            assert reused.poll() is None
            assert foreign.poll() is None
        finally:
            for process in (reused, foreign):
                process.kill()
                process.wait()


def test_plan_without_processes_is_finished_at_once(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path, "a")
    with directory.locked():
        runtime = LocalRuntime(LocalPlan("a", "a", 1.0, ()), directory, url=URL)
        assert runtime.finished
        assert not runtime.ready
