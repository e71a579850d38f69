"""What an earlier local runtime left behind."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil

from helpers.local_runtime import URL, gone
from kvasir.operator.local.runtime import LocalRuntime
from kvasir.operator.local.state import (
    Instance,
    ProcessRecord,
    StateDirectory,
    record_of,
    running_instances,
)
from kvasir.operator.plan import LocalPlan


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
