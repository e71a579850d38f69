"""`kvasir bench serve`: offer load to a running OpenAI-compatible server and report what it did."""

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvasir.bench.arrivals import Process, arrival_times
from kvasir.bench.client import Target, send, why_unreachable
from kvasir.bench.load import closed_loop, open_loop
from kvasir.bench.machine import memory_bandwidth
from kvasir.bench.stats import Objectives, Record, RunSummary, summarize
from kvasir.bench.traces import Replay, read_trace, trace_requests
from kvasir.bench.workload import (
    FIRST_TOKEN_ID,
    Lengths,
    Prompt,
    RequestSpec,
    TokenSource,
    WorkloadError,
    question_requests,
    random_requests,
    read_questions,
)
from kvasir.operator.local.address import why_silent

REFUSALS = ("http 429", "http 503")
"""Failures by which an overloaded server protects itself."""

_NO_SUCH_MODEL = "http 404"
"""Servers answer so, too, if they have no such path."""

_SUSPICIOUS_SHARE = 0.5
"""Of input tokens. Short questions share a chat template, which is less."""


class ServerError(RuntimeError):
    """The server cannot be measured: it gives no answer, or not one that can be counted."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much and when. Open loop with ``rate`` or a trace, else closed loop."""

    requests: int = 64
    concurrency: int = 8
    rate: float | None = None
    arrivals: Process = "poisson"
    burst_size: int = 8


@dataclass(frozen=True, slots=True)
class Content:
    """What is asked: a trace, a question file, or random tokens of drawn lengths."""

    inputs: Lengths
    outputs: Lengths
    vocab_size: int = 10_000
    prompts: Path | None = None
    shots: int = 0
    trace: Path | None = None
    limit: int | None = None
    replay: Replay = field(default_factory=Replay)


@dataclass(frozen=True, slots=True)
class Options:
    """``seed`` fixes lengths and arrivals, ``content_seed`` the random tokens."""

    target: Target
    content: Content
    content_seed: int
    load: Load = Load()
    objectives: Objectives | None = None
    runs: int = 1
    warmup: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One run, with memory bandwidth (GB/s) just before and just after it."""

    summary: RunSummary
    left_out: int
    """Trace rows too long for the server."""
    memory_gb_s: tuple[float, float]


def build_requests(options: Options, run: int) -> tuple[list[RequestSpec], int]:
    """The requests of one run, and how many trace rows were left out as too long.

    Lengths and arrivals are those of the seed; random contents differ from run to run, and with
    another content seed from all runs of an earlier command.
    """
    content, load = options.content, options.load
    tokens = TokenSource(f"{options.content_seed}/{run}", content.vocab_size)
    if content.trace is not None:
        rows = read_trace(content.trace, content.limit)
        specs, left_out = trace_requests(rows, content.replay, tokens)
        if not specs:
            raise WorkloadError(
                f"all {left_out} requests of {content.trace} are longer than"
                f" {content.replay.max_total} tokens; raise it, or shrink them with --length-scale",
                "--max-total",
            )
        return specs, left_out
    if content.prompts is not None:
        questions = read_questions(content.prompts)
        specs = question_requests(questions, load.requests, content.outputs.mean, content.shots)
    else:
        specs = random_requests(
            load.requests, content.inputs, content.outputs, seed=options.seed, tokens=tokens
        )
    if load.rate is not None:
        due = arrival_times(load.arrivals, load.rate, len(specs), options.seed, load.burst_size)
        specs = [dataclasses.replace(s, due=at) for s, at in zip(specs, due, strict=True)]
    return specs, 0


async def run_serve(
    options: Options, progress: Callable[[str], None], clock: Callable[[], float]
) -> list[Run]:
    """Warm up, then run ``options.runs`` times, one after the other.

    Raises:
        ServerError: the server did not serve a first small request.
        WorkloadError: the options make no requests, or none that this server takes.
    """
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    runs = []
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        await _check_server(http, options)
        await _warm_up(http, options, clock)
        for index in range(options.runs):
            specs, left_out = build_requests(options, index)
            progress(f"run {index + 1} of {options.runs}: {len(specs)} requests")
            before = await asyncio.to_thread(memory_bandwidth)
            records = await _offer(http, options, specs, clock)
            after = await asyncio.to_thread(memory_bandwidth)
            runs.append(Run(summarize(records, options.objectives), left_out, (before, after)))
    return runs


async def find_model(url: str, api_key: str | None) -> str:
    """The id of the only model that the server has.

    Raises:
        ServerError: the server does not tell.
        WorkloadError: it has not just one.
    """
    where = f"{url}/v1/models"
    status, body = await _get(where, url, api_key)
    if status != 200:
        raise ServerError(f"{where} answers with HTTP {status}: check --url and --api-key")
    try:
        names = _model_ids(body)
    except (ValueError, KeyError, TypeError):
        raise ServerError(f"{where} lists no models as OpenAI's API does: check --url") from None
    if len(names) != 1:
        served = ", ".join(names) or "no model"
        raise WorkloadError(f"{url} serves {served}: name one of them", "--model")
    return names[0]


async def _get(where: str, url: str, api_key: str | None) -> tuple[int, bytes]:
    """Status and body. Raises ServerError if there are none."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=30)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as http,
            http.get(where) as response,
        ):
            return response.status, await response.read()
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, ConnectionRefusedError):
            raise ServerError(why_silent(url, os.environ)) from None
        raise ServerError(f"{url}: {why_unreachable(error)}: check --url") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        problem = str(error) or type(error).__name__
        raise ServerError(f"{where} gives no answer ({problem}): check --url") from None


