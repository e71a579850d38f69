"""What one decision leaves for the next: peaks, a worker's speed, how steps down went. Pure."""

from dataclasses import replace

from kvasir.operator.scaling.contracts import RoleSignals, ScaleState, Settings, Throughput
from kvasir.operator.scaling.windows import busy_intervals


def stabilization(state: ScaleState, settings: Settings) -> float:
    """For how long less must have been enough before a step down, in seconds."""
    # The exponent is bounded as well: 2.0 ** 1024 would overflow.
    longer = settings.stabilization * 2.0 ** min(state.retracted, 16)
    return max(settings.stabilization, min(longer, settings.max_stabilization))


def changed(
    state: ScaleState, wanted: int, desired: int, now: float, settings: Settings
) -> ScaleState:
    """The state after a decision; ``wanted`` is what the role had before."""
    if desired == wanted:
        return state
    young = state.changed is not None and now - state.changed <= settings.stabilization
    retracted = state.retracted
    if state.lowered:
        if not young:  # it has proven right
            retracted = 0
        elif desired > wanted:
            retracted += 1
    return replace(state, changed=now, lowered=desired < wanted, retracted=retracted)


def observed(state: ScaleState, signals: RoleSignals, now: float, settings: Settings) -> ScaleState:
    """The state at a new observation; after a gap, or a clock set back, the past is unknown."""
    unbroken = state.seen is not None and 0 <= now - state.seen <= settings.rate_window
    throughput = replace(state.throughput, until=min(state.throughput.until, now))
    throughput = _measured(throughput, signals, now, settings)
    if unbroken:
        return replace(state, seen=now, throughput=throughput)
    changed = None if state.changed is None else min(state.changed, now)
    return ScaleState(since=now, seen=now, changed=changed, throughput=throughput)


def _measured(
    throughput: Throughput, signals: RoleSignals, now: float, settings: Settings
) -> Throughput:
    if signals.role != "prefill":
        return throughput
    tokens, busy = throughput.tokens, throughput.busy
    for name in signals.replicas.ready:
        samples = signals.workers.get(name, ())
        for computed, seconds in busy_intervals(samples, throughput.until, settings):
            kept = 0.5 ** (seconds / settings.throughput_half_life)
            tokens, busy = tokens * kept + computed, busy * kept + seconds
    return Throughput(tokens, busy, until=now)


def with_peak(state: ScaleState, replicas: int, now: float, settings: Settings) -> ScaleState:
    """The state with what is needed now."""
    oldest = now - stabilization(state, settings)
    higher = [(time, need) for time, need in state.peaks if time >= oldest and need > replicas]
    return replace(state, peaks=(*higher, (now, replicas)))
