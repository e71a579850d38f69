"""What this machine gives to processes: cores and memory, container limits respected."""

import os
from pathlib import Path

import psutil

from kvasir.operator.plan import Machine

_CGROUP = Path("/sys/fs/cgroup")


def this_machine(cgroup: Path = _CGROUP) -> Machine:
    """Cores and bytes that processes started here may use. ``cgroup``: of version 2."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    memory: int = psutil.virtual_memory().total
    return Machine(
        cores=min(cores, _cpu_limit(cgroup) or cores), memory=min(memory, _limit(cgroup) or memory)
    )


def _cpu_limit(cgroup: Path) -> int | None:
    """cpu.max reads ``QUOTA PERIOD`` in microseconds, or ``max PERIOD``."""
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if not quota.isdigit() or not period.isdigit():
        return None
    return max(1, -(-int(quota) // int(period)))


def _limit(cgroup: Path) -> int | None:
    """memory.max reads bytes, or ``max``."""
    text = _read(cgroup / "memory.max")
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    """The file's text; empty where the platform has no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
