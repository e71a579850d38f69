"""`kvasir bench kv`: how much of the KV memory holds KV, and how much is lost.

The worker's own scheduler serves the lengths of a trace on a runner that computes nothing: who
holds which blocks at each step depends on lengths alone, so the shares are exact and the same on
every machine. All requests are queued at once, and a step counts while some of them wait, that is
while memory is what limits the batch.

    paging        blocks as tokens come, in each of several block sizes
    reservation   blocks for the longest sequence at admission: the baseline, in the same scheduler

Shares are of the slots taken out of use: filled, reserved (tokens known and not computed yet),
internal waste (beyond all known tokens) and external waste (free, but too few for anyone).
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvasir.bench.instant import InstantRunner
from kvasir.bench.machine import memory_bandwidth
from kvasir.bench.stats import Spread, spread
from kvasir.bench.traces import TraceRow
from kvasir.bench.workload import WorkloadError
from kvasir.proto.sampling import SamplingParams
from kvasir.worker.contracts import KvUsage, Request
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.scheduler import Scheduler

TABLE_ENTRY_BYTES = 8
"""A block id as the attention kernels get it."""

RESERVATION = "reservation"
PAGING = "paging"


@dataclass(frozen=True, slots=True)
class Workload:
    """``kv_tokens`` slots of memory for ``requests`` rows drawn from ``rows``.

    ``token_bytes`` is what the KV of one token takes.
    """

    rows: Sequence[TraceRow]
    requests: int
    kv_tokens: int
    token_bytes: int
    max_model_len: int
    max_batched_tokens: int
    max_running: int
    seed: int


@dataclass(frozen=True, slots=True)
class Mode:
    name: str
    block_size: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One mode. Shares are in [0, 1]; ``table`` is bytes of block tables for each byte of KV."""

    mode: str
    block_size: int
    filled: Spread
    reserved: Spread
    internal: Spread
    external: Spread
    waste: Spread
    """Internal and external."""
    table: Spread
    running: Spread
    """Requests that hold blocks: mean over steps."""
    steps: Spread
    """Until the last request is done."""
    preemptions: Spread
    scheduler_us: Spread
    """Of one step, in microseconds of CPU time; accounting is in it."""
    memory_gb_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    """Sums over the steps in which requests waited."""

    usage: KvUsage
    running: float
    steps: int
    preemptions: int
    scheduler_us: float


def fitting(rows: Sequence[TraceRow], max_model_len: int) -> list[TraceRow]:
    """Rows that the model's window holds, and that ask for something."""
    return [
        row
        for row in rows
        if row.input_length
        and row.output_length
        and row.input_length + row.output_length <= max_model_len
    ]


def least_kv_tokens(max_model_len: int, modes: Sequence[Mode]) -> int:
    """Tokens of KV memory in which every mode has the blocks of the longest sequence."""
    return max(math.ceil(max_model_len / mode.block_size) * mode.block_size for mode in modes)


def drawn(work: Workload, run: int) -> list[TraceRow]:
    """The rows that a run measures: ``requests`` of them, or all if there are fewer."""
    rng = random.Random(f"{work.seed}/{run}")
    return rng.sample(work.rows, min(work.requests, len(work.rows)))


def measure(
    work: Workload, modes: Sequence[Mode], runs: int, say: Callable[[str], None]
) -> list[Figure]:
    """All modes on the same requests, ``runs`` times with other rows of the trace.

    Raises:
        WorkloadError: so few requests that none ever waits.
    """
    found: dict[Mode, list[_Run]] = {mode: [] for mode in modes}
    bandwidth: dict[Mode, list[float]] = {mode: [] for mode in modes}
    for run in range(runs):
        rows = drawn(work, run)
        for mode in modes:
            say(f"{mode.name}, blocks of {mode.block_size}, run {run + 1} of {runs}")
            bandwidth[mode].append(memory_bandwidth())
            found[mode].append(_serve(_config(work, mode), rows))
    return [_figure(work, mode, found[mode], bandwidth[mode]) for mode in modes]


def _config(work: Workload, mode: Mode) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=work.kv_tokens // mode.block_size,
        block_size=mode.block_size,
        max_model_len=work.max_model_len,
        max_batched_tokens=work.max_batched_tokens,
        max_running_requests=work.max_running,
        max_waiting_requests=work.requests,
        prefix_caching=False,  # a trace of lengths has no prefixes to share
        reserve_max_len=mode.name == RESERVATION,
    )


def _serve(config: SchedulerConfig, rows: Sequence[TraceRow]) -> _Run:
    scheduler, runner = Scheduler(config), InstantRunner()
    for index, row in enumerate(rows):
        params = SamplingParams(temperature=0.0, max_tokens=row.output_length, ignore_eos=True)
        scheduler.add(Request(str(index), (1,) * row.input_length, params))
    saturated: list[KvUsage] = []
    running = steps = 0
    begin = time.thread_time()
    while scheduler.request_ids():
        plan = scheduler.plan(now=0.0)
        scheduler.update(plan, runner.execute(plan))
        scheduler.take_outputs()
        load = scheduler.load()
        steps += 1
        if load.waiting:
            saturated.append(load.kv)
            running += load.running
    seconds = time.thread_time() - begin
    scheduler.check()
    if not saturated:
        raise WorkloadError(
            f"none of {len(rows)} requests ever waited for memory; ask for more, of a longer trace"
            " if it has no more, or lower --kv-tokens",
            "--requests",
        )
    return _Run(
        usage=_total(saturated),
        running=running / len(saturated),
        steps=steps,
        preemptions=scheduler.load().preemptions,
        scheduler_us=1e6 * seconds / steps,
    )


def _total(usages: Sequence[KvUsage]) -> KvUsage:
    return KvUsage(
        filled=sum(usage.filled for usage in usages),
        reserved=sum(usage.reserved for usage in usages),
        internal=sum(usage.internal for usage in usages),
        external=sum(usage.external for usage in usages),
        table_entries=sum(usage.table_entries for usage in usages),
    )


def _figure(work: Workload, mode: Mode, runs: Sequence[_Run], bandwidth: Sequence[float]) -> Figure:
    def share(part: Callable[[KvUsage], float]) -> Spread:
        return spread([part(run.usage) / _taken(run.usage) for run in runs])

    return Figure(
        mode=mode.name,
        block_size=mode.block_size,
        filled=share(lambda usage: usage.filled),
        reserved=share(lambda usage: usage.reserved),
        internal=share(lambda usage: usage.internal),
        external=share(lambda usage: usage.external),
        waste=spread([run.usage.waste for run in runs]),
        table=share(lambda u: u.table_entries * TABLE_ENTRY_BYTES / work.token_bytes),
        running=spread([run.running for run in runs]),
        steps=spread([float(run.steps) for run in runs]),
        preemptions=spread([float(run.preemptions) for run in runs]),
        scheduler_us=spread([run.scheduler_us for run in runs]),
        memory_gb_s=tuple(bandwidth),
    )


def _taken(usage: KvUsage) -> int:
    return usage.filled + usage.reserved + usage.internal + usage.external
