"""`kvasir bench engine`: what an engine is asked, and how its answers compare with another one's.

Every engine gets the same work, one piece after the other in turn, so that all see the same
weather on a shared machine. Every prompt is new random tokens, so no prefix cache helps except in
the row that measures it. Knows no engine in particular; see engine_contenders.py.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvasir.bench.machine import memory_bandwidth
from kvasir.bench.stats import Spread, spread
from kvasir.bench.timeline import Timeline
from kvasir.bench.trial import in_turns
from kvasir.bench.workload import TokenSource

_SETTLE_S = 0.3
"""Pause before a measurement: the other engine's threads stop spinning."""
INPUTS, OUTPUTS = 128, 128
"""Tokens of each request where several run at once."""
CACHED_TOKENS = 1024
NEW_TOKENS = 16


class RequestsFailedError(RuntimeError):
    """Some of the requests have no complete answer, so their work has no figure."""

    def __init__(self, failures: Collection[str]) -> None:
        super().__init__(f"{len(failures)} requests failed: {', '.join(sorted(set(failures)))}")
        self.count = len(failures)


class EngineLostError(RequestsFailedError):
    """The engine answers nothing any more: whatever it is asked later fails like this too."""


class Generator(Protocol):
    """An engine under test."""

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        """Greedy output of exactly ``max_tokens`` tokens for each prompt, all submitted at once.

        Raises:
            RequestsFailedError: not every prompt has its output.
        """
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """Something to ask of an engine. Rows of the same work come from the same answer."""

    name: str
    ask: Callable[[Generator, TokenSource], Timeline]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``better`` says which way is better, so that a ratio above 1 is a win."""

    key: str
    name: str
    unit: str
    better: Literal["higher", "lower"]
    work: Work
    value: Callable[[Timeline], float]


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine that takes part. ``against``: names of those it is compared with.

    ``rows``: keys of the rows that it can do; None for all.
    """

    name: str
    engine: Generator
    against: tuple[str, ...] = ()
    rows: frozenset[str] | None = None

    def does(self, row: Row) -> bool:
        return self.rows is None or row.key in self.rows


# --- what is asked ---------------------------------------------------------------------------


def _at_once(batch: int) -> Work:
    def ask(engine: Generator, tokens: TokenSource) -> Timeline:
        prompts = [tokens.draw(f"{batch} at once {i}", INPUTS) for i in range(batch)]
        return engine.generate(prompts, OUTPUTS)

    return Work(f"{batch} at once", ask)


def _prefill(engine: Generator, tokens: TokenSource) -> Timeline:
    return engine.generate([tokens.draw("prefill", CACHED_TOKENS)], 1)


def _cached(engine: Generator, tokens: TokenSource) -> Timeline:
    prefix = tokens.draw("prefix", CACHED_TOKENS)
    engine.generate([prefix + tokens.draw("first tail", NEW_TOKENS)], 1)
    return engine.generate([prefix + tokens.draw("second tail", NEW_TOKENS)], 1)


def _rows() -> Iterable[Row]:
    batches = {batch: _at_once(batch) for batch in (1, 16, 64)}
    shape = f"({INPUTS} in, {OUTPUTS} out)"
    for batch, work in batches.items():
        yield Row(
            f"decode-{batch}",
            f"decode, batch {batch} {shape}",
            "tokens/s",
            "higher",
            work,
            Timeline.decode_rate,
        )
    for batch in (16, 64):
        yield Row(
            f"run-{batch}",
            f"{batch} concurrent {shape}, whole run",
            "output tokens/s",
            "higher",
            batches[batch],
            Timeline.output_rate,
        )
    yield Row(
        "prefill",
        f"prefill of {CACHED_TOKENS:,} tokens",
        "tokens/s",
        "higher",
        Work("prefill", _prefill),
        lambda timeline: CACHED_TOKENS / timeline.first_token,
    )
    yield Row(
        "cached",
        f"TTFT, {CACHED_TOKENS:,} cached + {NEW_TOKENS} new tokens",
        "ms",
        "lower",
        Work("cached prefix", _cached),
        lambda timeline: 1000 * timeline.first_token,
    )


