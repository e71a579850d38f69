"""Options and output of `kvasir bench speculation`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvasir.bench.in_process import load, model_options
from kvasir.bench.options import COUNT, FILE, common_options
from kvasir.bench.refusals import blaming
from kvasir.bench.report import output, print_header, progress, spread_cell, table
from kvasir.bench.stats import spread

if TYPE_CHECKING:
    from rich.console import Console

    from kvasir.bench.speculation import Figure

_COMMAND = "kvasir bench speculation"


@click.command()
@click.option("--method", type=click.Choice(["ngram", "draft"]), default="ngram", show_default=True)
@click.option(
    "--draft-tokens",
    type=click.IntRange(1, 32),
    default=8,
    show_default=True,
    help="Most tokens drafted for a request in one step.",
)
@click.option(
    "--batch",
    "batches",
    type=COUNT,
    multiple=True,
    default=(1, 32),
    show_default=True,
    help="Requests at once; may be given more than once.",
)
@click.option(
    "--output-len",
    type=click.IntRange(min=2),
    default=128,
    show_default=True,
    help="Tokens; those after the first are timed.",
)
@click.option(
    "--prompts", type=FILE, help='JSON lines {"prompt": "..."} instead of our own prompts.'
)
@model_options
@common_options
def speculation(**given: Any) -> None:
    """Compare decoding without drafts, with drafts forced, and with the engine deciding.

    Drafts win where a step has few rows and the text repeats itself; in a large batch they only
    cost, and the engine stops making them.
    """
    from kvasir.bench.speculation import TEXTS, Workload, longest_prompt, measure, text_of_file
    from kvasir.bench.trial import TrialError
    from kvasir.router.text.tokenizer import ModelTokenizer
    from kvasir.worker.speculation.config import Method, SpeculationConfig

    console = output()
    with blaming("--prompts"):
        texts = TEXTS if given["prompts"] is None else (text_of_file(given["prompts"]),)
    settings = SpeculationConfig(Method(given["method"]), given["draft_tokens"])
    with progress() as say:
        bench = load(given, say, kv_cache_memory=1024**3, speculative_method=given["method"])
        tokenizer = ModelTokenizer.from_files(bench.loaded.tokenizer_files)
        work = Workload(
            texts, given["batches"], given["output_len"], given["seed"], tokenizer.encode
        )
        _check_length(
            work.output_len, longest_prompt(work, given["runs"]), bench.scheduler.max_model_len
        )
        bench.settings.update(
            {"method": given["method"], "draft tokens": settings.num_tokens}
            | {"output": work.output_len}
        )
        try:
            figures = measure(
                bench.loaded.runner, bench.scheduler, settings, work, given["runs"], say
            )
        except TrialError as error:
            raise click.ClickException(str(error)) from None
    print_header(console, _COMMAND, bench.machine, bench.settings)
    _print(console, figures)
    bench.write(given, _COMMAND, figures=figures)


def _check_length(output_len: int, prompt_len: int, max_model_len: int) -> None:
    """The engine would end such outputs early."""
    if prompt_len + output_len > max_model_len:
        raise click.BadParameter(
            f"{output_len} tokens after a prompt of {prompt_len} are more than the model's length,"
            f" {max_model_len}: give at most {max(0, max_model_len - prompt_len)}",
            param_hint="--output-len",
        )


def _print(console: "Console", figures: Sequence["Figure"]) -> None:
    columns = (
        "text, batch, drafting",
        "tokens/s",
        "times off",
        "drafted per token",
        "accepted %",
        "memory GB/s",
    )
    rows = []
    for figure in figures:
        for mode, rate in figure.tokens_per_s.items():
            accepted = figure.acceptance[mode]
            rows.append(
                (
                    f"{figure.text}, {figure.batch}, {mode}",
                    spread_cell(rate),
                    spread_cell(figure.ratio[mode]),
                    spread_cell(figure.drafted[mode]),
                    "-" if accepted is None else f"{100 * accepted.median:.0f}",
                    spread_cell(spread(figure.memory_gb_s)),
                )
            )
    console.print(table("Decoding. Median (range) of runs", columns, rows))
    failures = sum(figure.failures for figure in figures)
    console.print(f"Ratios are of the same run. Failed requests: {failures}.")
