"""Options and output of `kvasir bench engine`."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvasir.bench.machine import Machine, describe_machine
from kvasir.bench.options import DURATION, Names, common_options, threads_option
from kvasir.bench.refusals import bad_model, blaming
from kvasir.bench.report import output, print_header, progress, write_json
from kvasir.bench.rival import RIVALS, RivalError

if TYPE_CHECKING:
    from kvasir.bench.engine import Figure
    from kvasir.bench.engine_contenders import Lineup, Wanted
    from kvasir.bench.through_router import Cost

_COMMAND = "kvasir bench engine"
_INSTALL = "deploy/dev/rivals.sh"
_FORMS = ("full", "int8", "int8-a8", "int4")
_ROWS = ("decode-1", "decode-16", "decode-64", "run-16", "run-64", "prefill", "cached")


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir"


@click.command()
@click.option("--model", default="bundled://smollm2-135m-instruct", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    default="auto",
    show_default=True,
)
@threads_option
@click.option(
    "--forms",
    type=Names(_FORMS, needed=True),
    default="full,int8,int8-a8",
    show_default=True,
    help="Our engine with full weights, with int8 weights (-a8: activations too), or with int4.",
)
@click.option(
    "--rows",
    type=Names(_ROWS, needed=True),
    default=",".join(_ROWS),
    show_default=True,
    help="What to measure.",
)
@click.option(
    "--max-batched-tokens",
    type=click.IntRange(min=256),
    default=2048,
    show_default=True,
    help="Tokens in one step, for every engine.",
)
@click.option(
    "--against",
    type=Names(RIVALS),
    default="",
    help=f"Run the same work on these too: {', '.join(RIVALS)}.",
)
@click.option(
    "--through-router",
    is_flag=True,
    help="Also ask a worker of the first form over HTTP, through a router: whole runs only.",
)
@click.option(
    "--rivals",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="KVASIR_RIVALS",
    default=lambda: _default_cache() / "rivals",
    help=f"Where {_INSTALL} installs engines.  [default: ~/.cache/kvasir/rivals]",
)
@click.option(
    "--rival-timeout",
    type=DURATION,
    default="15m",
    show_default=True,
    help="For a rival to start, and for each piece of its work. One that takes longer is ended: at "
    "its start that is an error, later its rows have failed.",
)
@common_options
@click.pass_context
def engine(ctx: click.Context, /, **given: Any) -> None:
    """Measure the engine inside this process, without network.

    Decode at batch 1, 16 and 64, whole runs of 16 and 64 requests, prefill of 1,024 tokens, and
    the first token after 1,024 cached ones. With --against, other engines do the same work in
    turn, and the ratios are printed: above 1, ours is better. With both of them and all rows it
    takes some four minutes a run, one unmeasured round before, and two minutes to start.
    """
    from kvasir.bench.engine import RequestsFailedError
    from kvasir.bench.reference import MissingReferenceError
    from kvasir.bench.stack import RefusedStartError, StackError
    from kvasir.bench.trial import TrialError
    from kvasir.worker.model.errors import ModelError

    _check(ctx, given)
    machine = describe_machine()  # before this process is itself the load
    try:
        with blaming("--model"), progress() as say:
            figures, costs, found = _measure(given, say)
    except ModelError as error:
        raise bad_model(str(error)) from None
    except RefusedStartError as error:
        raise bad_model(error.line) from None
    except (
        MissingReferenceError,
        RequestsFailedError,
        RivalError,
        StackError,
        TrialError,
    ) as error:
        raise click.ClickException(str(error)) from None
    settings = _settings(given, found)
    _print(machine, settings, figures, costs, found)
    if given["json_file"] is not None:
        report = {"command": _COMMAND, "machine": machine, "settings": settings, "lost": found.lost}
        write_json(
            given["json_file"], {**report, "figures": figures, "costs_through_router": costs}
        )
    for name, why in found.lost.items():
        click.echo(f"kvasir bench: {name} was lost: {why}", err=True)
    if failed := sum(sum(figure.failed.values()) for figure in figures):
        click.echo(f"kvasir bench: {failed} requests failed", err=True)
        ctx.exit(1)


def _check(ctx: click.Context, given: Mapping[str, Any]) -> None:
    from kvasir.bench.engine import WHOLE_RUNS

    if (
        ctx.get_parameter_source("rivals") is not click.core.ParameterSource.DEFAULT
        and not given["rivals"].is_dir()
    ):
        raise click.BadParameter(
            f"there is no directory {given['rivals']}: correct it, or run {_INSTALL}",
            param_hint="--rivals",
        )

    if given["through_router"] and WHOLE_RUNS.isdisjoint(given["rows"]):
        runs = " or ".join(sorted(WHOLE_RUNS))
        raise click.UsageError(f"--through-router measures whole runs: name {runs} in --rows")


def _measure(
    given: Mapping[str, Any], say: Callable[[str], None]
) -> tuple[list["Figure"], list["Cost"], "Lineup"]:
    """The figures, what asking through the router cost, and who took part."""
    from kvasir.bench.engine import ROWS, measure_rows, warm_up
    from kvasir.bench.engine_contenders import lineup

    rows = [ROWS[key] for key in given["rows"]]
    with lineup(_wanted(given), say) as found:
        contenders, words = found.contenders, found.vocab_size
        warm_up(contenders, rows, given["seed"], words, say)
        if found.router is not None:
            found.router.costs.clear()
        figures = measure_rows(contenders, rows, given["runs"], given["seed"], words, say)
        costs = [] if found.router is None else list(found.router.costs)
    return figures, costs, found


def _wanted(given: Mapping[str, Any]) -> "Wanted":
    from kvasir.bench.engine_contenders import Wanted
    from kvasir.worker.config import WorkerConfig
    from kvasir.worker.model.machine import usable_cores

    config = WorkerConfig(
        worker_id="bench",
        model=given["model"],
        dtype=given["dtype"],
        threads=given["threads"] or usable_cores(),
        max_batched_tokens=given["max_batched_tokens"],
    )
    return Wanted(
        config=config,
        forms=given["forms"],
        against=given["against"],
        rivals=given["rivals"],
        rival_limit_s=given["rival_timeout"],
        cache=_default_cache() / "models",
        through_router=given["through_router"],
    )


def _settings(given: Mapping[str, Any], found: "Lineup") -> dict[str, Any]:
    """For the report's header."""
    return {
        "model": given["model"],
        "dtype": found.dtype,
        "threads": found.config.threads,
        "max_batched_tokens": given["max_batched_tokens"],
        "sampling": "greedy, ignore_eos",
        "seed": given["seed"],
        "runs": given["runs"],
        **found.versions,
        **found.absent,
    }


def _print(
    machine: Machine,
    settings: Mapping[str, Any],
    figures: Sequence["Figure"],
    costs: Sequence["Cost"],
    found: "Lineup",
) -> None:
    from kvasir.bench.engine_report import print_costs, print_figures

    console = output()
    print_header(console, _COMMAND, machine, settings)
    print_figures(console, figures)
    print_costs(console, costs)
    for name, why in found.absent.items():
        console.print(f"{name} takes no part: {why}")
