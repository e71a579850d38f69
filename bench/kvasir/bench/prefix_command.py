"""Options and output of `kvasir bench prefix`."""

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import click

from kvasir.bench.in_process import load, model_options
from kvasir.bench.options import COUNT, common_options
from kvasir.bench.report import output, print_header, progress, spread_cell, table
from kvasir.bench.stats import Spread, spread

if TYPE_CHECKING:
    from rich.console import Console

    from kvasir.bench.prefix import Cost, Gain

_COMMAND = "kvasir bench prefix"
_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9)


@click.command()
@click.option(
    "--requests", type=COUNT, default=24, show_default=True, help="Unrelated ones, in one run."
)
@click.option("--input-len", type=COUNT, default=1024, show_default=True, help="Of each prompt.")
@click.option("--output-len", type=COUNT, default=16, show_default=True)
@click.option(
    "--shared-requests",
    type=COUNT,
    default=4,
    show_default=True,
    help="In one run, for each part that is shared.",
)
@model_options
@common_options
def prefix(**given: Any) -> None:
    """Show what the prefix cache costs without hits, and what it brings with them.

    The cost is measured in the whole engine, and in the scheduler alone, where the noise of the
    machine is small.
    """
    from kvasir.bench.prefix import Workload, measure_cost, measure_gain
    from kvasir.bench.trial import TrialError
    from kvasir.worker.config import WorkerConfig

    work = Workload(
        requests=given["requests"],
        input_len=given["input_len"],
        output_len=given["output_len"],
        shares=_SHARES,
        shared_requests=given["shared_requests"],
        seed=given["seed"],
    )
    longest = work.input_len + work.output_len
    block_size = WorkerConfig.model_fields["block_size"].default
    _check_input(work.input_len, block_size)
    console = output()
    with progress() as say:
        bench = load(
            given,
            say,
            lengths="--input-len and --output-len",
            max_model_len=longest,
            kv_cache_memory=1024**3,
        )
        bench.settings.update(
            {"input": work.input_len, "output": work.output_len, "requests": work.requests}
        )
        told = (given["runs"], bench.loaded.vocab_size, say)
        try:
            cost = measure_cost(bench.loaded.runner, bench.scheduler, work, *told)
            gains = measure_gain(bench.loaded.runner, bench.scheduler, work, *told)
        except TrialError as error:
            raise click.ClickException(str(error)) from None
    print_header(console, _COMMAND, bench.machine, bench.settings)
    _print_cost(console, cost)
    _print_gains(console, gains)
    bench.write(given, _COMMAND, cost=cost, gains=gains)


def _check_input(input_len: int, block_size: int) -> None:
    """Whole blocks are cached: a shared part that fills none would be a share without hits."""
    from kvasir.bench.prefix import common_tokens

    if common_tokens(input_len, max(_SHARES)) < block_size:
        least = next(n for n in count(1) if common_tokens(n, max(_SHARES)) >= block_size)
        raise click.BadParameter(
            f"of {input_len} tokens no shared part fills a block of {block_size} tokens, and only"
            f" whole blocks are cached: give at least {least}",
            param_hint="--input-len",
        )


def _scaled(found: Spread, factor: float) -> str:
    return spread_cell(Spread(factor * found.median, factor * found.low, factor * found.high))


def _print_cost(console: "Console", cost: "Cost") -> None:
    columns = ("", "caching on", "caching off", "on / off", "memory GB/s")
    memory = spread_cell(spread(cost.memory_gb_s))
    rows = [
        (
            "whole engine, tokens/s in and out",
            spread_cell(cost.tokens_per_s["on"]),
            spread_cell(cost.tokens_per_s["off"]),
            f"{cost.whole.median:.3f} ({cost.whole.low:.3f} to {cost.whole.high:.3f})",
            memory,
        )
    ]
    console.print(table("No prompt shares anything. Median (range) of runs", columns, rows))
    console.print(
        f"Bookkeeping alone: {spread_cell(cost.bookkeeping_us)} us for a token, "
        f"{100 * cost.bookkeeping_share.median:.2g} % of the engine's time for it.\n"
    )


def _print_gains(console: "Console", gains: Sequence["Gain"]) -> None:
    columns = (
        "shared part, whole blocks",
        "hit rate %",
        "TTFT ms, on",
        "TTFT ms, off",
        "times sooner",
        "memory GB/s",
    )
    rows = [
        (
            f"{100 * gain.share:.0f} %, {gain.blocks}",
            _scaled(gain.hit_rate, 100),
            _scaled(gain.ttft["on"], 1000),
            _scaled(gain.ttft["off"], 1000),
            spread_cell(gain.ratio),
            spread_cell(spread(gain.memory_gb_s)),
        )
        for gain in gains
    ]
    console.print(table("Prompts that begin alike. Median (range) of runs", columns, rows))
