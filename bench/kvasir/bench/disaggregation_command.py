"""Options and output of `kvasir bench disaggregation`."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvasir.bench.in_process import computing, model_options
from kvasir.bench.machine import describe_machine
from kvasir.bench.options import COUNT, DURATION, POSITIVE, common_options
from kvasir.bench.refusals import bad_model
from kvasir.bench.report import (
    maybe_cell,
    output,
    print_header,
    progress,
    spread_cell,
    table,
    write_json,
)
from kvasir.bench.serve_report import print_failures
from kvasir.bench.stats import Objectives, spread
from kvasir.bench.workload import Lengths

if TYPE_CHECKING:
    from rich.console import Console

    from kvasir.bench.disaggregation import Figure

_COMMAND = "kvasir bench disaggregation"


@click.command()
@click.option("--requests", type=COUNT, default=60, show_default=True, help="In one run.")
@click.option("--rate", type=POSITIVE, default=1.0, show_default=True, help="Requests a second.")
@click.option("--input-len", type=COUNT, default=512, show_default=True, help="Mean tokens.")
@click.option("--output-len", type=COUNT, default=64, show_default=True, help="Mean tokens.")
@click.option("--slo-ttft", type=DURATION, default="2s", show_default=True)
@click.option("--slo-itl", type=DURATION, default="50ms", show_default=True)
@model_options
@common_options
@click.pass_context
def disaggregation(ctx: click.Context, /, **given: Any) -> None:
    """Compare one pool of workers with a prefill and a decode pool, on the same cores.

    Same open-loop load, lengths and threads in total. It tells the cost (throughput, bytes moved)
    as well as the gain (the tail between tokens).
    """
    from kvasir.bench.disaggregation import Workload, longest, measure
    from kvasir.bench.serve import ServerError
    from kvasir.bench.stack import RefusedStartError, StackError
    from kvasir.worker.config import WorkerConfig
    from kvasir.worker.model.machine import usable_cores

    threads = given["threads"] or usable_cores()
    if threads % 2:
        raise click.BadParameter(
            f"{threads} cannot be halved: give an even number", param_hint="--threads"
        )
    work = Workload(
        rate=given["rate"],
        requests=given["requests"],
        inputs=Lengths("lognormal", given["input_len"], 0.5),
        outputs=Lengths("lognormal", given["output_len"], 0.5),
        objectives=Objectives(given["slo_ttft"], given["slo_itl"]),
        seed=given["seed"],
    )
    worker = WorkerConfig(
        worker_id="bench",
        model=given["model"],
        dtype=given["dtype"],
        quantization=given["quantization"],
        activation_quantization=given["activation_quantization"],
        threads=threads,
        max_model_len=longest(work),
    )
    content_seed = secrets.randbits(32)
    machine = describe_machine()
    console = output()
    try:
        with progress() as say:
            figures = asyncio.run(
                measure(worker, work, given["runs"], content_seed, say, time.perf_counter)
            )
    except RefusedStartError as error:
        raise bad_model(error.line, "--input-len and --output-len") from None
    except (StackError, ServerError) as error:
        raise click.ClickException(str(error)) from None
    settings = {
        "model": worker.model,
        **computing(figures[0].computes),
        "threads": f"{threads} in total",
        "open loop, rate": work.rate,
        "requests": work.requests,
        "input length": work.inputs,
        "output length": work.outputs,
        "objectives": work.objectives,
        "runs": given["runs"],
        "seed": work.seed,
        "content seed": content_seed,
    }
    print_header(console, _COMMAND, machine, settings)
    _print(console, figures)
    if given["json_file"] is not None:
        report = {"command": _COMMAND, "machine": machine, "settings": settings}
        write_json(given["json_file"], {**report, "figures": figures})
    if failed := sum(figure.failed for figure in figures):
        click.echo(f"kvasir bench: {failed} requests failed", err=True)
        ctx.exit(1)


def _print(console: "Console", figures: Sequence["Figure"]) -> None:
    columns = (
        "layout",
        "output tokens/s",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "ITL p50 ms",
        "ITL p99 ms",
        "goodput/s",
        "KV moved MB",
        "KB for a prompt token",
        "failed",
        "memory GB/s",
    )
    rows = [
        (
            figure.layout,
            spread_cell(figure.output_tokens_per_s),
            maybe_cell(figure.ttft_p50, 1000),
            maybe_cell(figure.ttft_p99, 1000),
            maybe_cell(figure.itl_p50, 1000),
            maybe_cell(figure.itl_p99, 1000),
            spread_cell(figure.goodput_per_s),
            maybe_cell(figure.transferred_bytes, 1e-6),
            maybe_cell(figure.transferred_per_token, 1e-3),
            str(figure.failed),
            spread_cell(spread([v for run in figure.runs for v in run.memory_gb_s])),
        )
        for figure in figures
    ]
    console.print(table("Median (range) of runs", columns, rows))
    for figure in figures:
        if figure.failed:
            console.print(f"{figure.layout}:")
            print_failures(console, [run.summary for run in figure.runs])
