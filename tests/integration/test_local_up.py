"""`kvasir up` as a process: signals, crashes, terminals."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers import standin_up
from helpers.local_runtime import PATIENCE, environment, gone, happenings, wait_for
from kvasir.operator.local.state import StateDirectory, running_instances


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


@contextmanager
def up(tmp_path: Path, **behaviors: Any) -> Iterator[Up]:
    process = Up(tmp_path, **behaviors)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.communicate()


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
