"""One `kvasir-worker` or `kvasir-router` as a real operating-system process.

Owns its configuration file, its state file, its log and its process group. It starts and
signals exactly one process at a time and never restarts one by itself. On Linux the process dies
with the thread that starts it (child.py), and so with the bench, however that ends.
"""

import asyncio
import json
import os
import signal
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvasir.operator.local.child import dies_with_us
from kvasir.operator.supervision import EXIT_CONFIGURATION

_POLL_S = 0.05
_TAIL_LINES = 20
_COMPUTES = " kvasir.worker computes "


class StackError(RuntimeError):
    """A process failed to start, died unasked, or left something behind."""


class RefusedStartError(StackError):
    """A process refused its configuration. ``line`` is why: ``field: problem; fix``."""

    def __init__(self, line: str) -> None:
        super().__init__(line)
        self.line = line


@dataclass(frozen=True, slots=True)
class State:
    """What a process last wrote to its state file; addresses are empty before ``ready``."""

    phase: str
    detail: str = ""
    pid: int = 0
    address: str = ""
    metrics_address: str = ""
    epoch: str = ""


class Process:
    """A component's process: ``program`` run with ``config`` in ``folder``.

    Files in ``folder``, by the process's name: NAME.json (configuration), NAME.state.json,
    NAME.log (stderr of all its runs, in order).
    """

    def __init__(
        self, name: str, program: str, config: str, folder: Path, env: Mapping[str, str]
    ) -> None:
        self.name = name
        self._program = Path(sysconfig.get_path("scripts")) / program
        self._config = config
        self._folder = folder
        self._env = dict(env)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def log(self) -> Path:
        return self._folder / f"{self.name}.log"

    async def start(self) -> None:
        """Start the process, in a process group of its own; does not wait until it is ready."""
        if self.alive:
            raise StackError(f"{self.name} is already running")
        config_file = self._folder / f"{self.name}.json"
        config_file.write_text(self._config)
        self._state_file.unlink(missing_ok=True)
        options = ["--config", str(config_file), "--state-file", str(self._state_file)]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *dies_with_us([str(self._program), *options]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._env},
                start_new_session=True,
            )

    def state(self) -> State | None:
        """The last state written; None before the first."""
        try:
            written = json.loads(self._state_file.read_text())
        except FileNotFoundError:
            return None
        known = {key: value for key, value in written.items() if key in State.__slots__}
        return State(**known)

    async def ready(self, timeout_s: float) -> State:
        """Wait for phase ``ready``.

        Raises:
            RefusedStartError: the process refused its configuration.
            StackError: it died otherwise, or took too long.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self.alive:
                    state = self.state()
                    if state is not None and state.phase == "ready":
                        return state
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise StackError(
                f"{self.name} is not ready after {timeout_s:g} s (state: {self.state()});"
                f" its log ends:\n{self.log_tail()}"
            ) from None
        if self._running().returncode == EXIT_CONFIGURATION:
            last = self.log_tail().splitlines()[-1]
            raise RefusedStartError(last.removeprefix(f"{self._program.name}: "))
        raise StackError(
            f"{self.name} ended with exit code {self._running().returncode} before it was ready;"
            f" its log ends:\n{self.log_tail()}"
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself, as `kill` does."""
        self._running().send_signal(number)

    async def exited(self, timeout_s: float) -> int:
        """Wait for the end. Returns the exit code, negative for a signal."""
        try:
            return await asyncio.wait_for(self._running().wait(), timeout_s)
        except TimeoutError:
            raise StackError(
                f"{self.name} (pid {self.pid}) has not ended after {timeout_s:g} s;"
                f" its log ends:\n{self.log_tail()}"
            ) from None

    async def destroy(self) -> None:
        """End the process and all that it started, at once."""
        if self._process is None:
            return
        if self._group_exists():
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    def check_nothing_left(self) -> None:
        """Raise if a process of the ended one's group still runs."""
        if self._process is not None and self._group_exists():
            raise StackError(f"{self.name} ended and left processes in group {self._process.pid}")

    def computes(self) -> dict[str, str]:
        """What the process, a worker, has said that it computes with: with, dtype, threads, ...

        Empty before it has loaded its model.
        """
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        said = [line.partition(_COMPUTES)[2] for line in lines if _COMPUTES in line]
        return dict(part.split("=", 1) for part in said[-1].split()) if said else {}

    def log_tail(self) -> str:
        if not self.log.exists():
            return "(no log)"
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_TAIL_LINES:]) or "(empty log)"

    @property
    def _state_file(self) -> Path:
        return self._folder / f"{self.name}.state.json"

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise StackError(f"{self.name} was never started")
        return self._process

    def _group_exists(self) -> bool:
        if self._process is None:
            return False
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True
