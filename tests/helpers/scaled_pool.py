"""A role under the autoscaler, simulated: pods that start late, queues that fill, scrapes.

Prompts and sequences are fluid, split evenly over the ready pods: what is simulated is the loop
of load, metrics and decisions, not the order of requests. Seconds throughout.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvasir.operator.modelservice import Objectives
from kvasir.operator.scale import Bounds, Decision, Replicas, RoleSignals, ScaleState, decide
from kvasir.operator.scaling.contracts import Role
from kvasir.operator.signals import Histogram, RouterSample, WorkerSample, remember

STEP = 1.0
SCRAPE = 5.0
BUCKETS = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0, 10.0, math.inf)


def observe(histogram: Histogram, seconds: float, count: float) -> Histogram:
    """``count`` more observations of the same latency."""
    counts = tuple(
        have + (count if seconds <= bound else 0.0)
        for bound, have in zip(histogram.bounds, histogram.counts, strict=True)
    )
    return Histogram(histogram.bounds, counts)


EMPTY = Histogram(BUCKETS, (0.0,) * len(BUCKETS))


@dataclass
class _Pod:
    ready_at: float
    queue: float = 0.0
    sample: WorkerSample = field(
        default_factory=lambda: WorkerSample(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, EMPTY, EMPTY)
    )


class ScaledPool:
    """``load(t)`` is uncached prompt tokens/s for prefill, concurrent sequences for decode.

    A prefill worker computes ``speed`` tokens/s of prompts of ``prompt`` tokens. A decode worker
    holds ``slots`` sequences in its KV cache; its ITL is 10 ms and 1 ms for each sequence.
    At most ``nodes`` pods can be scheduled.
    """

    prompt = 500.0
    speed = 5000.0
    slots = 50.0

    def __init__(
        self,
        role: Role,
        load: Callable[[float], float],
        bounds: Bounds,
        *,
        objectives: Objectives | None = None,
        startup: float = 30.0,
        nodes: int = 1000,
    ) -> None:
        self._role: Role = role
        self._load = load
        self._bounds = bounds
        self._objectives = objectives or Objectives()
        self._startup = startup
        self._nodes = nodes
        self._state = ScaleState()
        self._pods: dict[str, _Pod] = {}
        self._made = 0
        self._history: dict[str, tuple[WorkerSample, ...]] = {}
        self._routers: dict[str, tuple[RouterSample, ...]] = {}
        self._held = 0.0
        self.wanted = 0
        self.now = 1000.0
        self.decisions: list[Decision] = []
        self._resize(max(1, bounds.min), ready_at=self.now)

    def run(self, seconds: float) -> list[int]:
        """The replicas wanted after each decision."""
        begin = len(self.decisions)
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            self._serve()
            if self.now % SCRAPE == 0:
                self._scrape()
                self._decide()
        return [decision.desired for decision in self.decisions[begin:]]

    def restart_operator(self) -> None:
        """Nothing outlives it."""
        self._state = ScaleState()
        self._history, self._routers = {}, {}

    def _ready(self) -> list[str]:
        return [name for name, pod in self._pods.items() if pod.ready_at <= self.now]

    def _serve(self) -> None:
        ready = self._ready()
        load = self._load(self.now)
        self._held = 0.0 if ready else math.ceil(load / self.prompt)
        for name in ready:
            serve = self._prefill if self._role == "prefill" else self._decode
            serve(self._pods[name], load / len(ready))

    def _prefill(self, pod: _Pod, load: float) -> None:
        wait = pod.queue / self.speed
        offered = pod.queue + load * STEP
        computed = min(offered, self.speed * STEP)
        busy = computed / (self.speed * STEP)
        pod.queue = offered - computed
        # Within a step prompts queue even if none is left at its end: half a step's on average.
        queued = pod.queue + (self.prompt / 2 if math.fmod(self.now / 7.3, 1.0) < busy else 0.0)
        assert isinstance(pod.sample.prompt_tokens, float)
        assert isinstance(pod.sample.ttft, Histogram)
        pod.sample = replace(
            pod.sample,
            running=float(queued > 0),
            waiting=max(0.0, math.ceil(queued / self.prompt) - 1.0),
            queued_prefill_tokens=queued,
            prompt_tokens=pod.sample.prompt_tokens + computed,
            ttft=observe(
                pod.sample.ttft, wait + self.prompt / self.speed, load * STEP / self.prompt
            ),
        )

    def _decode(self, pod: _Pod, load: float) -> None:
        running = min(load, self.slots)
        latency = 0.01 + 0.001 * running
        assert isinstance(pod.sample.prompt_tokens, float)
        assert isinstance(pod.sample.itl, Histogram)
        pod.sample = replace(
            pod.sample,
            running=running,
            waiting=load - running,
            kv_usage=running / self.slots,
            prompt_tokens=pod.sample.prompt_tokens + running,
            itl=observe(pod.sample.itl, latency, running / latency * STEP),
        )

    def _scrape(self) -> None:
        samples = {name: replace(self._pods[name].sample, time=self.now) for name in self._ready()}
        since = self.now - 90
        self._history = remember(self._history, samples, self._pods, since)
        router = {"r-0": RouterSample(self.now, self._held, self._held, 0.0)}
        self._routers = remember(self._routers, router, router, since)

    def _decide(self) -> None:
        waiting = [pod for pod in self._pods.values() if pod.ready_at > self.now]
        unschedulable = sum(pod.ready_at == math.inf for pod in waiting)
        signals = RoleSignals(
            role=self._role,
            bounds=self._bounds,
            replicas=Replicas(
                self.wanted, tuple(self._ready()), len(waiting) - unschedulable, unschedulable
            ),
            objectives=self._objectives,
            workers=self._history,
            answering=self._history,
            routers=self._routers,
        )
        decision, self._state = decide(self._state, signals, self.now)
        self.decisions.append(decision)
        self._resize(decision.desired, self.now + self._startup)

    def _resize(self, wanted: int, ready_at: float) -> None:
        self.wanted = wanted
        while len(self._pods) < wanted:
            fits = len(self._pods) < self._nodes
            self._pods[f"p-{self._made}"] = _Pod(ready_at if fits else math.inf)
            self._made += 1
        while len(self._pods) > wanted:  # the latest first: those not ready, if there are any
            self._pods.popitem()
