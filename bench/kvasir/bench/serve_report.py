"""Tables of `kvasir bench serve`."""

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from kvasir.bench.report import spread_cell, table
from kvasir.bench.serve import Run
from kvasir.bench.stats import Distribution, RunSummary, Spread, spread

_LATENCIES: tuple[tuple[str, Callable[[RunSummary], Distribution | None]], ...] = (
    ("TTFT ms", lambda s: s.ttft),
    ("ITL ms (between stream chunks)", lambda s: s.itl),
    ("TPOT ms (per request)", lambda s: s.tpot),
    ("E2E ms", lambda s: s.e2e),
)
_RATES: tuple[tuple[str, Callable[[RunSummary], float | None]], ...] = (
    ("output tokens/s", lambda s: s.output_tokens_per_s),
    ("input tokens/s", lambda s: s.input_tokens_per_s),
    ("requests/s", lambda s: s.requests_per_s),
    ("goodput requests/s", lambda s: s.goodput_per_s),
    ("cached input %", lambda s: 100 * s.cached_ratio),
    ("duration s", lambda s: s.duration),
)


def print_runs(console: Console, runs: Sequence[Run]) -> None:
    """Every figure is the median over runs, with its range where there are several."""
    summaries = [run.summary for run in runs]
    console.print(_rates(runs, summaries))
    console.print(_latencies(summaries))
    console.print(_lengths(summaries))
    print_failures(console, summaries)
    _print_shares(console, summaries)


def _rates(runs: Sequence[Run], summaries: Sequence[RunSummary]) -> Table:
    rows = []
    for name, pick in _RATES:
        values = [value for s in summaries if (value := pick(s)) is not None]
        if values:
            rows.append((name, spread_cell(spread(values))))
    bandwidth = spread([value for run in runs for value in run.memory_gb_s])
    rows.append(("memory bandwidth GB/s, one core", spread_cell(bandwidth)))
    return table("Throughput, median (range) of runs", ("", "value"), rows)


def _latencies(summaries: Sequence[RunSummary]) -> Table:
    rows = []
    for name, pick in _LATENCIES:
        found = [d for s in summaries if (d := pick(s)) is not None]
        if found:
            rows.append((name, *(_quantile(found, p, 1000) for p in ("p50", "p95", "p99", "mean"))))
    return table("Latency of complete answers", ("", "p50", "p95", "p99", "mean"), rows)


def _lengths(summaries: Sequence[RunSummary]) -> Table:
    picks: tuple[tuple[str, Callable[[RunSummary], Distribution | None], float], ...] = (
        ("input tokens", lambda s: s.input_length, 1),
        ("output tokens", lambda s: s.output_length, 1),
        ("generator lateness ms", lambda s: s.lateness, 1000),
    )
    rows = []
    for name, pick, scale in picks:
        found = [d for s in summaries if (d := pick(s)) is not None]
        if found:
            cells = (_quantile(found, p, scale) for p in ("p50", "p95", "p99", "max"))
            rows.append((name, *cells))
    return table("What was really sent and received", ("", "p50", "p95", "p99", "max"), rows)


def _quantile(found: Sequence[Distribution], name: str, scale: float) -> str:
    values: list[float] = [getattr(d, name) * scale for d in found]
    return spread_cell(spread(values))


def print_failures(console: Console, summaries: Sequence[RunSummary]) -> None:
    """How many requests failed, and of each kind one example."""
    total = sum(s.requests for s in summaries)
    succeeded = sum(s.succeeded for s in summaries)
    console.print(f"requests {total}, succeeded {succeeded}, failed {total - succeeded}")
    kinds: dict[str, int] = {}
    examples: dict[str, str] = {}
    for summary in summaries:
        for kind, count in summary.failures.items():
            kinds[kind] = kinds.get(kind, 0) + count
        examples = {**summary.failure_examples, **examples}
    for kind, count in sorted(kinds.items(), key=lambda item: -item[1]):
        console.print(f"  {count} x {kind}, for example: {examples[kind]}", markup=False)


def _print_shares(console: Console, summaries: Sequence[RunSummary]) -> None:
    workers = sorted({worker for s in summaries for worker in s.worker_share})
    for worker in workers:
        share: Spread = spread([100 * s.worker_share.get(worker, 0.0) for s in summaries])
        console.print(f"  served by {worker}: {spread_cell(share)} %")
