"""What this process may use of its machine: cores, memory, dtypes.

A container's limits count, not the host's size.
"""

import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def usable_cores() -> int:
    """Cores by affinity, and by CPU quota, rounded up, where a cgroup sets one; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = _CGROUP / "cpu.max"
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(-(-int(limit) // int(period)), 1))
    return cores


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on ``device``; None where nothing tells."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    limits = [value for value in (_available(), _cgroup_free()) if value is not None]
    return min(limits, default=None)


def computes_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies bfloat16 itself, so that it is faster than float32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _available() -> int | None:
    if not _MEMINFO.is_file():
        return None
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_free() -> int | None:
    """What the cgroup's limit leaves beside its working set; cached files can be dropped."""
    limit = _CGROUP / "memory.max"
    if not limit.is_file() or (text := limit.read_text().strip()) == "max":
        return None
    used = int((_CGROUP / "memory.current").read_text())
    stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    return max(int(text) - used + int(stat.get("inactive_file", 0)), 0)
