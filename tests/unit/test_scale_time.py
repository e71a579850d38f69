"""What the autoscaler remembers: windows, steps that were taken back, speed."""

from dataclasses import replace

import pytest

from helpers.scale_scenes import (
    CALM,
    FULL,
    LOW,
    NOW,
    SPEED,
    History,
    Scene,
    check_scene,
    pods,
    worker,
)
from kvasir.operator.scale import ScaleState, decide
from kvasir.operator.signals import WorkerSample

TIME = [
    Scene(
        "more was needed in the window",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "up to 3 were needed in the last 300 s",
        state=replace(CALM, peaks=((NOW - 290, 3),)),
    ),
    Scene(
        "more was needed before the window",
        "decode",
        pods(3, LOW),
        2,
        "stabilization",
        "it goes down one by one",
        state=replace(CALM, peaks=((NOW - 301, 3),)),
    ),
    Scene(
        "not watched for long enough",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "watched for 299 s of 300 s",
        state=replace(CALM, since=NOW - 299),
    ),
    Scene(
        "a gap begins the watch anew",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "watched for 0 s of 300 s",
        state=replace(CALM, seen=NOW - 61),
    ),
    Scene(
        "a clock set back begins the watch anew",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "watched for 0 s of 300 s",
        state=replace(CALM, seen=NOW + 500, since=NOW - 500, peaks=((NOW + 400, 9),)),
    ),
    Scene(
        "first decision",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "watched for 0 s of 300 s",
        state=ScaleState(),
    ),
    Scene(
        "first decision may grow",
        "decode",
        pods(2, FULL),
        3,
        "none",
        "Raise decode from 2 to 3",
        state=ScaleState(),
    ),
    Scene(
        "steps down are apart",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "the last change was 59 s ago",
        state=replace(CALM, changed=NOW - 59, lowered=True),
    ),
    Scene(
        "steps down that were taken back make it wait longer",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "up to 3 were needed in the last 1200 s",
        state=replace(CALM, retracted=2, peaks=((NOW - 1100, 3),)),
    ),
]


@pytest.mark.parametrize("scene", TIME, ids=lambda scene: scene.name)
def test_scene(scene: Scene) -> None:
    check_scene(scene)


# --- memory ----------------------------------------------------------------------------------


def test_speed_is_tokens_per_busy_time() -> None:
    """Busy half of the time at 300 tokens/s on average: 600 tokens/s when busy."""
    samples = tuple(
        WorkerSample(
            NOW - 60 + 5 * i,
            running=1.0,
            waiting=0.0,
            queued_prefill_tokens=float(i % 2),
            prompt_tokens=2000.0 * i,
            cached_tokens=500.0 * i,
        )
        for i in range(13)
    )
    scene = Scene("", "prefill", {"w-0": samples}, 1, "none", "")
    _, state = decide(ScaleState(), scene.signals(), NOW)
    assert state.throughput.tokens / state.throughput.busy == pytest.approx(600.0, rel=0.02)
    _, again = decide(state, scene.signals(), NOW + 5)
    assert again.throughput.tokens == state.throughput.tokens  # each interval counts once


def test_speed_follows_a_change() -> None:
    state = CALM
    fast = worker(running=1, queued=1, rate=5 * SPEED)
    scene = Scene("", "prefill", {"w-0": fast}, 1, "none", "")
    for i in range(50):
        later = tuple(replace(sample, time=sample.time + 60 * i) for sample in fast)
        signals = replace(scene.signals(), workers={"w-0": later})
        state = replace(state, throughput=replace(state.throughput, until=NOW + 60 * (i - 1)))
        _, state = decide(state, signals, NOW + 60 * i)
    assert state.throughput.tokens / state.throughput.busy == pytest.approx(5 * SPEED, rel=0.05)


def test_a_step_down_that_is_taken_back_doubles_the_window() -> None:
    down = Scene("", "decode", pods(3, LOW), 2, "none", "").signals()
    up = Scene("", "decode", pods(2, FULL), 3, "none", "").signals()
    lowered, state = decide(CALM, down, NOW)
    assert (lowered.desired, state.lowered, state.retracted) == (2, True, 0)
    soon = {name: shifted(history, 30) for name, history in up.workers.items()}
    raised, state = decide(state, replace(up, workers=soon), NOW + 30)
    assert (raised.desired, state.lowered, state.retracted) == (3, False, 1)


def test_a_step_down_that_lasts_resets_it() -> None:
    state = replace(CALM, lowered=True, retracted=3, changed=NOW - 301)
    up = Scene("", "decode", pods(2, FULL), 3, "none", "").signals()
    _, state = decide(state, up, NOW)
    assert state.retracted == 0


def shifted(history: History, seconds: float) -> History:
    return tuple(replace(sample, time=sample.time + seconds) for sample in history)
