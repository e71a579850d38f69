"""When requests are due: arrival processes, as seconds from the start of a run. Pure."""

import random
from typing import Literal

Process = Literal["poisson", "constant", "burst"]


def arrival_times(
    process: Process, rate: float, count: int, seed: int, burst_size: int = 8
) -> list[float]:
    """``count`` instants in order, from 0 on, at a mean of ``rate`` per second.

    poisson: independent exponential gaps, as many unrelated users make.
    constant: equal gaps.
    burst: ``burst_size`` requests at one instant, then a gap that keeps the mean rate.
    """
    if rate <= 0:
        raise ValueError(f"rate must be positive, not {rate}")
    if process == "constant":
        return [i / rate for i in range(count)]
    if process == "burst":
        return [i // burst_size * burst_size / rate for i in range(count)]
    rng = random.Random(f"arrivals {seed}")
    times = []
    now = 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times
