"""The autoscaler in a loop with a simulated role."""

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.scale_scenes import objectives
from helpers.scaled_pool import ScaledPool
from kvasir.operator.scale import Bounds
from kvasir.operator.scaling.contracts import Role


def changes(replicas: list[int]) -> int:
    return sum(before != after for before, after in pairwise(replicas))


@settings(max_examples=6, deadline=None)
@given(
    role=st.sampled_from(["prefill", "decode"]),
    load=st.floats(0.02, 7.5),
)
def test_a_constant_load_ends_in_a_fixed_size(role: Role, load: float) -> None:
    """``load`` in workers at the target: never too few of them, and no flapping."""
    total = load * 0.8 * (ScaledPool.speed if role == "prefill" else ScaledPool.slots)
    pool = ScaledPool(role, lambda _: total, Bounds(1, 12))
    pool.run(1800)
    settled = pool.run(1800)
    assert changes(settled) <= 2
    assert settled[-1] >= load / 1.1
    assert settled[-1] <= math.ceil(load * 1.15) + 1


def test_a_burst_is_met_within_two_starts_of_a_pod() -> None:
    pool = ScaledPool(
        "prefill",
        lambda t: 18_000.0 if 2000 <= t < 2300 else 2000.0,
        Bounds(1, 10),
        objectives=objectives(ttft="500ms"),
    )
    assert pool.run(900)[-1] == 1
    during = pool.run(100 + 90)
    assert during[-1] >= 5  # 18,000 / (0.8 * 5,000) = 4.5
    pool.run(110)
    after = pool.run(1500)
    assert max(after) <= 10
    assert after[-1] == 1
    assert all(later >= sooner - 1 for sooner, later in pairwise(after))


def test_a_ramp_is_followed_up_and_down() -> None:
    pool = ScaledPool(
        "decode",
        lambda t: 240.0 - abs(t - 3400.0) / 10.0,
        Bounds(1, 12),
        objectives=objectives(itl="60ms"),
    )
    up = pool.run(2400)
    assert 5 <= up[-1] <= 8  # 240 / 50 / 0.8 = 6
    assert pool.run(2000)[-1] <= 3 + 1


def test_to_zero_and_back() -> None:
    pool = ScaledPool("decode", lambda t: 0.0 if t < 1900 else 20.0, Bounds(0, 3))
    asleep = pool.run(800)
    assert asleep[-1] == 0
    awake = pool.run(600)
    assert set(awake[20:]) == {1}


def test_a_cluster_that_is_full() -> None:
    pool = ScaledPool("prefill", lambda t: 18_000.0 if t < 1600 else 2000.0, Bounds(1, 10), nodes=3)
    busy = pool.run(600)
    assert max(busy) <= 6  # what is asked for before it is known that no node has room
    calm = pool.run(2500)
    assert calm[-1] == 1


def test_a_restarted_operator_watches_a_whole_window_before_a_step_down() -> None:
    """Restarted when it was about to go down; then it ends like one that has never gone."""

    def pool() -> ScaledPool:
        return ScaledPool("decode", lambda t: 150.0 if t < 1200 else 20.0, Bounds(1, 12))

    steady, restarted = pool(), pool()
    most = steady.run(450)[-1]
    assert restarted.run(450)[-1] == most > 1
    restarted.restart_operator()
    assert steady.run(290)[-1] < most
    assert set(restarted.run(290)) == {most}
    steady.run(900)
    restarted.run(900)
    assert steady.wanted == restarted.wanted == 1


def test_an_operator_that_starts_meets_a_burst_at_once() -> None:
    pool = ScaledPool("decode", lambda t: 20.0 if t < 1100 else 200.0, Bounds(1, 12))
    pool.run(100)
    pool.restart_operator()
    assert pool.run(60)[-1] > 1
