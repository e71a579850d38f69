"""`kvasir bench disaggregation`: one pool against two, on the same cores and the same load.

Three layouts behind a router, as real processes with the same threads in total:

    one pool, two workers    each does prefill and decode, one thread each
    one pool, one worker     prefill and decode, both threads
    two pools                a prefill worker and a decode worker, one thread each

Two pools move every prompt's KV and leave the prefill worker idle when nobody prefills: that is
the cost. The gain is that a long prompt no longer delays tokens of other requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvasir.bench.client import Target
from kvasir.bench.serve import Content, Load, Options, Run, run_serve
from kvasir.bench.stack import Stack
from kvasir.bench.stats import Distribution, Objectives, Spread, spread, spread_of_known
from kvasir.bench.trial import in_turns, run_name
from kvasir.bench.workload import Lengths, random_lengths
from kvasir.worker.config import WorkerConfig

Role = Literal["prefill", "decode", "both"]

_WARM_UP = 2
"""Requests before a run, neither timed nor in the bytes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """``workers``: role and threads of each."""

    name: str
    workers: tuple[tuple[Role, int], ...]

    @property
    def splits(self) -> bool:
        return any(role == "prefill" for role, _ in self.workers)


def layouts(threads: int) -> tuple[Layout, ...]:
    """The three layouts on ``threads`` threads, an even number."""
    half = threads // 2
    return (
        Layout("one pool, two workers", (("both", half), ("both", half))),
        Layout("one pool, one worker", (("both", 2 * half),)),
        Layout("two pools", (("prefill", half), ("decode", half))),
    )


@dataclass(frozen=True, slots=True)
class Workload:
    """Open loop, Poisson arrivals."""

    rate: float
    requests: int
    inputs: Lengths
    outputs: Lengths
    objectives: Objectives
    seed: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One layout over the runs. Times in seconds."""

    layout: str
    output_tokens_per_s: Spread
    ttft_p50: Spread | None
    """None, as the others, where no request of any run was answered."""
    ttft_p99: Spread | None
    itl_p50: Spread | None
    itl_p99: Spread | None
    goodput_per_s: Spread
    transferred_bytes: Spread
    """KV payload that workers received in one run."""
    transferred_per_token: Spread
    """Of input tokens."""
    failed: int
    runs: tuple[Run, ...]
    computes: Mapping[str, str]
    """With what, and how, a worker of it has said to compute; see Process.computes."""


@dataclass(frozen=True, slots=True)
class _Observed:
    """One run: its requests, the bytes of KV that its transfers brought, and see Figure."""

    run: Run
    received: float
    computes: Mapping[str, str]


def longest(work: Workload) -> int:
    """Tokens of the longest request that ``measure`` sends, prompt and output together."""
    return max(
        inputs + outputs
        for requests in (work.requests, _WARM_UP)
        for inputs, outputs in random_lengths(requests, work.inputs, work.outputs, seed=work.seed)
    )


async def measure(
    worker: WorkerConfig,
    work: Workload,
    runs: int,
    content_seed: int,
    say: Callable[[str], None],
    clock: Callable[[], float],
) -> list[Figure]:
    """All layouts in turn, ``runs`` times. Every run starts its processes anew, caches empty.

    Raises:
        RefusedStartError: a worker refused its configuration.
        StackError: a process failed, or a run left KV blocks behind.
        ServerError: the router did not serve a first small request.
    """
    known = {layout.name: layout for layout in layouts(worker.threads)}
    found: dict[str, list[_Observed]] = {name: [] for name in known}
    for run in range(runs):
        for name in in_turns(list(known), run):
            say(f"{name}, {run_name(run, runs)}")
            options = replace(_options(work), content_seed=content_seed + run)
            found[name].append(await _one(known[name], worker, options, clock))
    return [_figure(name, seen) for name, seen in found.items()]


def _options(work: Workload) -> Options:
    return Options(
        target=Target(url="", model=""),
        content=Content(inputs=work.inputs, outputs=work.outputs),
        content_seed=0,
        load=Load(requests=work.requests, rate=work.rate),
        objectives=work.objectives,
        warmup=0,
        seed=work.seed,
    )


async def _one(
    layout: Layout, worker: WorkerConfig, options: Options, clock: Callable[[], float]
) -> _Observed:
    """One run."""
    configs = [
        worker.model_copy(update={"worker_id": f"w{i}", "role": role, "threads": threads})
        for i, (role, threads) in enumerate(layout.workers)
    ]
    mode = "always" if layout.splits else "never"
    router = {"disaggregation": {"mode": mode}}
    async with Stack(configs, router=router) as stack:
        target = replace(options.target, url=stack.url, model=worker.served_name)
        options = replace(options, target=target)
        first = replace(
            options,
            load=Load(requests=_WARM_UP, concurrency=1),
            content_seed=options.content_seed + 1_000_000,
        )
        await run_serve(first, lambda _: None, clock)
        before = await _received(stack, configs)
        (run,) = await run_serve(options, lambda _: None, clock)
        received = await _received(stack, configs) - before
        return _Observed(run, received, stack.worker(configs[0].worker_id).computes())


async def _received(stack: Stack, workers: Sequence[WorkerConfig]) -> float:
    """Bytes of KV that the workers have received since they started."""
    samples = [await stack.worker_metrics(worker.worker_id) for worker in workers]
    name = "kvasir_kv_transfer_bytes_total"
    return sum(found.total(name, direction="received") for found in samples)


def _figure(name: str, seen: list[_Observed]) -> Figure:
    summaries = [one.run.summary for one in seen]

    def over(pick: Callable[[Distribution], float], of: str) -> Spread | None:
        values = [getattr(summary, of) for summary in summaries]
        return spread_of_known(None if value is None else pick(value) for value in values)

    received = [one.received for one in seen]
    return Figure(
        layout=name,
        output_tokens_per_s=spread([s.output_tokens_per_s for s in summaries]),
        ttft_p50=over(lambda d: d.p50, "ttft"),
        ttft_p99=over(lambda d: d.p99, "ttft"),
        itl_p50=over(lambda d: d.p50, "itl"),
        itl_p99=over(lambda d: d.p99, "itl"),
        goodput_per_s=spread([s.goodput_per_s or 0.0 for s in summaries]),
        transferred_bytes=spread(received),
        transferred_per_token=spread(
            [b / max(s.input_tokens, 1) for b, s in zip(received, summaries, strict=True)]
        ),
        failed=sum(s.requests - s.succeeded for s in summaries),
        runs=tuple(one.run for one in seen),
        computes=seen[0].computes,
    )
