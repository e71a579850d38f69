"""What holds of the autoscaler for any input."""

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.scale_scenes import CALM, NOW, History, Scene, check_form, objectives, pods, worker
from helpers.scaled_pool import BUCKETS
from kvasir.operator.scale import Bounds, Replicas, RoleSignals, ScaleState, decide
from kvasir.operator.scaling.contracts import Role, Throughput
from kvasir.operator.signals import Histogram, Missing, RouterSample, WorkerSample

any_number = st.one_of(
    st.floats(0, 2.0**63), st.floats(0, 100), st.just(0.0), st.sampled_from(list(Missing))
)
any_part = st.one_of(st.floats(0, 1), st.sampled_from(list(Missing)))


@st.composite
def histograms(draw: st.DrawFn) -> Histogram | Missing:
    if draw(st.booleans()):
        return draw(st.sampled_from(list(Missing)))
    counts = sorted(draw(st.lists(st.integers(0, 2**40), min_size=15, max_size=15)))
    return Histogram(BUCKETS, tuple(float(count) for count in counts))


@st.composite
def histories(draw: st.DrawFn) -> History:
    times = sorted(draw(st.sets(st.integers(0, 100), max_size=5)))
    return tuple(
        WorkerSample(
            NOW - 90 + time,
            draw(any_number),
            draw(any_number),
            draw(any_part),
            draw(any_number),
            draw(any_number),
            draw(any_number),
            draw(histograms()),
            draw(histograms()),
            draw(any_number),
            draw(any_number),
        )
        for time in times
    )


@st.composite
def any_signals(draw: st.DrawFn) -> RoleSignals:
    low = draw(st.integers(0, 5))
    names = st.sampled_from(["a", "b", "c", "d"])
    some = st.dictionaries(names, histories(), max_size=4)
    times = st.floats(NOW - 50, NOW)
    router_sample = st.builds(RouterSample, times, any_number, any_number, any_number).map(
        lambda sample: (sample,)
    )
    return RoleSignals(
        role=draw(st.sampled_from(["prefill", "decode"])),
        bounds=Bounds(low, low + draw(st.integers(0, 5))),
        replicas=Replicas(
            draw(st.integers(0, 12)),
            tuple(draw(st.sets(names))),
            *(draw(st.integers(0, 3)) for _ in range(3)),
        ),
        objectives=draw(st.sampled_from([objectives(), objectives("500ms", "50ms")])),
        workers=draw(some),
        answering=draw(some),
        routers=draw(st.dictionaries(st.sampled_from(["r", "s"]), router_sample)),
    )


any_state = st.builds(
    ScaleState,
    peaks=st.lists(st.tuples(st.floats(0, NOW), st.integers(0, 20)), max_size=4).map(tuple),
    since=st.one_of(st.none(), st.floats(0, NOW)),
    seen=st.one_of(st.none(), st.floats(NOW - 50, NOW)),
    changed=st.one_of(st.none(), st.floats(0, NOW)),
    lowered=st.booleans(),
    retracted=st.integers(0, 2000),
    throughput=st.builds(Throughput, st.floats(0, 1e300), st.floats(0, 1e6), st.floats(0, NOW)),
)


@settings(max_examples=120, deadline=None)
@given(any_state, any_signals())
def test_always_within_bounds_and_sound(state: ScaleState, signals: RoleSignals) -> None:
    decision, _ = decide(state, signals, NOW)
    bounds, wanted = signals.bounds, signals.replicas.wanted
    assert bounds.min <= decision.desired <= bounds.max
    # Down one by one, except into the bounds.
    assert decision.desired >= min(wanted - 1, bounds.max)
    check_form(decision)


@settings(max_examples=120, deadline=None)
@given(any_signals())
def test_a_restart_takes_no_worker_away(signals: RoleSignals) -> None:
    decision, _ = decide(ScaleState(), signals, NOW)
    assert decision.desired >= signals.bounds.clamp(signals.replicas.wanted)


@settings(max_examples=120, deadline=None)
@given(any_state, any_signals())
def test_silent_workers_are_never_taken_away(state: ScaleState, signals: RoleSignals) -> None:
    silent = replace(signals, workers={}, routers={})
    decision, _ = decide(state, silent, NOW)
    assert decision.desired == signals.bounds.clamp(signals.replicas.wanted)


@settings(max_examples=120, deadline=None)
@given(
    role=st.sampled_from(["prefill", "decode"]),
    field_name=st.sampled_from(["queued", "kv", "waiting", "itl", "rate", "ttft"]),
    base=st.tuples(*(st.floats(0, 1) for _ in range(6))),
    more=st.floats(0, 1),
    count=st.integers(1, 6),
)
def test_more_load_never_asks_for_less(
    role: Role, field_name: str, base: tuple[float, ...], more: float, count: int
) -> None:
    scales = {"queued": 9e4, "kv": 1.0, "waiting": 40.0, "itl": 0.2, "rate": 3000.0, "ttft": 2.0}
    low = {name: scale * part for (name, scale), part in zip(scales.items(), base, strict=True)}
    high = low | {field_name: low[field_name] + more * (scales[field_name] - low[field_name])}

    def desired(load: Mapping[str, float]) -> int:
        workers = pods(count, worker(running=20, observations=50, **load))
        scene = Scene("", role, workers, 0, "none", "", objectives=objectives("1s", "50ms"))
        signals = replace(scene.signals(), answering=workers)
        return decide(CALM, signals, NOW)[0].desired

    assert desired(high) >= desired(low)
