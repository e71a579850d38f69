"""Rollouts on a node without room for both revisions, with the real scheduler's words."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from helpers.operator_stage import Stage, operator_stage, sample

PATIENCE = 4


@pytest.fixture
def stage(
    control_plane: ControlPlane, namespace: str, node: FakeNode, installed: None, tmp_path: Path
) -> Iterator[Stage]:
    patience = f"--room-patience={PATIENCE}"
    with operator_stage(control_plane, namespace, tmp_path, patience) as made:
        yield made


UNMENDABLE: list[tuple[dict[str, Any], str]] = [
    ({"resources": {"requests": {"memory": "900Gi"}}}, "Insufficient memory"),
    ({"accelerator": {"resourceName": "example.com/none"}}, "Insufficient example.com/none"),
    ({"template": {"spec": {"nodeSelector": {"no": "where"}}}}, "affinity/selector"),
    (
        {
            "template": {
                "spec": {"volumes": [{"name": "x", "persistentVolumeClaim": {"claimName": "nope"}}]}
            }
        },
        'persistentvolumeclaim "nope" not found',
    ),
]


def test_what_no_place_would_mend_takes_no_worker_away(stage: Stage) -> None:
    stage.apply(sample())
    stage.wait_ready()
    serving = stage.names("pods")
    for decode, words in UNMENDABLE:
        stage.apply(sample(decode=decode))
        stage.wait_until(lambda words=words: words in stage.condition()[2], words)  # type: ignore[misc]  # a lambda's default has no type
        time.sleep(PATIENCE + 2)
        assert stage.condition("Available")[:2] == ("True", "Serving")
        assert stage.condition("Degraded")[:2] == ("True", "Unschedulable")
        assert stage.condition("Progressing")[1] == "RollingOut"
        assert serving <= stage.names("pods")
    assert "DrainStarted" not in stage.run("events", "--for=msvc/smollm2")
    stage.apply(sample())
    stage.wait_ready()
    stage.wait_until(lambda: stage.names("pods") == serving, "the ones that served all the time")


def test_where_both_revisions_do_not_fit_the_old_one_goes_first_and_says_so(stage: Stage) -> None:
    half = {"resources": {"requests": {"cpu": "30"}}}  # of the node
    stage.apply(sample(prefill=half, decode=half))
    stage.wait_ready()
    old = stage.names("pods")
    stage.apply(sample(prefill=half, decode=half, engine={"blockSize": 32}))
    message = stage.wait_reason("WaitingForRoom", "Progressing")
    assert "the service is down until a new prefill and decode worker is ready" in message
    assert old <= stage.names("pods")
    assert stage.condition("Available")[0] == "True"
    stage.wait_until(stage.rolled_out, "rolled out")
    assert len(stage.names("pods") & old) == 1  # the router
    events = stage.run("events", "--for=msvc/smollm2")
    assert events.index("WaitingForRoom") < events.index("DrainFirst")
