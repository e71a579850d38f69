"""How many decode workers are needed: KV cache, waiting requests and ITL. Pure.

KV cache         sum of the used parts / target
waiting          known * (1 + waiting / running), if enough wait to notice
ITL              workers * p95 / objective, at most one worker for each request
"""

from kvasir.operator import signals as metrics
from kvasir.operator.scaling.contracts import Input
from kvasir.operator.scaling.view import MAX_RATIO, Need, View, latency_of, requests_of
from kvasir.operator.scaling.windows import histogram_increase


def decode_needs(view: View) -> list[Need]:
    """What each signal asks for; ITL asks for nothing without an objective."""
    return [_kv_cache(view), _waiting(view), *_itl(view)]


def _kv_cache(view: View) -> Need:
    seen = view.collect(lambda s: view.mean(s, metrics.KV_USAGE, lambda w: w.kv_usage))
    if not seen.known:
        return seen.blind("KV cache usage", ["kv_usage"])
    used, target = sum(seen.known.values()), view.settings.target
    usage = used / len(seen.known)
    text = f"KV cache usage is {usage:.0%} on average (target {target:.0%})"
    return seen.need(used / target, text, {"kv_usage": usage})


def _waiting(view: View) -> Need:
    """Requests wait because a worker is full, whatever it is that is full."""
    seen = view.collect(lambda samples: requests_of(view, samples))
    if not seen.known:
        return seen.blind("number of requests", ["running", "waiting"])
    running = sum(one.running for one in seen.known.values())
    waiting = sum(one.waiting for one in seen.known.values())
    ratio = 1 + waiting / max(running, len(seen.known))
    # A request waits for the next step even where there is room: no reason to keep a worker.
    notable = ratio > 1 + view.settings.tolerance
    x = len(seen.known) * min(ratio, MAX_RATIO) if notable else 0.0
    text = f"{running:.1f} requests run and {waiting:.1f} wait"
    return seen.need(x, text, {"running": running, "waiting": waiting})


def _itl(view: View) -> list[Need]:
    objective = view.signals.objectives.itl_p95
    if objective is None:
        return []
    seen = view.collect(
        lambda s: histogram_increase(s, metrics.ITL, lambda w: w.itl, view.window_start)
    )
    if not seen.known:
        return [seen.blind("ITL", ["itl_p95_seconds"])]
    latency = latency_of(seen.known, view.settings)
    inputs: dict[str, Input] = {"itl_p95_seconds": latency.p95}
    x = 0.0
    if latency.p95 is not None:
        x = latency.workers * min(latency.p95 / objective, MAX_RATIO)
        requests = view.collect(lambda samples: requests_of(view, samples)).known
        if requests:  # alone on its worker, a request cannot be faster
            mean = sum(one.total for one in requests.values()) / len(requests)
            x = min(x, len(seen.known) * mean)
    return [seen.need(x, latency.text("ITL", objective), inputs)]
