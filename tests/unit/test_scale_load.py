"""The autoscaler under load: how many decode and prefill workers are needed."""

from dataclasses import replace

import pytest

from helpers.scale_scenes import CALM, FULL, IDLE, NOW, Scene, check_scene, objectives, pods, worker
from kvasir.operator.scale import Bounds
from kvasir.operator.scaling.contracts import Throughput

DECODE = [
    Scene("kv within target", "decode", pods(2, worker(running=9, kv=0.75)), 2, "none", "75%"),
    Scene("kv above target", "decode", pods(2, FULL), 3, "none", "from 2 to 3: KV cache"),
    Scene("kv within tolerance", "decode", pods(2, worker(running=9, kv=0.85)), 2, "none", "85%"),
    Scene(
        "waiting doubles at most",
        "decode",
        pods(2, worker(running=10, waiting=90, kv=0.2)),
        4,
        "none",
        "20.0 requests run and 180.0 wait",
    ),
    Scene(
        "one waits for the next step",
        "decode",
        pods(2, worker(running=12, waiting=1, kv=0.1)),
        1,
        "none",
        "Lower decode from 2 to 1",
    ),
    Scene(
        "itl above objective",
        "decode",
        pods(2, worker(running=10, kv=0.1, itl=0.055, observations=50)),
        3,
        "none",
        "ITL p95 is 60 ms (objective 50 ms)",
        objectives=objectives(itl="50ms"),
    ),
    Scene(
        "itl cannot be met by a request alone on its worker",
        "decode",
        pods(2, worker(running=1, kv=0.1, itl=0.4, observations=50)),
        2,
        "none",
        "Keep decode at 2: ITL p95",
        objectives=objectives(itl="50ms"),
    ),
    Scene(
        "few latencies say nothing",
        "decode",
        pods(1, worker(running=1, kv=0.1, itl=0.4, observations=1)),
        1,
        "none",
        "needs 1 replica.",
        objectives=objectives(itl="50ms"),
    ),
    Scene("idle", "decode", pods(3, IDLE), 2, "stabilization", "it is idle"),
    Scene("idle at min", "decode", pods(1, IDLE), 1, "min", "minReplicas is 1"),
    Scene(
        "a request in the last minute is not idle",
        "decode",
        {"w-0": worker(rate=0.5)},
        1,
        "none",
        "needs 1 replica",
        bounds=Bounds(0, 3),
    ),
    Scene(
        "limited by max", "decode", pods(2, FULL), 2, "max", "maxReplicas is 2", bounds=Bounds(1, 2)
    ),
    Scene("max lowered", "decode", pods(5, FULL), 3, "max", "from 5 to 3", bounds=Bounds(1, 3)),
    Scene("min raised", "decode", pods(1, IDLE), 4, "min", "from 1 to 4", bounds=Bounds(4, 9)),
]
PREFILL = [
    Scene(
        "arriving within speed",
        "prefill",
        pods(2, worker(running=1, rate=700)),
        2,
        "none",
        "1400 prompt tokens/s arrive",
    ),
    Scene(
        "arriving beyond speed",
        "prefill",
        pods(2, worker(running=1, rate=1000)),
        3,
        "none",
        "a worker computes 1000/s, which needs 3 replicas",
    ),
    Scene(
        "a backlog is worked off",
        "prefill",
        pods(2, worker(running=1, waiting=20, queued=15_000, rate=800)),
        3,
        "none",
        "30000 are queued",
    ),
    Scene(
        "one prompt longer than the objective cannot be shared",
        "prefill",
        pods(2, worker(running=0.5, queued=3000, rate=100)),
        1,
        "none",
        "6000 are queued",
    ),
    Scene(
        "the queue alone takes longer than the objective",
        "prefill",
        pods(2, worker(running=1, waiting=9, queued=600, rate=500)),
        3,
        "none",
        "1200 are queued",
        objectives=objectives(ttft="500ms"),
    ),
    Scene(
        "ttft above objective with a queue",
        "prefill",
        pods(2, worker(running=1, queued=100, rate=100)),
        3,
        "none",
        "TTFT p95",
        objectives=objectives(ttft="500ms"),
        answering=pods(1, worker(ttft=0.8, observations=30)),
    ),
    Scene(
        "ttft above objective without a queue",
        "prefill",
        pods(2, worker(running=1, rate=100)),
        2,
        "none",
        "no prompt is queued, so that more workers would not help",
        objectives=objectives(ttft="500ms"),
        answering=pods(1, worker(ttft=0.8, observations=30)),
    ),
    Scene(
        "speed not measured: nothing is added for it, nothing taken away",
        "prefill",
        pods(2, worker(running=1, queued=900, rate=5000)),
        2,
        "none",
        "not measured yet",
        state=replace(CALM, throughput=Throughput(until=NOW)),
    ),
    Scene(
        "a speed that is too little to divide by is none",
        "prefill",
        pods(2, worker(running=1, queued=900, rate=5000)),
        2,
        "none",
        "not measured yet",
        state=replace(CALM, throughput=Throughput(tokens=5e-324, busy=10.0, until=NOW)),
    ),
    Scene("idle", "prefill", pods(2, IDLE), 1, "min", "it is idle"),
]


@pytest.mark.parametrize("scene", DECODE + PREFILL, ids=lambda scene: scene.name)
def test_scene(scene: Scene) -> None:
    check_scene(scene)
