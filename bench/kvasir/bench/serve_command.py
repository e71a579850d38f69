"""Options of `kvasir bench serve`."""

import asyncio
import os
import secrets
import time
from contextlib import AbstractContextManager
from typing import Any

import click

from kvasir.bench.client import Target
from kvasir.bench.machine import describe_machine
from kvasir.bench.options import COUNT, DURATION, FILE, POSITIVE, common_options
from kvasir.bench.refusals import blaming
from kvasir.bench.report import output, print_header, progress, write_json
from kvasir.bench.serve import (
    Content,
    Load,
    Options,
    Run,
    ServerError,
    find_model,
    run_serve,
    share_cached_unasked,
    summaries_as_json,
    unexpected_failures,
)
from kvasir.bench.serve_report import print_runs
from kvasir.bench.stats import Objectives
from kvasir.bench.traces import Replay, read_trace
from kvasir.bench.workload import Lengths, Shape, question_requests, read_questions
from kvasir.operator.local.address import NoRouterError, router_root, running_router

_SHAPE = click.Choice(["fixed", "uniform", "lognormal"])


@click.command()
@click.option("--url", help="Server, as http://HOST:PORT. Default: the Kvasir running here.")
@click.option("--model", help="Served model; may be left out if there is only one.")
@click.option(
    "--api",
    type=click.Choice(["completions", "chat"]),
    help="Default: chat with --prompts, else completions.",
)
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Bearer token.")
@click.option(
    "--requests",
    type=COUNT,
    default=64,
    show_default=True,
    help="Requests in one run (not with --trace).",
)
@click.option(
    "--concurrency",
    type=COUNT,
    default=8,
    show_default=True,
    help="Closed loop: requests in flight.",
)
@click.option("--rate", type=POSITIVE, help="Open loop: mean requests per second.")
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "constant", "burst"]),
    default="poisson",
    show_default=True,
)
@click.option(
    "--burst-size", type=COUNT, default=8, show_default=True, help="Requests in one burst."
)
@click.option(
    "--trace", type=FILE, help="Open loop from a recorded trace: Mooncake .jsonl or Azure .csv."
)
@click.option("--limit", type=COUNT, help="Only the first rows of the trace.")
@click.option(
    "--speedup", type=POSITIVE, default=1.0, show_default=True, help="Divides the trace's gaps."
)
@click.option(
    "--length-scale",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    help="Multiplies the trace's lengths.",
)
@click.option(
    "--max-total",
    type=COUNT,
    help="Leave out trace rows of more tokens, input and output together.",
)
@click.option(
    "--prompts", type=FILE, help="Ask the questions of a JSON-lines file (question, answer)."
)
@click.option(
    "--shots",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Worked examples before each question.",
)
@click.option("--input-len", type=COUNT, default=128, show_default=True, help="Mean input tokens.")
@click.option("--input-dist", type=_SHAPE, default="fixed", show_default=True)
@click.option("--output-len", type=COUNT, default=64, show_default=True, help="Mean output tokens.")
@click.option("--output-dist", type=_SHAPE, default="fixed", show_default=True)
@click.option(
    "--spread",
    type=POSITIVE,
    default=0.5,
    show_default=True,
    help="Width of uniform and lognormal, relative to the mean.",
)
@click.option(
    "--vocab-size",
    type=COUNT,
    default=10_000,
    show_default=True,
    help="Random tokens are below this id.",
)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option(
    "--respect-eos",
    is_flag=True,
    help="Let the model stop early; otherwise every output has its full length.",
)
@click.option(
    "--timeout", type=DURATION, default="600s", show_default=True, help="For one whole request."
)
@click.option("--slo-ttft", type=DURATION, help="Objective for goodput: time to first token.")
@click.option(
    "--slo-itl", type=DURATION, help="Objective for goodput: mean inter-token latency of a request."
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Requests before the first run, not counted.",
)
@click.option(
    "--allow-refusals", is_flag=True, help="Exit 0 although requests were refused with 429 or 503."
)
@click.option(
    "--content-seed",
    type=int,
    help="Fixes the random contents. Default: new ones, so that no cache knows them.",
)
@common_options
@click.pass_context
def serve(ctx: click.Context, /, **given: Any) -> None:
    """Offer load to a running OpenAI-compatible server.

    Closed loop (--concurrency) by default; open loop with --rate or --trace, where a request is
    sent when it is due, however busy the server is, and its latency counts from then.
    """
    console = output()
    try:
        with _blaming_content(given):
            options = _options(given)
            machine = describe_machine()
            print_header(console, "kvasir bench serve", machine, _settings(options))
            with progress() as say:
                runs = asyncio.run(run_serve(options, say, time.perf_counter))
    except ServerError as error:
        raise click.ClickException(str(error)) from None
    print_runs(console, runs)
    if share := share_cached_unasked(options, runs):
        console.print(_warm_cache(share, given), soft_wrap=True)
    if given["json_file"] is not None:
        report = {
            "command": "kvasir bench serve",
            "settings": _settings(options),
            "machine": machine,
            "runs": summaries_as_json(runs),
        }
        write_json(given["json_file"], report)
    _exit(ctx, runs, allow_refusals=given["allow_refusals"])


