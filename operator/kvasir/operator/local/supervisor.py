"""Starts, watches and signals one process of the plan. Decides nothing.

Each process leads its own session, so that a terminal's Ctrl-C reaches the runtime alone,
which then stops them in order. On Linux a process dies with the runtime (child.py).
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvasir.operator.local.child import dies_with_us
from kvasir.operator.local.state import ProcessRecord, ProcessState, StateDirectory, record_of
from kvasir.operator.plan import Process

CommandBuilder = Callable[[Process, Path, Path], list[str]]
"""(process, config file, state file) -> command line."""

LOG_LIMIT = 16 * 1024**2
"""Bytes of a log. One earlier log of the same length is kept."""
_TAIL = 8192
"""Bytes of a log that are searched for its last line."""


def component_command(process: Process, config_file: Path, state_file: Path) -> list[str]:
    component = "router" if process.role == "router" else "worker"
    return [
        sys.executable,
        # The current folder may hold anything; it must not shadow modules.
        "-P",
        "-m",
        f"kvasir.{component}.main",
        "--config",
        str(config_file),
        "--state-file",
        str(state_file),
    ]


class Supervised:
    """One started process."""

    def __init__(self, process: Process, directory: StateDirectory, build: CommandBuilder) -> None:
        """Start it. Raises OSError if the operating system refuses."""
        self.process = process
        self._directory = directory
        config, state = directory.config_file(process.id), directory.state_file(process.id)
        directory.write_json(config, process.config)
        state.unlink(missing_ok=True)
        with directory.log_file(process.id).open("ab") as log:
            self._log_start = log.tell()
            self._popen = subprocess.Popen(
                _bound(build(process, config, state)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        # Not yet waited for, so its pid cannot be anyone else's.
        self.record: ProcessRecord = record_of(process.id, self._popen.pid)

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._popen.poll()

    def state(self) -> ProcessState | None:
        return self._directory.read_state(self.process.id, self._popen.pid)

    def last_line(self) -> str:
        """The last line that this process (not an earlier one of its id) logged, or nothing."""
        try:
            with self._directory.log_file(self.process.id).open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - _TAIL))
                lines = log.read().decode(errors="replace").split("\n")
        except FileNotFoundError:  # somebody tidied up: no reason to stop the service
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def limit_log(self) -> None:
        """Put a log that is too long aside and begin anew.

        The process holds the file open for appending, so that the file is emptied, not replaced;
        what the process writes in just that moment is lost.
        """
        log = self._directory.log_file(self.process.id)
        with suppress(FileNotFoundError):  # somebody tidied up: no reason to stop the service
            if log.stat().st_size > LOG_LIMIT:
                shutil.copyfile(log, earlier_log(log))
                os.truncate(log, 0)
                self._log_start = 0

    def terminate(self) -> None:
        self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._popen.kill()

    def wait(self) -> None:
        self._popen.wait()


def earlier_log(log: Path) -> Path:
    return log.with_name(f"{log.name}.1")


def _bound(command: list[str]) -> list[str]:
    # Where child.py does nothing, `kvasir up` stops leftovers when it is started again.
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "processes live as long as the thread that starts them: use the main one"
        )
    return dies_with_us(command)
