"""Linux namespaces that last as long as one process, which ends with the tests.

What is made inside (processes, mounts, network devices, routes, packet filter rules) is undone by
the kernel when the namespaces go, also after a killed test run.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from cluster.processes import Daemon, wait_until

_START_TIMEOUT = 20.0
_END_TIMEOUT = 30.0
_COMMAND_TIMEOUT = 120.0
_INIT = Path(__file__).parent / "node_init.py"


class Namespaces:
    """New namespaces of the kinds `kinds` (network and PID always)."""

    def __init__(self, name: str, log: Path, kinds: Sequence[str] = ()) -> None:
        flags = [f"--{kind}" for kind in ("net", "pid", *kinds)]
        hold = ["unshare", *flags, "--mount-proc", "--fork", "--kill-child=KILL"]
        self._daemon = Daemon(name, [*hold, sys.executable, "-S", str(_INIT)], log)
        self._kinds = ("net", "pid", "mount", *kinds)
        self._daemon.wait_until(lambda: bool(self._children()), "started", _START_TIMEOUT)
        self._init = self._children()[0]
        wait_until(
            lambda: str(_INIT) in self._init.cmdline(), f"first process of {name}", _START_TIMEOUT
        )

    @property
    def pid(self) -> int:
        """The first process, as seen from outside; names the namespaces for ``ip ... netns``."""
        return self._init.pid

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` inside; it ends when that is ended."""
        enter = ["nsenter", f"--target={self.pid}", *(f"--{kind}" for kind in self._kinds)]
        return [*enter, "setpriv", "--pdeathsig", "TERM", *command]

    def run(self, *command: str, stdin: str | None = None) -> str:
        """Run a command inside; what it printed. Raises AssertionError with its message."""
        return run(*self.inside(command), stdin=stdin)

    def processes(self) -> list[psutil.Process]:
        """Every process that descends from the first one, as seen from outside.

        Containers are among them; what was run `inside` from here descends from this process.
        """
        return [self._init, *self._init.children(recursive=True)]

    def end(self) -> None:
        """End every process inside, and with them the namespaces."""
        inside = self.processes()
        self._daemon.kill()
        psutil.wait_procs(inside, timeout=_END_TIMEOUT)

    def _children(self) -> list[psutil.Process]:
        return psutil.Process(self._daemon.pid).children()


def run(*command: str, stdin: str | None = None) -> str:
    """Run a command; what it printed. Raises AssertionError with its message if it fails."""
    result = subprocess.run(
        command, check=False, input=stdin, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT
    )
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr.strip()}"
    return result.stdout
