"""Whether anybody asks for a role: what wakes it from zero, and what lets it go there. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvasir.operator import signals as metrics
from kvasir.operator.scaling.contracts import Role, RoleSignals, Settings
from kvasir.operator.scaling.view import Samples, View
from kvasir.operator.scaling.windows import Problem, fresh, increase
from kvasir.operator.signals import Missing, RouterSample, Value


@dataclass(frozen=True, slots=True)
class Routers:
    """What the routers of a service say together.

    ``held`` requests wait for a worker of the role; None if that is not known of every router, or
    there is none. ``call`` is a clause about what needs a worker of the role now, if anything does.
    ``problems``: router -> why it is not known what it holds.
    """

    held: float | None
    call: str | None
    problems: Mapping[str, str]


def read_routers(signals: RoleSignals, now: float, settings: Settings) -> Routers:
    held = without_prefill = 0.0
    problems: dict[str, str] = {}
    for name, history in signals.routers.items():
        samples = fresh(history, now, settings)
        if isinstance(samples, Problem):
            problems[name] = samples.text
            continue
        latest = _held(samples[-1], signals.role)
        if isinstance(latest, Missing):
            problems[name] = f"{metrics.HELD_REQUESTS} is {latest.value}"
        else:
            held += latest
        without_prefill += _without_prefill(samples, now - settings.rate_window)
    call = None
    if held > 0:
        call = f"routers hold {_counted(held, 'request')} until a worker is ready"
    elif signals.role == "prefill" and without_prefill > 0:
        call = f"{_counted(without_prefill, 'prompt')} found no prefill worker"
    known = bool(signals.routers) and not problems
    return Routers(held if known else None, call, problems)


def _held(sample: RouterSample, role: Role) -> Value:
    return sample.held_for_prefill if role == "prefill" else sample.held_for_decode


def _counted(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}" + ("" if number == 1 else "s")


def _without_prefill(samples: tuple[RouterSample, ...], since: float) -> float:
    risen = increase(samples, metrics.DISAGGREGATED, lambda s: s.without_prefill, since)
    return 0.0 if isinstance(risen, Problem) else risen.amount


def workers_idle(view: View) -> bool:
    """Whether every ready worker is known to have nothing to do, and to have had nothing."""
    idle = view.collect(lambda samples: _is_idle(view, samples)).known
    return len(idle) == len(view.signals.replicas.ready) and all(idle.values())


def _is_idle(view: View, samples: Samples) -> bool | Problem:
    latest = samples[-1]
    prompts = increase(samples, metrics.PROMPT_TOKENS, lambda s: s.prompt_tokens, view.window_start)
    if isinstance(prompts, Problem):
        return prompts
    return latest.running == latest.waiting == prompts.amount == 0
