"""`kvasir bench batching`: what continuous batching and paging each bring, and on what outputs.

Four modes of the same engine on the same requests, all queued at once, in the same KV memory:

    KV         a place for the longest possible sequence      blocks as they are needed
    batching   is reserved for each request: few fit           (paging): many fit
    static     static, reserved                               static, paged
    continuous continuous, reserved                           continuous, paged

Static batching admits a batch and nobody else until its longest output is done. It is shown
kindly: a finished sequence leaves the batch and costs nothing more, as a padded row would.
Reservation is a bound on how many requests run: memory divided by the longest sequence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvasir.bench.machine import memory_bandwidth
from kvasir.bench.stats import Record, RunSummary, Spread, spread, summarize
from kvasir.bench.trial import Progress, in_turns, paired_ratios, run_name, trial
from kvasir.bench.workload import Lengths, RequestSpec, TokenSource, random_lengths, random_requests
from kvasir.worker.contracts import Runner
from kvasir.worker.limits import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to batch; two settings, each switched on its own."""

    continuous: bool
    paged: bool

    @property
    def name(self) -> str:
        batching = "continuous" if self.continuous else "static"
        return f"{batching}, {'paged' if self.paged else 'reserved'}"


MODES = tuple(Mode(continuous, paged) for continuous in (False, True) for paged in (False, True))
BASELINE = MODES[0].name


@dataclass(frozen=True, slots=True)
class Workload:
    """``reserved_slots`` sequences of full length fill the KV memory of every mode."""

    requests: int
    inputs: Lengths
    outputs: tuple[tuple[str, Lengths], ...]
    """By name: the output lengths to compare."""
    reserved_slots: int
    max_running: int
    seed: int


@dataclass(frozen=True, slots=True)
class Figure:
    """One mode on one distribution of output lengths. Throughput is output tokens per second."""

    outputs: str
    mode: str
    throughput: Spread
    ratio: Spread
    """Of throughputs to ``BASELINE``'s, run by run."""
    running: Spread
    """Sequences in the batch: mean over the time of the run."""
    e2e_p50: Spread
    e2e_p99: Spread
    failed: int
    summaries: tuple[RunSummary, ...]
    memory_gb_s: tuple[float, ...]


def measure(
    runner: Runner,
    config: SchedulerConfig,
    work: Workload,
    runs: int,
    vocab_size: int,
    say: Progress,
) -> list[Figure]:
    """All modes on all distributions, ``runs`` times in turn, after one unmeasured run.

    Raises:
        TrialError: the engine failed.
        ValueError: the runner has fewer blocks than ``reserved_slots`` sequences need.
    """
    config = _bounded(config, work, runner.num_blocks)
    figures = []
    for name, outputs in work.outputs:
        records: dict[str, list[list[Record]]] = {mode.name: [] for mode in MODES}
        bandwidth: dict[str, list[float]] = {mode.name: [] for mode in MODES}
        for run in range(-1, runs):
            tokens = TokenSource(f"{work.seed}/{run}", vocab_size)
            specs = _requests(work, outputs, config.max_model_len, tokens)
            modes = {mode.name: mode for mode in MODES}
            for key in in_turns(list(modes), run):
                say(f"{name} outputs, {key}, {run_name(run, runs)}")
                speed = memory_bandwidth()
                # The unmeasured run warms up: two batches are enough for that.
                asked = specs if run >= 0 else specs[: 2 * work.reserved_slots]
                found = _offer(runner, config, modes[key], asked, work)
                if run >= 0:
                    records[key].append(found)
                    bandwidth[key].append(speed)
        figures += _figures(name, records, bandwidth)
    return figures


def _bounded(config: SchedulerConfig, work: Workload, available: int) -> SchedulerConfig:
    """The same memory for every mode: that of the reserved slots."""
    blocks = reserved_blocks(work, config)
    if blocks > available:
        raise ValueError(f"{work.reserved_slots} slots need {blocks} blocks; there are {available}")
    # Prompts are unrelated; without their cache, the memory holds running sequences only.
    return replace(config, num_blocks=blocks, prefix_caching=False)


def reserved_blocks(work: Workload, config: SchedulerConfig) -> int:
    """KV blocks that hold the reserved slots."""
    return work.reserved_slots * math.ceil(config.max_model_len / config.block_size)


def _requests(
    work: Workload, outputs: Lengths, max_model_len: int, tokens: TokenSource
) -> list[RequestSpec]:
    specs = random_requests(work.requests, work.inputs, outputs, seed=work.seed, tokens=tokens)
    return [
        replace(spec, max_tokens=min(spec.max_tokens, max_model_len - len(spec.prompt.token_ids)))
        for spec in specs
    ]


def cut_outputs(work: Workload, outputs: Lengths, max_model_len: int) -> int:
    """How many requests get fewer output tokens than drawn, because the model's length ends."""
    lengths = random_lengths(work.requests, work.inputs, outputs, seed=work.seed)
    return sum(n + m > max_model_len for n, m in lengths)


def _offer(
    runner: Runner,
    config: SchedulerConfig,
    mode: Mode,
    specs: Sequence[RequestSpec],
    work: Workload,
) -> list[Record]:
    """All requests are due at once: those that wait for a later batch wait from then on."""
    slots = work.max_running if mode.paged else work.reserved_slots
    with trial(runner, replace(config, max_running_requests=slots)) as running:
        records = running.run(specs, batch=None if mode.continuous else slots)
    start = min(record.due for record in records)
    return [replace(record, due=start) for record in records]


def _figures(
    outputs: str,
    records: dict[str, list[list[Record]]],
    bandwidth: dict[str, list[float]],
) -> list[Figure]:
    summaries = {mode: [summarize(run) for run in runs] for mode, runs in records.items()}
    throughput = {
        mode: [summary.output_tokens_per_s for summary in found]
        for mode, found in summaries.items()
    }
    ratios = paired_ratios(throughput, BASELINE)
    return [
        Figure(
            outputs=outputs,
            mode=mode,
            throughput=spread(throughput[mode]),
            ratio=ratios[mode],
            running=spread([mean_running(run) for run in records[mode]]),
            e2e_p50=spread([s.e2e.p50 for s in found if s.e2e is not None]),
            e2e_p99=spread([s.e2e.p99 for s in found if s.e2e is not None]),
            failed=sum(s.requests - s.succeeded for s in found),
            summaries=tuple(found),
            memory_gb_s=tuple(bandwidth[mode]),
        )
        for mode, found in summaries.items()
    ]


def mean_running(records: Sequence[Record]) -> float:
    """Sequences that decode, averaged over the time from the first token of all to the end."""
    spans = [(record.token_times[0], record.end) for record in records if record.token_times]
    start, end = min(first for first, _ in spans), max(last for _, last in spans)
    return sum(last - first for first, last in spans) / (end - start)
