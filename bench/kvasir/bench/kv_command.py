"""Options and output of `kvasir bench kv`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvasir.bench.machine import describe_machine
from kvasir.bench.options import COUNT, FILE, common_options
from kvasir.bench.refusals import blaming
from kvasir.bench.report import (
    number,
    output,
    print_header,
    progress,
    spread_cell,
    table,
    write_json,
)
from kvasir.bench.stats import Spread, distribution, spread
from kvasir.bench.traces import TraceRow, read_trace
from kvasir.bench.workload import WorkloadError

if TYPE_CHECKING:
    from rich.console import Console

    from kvasir.bench.kv import Figure, Mode

_COMMAND = "kvasir bench kv"
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_TOKEN_BYTES = 30 * 2 * 3 * 64 * 2


@click.command()
@click.option("--trace", type=FILE, required=True, help="Lengths: Azure .csv or Mooncake .jsonl.")
@click.option("--requests", type=COUNT, default=1000, show_default=True, help="Rows of one run.")
@click.option(
    "--kv-tokens", type=COUNT, default=65536, show_default=True, help="Tokens that the KV holds."
)
@click.option(
    "--token-bytes",
    type=COUNT,
    default=_TOKEN_BYTES,
    show_default=True,
    help="KV of one token; by default the bundled model's in bfloat16.",
)
@click.option(
    "--max-model-len",
    type=COUNT,
    default=8192,
    show_default=True,
    help="The longest sequence; longer rows are left out. Reservation takes as much.",
)
@click.option("--block-size", type=COUNT, default=16, show_default=True, help="Of reservation.")
@click.option("--max-batched-tokens", type=COUNT, default=512, show_default=True)
@click.option("--max-running", type=COUNT, default=256, show_default=True)
@common_options
def kv(**given: Any) -> None:
    """Show how much of the KV memory holds KV: paging in several block sizes, and reservation.

    The scheduler alone, on the lengths of a trace: nothing is computed, and the shares do not
    depend on the machine.
    """
    from kvasir.bench.kv import PAGING, RESERVATION, Mode, Workload, drawn, fitting, measure

    machine = describe_machine()
    console = output()
    modes = [Mode(RESERVATION, given["block_size"]), *(Mode(PAGING, n) for n in _SIZES)]
    _check_memory(given["kv_tokens"], given["max_model_len"], modes)
    with blaming("--trace"):
        rows = read_trace(given["trace"])
        fit = fitting(rows, given["max_model_len"])
        _check_rows(rows, fit, given["max_model_len"])
        names = ("requests", "kv_tokens", "token_bytes", "max_model_len", "max_batched_tokens")
        work = Workload(
            rows=fit,
            max_running=given["max_running"],
            seed=given["seed"],
            **{name: given[name] for name in names},
        )
        with progress() as say:
            figures = measure(work, modes, given["runs"], say)
    measured = [row for run in range(given["runs"]) for row in drawn(work, run)]
    settings = {
        "trace": given["trace"].name,
        "rows left out": len(rows) - len(fit),
        **{name: given[name] for name in (*names, "max_running", "seed", "runs")},
        "requests": len(measured) // given["runs"],
        **_fewer(len(measured) // given["runs"], given["requests"]),
        "input": _lengths([row.input_length for row in measured]),
        "output": _lengths([row.output_length for row in measured]),
    }
    print_header(console, _COMMAND, machine, settings)
    _print(console, figures)
    if given["json_file"] is not None:
        report = {"command": _COMMAND, "machine": machine, "settings": settings}
        write_json(given["json_file"], {**report, "figures": figures})


def _fewer(measured: int, asked: int) -> dict[str, Any]:
    """What is to be said if the trace has too few rows."""
    return {} if measured == asked else {"asked for": f"{asked}, more than fitting rows"}


def _check_memory(kv_tokens: int, max_model_len: int, modes: Sequence["Mode"]) -> None:
    """In less memory the longest request would wait for ever."""
    from kvasir.bench.kv import least_kv_tokens

    least = least_kv_tokens(max_model_len, modes)
    if kv_tokens < least:
        raise click.BadParameter(
            f"{kv_tokens} tokens do not hold one sequence of --max-model-len {max_model_len} in"
            f" blocks of every size: give at least {least}, or lower --max-model-len",
            param_hint="--kv-tokens",
        )


def _check_rows(rows: Sequence[TraceRow], fit: Sequence[TraceRow], max_model_len: int) -> None:
    longer = sum(row.input_length + row.output_length > max_model_len for row in rows)
    if longer and not fit:
        raise click.BadParameter(
            f"{longer} of {len(rows)} rows are longer than --max-model-len {max_model_len};"
            " raise it",
            param_hint="--max-model-len",
        )
    if not fit:
        raise WorkloadError(f"none of its {len(rows)} rows has both input and output")


def _lengths(lengths: Sequence[int]) -> str:
    found = distribution([float(length) for length in lengths])
    if found is None:
        return "none"
    return f"mean={number(found.mean)} p50={number(found.p50)} p99={number(found.p99)}"


def _print(console: "Console", figures: Sequence["Figure"]) -> None:
    first = "KV memory, block size"
    columns = ("filled", "reserved", "internal", "external", "waste", "tables")
    shares = [
        (
            f"{one.mode}, {one.block_size}",
            *map(_percent, (one.filled, one.reserved, one.internal)),
            *map(_percent, (one.external, one.waste, one.table)),
        )
        for one in figures
    ]
    title = "% of the slots taken, mean over steps. Median (range) of runs"
    console.print(table(title, (first, *columns), shares))
    console.print("Waste: internal and external. Tables: their bytes in % of the KV's.\n")
    measured = ("requests with blocks", "steps", "preemptions", "scheduler us/step")
    effects = [
        (
            f"{one.mode}, {one.block_size}",
            *map(spread_cell, (one.running, one.steps, one.preemptions, one.scheduler_us)),
            spread_cell(spread(one.memory_gb_s)),
        )
        for one in figures
    ]
    console.print(
        table("What that does. Median (range) of runs", (first, *measured, "memory GB/s"), effects)
    )


def _percent(share: Spread) -> str:
    low, high = f"{100 * share.low:.2f}", f"{100 * share.high:.2f}"
    median = f"{100 * share.median:.2f}"
    return median if low == high else f"{median} ({low} to {high})"
