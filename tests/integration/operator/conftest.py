"""An operator as a process on a real control plane, with the chart's resources."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.clients import Kubectl
from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from helpers.custom_resources import install
from helpers.operator_stage import Stage, operator_stage


@pytest.fixture(scope="module")
def installed(kubectl: Kubectl) -> None:
    install(kubectl)


@pytest.fixture
def stage(
    control_plane: ControlPlane, namespace: str, node: FakeNode, installed: None, tmp_path: Path
) -> Iterator[Stage]:
    with operator_stage(control_plane, namespace, tmp_path) as made:
        yield made
