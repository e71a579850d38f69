"""What a worker takes its machine for."""

import os
from pathlib import Path

import pytest

from kvasir.operator.local.machine import this_machine
from kvasir.worker.model import machine

MANY = 10_000


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", MANY), ("150000 100000", 2), ("200000 100000", 2), ("5000 100000", 1)],
)
def test_worker_and_operator_count_the_same_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(MANY), raising=False)
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.usable_cores() == cores
    assert this_machine(tmp_path).cores == cores
