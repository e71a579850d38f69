"""`kvasir up`: run a ModelService as local processes until Ctrl-C.

The operator's local runtime does the work. Here are its loop, the signals, and the words.
"""

import json
import os
import shlex
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import click
from rich.live import Live
from rich.table import Table

from kvasir.cli.client import RouterClient
from kvasir.cli.console import output
from kvasir.cli.errors import InvalidInput
from kvasir.operator.local.machine import this_machine
from kvasir.operator.local.ports import choose_port
from kvasir.operator.local.runtime import (
    Event,
    Exited,
    Failed,
    Hung,
    LocalRuntime,
    PhaseChanged,
)
from kvasir.operator.local.state import AlreadyRunningError, StateDirectory, state_root
from kvasir.operator.manifest import ManifestError, load
from kvasir.operator.modelservice import ModelService
from kvasir.operator.plan import HOST, LocalPlan, Refused, plan_local
from kvasir.operator.supervision import EXIT_CONFIGURATION

_ORDERLY = (0, EXIT_CONFIGURATION, -signal.SIGTERM)
"""Exit codes of processes that are not started again, about which nothing is to be said:
a configuration error is reported as a failure, and SIGTERM may meet a process that has not
yet begun to handle it."""

_STEP = 0.1
"""Seconds between two looks at the processes."""


@click.command()
@click.option(
    "-f",
    "--file",
    "manifest",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="ModelService in YAML, as `kubectl apply` takes it.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="HTTP port; 0 picks a free one.",
)
def up(manifest: Path, port: int) -> None:
    """Serve the ModelService in FILE on this machine.

    Starts its router and its prefill and decode workers as processes, restarts what
    crashes, and stops everything on Ctrl-C: open requests finish first, a second Ctrl-C
    ends them. Listens on 127.0.0.1 only. Logs are in $XDG_STATE_HOME/kvasir/NAME
    (~/.local/state/kvasir/NAME).
    """
    try:
        service = load(manifest)
    except ManifestError as error:
        raise InvalidInput(str(error)) from error
    directory = StateDirectory(state_root(os.environ), service.name)
    # What is wrong with the file is said first, whatever else is in the way.
    _plan(manifest, service, directory, port)
    with _owned(directory):
        for process_id in directory.stop_leftovers():
            click.echo(f"stopped {process_id}, left over by a `kvasir up` that was killed")
        chosen = choose_port(HOST, port)
        if chosen is None:
            raise click.ClickException(
                f"port {port} on {HOST} is in use or not allowed; "
                "stop what uses it, or choose another with --port (0 picks a free one)"
            )
        plan = _plan(manifest, service, directory, chosen)
        url = f"http://{HOST}:{chosen}"
        serve(LocalRuntime(plan, directory, url=url), Reporter(plan, directory.path, url))
        directory.remove_instance()


def _plan(manifest: Path, service: ModelService, directory: StateDirectory, port: int) -> LocalPlan:
    plan = plan_local(service, this_machine(), port=port, workers_file=directory.workers_file)
    if isinstance(plan, Refused):
        raise InvalidInput("\n".join(f"{manifest}: {problem}" for problem in plan.problems))
    return plan


@contextmanager
def _owned(directory: StateDirectory) -> Iterator[None]:
    """The directory, locked; the ways in which that can fail, in words."""
    with ExitStack() as stack:
        try:
            stack.enter_context(directory.locked())
        except AlreadyRunningError:
            instance = directory.read_instance()
            where = f" on {instance.url}" if instance else ""
            raise click.ClickException(
                f"{directory.path.name} already runs{where}; stop that `kvasir up` first, "
                "or change metadata.name"
            ) from None
        except OSError as error:
            raise click.ClickException(
                f"cannot write to {directory.path}: {error.strerror}; "
                "set XDG_STATE_HOME to a folder that you may write to"
            ) from error
        yield


