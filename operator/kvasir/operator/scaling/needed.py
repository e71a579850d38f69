"""How many replicas the signals of a role ask for, whatever the bounds and the past. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from kvasir.operator.scaling.contracts import Input, RoleSignals, Settings, Throughput
from kvasir.operator.scaling.decode import decode_needs
from kvasir.operator.scaling.demand import Routers, read_routers, workers_idle
from kvasir.operator.scaling.prefill import prefill_needs
from kvasir.operator.scaling.view import Need, View

_ROUNDING = 1e-9
_MANY = 2.0**20
"""Above any maxReplicas: a worker that computes next to nothing asks for more than a number."""


@dataclass(frozen=True, slots=True)
class Needed:
    """What the signals ask for, whatever the bounds and the past; ``text`` is a clause.

    ``guarded``: bad data keeps it from being less; ``blind``: it is what there is, for want of
    data. ``problems``: pod -> what is not known of it.
    """

    replicas: int
    text: str
    inputs: Mapping[str, Input]
    guarded: bool = False
    blind: bool = False
    problems: Mapping[str, str] = field(default_factory=dict)


def needed_replicas(
    signals: RoleSignals, throughput: Throughput, now: float, settings: Settings
) -> Needed:
    routers = read_routers(signals, now, settings)
    if not signals.replicas.ready:
        return _needed_without_workers(signals.replicas.wanted, routers)
    view = View(signals, now, settings)
    prefill = signals.role == "prefill"
    needs = prefill_needs(view, throughput) if prefill else decode_needs(view)
    needed = _highest(needs, signals.replicas.wanted, settings)
    needed = replace(needed, inputs={**needed.inputs, "held_requests": routers.held})
    if routers.call is not None and needed.replicas == 0:
        return replace(needed, replicas=1, text=routers.call, blind=False)
    # The last one goes only when nobody needs it; but for want of data, none comes either.
    least = min(signals.replicas.wanted, 1)
    if needed.replicas > 0 or not workers_idle(view):
        return replace(needed, replicas=max(needed.replicas, least))
    if routers.held is not None:
        return replace(needed, text="it is idle")
    if signals.bounds.min == 0:
        text = "its workers are idle, but what routers hold is not known"
        problems = {**needed.problems, **routers.problems}
        return replace(needed, replicas=least, text=text, guarded=True, problems=problems)
    return replace(needed, replicas=least)


def _needed_without_workers(wanted: int, routers: Routers) -> Needed:
    inputs: dict[str, Input] = {"held_requests": routers.held}
    if routers.call is not None:
        return Needed(max(wanted, 1), routers.call, inputs)
    if routers.held is not None:
        return Needed(0, "no worker is ready, and no request is held", inputs)
    text = "no worker is ready, and what routers hold is not known"
    return Needed(wanted, text, inputs, blind=True, problems=routers.problems)


def _highest(needs: Sequence[Need], wanted: int, settings: Settings) -> Needed:
    """The highest of all needs: of the ones to grow for if one does, else of all to keep."""
    inputs = {key: value for need in needs for key, value in need.inputs.items()}
    problems = {pod: text for need in reversed(needs) for pod, text in need.problems.items()}
    known = [need for need in needs if need.up is not None]
    blind = [need for need in needs if need.up is None]
    if not known:
        text = " and ".join(need.text for need in blind)
        return Needed(wanted, text, inputs, blind=True, problems=problems)
    growth = max(known, key=lambda need: need.up or 0.0)
    up = _whole((growth.up or 0.0) / (1 + settings.tolerance))
    if up > wanted:
        return Needed(up, growth.text, inputs, problems=problems)
    keep = max(known, key=lambda need: need.down or 0.0)
    enough = min(wanted, _whole(keep.down or 0.0))
    seen = min(wanted, _whole(growth.up or 0.0))
    if blind and wanted > enough:
        return Needed(wanted, blind[0].text, inputs, blind=True, problems=problems)
    guarded = bool(problems) and seen < enough
    return Needed(enough, keep.text, inputs, guarded=guarded, problems=problems)


def _whole(replicas: float) -> int:
    return ceil(min(replicas, _MANY) - _ROUNDING)
