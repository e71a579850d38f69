"""Stands in for a worker or router process under the local runtime: no model, only /health.

Run as ``standin.py CONFIG STATE``. The config says how it behaves:

    events           file to which a line is appended: "start ID", "term ID"
    crashes          how many times it exits with code 1 before it becomes ready
    exit_code        exits with this code at once, after a last line on stderr
    stubborn         ignores SIGTERM
    rest             seconds that it takes to leave after SIGTERM
    chatter          bytes that it logs when it is ready
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

from kvasir.operator.plan import LocalPlan, Process


def plan(events: Path, drain_deadline: float = 30.0, **behaviors: dict[str, Any]) -> LocalPlan:
    """A prefill worker, a decode worker and a router; behaviors by role."""
    return LocalPlan(
        name="standin",
        served_name="standin",
        drain_deadline=drain_deadline,
        processes=tuple(
            Process(
                f"standin-{role}-0",
                role,
                {"id": f"standin-{role}-0", "events": str(events), **behaviors.get(role, {})},
            )
            for role in ("prefill", "decode", "router")
        ),
    )


def command(_process: Process, config_file: Path, state_file: Path) -> list[str]:
    return [sys.executable, __file__, str(config_file), str(state_file)]


def main() -> None:
    config_file, state_file = map(Path, sys.argv[1:])
    config = json.loads(config_file.read_text())
    events = Path(config["events"])

    def note(event: str) -> None:
        with events.open("a") as file:
            file.write(f"{event} {config['id']}\n")

    def write_state(phase: str, **more: str) -> None:
        state = {"phase": phase, "detail": f"{phase} now", "pid": os.getpid(), **more}
        temporary = state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(state))
        temporary.replace(state_file)

    def leave(_number: int, _frame: FrameType | None) -> None:
        note("term")
        if not config.get("stubborn"):
            write_state("draining", address="127.0.0.1:1")
            time.sleep(config.get("rest", 0.0))
            sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    note("start")
    if "exit_code" in config:
        sys.exit(_fail("kvasir-worker: model: no such file", config["exit_code"]))
    write_state("loading")
    starts = events.read_text().splitlines().count(f"start {config['id']}")
    if starts <= config.get("crashes", 0):
        sys.exit(_fail("out of luck", 1))
    health = HTTPServer(("127.0.0.1", 0), _Health)
    threading.Thread(target=health.serve_forever, daemon=True).start()
    write_state(
        "ready",
        address=f"127.0.0.1:{os.getpid() % 60000 + 1000}",
        metrics_address=f"127.0.0.1:{health.server_port}",
    )
    sys.stderr.write("x" * config.get("chatter", 0))
    while True:
        time.sleep(0.05)


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # the name that http.server calls
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # as in http.server
        """Its log is for what the tests read."""


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"an earlier line\n{message}\n\n")
    return code


if __name__ == "__main__":
    main()
