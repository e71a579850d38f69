"""Options and output of `kvasir bench batching`."""

from typing import TYPE_CHECKING, Any

import click

from kvasir.bench.in_process import Bench, load, model_options
from kvasir.bench.options import COUNT, POSITIVE, common_options
from kvasir.bench.report import number, output, print_header, progress, spread_cell, table
from kvasir.bench.stats import spread
from kvasir.bench.workload import Lengths

if TYPE_CHECKING:
    from rich.console import Console

    from kvasir.bench.batching import Figure, Workload

_COMMAND = "kvasir bench batching"


@click.command()
@click.option("--requests", type=COUNT, default=96, show_default=True)
@click.option("--input-len", type=COUNT, default=64, show_default=True, help="Tokens, all alike.")
@click.option("--output-len", type=COUNT, default=96, show_default=True, help="Mean tokens.")
@click.option(
    "--spread",
    "variation",
    type=POSITIVE,
    default=1.5,
    show_default=True,
    help="Of the high-variance outputs (lognormal): standard deviation / mean.",
)
@click.option(
    "--max-model-len", type=COUNT, default=1024, show_default=True, help="What is reserved."
)
@click.option(
    "--reserved-slots",
    type=COUNT,
    default=8,
    show_default=True,
    help="KV memory of every mode, in sequences of full length.",
)
@click.option(
    "--max-running", type=COUNT, default=64, show_default=True, help="Sequences, where paged."
)
@model_options
@common_options
def batching(**given: Any) -> None:
    """Separate what continuous batching brings from what paging brings.

    Static and continuous batching, each with reserved and with paged KV memory: four modes of
    this engine on the same requests and in the same memory, for outputs of equal and of
    differing lengths. The baseline is static batching with reservation.
    """
    from kvasir.bench.batching import BASELINE, Workload, cut_outputs, measure
    from kvasir.bench.trial import TrialError

    mean = given["output_len"]
    _check_lengths(given["input_len"], mean, given["max_model_len"])
    shapes = (
        ("low variance", Lengths("uniform", mean, 0.1)),
        ("high variance", Lengths("lognormal", mean, given["variation"])),
    )
    work = Workload(
        requests=given["requests"],
        inputs=Lengths("fixed", given["input_len"]),
        outputs=shapes,
        reserved_slots=given["reserved_slots"],
        max_running=given["max_running"],
        seed=given["seed"],
    )
    console = output()
    with progress() as say:
        bench = load(
            given,
            say,
            lengths="--max-model-len",
            max_model_len=given["max_model_len"],
            kv_cache_memory=1024**3,
            max_running_requests=work.max_running,
        )
        _check_slots(work, bench)
        bench.settings.update(
            {
                "requests": work.requests,
                "input": given["input_len"],
                "outputs": dict(shapes),
                "outputs cut": ", ".join(
                    f"{cut_outputs(work, lengths, bench.scheduler.max_model_len)} of"
                    f" {work.requests} of {name}"
                    for name, lengths in shapes
                ),
                "KV memory": f"{work.reserved_slots} x {bench.scheduler.max_model_len} tokens",
                "running at most": f"{work.max_running} paged, {work.reserved_slots} reserved",
            }
        )
        try:
            figures = measure(
                bench.loaded.runner,
                bench.scheduler,
                work,
                given["runs"],
                bench.loaded.vocab_size,
                say,
            )
        except TrialError as error:
            raise click.ClickException(str(error)) from None
    print_header(console, _COMMAND, bench.machine, bench.settings)
    for name, _ in shapes:
        _print(console, name, [figure for figure in figures if figure.outputs == name], BASELINE)
    bench.write(given, _COMMAND, figures=figures)


def _check_lengths(input_len: int, output_len: int, max_model_len: int) -> None:
    """Most outputs must come whole: cut ones are no longer of the distribution that is named."""
    if input_len + output_len > max_model_len:
        raise click.BadParameter(
            f"{input_len} tokens leave {max(0, max_model_len - input_len)} of --max-model-len"
            f" {max_model_len} for outputs of --output-len {output_len} on average: lower it or"
            " --output-len, or raise --max-model-len",
            param_hint="--input-len",
        )


def _check_slots(work: "Workload", bench: Bench) -> None:
    from kvasir.bench.batching import reserved_blocks

    needed = reserved_blocks(work, bench.scheduler)
    available = bench.loaded.runner.num_blocks
    if needed > available:
        most = available * work.reserved_slots // needed
        raise click.BadParameter(
            f"{work.reserved_slots} sequences of --max-model-len {bench.scheduler.max_model_len}"
            f" tokens need {needed} KV blocks, and there are {available}: give at most {most}, or"
            " lower --max-model-len",
            param_hint="--reserved-slots",
        )


def _print(console: "Console", name: str, figures: list["Figure"], baseline: str) -> None:
    columns = (
        "mode",
        "output tokens/s",
        f"x {baseline}",
        "sequences in the batch",
        "E2E p50 s",
        "E2E p99 s",
        "failed",
        "memory GB/s",
    )
    rows = [
        (
            figure.mode,
            spread_cell(figure.throughput),
            spread_cell(figure.ratio),
            spread_cell(figure.running),
            spread_cell(figure.e2e_p50),
            spread_cell(figure.e2e_p99),
            str(figure.failed),
            spread_cell(spread(figure.memory_gb_s)),
        )
        for figure in figures
    ]
    lengths = figures[0].summaries[0].output_length
    told = ""
    if lengths is not None:
        told = (
            f": mean {number(lengths.mean)}, p50 {number(lengths.p50)}, p99 {number(lengths.p99)}"
        )
    console.print(table(f"Outputs of {name}{told}. Median (range) of runs", columns, rows))
