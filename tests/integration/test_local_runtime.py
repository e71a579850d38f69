"""The local runtime with real processes: start, restart, deadline, end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import standin
from helpers.local_runtime import (
    URL,
    children,
    environment,
    happenings,
    runtime_of,
    step_until,
    workers_file,
)
from kvasir.operator.local import supervisor
from kvasir.operator.local.runtime import Event, Exited, Failed, Hung, LocalRuntime, PhaseChanged
from kvasir.operator.local.state import AlreadyRunningError, StateDirectory, running_instances


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
