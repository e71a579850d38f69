"""Processes that tests start: their logs, signals and end.

Nothing outlives the tests: each process is told by the kernel to end when the thread that
started it does (Linux, through ``setpriv``), so that also a killed test run leaves none.
"""

import os
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

_POLL_SECONDS = 0.05


class Daemon:
    """One long-running process, started at once; restartable with the same command.

    Start it from the main thread: it ends with the thread that started it. `wrapped` says that the
    command only waits for a child (as ``nsenter`` does); then the child is what signals go to.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, *, wrapped: bool = False
    ) -> None:
        self.name = name
        self._wrapped = wrapped
        self._command = list(command)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} is not running"
        if not self._wrapped:
            return self._process.pid
        children = psutil.Process(self._process.pid).children()
        return int(children[0].pid) if children else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def resident_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    def start(self) -> None:
        assert not self.running, f"{self.name} runs already"
        tied = ["setpriv", "--pdeathsig", "KILL"] if platform.system() == "Linux" else []
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*tied, *self._command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def pause(self) -> None:
        """Stop it where it is: connections stay open and nothing is answered."""
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None and self.running:
            self.send(signal.SIGKILL)
            self._process.wait()

    def wait_until(self, ready: Callable[[], bool], what: str, timeout: float) -> None:
        """Wait for `ready`; fails with the end of the log if the process ends or time is up."""

        def alive_and_ready() -> bool:
            if not self.running:
                raise AssertionError(f"{self.name} ended before it was {what}:\n{self.tail()}")
            return ready()

        wait_until(alive_and_ready, f"{self.name} {what}", timeout, self.tail)

    def tail(self) -> str:
        return "\n".join(self.log.splitlines()[-30:])


def wait_until(
    predicate: Callable[[], bool],
    what: str,
    timeout: float,
    explain: Callable[[], str] = lambda: "",
) -> None:
    """Poll `predicate`; after `timeout` seconds fail with `what` and what `explain` adds."""
    deadline = time.monotonic() + timeout
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not seen within {timeout:.0f} s: {what}\n{explain()}".rstrip())
        time.sleep(_POLL_SECONDS)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
