"""Options, table and picture of `kvasir bench chunking`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvasir.bench.in_process import load, model_options
from kvasir.bench.options import COUNT, check_folder, common_options
from kvasir.bench.report import output, print_header, progress, spread_cell, table
from kvasir.bench.stats import Spread, spread

if TYPE_CHECKING:
    from rich.console import Console

    from kvasir.bench.chunking import Figure, Workload

_COMMAND = "kvasir bench chunking"
_ROOM = 2048
"""Tokens of a sequence that decodes: enough steps for all prompts of the default settings."""


class Counts(click.ParamType[tuple[int, ...]]):
    """Positive whole numbers, with commas between them."""

    name = "n,n,..."

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r}: write whole numbers with commas, as 64,256", param, ctx)
        if min(found) < 1 or len(set(found)) != len(found):
            self.fail(f"{value!r}: each must be at least 1, and none twice", param, ctx)
        return found


def _check_picture(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix.lower() != ".png":
        raise click.BadParameter(f"{value.name} must end in .png")
    return check_folder(ctx, param, value)


@click.command()
@click.option(
    "--budgets",
    type=Counts(),
    default="32,64,128,256,512,1024,2048",
    show_default=True,
    help="Values of maxBatchedTokens.",
)
@click.option("--decoding", type=COUNT, default=8, show_default=True, help="Sequences that decode.")
@click.option("--prompts", type=COUNT, default=6, show_default=True, help="In one run.")
@click.option("--input-len", type=COUNT, default=1024, show_default=True, help="Of each prompt.")
@click.option(
    "--png",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_check_picture,
    help="Also draw the two curves into this file.",
)
@model_options
@common_options
def chunking(**given: Any) -> None:
    """Show what the token budget of a step trades.

    Prompts are computed one after another while other sequences decode: time to first token of
    the prompts, and the gaps that the decoding sequences see, for each budget.
    """
    from kvasir.bench.chunking import Workload, measure
    from kvasir.bench.trial import TrialError

    work = Workload(
        budgets=given["budgets"],
        decoding=given["decoding"],
        prompts=given["prompts"],
        input_len=given["input_len"],
        seed=given["seed"],
    )
    if min(work.budgets) <= work.decoding:
        raise click.BadParameter(
            f"{min(work.budgets)} tokens leave no room for a prompt beside {work.decoding} decoding"
            " sequences: raise it or lower --decoding",
            param_hint="--budgets",
        )
    _check_steps(work)
    console = output()
    with progress() as say:
        bench = load(
            given,
            say,
            lengths="--input-len" if work.input_len >= _ROOM else "",
            max_model_len=max(_ROOM, work.input_len + 1),
            kv_cache_memory=1024**3,
        )
        bench.settings.update(
            {
                "decoding": work.decoding,
                "prompts": f"{work.prompts} of {work.input_len} tokens, one at a time",
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
    _print(console, figures)
    if given["png"] is not None:
        draw(figures, given["png"])
        console.print(f"Picture: {given['png']}")
    bench.write(given, _COMMAND, figures=figures)


def _check_steps(work: "Workload") -> None:
    """Sequences decode one token in a step: as many as they have room for must be enough."""
    from kvasir.bench.chunking import decoding_room, steps

    room = decoding_room(max(_ROOM, work.input_len + 1))
    budget = min(work.budgets)
    if steps(work, budget) > room:
        raise click.BadParameter(
            f"{work.prompts} prompts of {work.input_len} tokens take {steps(work, budget)} steps of"
            f" a budget of {budget}, and the sequences that decode beside them have room for"
            f" {room}: give fewer, or raise the smallest of --budgets",
            param_hint="--prompts",
        )


def _print(console: "Console", figures: Sequence["Figure"]) -> None:
    def cell(found: Spread) -> str:
        return spread_cell(Spread(1000 * found.median, 1000 * found.low, 1000 * found.high))

    columns = (
        "maxBatchedTokens",
        "TTFT p50 ms",
        "TTFT p95 ms",
        "ITL p50 ms",
        "ITL p99 ms",
        "ITL max ms",
        "prompt tokens/s",
        "output tokens/s",
        "memory GB/s",
    )
    rows = [
        (
            str(figure.budget),
            *(cell(s) for s in (figure.ttft_p50, figure.ttft_p95, figure.itl_p50)),
            *(cell(s) for s in (figure.itl_p99, figure.itl_max)),
            spread_cell(figure.input_tokens_per_s),
            spread_cell(figure.output_tokens_per_s),
            spread_cell(spread(figure.memory_gb_s)),
        )
        for figure in figures
    ]
    console.print(table("Median (range) of runs", columns, rows))


def draw(figures: Sequence["Figure"], path: Path) -> None:
    """TTFT falls and the ITL tail rises with the budget: both curves, with the range of runs."""
    from matplotlib.figure import Figure as Picture

    ordered = sorted(figures, key=lambda figure: figure.budget)
    budgets = [figure.budget for figure in ordered]
    picture = Picture(figsize=(8, 4.5), layout="constrained")
    left = picture.subplots()
    right = left.twinx()
    for axis, color, label, series in (
        (left, "tab:blue", "TTFT p50 (ms)", [figure.ttft_p50 for figure in ordered]),
        (right, "tab:red", "ITL p99 (ms)", [figure.itl_p99 for figure in ordered]),
    ):
        axis.plot(budgets, [1000 * s.median for s in series], color=color, marker="o", label=label)
        axis.fill_between(
            budgets,
            [1000 * s.low for s in series],
            [1000 * s.high for s in series],
            color=color,
            alpha=0.15,
        )
        axis.set_ylabel(label, color=color)
        axis.set_ylim(bottom=0)
    left.set_xscale("log", base=2)
    left.set_xticks(budgets, [str(budget) for budget in budgets])
    left.set_xlabel("token budget of a step (maxBatchedTokens)")
    left.set_title("A larger token budget: prompts wait less, decoding sequences more")
    picture.savefig(path, dpi=120)
