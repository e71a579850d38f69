"""What a role's ready workers show at one moment, and what a signal asks for. Pure.

A signal is turned into the number of workers that would be just loaded enough, ``x``, from the
workers of which it is known. Those of which it is not known are assumed to be

    when growing     loaded like the mean of the known ones        up   = x * (1 + missing / known)
    when shrinking   loaded at the target: needed, each of them    down = max(up, x + missing)

A pod that has just become ready is neither known nor missing: what it takes over from the others
still shows in their numbers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvasir.operator import signals as metrics
from kvasir.operator.scaling.contracts import Input, RoleSignals, Settings
from kvasir.operator.scaling.windows import (
    Problem,
    fresh,
    mean,
    merged,
    quantile,
)
from kvasir.operator.signals import Histogram, Value, WorkerSample

T = TypeVar("T")
Samples = tuple[WorkerSample, ...]
_PERCENTILE = 0.95
MAX_RATIO = 2.0
"""A ratio at most doubles a role: it says that a role is too small, not exactly by how much."""


@dataclass(frozen=True, slots=True)
class Need:
    """What one signal asks for.

    ``up`` and ``down`` are workers, as above; both None if the signal is known of no worker:
    then it adds none, and none may be taken away. ``text`` says why, as a clause.
    ``problems``: worker -> why the signal is not known of it.
    """

    up: float | None
    down: float | None
    text: str
    inputs: Mapping[str, Input]
    problems: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """Something about several pods: what it is, or why it is not known."""

    known: Mapping[str, T]
    problems: Mapping[str, str]

    def need(self, x: float, text: str, inputs: Mapping[str, Input]) -> Need:
        return self.cautious_need(x, x, text, inputs)

    def cautious_need(
        self, x: float, x_down: float, text: str, inputs: Mapping[str, Input]
    ) -> Need:
        """With different numbers, ``x <= x_down``, for growing and shrinking."""
        missing = len(self.problems)
        scale = 1 + missing / len(self.known)
        down = max(x_down * scale, x_down + missing)
        return Need(x * scale, down, text, inputs, self.problems)

    def blind(self, what: str, inputs: Iterable[str]) -> Need:
        nothing: dict[str, Input] = dict.fromkeys(inputs)
        return Need(None, None, f"nothing is known of the {what}", nothing, self.problems)


@dataclass(frozen=True, slots=True)
class View:
    """The ready workers of a role at one moment. There is at least one."""

    signals: RoleSignals
    now: float
    settings: Settings

    @property
    def window_start(self) -> float:
        return self.now - self.settings.rate_window

    def collect(self, read: Callable[[Samples], T | Problem]) -> Seen[T]:
        """What ``read`` finds for each ready worker."""
        return self.collect_from(self.signals.workers, self.signals.replicas.ready, read)

    def collect_from(
        self,
        workers: Mapping[str, Samples],
        names: Iterable[str],
        read: Callable[[Samples], T | Problem],
    ) -> Seen[T]:
        known: dict[str, T] = {}
        problems: dict[str, str] = {}
        for name in names:
            samples = fresh(workers.get(name, ()), self.now, self.settings)
            found = samples if isinstance(samples, Problem) else read(samples)
            if not isinstance(found, Problem):
                known[name] = found
            elif not found.new:
                problems[name] = found.text
        return Seen(known, problems)

    def mean(
        self, samples: Samples, name: str, pick: Callable[[WorkerSample], Value]
    ) -> float | Problem:
        return mean(samples, name, pick, self.now - self.settings.gauge_window)


@dataclass(frozen=True, slots=True)
class Requests:
    """Of one worker, on average."""

    running: float
    waiting: float

    @property
    def total(self) -> float:
        return self.running + self.waiting


def requests_of(view: View, samples: Samples) -> Requests | Problem:
    running = view.mean(samples, metrics.RUNNING, lambda s: s.running)
    if isinstance(running, Problem):
        return running
    waiting = view.mean(samples, metrics.WAITING, lambda s: s.waiting)
    return waiting if isinstance(waiting, Problem) else Requests(running, waiting)


def queued_prefill(sample: WorkerSample) -> Value:
    return sample.queued_prefill_tokens


@dataclass(frozen=True, slots=True)
class Latency:
    """A latency over some workers.

    ``workers`` is how many gave it, on average over the window: pods that came in the meantime
    count for their part of it. ``p95`` None: too few observations, or none.
    """

    workers: float
    observations: float
    p95: float | None

    def text(self, name: str, objective: float) -> str:
        if self.p95 is None:
            return f"{self.observations:.0f} observations of {name} are too few to judge"
        return f"{name} p95 is {self.p95 * 1000:.0f} ms (objective {objective * 1000:.0f} ms)"


def latency_of(seen: Mapping[str, tuple[Histogram, float]], settings: Settings) -> Latency:
    """Of what ``histogram_increase`` gives for each worker; at least one."""
    histogram = merged(histogram for histogram, _ in seen.values())
    seconds = [seconds for _, seconds in seen.values()]
    observations = histogram.counts[-1]
    p95 = quantile(histogram, _PERCENTILE) if observations >= settings.min_observations else None
    return Latency(sum(seconds) / max(seconds), observations, p95)
