"""Runs the loop of `kvasir up` on stand-in processes: ``standin_up.py STATE_ROOT BEHAVIORS``.

BEHAVIORS is JSON: role to behavior, as in standin.py, and ``drain_deadline``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import click

from helpers import standin
from kvasir.cli.errors import run
from kvasir.cli.up import Reporter, serve
from kvasir.operator.local.runtime import LocalRuntime
from kvasir.operator.local.state import StateDirectory

NO_ROUTER = "http://127.0.0.1:9"
"""Nothing listens on the discard port, so the ready line never comes."""


@click.command()
@click.argument("root", type=click.Path(path_type=Path))
@click.argument("behaviors", type=json.loads)
def main(root: Path, behaviors: dict[str, Any]) -> None:
    plan = standin.plan(root / "events", **behaviors)
    directory = StateDirectory(root, plan.name)
    with directory.locked():
        directory.stop_leftovers()
        runtime = LocalRuntime(plan, directory, url=NO_ROUTER, command=standin.command)
        serve(runtime, Reporter(plan, directory.path, NO_ROUTER))
        directory.remove_instance()


if __name__ == "__main__":
    sys.exit(run(main))
