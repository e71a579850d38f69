"""`kvasir bench speculation`: drafting switched off, forced, and left to the engine to decide.

Two kinds of text. *Edit*: a list is to be written again with a small change, so that most of the
answer stands in the prompt. *Open*: a story, of which nothing does. Every prompt is computed
before the clock runs, so that the figures are those of decoding.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvasir.bench.machine import memory_bandwidth
from kvasir.bench.stats import Record, Spread, spread
from kvasir.bench.trial import Progress, Trial, in_turns, paired_ratios, run_name, trial
from kvasir.bench.workload import Prompt, RequestSpec, WorkloadError, json_rows, text_field
from kvasir.worker.contracts import Runner
from kvasir.worker.limits import SchedulerConfig
from kvasir.worker.speculation.config import SpeculationConfig

OFF, FORCED, AUTO = "off", "forced", "auto"
MODES = (OFF, FORCED, AUTO)

Encode = Callable[[str], Sequence[int]]

_NAMES = ("Anna", "Bruno", "Carla", "Dmitri", "Edda", "Farid", "Greta", "Hugo", "Ines", "Jonas")
_PLACES = (
    "the harbor",
    "the mill",
    "the north gate",
    "the old school",
    "the station",
    "the market",
)
_THINGS = ("rope", "lamp oil", "nails", "flour", "copper wire", "blankets", "paint", "timber")
_HEROES = ("a ferryman", "a clockmaker", "a young botanist", "a retired judge", "two sisters")
_LOSSES = ("lost a map", "found a locked door", "heard a bell at night", "missed the last train")


@dataclass(frozen=True, slots=True)
class Text:
    """A kind of prompt: its name, and the prompts of it that a generator gives."""

    name: str
    prompt: Callable[[random.Random], str]


@dataclass(frozen=True, slots=True)
class Figure:
    """One kind of text in one batch size. By mode: tokens/s, and how they compare with OFF in the
    same run; drafted and accepted tokens for each that came out; memory GB/s just before."""

    text: str
    batch: int
    tokens_per_s: dict[str, Spread]
    ratio: dict[str, Spread]
    drafted: dict[str, Spread]
    acceptance: dict[str, Spread | None]
    """Accepted of drafted tokens; None where nothing was drafted."""
    memory_gb_s: tuple[float, ...]
    failures: int


@dataclass(frozen=True, slots=True)
class _Measured:
    tokens_per_s: float
    drafted: float
    acceptance: float | None
    failures: int


def edit_prompt(rng: random.Random) -> str:
    """A list of deliveries and the task to write it again, a little differently."""
    old, new = rng.sample(_PLACES, 2)
    lines = [
        f"{rng.choice(_NAMES)} brought {rng.randint(2, 90)} crates of {rng.choice(_THINGS)} "
        f"to {rng.choice((old, *_PLACES))}."
        for _ in range(10)
    ]
    listing = "\n".join(lines)
    task = f"The same list once more, with {new} instead of {old}"
    return f"Deliveries:\n{listing}\n\n{task}:\n{lines[0].replace(old, new)}\n"


def open_prompt(rng: random.Random) -> str:
    """The beginning of a story."""
    hero, loss, host = rng.choice(_HEROES), rng.choice(_LOSSES), rng.choice(_NAMES)
    return f"Once there lived {hero} who {loss} near {host}'s house. Years later,"


TEXTS = (Text("edit", edit_prompt), Text("open", open_prompt))


def text_of_file(path: Path) -> Text:
    """Prompts of a file with a row ``{"prompt": "..."}`` each; WorkloadError if it has none."""
    prompts = []
    for number, row in json_rows(path, "prompt"):
        prompts.append(text_field(f"{path}:{number}", row, "prompt"))
    if not prompts:
        raise WorkloadError(f"{path}: no prompts in this file")
    return Text(path.name, lambda rng: rng.choice(prompts))


@dataclass(frozen=True, slots=True)
class Workload:
    texts: Sequence[Text]
    batches: Sequence[int]
    output_len: int
    seed: int
    encode: Encode


def measure(
    runner: Runner,
    config: SchedulerConfig,
    speculation: SpeculationConfig,
    work: Workload,
    runs: int,
    say: Progress,
) -> list[Figure]:
    """Every kind of text in every batch size, the modes in turn; one unmeasured run before.

    Raises:
        TrialError: the engine failed.
    """
    configs = {
        OFF: replace(config, speculation=None),
        FORCED: replace(config, speculation=replace(speculation, adaptive=False)),
        AUTO: replace(config, speculation=replace(speculation, adaptive=True)),
    }
    figures = []
    for text in work.texts:
        for batch in work.batches:
            found: dict[str, list[_Measured]] = {mode: [] for mode in MODES}
            bandwidth = []
            for run in range(-1, runs):
                say(f"{text.name}, batch {batch}, {run_name(run, runs)}")
                specs = _specs(work, text, batch, run)
                bandwidth.append(memory_bandwidth())
                for mode in in_turns(MODES, run):
                    with trial(runner, configs[mode]) as running:
                        found[mode].append(_measure(running, specs))
            measured = {mode: results[1:] for mode, results in found.items()}
            figures.append(_figure(text.name, batch, measured, bandwidth[1:]))
    return figures


def longest_prompt(work: Workload, runs: int) -> int:
    """Tokens of the longest prompt that ``measure`` asks."""
    return max(
        len(spec.prompt.token_ids)
        for text in work.texts
        for run in range(-1, runs)
        for spec in _specs(work, text, max(work.batches), run)  # a smaller batch is its beginning
    )


def _specs(work: Workload, text: Text, batch: int, run: int) -> list[RequestSpec]:
    rng = random.Random(f"{work.seed}/{run}/{text.name}")
    prompts = [tuple(work.encode(text.prompt(rng))) for _ in range(batch)]
    return [RequestSpec(Prompt(prompt), work.output_len) for prompt in prompts]


def _measure(running: Trial, specs: Sequence[RequestSpec]) -> _Measured:
    running.run([replace(spec, max_tokens=1) for spec in specs])
    records = running.run(specs)
    load = running.load()
    produced = sum(record.output_tokens for record in records)
    return _Measured(
        tokens_per_s=_decode_rate(records),
        drafted=load.draft_tokens / produced if produced else 0.0,
        acceptance=load.accepted_tokens / load.draft_tokens if load.draft_tokens else None,
        failures=sum(not record.ok for record in records),
    )


def _decode_rate(records: Sequence[Record]) -> float:
    """Tokens after each request's first, over the time from the first of these to the end."""
    begun = min(record.token_times[0] for record in records)
    end = max(record.token_times[-1] for record in records)
    return sum(record.output_tokens - 1 for record in records) / (end - begun)


def _figure(
    text: str, batch: int, found: Mapping[str, Sequence[_Measured]], bandwidth: Sequence[float]
) -> Figure:
    rates = {mode: [one.tokens_per_s for one in results] for mode, results in found.items()}
    acceptance = {
        mode: [one.acceptance for one in results if one.acceptance is not None]
        for mode, results in found.items()
    }
    return Figure(
        text=text,
        batch=batch,
        tokens_per_s={mode: spread(values) for mode, values in rates.items()},
        ratio=paired_ratios(rates, OFF),
        drafted={mode: spread([one.drafted for one in found[mode]]) for mode in MODES},
        acceptance={
            mode: spread(values) if values else None for mode, values in acceptance.items()
        },
        memory_gb_s=tuple(bandwidth),
        failures=sum(one.failures for results in found.values() for one in results),
    )
