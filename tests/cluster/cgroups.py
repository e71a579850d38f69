"""The control groups of one test cluster: made for its nodes, and removed after them.

The only thing that the kernel does not remove with the processes; so each name has the process
id of the run that made it, and a later run removes what a killed one left.
"""

import os
import re
import secrets
from functools import partial
from pathlib import Path

import psutil

from cluster.processes import wait_until

_REMOVE_TIMEOUT = 20.0
_WEIGHTS = {"cpu.shares": 8 * 1024, "cpu.weight": 8 * 100}
"""All pods together get as much of a busy machine as so many processes outside would. A group that
nobody gave a weight counts as one."""


def make_root() -> str:
    """Make a group in every hierarchy; its path below each hierarchy's mount point."""
    path = f"kvasir-{os.getpid()}-{secrets.token_hex(4)}"
    for mount in _hierarchies():
        group = mount / path
        group.mkdir()
        for setting in ("cpuset.cpus", "cpuset.mems"):
            if (group / setting).exists() and not (group / setting).read_text().strip():
                (group / setting).write_text((mount / setting).read_text())
        for setting, weight in _WEIGHTS.items():
            if (group / setting).exists():
                (group / setting).write_text(str(weight))
    return f"/{path}"


def remove(root: str) -> None:
    """Remove a group and all in it. What ran in it must have ended."""
    for mount in _hierarchies():
        _remove_tree(mount / root.lstrip("/"))


def remove_abandoned() -> None:
    """Remove the groups of runs that were killed."""
    for root in existing_roots():
        made_by = re.match(r"kvasir-(\d+)-", root)
        if made_by and not psutil.pid_exists(int(made_by[1])):
            remove(root)


def existing_roots() -> set[str]:
    """The names of all groups that `make_root` made and nobody removed."""
    return {group.name for mount in _hierarchies() for group in mount.glob("kvasir-*")}


def _remove_tree(group: Path) -> None:
    """A group is a folder whose files do not count; it must have no group below."""
    if not group.exists():
        return
    for below, _, _ in sorted(os.walk(group), reverse=True):
        wait_until(partial(_removed, Path(below)), f"{below} empty", _REMOVE_TIMEOUT)


def _removed(group: Path) -> bool:
    """Whether it is gone now. Busy for a moment after its last process ended."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _hierarchies() -> list[Path]:
    """Where control groups are mounted: many places in version 1, one in version 2."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(mount[1]) for mount in mounts if mount[2] in {"cgroup", "cgroup2"}]
