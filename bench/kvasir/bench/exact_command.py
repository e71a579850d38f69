"""Options and output of `kvasir bench exact`."""

import asyncio
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvasir.bench.machine import describe_machine, memory_bandwidth
from kvasir.bench.options import COUNT, FILE, common_options
from kvasir.bench.refusals import bad_model, blaming
from kvasir.bench.report import number, output, print_header, progress, table, write_json
from kvasir.bench.scenarios import SCENARIOS, Setup
from kvasir.bench.workload import Question, read_questions

if TYPE_CHECKING:
    from kvasir.bench.exact import Result

_MISTAKES_SHOWN = 10


@click.command()
@click.option("--prompts", type=FILE, required=True, help="JSON lines with question and answer.")
@click.option("--count", type=COUNT, default=50, show_default=True, help="Prompts per scenario.")
@click.option(
    "--shots",
    type=click.IntRange(min=0),
    help="Worked examples per prompt. Default: lengths spread over 32 to 1,200 tokens.",
)
@click.option("--max-tokens", type=COUNT, default=32, show_default=True)
@click.option("--model", default="bundled://smollm2-135m-instruct", show_default=True)
@click.option(
    "--scenario",
    "chosen",
    multiple=True,
    type=click.Choice(list(SCENARIOS)),
    help="Only this one; may be repeated.",
)
@common_options
@click.pass_context
def exact(ctx: click.Context, /, **given: Any) -> None:
    """Compare greedy float32 tokens with transformers' own, however they are served.

    Starts real routers and workers on this machine for each scenario. A token may differ only
    where the reference proves a tie (logits less than 1e-4 apart). Exits 1 if any token is
    wrong, any answer failed, or a scenario's fault did not happen.
    """
    # Not before it is needed: these import torch.
    from kvasir.bench.exact import check_enough
    from kvasir.bench.reference import MissingReferenceError
    from kvasir.worker.model.errors import ModelError

    with blaming("--prompts"):
        questions = read_questions(given["prompts"])
        check_enough(len(questions), given["count"], given["shots"])
    console = output()
    machine = describe_machine()
    settings = {name: given[name] for name in ("model", "count", "max_tokens", "seed", "runs")} | {
        "shots": "as many as fit 32 to 1,200 tokens" if given["shots"] is None else given["shots"],
        "prompts": given["prompts"].name,
        "dtype": "float32",
        "sampling": "greedy",
    }
    print_header(console, "kvasir bench exact", machine, settings)
    try:
        with progress() as say:
            results, bandwidth = _measure(given, questions, say)
    except ModelError as error:
        raise bad_model(str(error)) from None
    except MissingReferenceError as error:
        raise click.ClickException(str(error)) from None
    _print(console, results, bandwidth)
    if given["json_file"] is not None:
        report = {
            "command": "kvasir bench exact",
            "settings": settings,
            "machine": machine,
            "memory_gb_s": bandwidth,
            "results": results,
        }
        write_json(given["json_file"], report)
    if not all(result.ok for result in results):
        ctx.exit(1)


def _measure(
    given: dict[str, Any], questions: Sequence[Question], say: Callable[[str], None]
) -> tuple[list["Result"], float]:
    from kvasir.bench.exact import Oracle, build_cases, build_prompts, run_scenario
    from kvasir.bench.reference import load_reference

    say("loading the reference")
    reference = load_reference(given["model"])
    prompts = build_prompts(questions, given["count"], given["shots"], given["seed"], reference)
    cases = build_cases(prompts, given["max_tokens"], reference, say)
    setup = Setup(
        model=given["model"],
        max_tokens=given["max_tokens"],
        longest_prompt=max(map(len, prompts)),
        kv_bytes_per_token=reference.kv_bytes_per_token,
    )
    lengths = sorted(map(len, prompts))
    say(f"prompt lengths {lengths[0]} to {lengths[-1]} tokens, median {median(lengths):g}")
    bandwidth = memory_bandwidth()
    oracle = Oracle(reference)
    results = []
    for _ in range(given["runs"]):
        for name in given["chosen"] or SCENARIOS:
            say(f"scenario: {name}")
            scenario = run_scenario(name, SCENARIOS[name], setup, cases, oracle)
            results.append(asyncio.run(scenario))
    return results, bandwidth


def _print(console: Console, results: Sequence["Result"], bandwidth: float) -> None:
    rows = [
        (
            result.scenario,
            str(result.prompts),
            str(result.equal),
            f"{result.ties} (gap up to {result.largest_tie:.1g})" if result.ties else "0",
            str(result.wrong),
            str(result.faults),
            ", ".join(f"{count} {what}" for what, count in result.evidence.items()),
            "ok" if result.ok else "FAILED",
        )
        for result in results
    ]
    columns = ("scenario", "prompts", "equal", "proven ties", "wrong", "faults", "seen", "")
    console.print(table("Greedy tokens against transformers", columns, rows))
    console.print(f"memory bandwidth {number(bandwidth)} GB/s, one core")
    for result in results:
        for mistake in result.mistakes[:_MISTAKES_SHOWN]:
            console.print(f"  {result.scenario}: {mistake}", markup=False)
