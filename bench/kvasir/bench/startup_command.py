"""Options and output of `kvasir bench startup`."""

import asyncio
from typing import TYPE_CHECKING, Any

import click

from kvasir.bench.in_process import computing, model_options
from kvasir.bench.machine import describe_machine, memory_bandwidth
from kvasir.bench.options import common_options
from kvasir.bench.refusals import bad_model
from kvasir.bench.report import (
    number,
    output,
    print_header,
    progress,
    spread_cell,
    table,
    write_json,
)
from kvasir.bench.stats import Spread

if TYPE_CHECKING:
    from rich.console import Console

    from kvasir.bench.startup import Figure

_COMMAND = "kvasir bench startup"


@click.command()
@model_options
@common_options
def startup(**given: Any) -> None:
    """Measure how soon a worker is ready, and its resident memory.

    A worker process behind a router, started anew in every run.
    """
    from kvasir.bench.stack import RefusedStartError, StackError
    from kvasir.bench.startup import measure, summarize
    from kvasir.worker.config import WorkerConfig

    names = ("model", "dtype", "quantization", "activation_quantization", "threads")
    worker = WorkerConfig(worker_id="bench", **{name: given[name] for name in names})
    machine = describe_machine()
    memory = memory_bandwidth()
    console = output()
    try:
        with progress() as say:
            starts = asyncio.run(measure(worker, given["runs"], given["seed"], say))
    except RefusedStartError as error:
        raise bad_model(error.line) from None
    except StackError as error:
        raise click.ClickException(str(error)) from None
    figure = summarize(starts)
    settings = {
        "model": worker.model,
        **computing(starts[0].computes),
        "seed": given["seed"],
        "runs": given["runs"],
    }
    print_header(console, _COMMAND, machine, {**settings, "memory GB/s": number(memory)})
    _print(console, figure)
    if given["json_file"] is not None:
        report = {"command": _COMMAND, "machine": machine, "settings": settings}
        write_json(
            given["json_file"],
            {**report, "memory_gb_s": memory, "figure": figure, "starts": starts},
        )


def _print(console: "Console", figure: "Figure") -> None:
    def megabytes(size: Spread) -> str:
        return spread_cell(Spread(size.median / 1e6, size.low / 1e6, size.high / 1e6))

    console.print(f"Ready after {spread_cell(figure.ready_s)} s\n")
    columns = ("resident, MB", "weights", "KV", "everything else", "in all")
    held = (megabytes(figure.weights), megabytes(figure.kv))
    rows = [
        ("when ready", *held, megabytes(figure.other), megabytes(figure.resident)),
        ("after requests", *held, megabytes(figure.other_serving), megabytes(figure.serving)),
    ]
    console.print(table("Median (range) of runs", columns, rows))
