"""How many prefill workers are needed: prompt tokens and TTFT. Pure.

With c the measured tokens/s of one busy worker, tokens being uncached prompt tokens:

    prompt tokens    the highest of
                     arriving / (c * target)            there is time to spare
                     (arriving + queued / catch-up)/c   a backlog is worked off in that time
                     known + 1                          if the queue takes longer than TTFT may
    TTFT             ready + 1                          if p95 is too high and prompts are queued

The step of one is taken again when the new worker is ready and it is still not enough: how a
queue's length answers to one more worker is not known beforehand. More workers than requests would
not help, so that requests bound what the queue asks for.
"""

from dataclasses import dataclass

from kvasir.operator import signals as metrics
from kvasir.operator.scaling.contracts import Input, Throughput
from kvasir.operator.scaling.view import (
    Need,
    Samples,
    View,
    latency_of,
    queued_prefill,
    requests_of,
)
from kvasir.operator.scaling.windows import (
    Increase,
    Problem,
    change,
    histogram_increase,
    increase,
)
from kvasir.operator.signals import Missing

_INPUTS = (
    "arriving_tokens_per_second",
    "queued_prefill_tokens",
    "tokens_per_second_per_worker",
)


def prefill_needs(view: View, throughput: Throughput) -> list[Need]:
    """What each signal asks for; TTFT asks for nothing without an objective."""
    return [_prompt_tokens(view, throughput), *_ttft(view)]


@dataclass(frozen=True, slots=True)
class _PromptWork:
    """Uncached prompt tokens of one worker: arrived in so many seconds, and queued on average."""

    arrived: float
    seconds: float
    queued: float
    requests: float


def _prompt_work(view: View, samples: Samples) -> _PromptWork | Problem:
    """A queue that has grown has arrived as well, beside what was computed.

    What is queued counts with its cached tokens: which they are is known at admission.
    """
    queued = view.mean(samples, metrics.QUEUED_PREFILL_TOKENS, queued_prefill)
    if isinstance(queued, Problem):
        return queued
    requests = requests_of(view, samples)
    if isinstance(requests, Problem):
        return requests
    since = view.window_start
    computed = _computed(samples, since)
    if isinstance(computed, Problem):
        return computed
    arrived = computed.amount + change(samples, queued_prefill, since)
    return _PromptWork(max(0.0, arrived), computed.seconds, queued, requests.total)


def _computed(samples: Samples, since: float) -> Increase | Problem:
    """Prompt tokens that the worker computed; if it does not count them, what it admitted of
    them, but for the cached ones."""
    if samples[-1].prefill_tokens is not Missing.ABSENT:
        return increase(samples, metrics.PREFILL_TOKENS, lambda s: s.prefill_tokens, since)
    prompts = increase(samples, metrics.PROMPT_TOKENS, lambda s: s.prompt_tokens, since)
    if isinstance(prompts, Problem):
        return prompts
    cached = increase(samples, metrics.CACHED_TOKENS, lambda s: s.cached_tokens, since)
    if isinstance(cached, Problem):
        return cached
    return Increase(prompts.amount - cached.amount, prompts.seconds)


@dataclass(frozen=True, slots=True)
class _Demand:
    """Of all known workers together; ``arriving`` in tokens/s."""

    workers: int
    arriving: float
    queued: float
    requests: float


def _prompt_tokens(view: View, throughput: Throughput) -> Need:
    seen = view.collect(lambda samples: _prompt_work(view, samples))
    if not seen.known:
        return seen.blind("prompt tokens", [*_INPUTS])
    known = seen.known.values()
    demand = _Demand(
        workers=len(known),
        # Over the longest time, not each over its own: pods that came in the meantime have taken
        # over from the others, and the sum of all rates would count that twice.
        arriving=sum(one.arrived for one in known) / max(one.seconds for one in known),
        queued=sum(one.queued for one in known),
        requests=sum(one.requests for one in known),
    )
    evidence = view.settings.throughput_evidence
    measured = throughput.tokens / throughput.busy if throughput.busy >= evidence else 0.0
    speed = measured or None  # the least token counts are so small that the quotient is 0
    inputs = dict(zip(_INPUTS, (demand.arriving, demand.queued, speed), strict=True))
    text = f"{demand.arriving:.0f} prompt tokens/s arrive and {demand.queued:.0f} are queued"
    if demand.arriving == demand.queued == 0:
        return seen.need(0.0, text, inputs)
    # Little evidence must not make a worker look fast when one is to be taken away.
    slow = throughput.tokens / (throughput.busy + evidence)
    x_down = _workers_for(demand, slow, view) if slow > 0 else float(demand.workers)
    if speed is None:
        text += ", and the speed of a worker is not measured yet"
        return seen.cautious_need(0.0, x_down, text, inputs)
    text += f", and a worker computes {speed:.0f}/s"
    return seen.cautious_need(_workers_for(demand, speed, view), x_down, text, inputs)


def _workers_for(demand: _Demand, speed: float, view: View) -> float:
    """Workers of that speed, in tokens/s, so that no prompt waits longer than it may."""
    settings = view.settings
    steady = demand.arriving / speed / settings.target
    allowed = view.signals.objectives.ttft_p95 or settings.default_ttft
    in_time = (demand.arriving + demand.queued / max(settings.catch_up, allowed)) / speed
    if demand.queued / speed / demand.workers > allowed:
        in_time = max(in_time, _one_more(demand.workers, view))
    return max(steady, min(in_time, demand.requests))


def _one_more(workers: int, view: View) -> float:
    """So many that the tolerance does not take it away again."""
    return (workers + 1) * (1 + view.settings.tolerance)


def _ttft(view: View) -> list[Need]:
    """TTFT as clients see it: also of prompts that a decode worker computed by itself."""
    objective = view.signals.objectives.ttft_p95
    workers = view.signals.answering
    if objective is None or not workers:
        return []
    seen = view.collect_from(
        workers,
        workers,
        lambda s: histogram_increase(s, metrics.TTFT, lambda w: w.ttft, view.window_start),
    )
    if not seen.known:
        return [seen.blind("TTFT", ["ttft_p95_seconds"])]
    latency = latency_of(seen.known, view.settings)
    text = latency.text("TTFT", objective)
    inputs: dict[str, Input] = {"ttft_p95_seconds": latency.p95}
    if latency.p95 is None or latency.p95 <= objective:
        return [Need(0.0, 0.0, text, inputs)]
    ready = len(view.signals.replicas.ready)
    queues = view.collect(lambda s: view.mean(s, metrics.QUEUED_PREFILL_TOKENS, queued_prefill))
    if not any(queues.known.values()):
        text += ", but no prompt is queued, so that more workers would not help"
        return [Need(0.0, float(ready), text, inputs)]
    up = _one_more(ready, view)
    return [Need(up, up, text, inputs)]