def share_cached_unasked(options: Options, runs: list[Run]) -> float | None:
    """The largest share of input that the server had cached, if it is high although the
    workload shares no prefix by design: then the runs have measured a warm cache."""
    content = options.content
    if content.trace is not None or content.shots:
        return None
    share = max(run.summary.cached_ratio for run in runs)
    return share if share >= _SUSPICIOUS_SHARE else None


def unexpected_failures(runs: list[Run], *, allow_refusals: bool) -> int:
    """Failed requests over all runs; refusals count unless they are allowed."""
    return sum(
        count
        for run in runs
        for kind, count in run.summary.failures.items()
        if not (allow_refusals and kind in REFUSALS)
    )


async def _offer(
    http: aiohttp.ClientSession,
    options: Options,
    specs: list[RequestSpec],
    clock: Callable[[], float],
) -> list[Record]:
    async def send_one(spec: RequestSpec, due: float) -> Record:
        return await send(http, options.target, spec, due, clock)

    if options.content.trace is not None or options.load.rate is not None:
        return await open_loop(specs, send_one, clock)
    return await closed_loop(specs, options.load.concurrency, send_one, clock)


async def _check_server(http: aiohttp.ClientSession, options: Options) -> None:
    """Prove with one small request that the server takes this kind of prompt at all."""
    if options.content.prompts is not None:
        prompt = Prompt(text="Hello")
    else:
        prompt = Prompt(token_ids=(FIRST_TOKEN_ID,) * 4)
    spec = RequestSpec(prompt, max_tokens=2)
    record = await send(http, options.target, spec, time.perf_counter(), time.perf_counter)
    if record.failure == _NO_SUCH_MODEL and (served := await _served(http, options.target)):
        raise WorkloadError(
            f"{options.target.url} does not serve {options.target.model}, but {', '.join(served)}",
            "--model",
        )
    if record.failure is not None:
        raise ServerError(
            f"{options.target.endpoint} did not serve a first small request ({record.failure}):"
            f" {record.message}"
        )
    if prompt.token_ids and record.input_tokens != len(prompt.token_ids):
        raise WorkloadError(
            f"{options.target.endpoint} counted {record.input_tokens} tokens in a prompt of"
            f" {len(prompt.token_ids)} token ids: it does not take token-id prompts; use --prompts",
            "--api",
        )


async def _served(http: aiohttp.ClientSession, target: Target) -> list[str]:
    """The models that a server lists, unless the target's is one; none where it does not tell."""
    try:
        async with http.get(f"{target.url}/v1/models", headers=target.headers) as response:
            names = _model_ids(await response.read())
    except (aiohttp.ClientError, ValueError, KeyError, TypeError):
        return []
    return [] if target.model in names else names


def _model_ids(body: bytes) -> list[str]:
    """Of a list in OpenAI's form. Raises ValueError, KeyError or TypeError if it is none."""
    return [str(model["id"]) for model in json.loads(body)["data"]]


async def _warm_up(
    http: aiohttp.ClientSession, options: Options, clock: Callable[[], float]
) -> None:
    """Requests whose records are dropped; their contents are those of no run."""
    specs, _ = build_requests(options, run=-1)
    for spec in specs[: options.warmup]:
        await send(http, options.target, spec, clock(), clock)


def summaries_as_json(runs: list[Run]) -> list[dict[str, Any]]:
    return [{**dataclasses.asdict(run), "cached_ratio": run.summary.cached_ratio} for run in runs]
