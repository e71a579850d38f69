"""The autoscaler: how many replicas a role should have, and why. Pure: no I/O, no clock.

    signals --needs of each signal--> needed --bounds, stabilization, pods on their way--> Decision

``decide`` takes what the previous call left and returns what the next one needs. That state is
never stored: an operator that starts knows nothing of the past, and what is not known never takes
a worker away, so that it watches a whole window before its first step down. Invariants:

- ``desired`` is within the bounds, whatever the signals say.
- Up at once, to the highest of all needs. Down one by one, to what was enough for the whole
  stabilization window.
- What is not known never takes a worker away; with nothing known at all, nothing changes.
- Only a role that was idle for the whole window, as its workers and all routers say, goes to 0.
- Rollouts, pods that start and pods that cannot be scheduled hinder no step down.
"""

from dataclasses import dataclass

from kvasir.operator.scaling.contracts import (
    Bounds,
    Decision,
    Input,
    LimitedBy,
    Replicas,
    RoleSignals,
    ScaleState,
    Settings,
)
from kvasir.operator.scaling.memory import changed, observed, stabilization, with_peak
from kvasir.operator.scaling.needed import Needed, needed_replicas

__all__ = [
    "Bounds",
    "Decision",
    "Replicas",
    "RoleSignals",
    "ScaleState",
    "Settings",
    "decide",
]

_DEFAULTS = Settings()


def decide(
    state: ScaleState, signals: RoleSignals, now: float, settings: Settings = _DEFAULTS
) -> tuple[Decision, ScaleState]:
    """The replicas of a role from now on.

    Args:
        state: from the previous decision about this role; ``ScaleState()`` for the first one.
        signals: what is known now.
        now: seconds since the Unix epoch.
        settings: the same from call to call.

    Returns:
        The decision, and the state for the next one, which assumes that ``desired`` is applied.
    """
    state = observed(state, signals, now, settings)
    needed = needed_replicas(signals, state.throughput, now, settings)
    state = with_peak(state, needed.replicas, now, settings)
    step = _step(state, signals, needed, now, settings)
    decision = Decision(
        time=now,
        role=signals.role,
        desired=step.desired,
        reason=_sentence(signals, needed, step),
        limited_by=step.limited_by,
        inputs=_inputs(signals.replicas, needed),
    )
    return decision, changed(state, signals.replicas.wanted, step.desired, now, settings)


# --- what is done about it -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    desired: int
    limited_by: LimitedBy
    limit: str = ""
    """A clause."""


def _step(
    state: ScaleState, signals: RoleSignals, needed: Needed, now: float, settings: Settings
) -> _Step:
    bounds, replicas = signals.bounds, signals.replicas
    start = bounds.clamp(replicas.wanted)  # bounds are obeyed at once
    goal = bounds.clamp(needed.replicas)
    if goal > start:
        limit = _no_more(replicas, start)
        if goal > limit.desired:
            return limit
    if goal < start:
        why_not = _not_lower(state, signals, now, settings)
        if start < replicas.wanted:
            return _Step(start, "max", f"maxReplicas is {bounds.max}")
        if why_not:
            return _Step(start, "stabilization", why_not)
        goal = start - 1
        if goal > bounds.clamp(needed.replicas):
            return _Step(goal, "stabilization", "it goes down one by one")
    if needed.replicas > bounds.max:
        return _Step(goal, "max", f"maxReplicas is {bounds.max}")
    if needed.replicas < bounds.min:
        return _Step(goal, "min", f"minReplicas is {bounds.min}")
    return _Step(goal, "bad_data" if needed.guarded or needed.blind else "none")


def _no_more(replicas: Replicas, start: int) -> _Step:
    """How far a role may grow at once: new pods help only when they are ready."""
    if replicas.unschedulable:
        pods = "pod" if replicas.unschedulable == 1 else "pods"
        limit = f"{replicas.unschedulable} {pods} cannot be scheduled, so none is added"
        return _Step(start, "pending", limit)
    ready = len(replicas.ready)
    most = max(2 * ready, ready + 2, start)
    return _Step(most, "pending", f"only {ready} are ready, and it at most doubles until more are")


def _not_lower(state: ScaleState, signals: RoleSignals, now: float, settings: Settings) -> str:
    """Why a role that needs less must not shrink yet; empty if it may."""
    window = stabilization(state, settings)
    peak = max((need for _, need in state.peaks), default=0)
    if signals.bounds.clamp(peak) >= signals.bounds.clamp(signals.replicas.wanted):
        return f"up to {peak} were needed in the last {window:.0f} s"
    observed = 0.0 if state.since is None else now - state.since
    if observed < window:
        return f"it has been watched for {observed:.0f} s of {window:.0f} s"
    if signals.replicas.draining:
        return f"{signals.replicas.draining} still drain"
    if state.changed is not None and now - state.changed < settings.down_interval:
        return f"the last change was {now - state.changed:.0f} s ago"
    return ""


# --- what is said ----------------------------------------------------------------------------

_MOST_PROBLEMS = 3


def _sentence(signals: RoleSignals, needed: Needed, step: _Step) -> str:
    wanted, desired = signals.replicas.wanted, step.desired
    if desired == wanted:
        head = f"Keep {signals.role} at {wanted}"
    else:
        verb = "Raise" if desired > wanted else "Lower"
        head = f"{verb} {signals.role} from {wanted} to {desired}"
    noun = "replica" if needed.replicas == 1 else "replicas"
    outcome = "so none is removed" if needed.blind else f"which needs {needed.replicas} {noun}"
    clauses = [f"{needed.text}, {outcome}"]
    if step.limit:
        clauses.append(step.limit)
    if needed.problems:
        listed = [f"{pod} ({text})" for pod, text in sorted(needed.problems.items())]
        more = len(listed) - _MOST_PROBLEMS
        rest = [f"{more} more"] if more > 0 else []
        effect = ", and what they hide counts as load" if needed.guarded else ""
        named = ", ".join(listed[:_MOST_PROBLEMS] + rest)
        clauses.append(f"some metrics cannot be used{effect}: {named}")
    return f"{head}: {'; '.join(clauses)}."


def _inputs(replicas: Replicas, needed: Needed) -> dict[str, Input]:
    counts: dict[str, Input] = {
        "wanted": replicas.wanted,
        "ready": len(replicas.ready),
        "pending": replicas.pending,
        "unschedulable": replicas.unschedulable,
        "draining": replicas.draining,
        "needed": needed.replicas,
    }
    measured = {
        key: round(value, 3) if isinstance(value, float) else value
        for key, value in needed.inputs.items()
    }
    return counts | measured
