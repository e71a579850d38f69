"""A local runtime in a folder, of stand-ins for worker and router."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from helpers import standin
from kvasir.operator.local.health import Timing
from kvasir.operator.local.runtime import Event, LocalRuntime
from kvasir.operator.local.state import StateDirectory

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


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(TESTS)}


def gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
