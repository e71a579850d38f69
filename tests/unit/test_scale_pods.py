"""The autoscaler with pods that are new, leave, cannot be placed, or are too many."""

import pytest

from helpers.scale_scenes import FULL, LOW, Scene, check_scene, pods, router, worker
from kvasir.operator.scale import Bounds

PODS = [
    Scene(
        "new pods are on their way already",
        "decode",
        pods(2, FULL),
        3,
        "none",
        "Keep decode at 3",
        wanted=3,
        pending=1,
    ),
    Scene(
        "at most double what is ready",
        "prefill",
        pods(3, worker(running=9, waiting=90, queued=300_000, rate=1000)),
        6,
        "pending",
        "only 3 are ready, and it at most doubles",
        bounds=Bounds(1, 90),
    ),
    Scene(
        "no more while pods cannot be scheduled",
        "decode",
        pods(2, worker(running=10, waiting=10, kv=0.9)),
        3,
        "pending",
        "1 pod cannot be scheduled, so none is added",
        wanted=3,
        unschedulable=1,
    ),
    Scene(
        "unschedulable pods do not freeze the way down",
        "decode",
        pods(2, LOW),
        4,
        "stabilization",
        "Lower decode from 5 to 4",
        wanted=5,
        unschedulable=3,
    ),
    Scene(
        "scales up during a rollout",
        "decode",
        {**pods(2, FULL), "new-0": worker(running=10, kv=0.95)},
        4,
        "none",
        "Raise decode from 2 to 4",
        wanted=2,
        pending=1,
    ),
    Scene(
        "scales down during a rollout",
        "decode",
        {**pods(3, LOW), "new-0": LOW},
        2,
        "stabilization",
        "Lower decode from 3 to 2",
        wanted=3,
        pending=2,
    ),
    Scene(
        "one drain at a time",
        "decode",
        pods(3, LOW),
        3,
        "stabilization",
        "1 still drain",
        draining=1,
    ),
    Scene(
        "none ready, none wanted by anybody",
        "decode",
        {},
        2,
        "stabilization",
        "no worker is ready, and no request is held",
        wanted=3,
    ),
    Scene(
        "none ready, but requests are held",
        "decode",
        {},
        3,
        "none",
        "Keep decode at 3: routers hold 2 requests",
        wanted=3,
        routers={"r-0": router(2)},
    ),
]


@pytest.mark.parametrize("scene", PODS, ids=lambda scene: scene.name)
def test_scene(scene: Scene) -> None:
    check_scene(scene)