class Reporter:
    """Says what happens: live lines on a terminal while models load, else one line each."""

    def __init__(self, plan: LocalPlan, directory: Path, url: str) -> None:
        self._plan = plan
        self._url = url
        self._ready = False
        self._stopping = False
        self.error: click.ClickException | None = None
        """What the command ends with; None if nothing failed."""
        self._directory = directory
        self._console = output()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        click.echo(f"Starting {plan.served_name}; logs are in {directory}")
        for note in plan.notes:
            click.echo(f"note: {note}")
        if self._console.is_terminal:
            self._live.start()

    def event(self, event: Event) -> None:
        match event:
            case PhaseChanged(id=process_id, phase="ready") if self._ready:
                self._say(f"{process_id} is ready again")
            case PhaseChanged(id=process_id, phase=phase, detail=detail):
                if not self._live.is_started and not self._ready:
                    self._say(f"{process_id}: {phase}{detail and ', '}{detail}")
            case Exited(id=process_id, restart_in=float(delay)):
                self._say(f"{process_id} {_why(event)}; starting it again in {delay:g} s")
            case Hung(id=process_id):
                self._say(f"{process_id} does not answer its health check any more; killed")
            case Failed():
                self._failed(event)
            case Exited(id=process_id, exit_code=code) if code not in _ORDERLY:
                self._say(f"{process_id} {_why(event)}")

    def show(self, runtime: LocalRuntime) -> None:
        """Refresh the live lines, and say once when everything is ready."""
        if self._ready or self._stopping:
            return
        if self._live.is_started:
            self._live.update(_progress(runtime), refresh=True)
        if runtime.ready and RouterClient(self._url, timeout=1.0).is_ready():
            self._ready = True
            self.end_live()
            self._say_ready()

    def stopping(self) -> None:
        """Said once."""
        if not self._stopping:
            self._stopping = True
            self.end_live()
            self._say("Stopping: open requests finish first; Ctrl-C again ends them")

    def end_live(self) -> None:
        if self._live.is_started:
            self._live.stop()

    def _failed(self, event: Failed) -> None:
        line = f"{event.id}: {event.message} (log: {self._directory / event.id}.log)"
        kind = InvalidInput if event.invalid else click.ClickException
        self.error = kind(f"{self.error.message}\n{line}" if self.error else line)

    def _say_ready(self) -> None:
        roles = Counter(process.role for process in self._plan.processes)
        counts = ", ".join(f"{roles[role]} {role}" for role in ("prefill", "decode") if roles[role])
        body = {
            "model": self._plan.served_name,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            # Small models talk nonsense at the API's default temperature of 1.
            "temperature": 0,
        }
        self._say(f"Ready: {self._plan.served_name} on {self._url} ({counts})")
        self._say("")
        self._say(
            f"    curl {self._url}/v1/chat/completions -H 'Content-Type: application/json' \\"
        )
        self._say(f"      -d {shlex.quote(json.dumps(body))}")
        self._say("")
        self._say("Ctrl-C stops it. `kvasir chat` and `kvasir status` work in another terminal.")

    def _say(self, line: str) -> None:
        # Not wrapped: what is to be pasted stays in one piece. Above the live lines, if any.
        self._console.print(line, markup=False, soft_wrap=True)


def serve(runtime: LocalRuntime, report: Reporter) -> None:
    """Step until everything has stopped. Leaves no process, whatever is raised."""
    try:
        with _stop_signals() as received:
            while not runtime.finished:
                for event in runtime.step():
                    report.event(event)
                if received:
                    report.stopping()
                    runtime.stop()
                if len(received) > 1:
                    runtime.kill()
                report.show(runtime)
                time.sleep(_STEP)
    except OSError as error:
        raise click.ClickException(
            f"everything is stopped, because of an error of the system: {error}"
        ) from error
    finally:
        report.end_live()
        runtime.kill()
    if report.error is not None:
        raise report.error


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT, SIGTERM and SIGHUP instead of dying from them."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    previous = {
        number: signal.signal(number, note)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _why(event: Exited) -> str:
    """How it ended, and its last words after a crash."""
    if event.exit_code < 0:
        return f"was ended by {signal.Signals(-event.exit_code).name}"
    last_words = f" ({event.last_line})" if event.exit_code and event.last_line else ""
    return f"exited with code {event.exit_code}{last_words}"


def _progress(runtime: LocalRuntime) -> Table:
    table = Table.grid(padding=(0, 2))
    for view in runtime.view():
        style = "green" if view.phase == "ready" else "yellow"
        table.add_row(view.id, f"[{style}]{view.phase}[/{style}]", view.detail)
    return table