def _blaming_content(given: dict[str, Any]) -> AbstractContextManager[None]:
    return blaming(
        "--trace" if given["trace"] else "--prompts" if given["prompts"] else "--vocab-size"
    )


def _warm_cache(share: float, given: dict[str, Any]) -> str:
    fix = ""
    if given["prompts"]:
        fix = "; ask other questions, or start the server again"
    elif given["content_seed"] is not None:
        fix = "; leave out --content-seed, or start the server again"
    return (
        f"[yellow]warning:[/yellow] {100 * share:.0f} % of the input was in the server's prefix "
        f"cache, though no shared prefix was asked for: these are times of a warm cache{fix}"
    )


def _exit(ctx: click.Context, runs: list[Run], *, allow_refusals: bool) -> None:
    if failed := unexpected_failures(runs, allow_refusals=allow_refusals):
        click.echo(f"kvasir bench: {failed} requests failed", err=True)
        ctx.exit(1)


def _options(given: dict[str, Any]) -> Options:
    """Settings from the command line; refuses combinations that contradict each other.

    Files are read before a server is asked for anything, so that what is wrong with them is said
    whether or not one runs.
    """
    _check(given)
    if given["trace"] is not None:
        read_trace(given["trace"], given["limit"])
    elif given["prompts"] is not None:
        question_requests(read_questions(given["prompts"]), 1, 1, given["shots"])
    url = _server(given["url"])
    model = given["model"] or asyncio.run(find_model(url, given["api_key"]))
    objectives = None
    if given["slo_ttft"] is not None or given["slo_itl"] is not None:
        objectives = Objectives(given["slo_ttft"], given["slo_itl"])
    return Options(
        target=Target(
            url=url,
            model=model,
            api=given["api"] or ("chat" if given["prompts"] else "completions"),
            api_key=given["api_key"],
            timeout_s=given["timeout"],
            temperature=given["temperature"],
            ignore_eos=not given["respect_eos"],
            seed=given["seed"],
        ),
        content=Content(
            inputs=_lengths(given, "input"),
            outputs=_lengths(given, "output"),
            vocab_size=given["vocab_size"],
            prompts=given["prompts"],
            shots=given["shots"],
            trace=given["trace"],
            limit=given["limit"],
            replay=Replay(given["speedup"], given["length_scale"], given["max_total"]),
        ),
        load=Load(
            requests=given["requests"],
            concurrency=given["concurrency"],
            rate=given["rate"],
            arrivals=given["arrivals"],
            burst_size=given["burst_size"],
        ),
        content_seed=_content_seed(given["content_seed"]),
        objectives=objectives,
        runs=given["runs"],
        warmup=given["warmup"],
        seed=given["seed"],
    )


def _server(url: str | None) -> str:
    try:
        return running_router(os.environ) if url is None else router_root(url)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--url") from None
    except NoRouterError as error:
        raise click.ClickException(str(error)) from None


def _content_seed(given: int | None) -> int:
    return secrets.randbits(32) if given is None else given


def _check(given: dict[str, Any]) -> None:
    if given["trace"] and (given["rate"] or given["prompts"]):
        raise click.UsageError(
            "--trace brings its own arrivals and prompts: leave out --rate and --prompts"
        )
    if given["api"] == "chat" and not given["prompts"]:
        raise click.UsageError(
            "random and trace prompts are token ids, which chat cannot take: use --api completions"
        )
    if given["shots"] and not given["prompts"]:
        raise click.UsageError("--shots needs --prompts")


def _lengths(given: dict[str, Any], side: str) -> Lengths:
    shape: Shape = given[f"{side}_dist"]
    return Lengths(shape, given[f"{side}_len"], given["spread"])


def _settings(options: Options) -> dict[str, Any]:
    """What a reader must know to repeat the measurement."""
    content, load, target = options.content, options.load, options.target
    settings: dict[str, Any] = {"url": target.url, "model": target.model, "api": target.api}
    if content.trace is not None:
        settings |= {"open loop, trace": content.trace.name, "replay": content.replay}
    elif load.rate is not None:
        settings |= {"open loop, rate": load.rate, "arrivals": load.arrivals}
    else:
        settings |= {"closed loop, concurrency": load.concurrency}
    if content.prompts is not None:
        settings |= {"prompts": content.prompts.name, "shots": content.shots}
    elif content.trace is None:
        settings |= {"input length": content.inputs}
    if content.trace is None:
        settings |= {"requests": load.requests, "output length": content.outputs}
    return settings | {
        "temperature": target.temperature,
        "ignore_eos": target.ignore_eos,
        "timeout s": target.timeout_s,
        "objectives": options.objectives or "none",
        "seed": options.seed,
        "content seed": options.content_seed,
        "runs": options.runs,
        "warmup": options.warmup,
    }