ROWS: Mapping[str, Row] = {row.key: row for row in _rows()}
WHOLE_RUNS = frozenset(key for key in ROWS if key.startswith("run-"))
"""Rows for which it is enough to know when the last token came."""


# --- the measurement -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """One row over runs, by contender, with the memory bandwidth (GB/s) just before each value."""

    key: str
    row: str
    unit: str
    values: dict[str, list[float]]
    memory_gb_s: dict[str, list[float]]
    ratios: dict[str, dict[str, Spread]]
    """How many times better one is than the other, in the same run: by the one, then by the
    other; above 1 is a win."""
    failed: dict[str, int]
    """Requests without a complete answer; the work that they were part of has no value."""


@dataclass(slots=True)
class _Seen:
    """What has come of one row and contender so far. ``values`` by run."""

    values: dict[int, float] = field(default_factory=dict)
    memory_gb_s: list[float] = field(default_factory=list)
    failed: int = 0


def warm_up(
    contenders: Sequence[Contender],
    rows: Sequence[Row],
    seed: int,
    vocab_size: int,
    progress: Callable[[str], None],
) -> None:
    """Each contender's work once, unmeasured. A lost engine's failures count when measured."""
    tokens = TokenSource(f"{seed}/warm up", vocab_size)
    for work in dict.fromkeys(row.work for row in rows):
        for contender in contenders:
            if any(contender.does(row) for row in rows if row.work is work):
                progress(f"warming up: {work.name}, {contender.name}")
                with suppress(EngineLostError):
                    work.ask(contender.engine, tokens)


def measure_rows(
    contenders: Sequence[Contender],
    rows: Sequence[Row],
    runs: int,
    seed: int,
    vocab_size: int,
    progress: Callable[[str], None],
) -> list[Figure]:
    """All rows, ``runs`` times, the contenders in turn within each piece of work."""
    seen = {(row.key, c.name): _Seen() for row in rows for c in contenders if c.does(row)}
    by_name = {contender.name: contender for contender in contenders}
    for run in range(runs):
        tokens = TokenSource(f"{seed}/{run}", vocab_size)
        for work in dict.fromkeys(row.work for row in rows):
            for name in in_turns(list(by_name), run):
                mine = [r for r in rows if r.work is work and by_name[name].does(r)]
                if mine:
                    progress(f"run {run + 1} of {runs}: {work.name}, {name}")
                    found = [seen[row.key, name] for row in mine]
                    _measure_one(by_name[name].engine, work, tokens, run, mine, found)
    return [_figure(row, contenders, seen) for row in rows]


def _measure_one(
    engine: Generator,
    work: Work,
    tokens: TokenSource,
    run: int,
    rows: Sequence[Row],
    found: Sequence[_Seen],
) -> None:
    """One piece of work by one engine, into what was seen of its rows."""
    time.sleep(_SETTLE_S)
    bandwidth = memory_bandwidth()
    try:
        timeline = work.ask(engine, tokens)
    except RequestsFailedError as error:
        for seen in found:
            seen.failed += error.count
        return
    for row, seen in zip(rows, found, strict=True):
        seen.values[run] = row.value(timeline)
        seen.memory_gb_s.append(bandwidth)


def _figure(
    row: Row, contenders: Sequence[Contender], seen: Mapping[tuple[str, str], _Seen]
) -> Figure:
    mine = {c.name: seen[row.key, c.name] for c in contenders if c.does(row)}
    return Figure(
        key=row.key,
        row=row.name,
        unit=row.unit,
        values={name: list(each.values.values()) for name, each in mine.items()},
        memory_gb_s={name: each.memory_gb_s for name, each in mine.items()},
        ratios={
            c.name: {
                other: times
                for other in c.against
                if other in mine and (times := _times_better(row, mine[c.name], mine[other]))
            }
            for c in contenders
            if c.name in mine
        },
        failed={name: each.failed for name, each in mine.items()},
    )


def _times_better(row: Row, one: _Seen, other: _Seen) -> Spread | None:
    """Over the runs that both have a value of; None if there is none."""
    pairs = [(value, other.values[run]) for run, value in one.values.items() if run in other.values]
    if not pairs:
        return None
    return spread([a / b if row.better == "higher" else b / a for a, b in pairs])
