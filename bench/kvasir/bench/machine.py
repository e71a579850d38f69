"""What a figure was measured on: hardware, versions, load, and how fast memory was just then.

Decoding is bound by memory bandwidth, and on a shared machine it varies from minute to minute:
a figure without the bandwidth of its moment cannot be compared with another one.
"""

import importlib.metadata
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_PACKAGES = ("kvasir", "torch", "transformers", "aiohttp", "grpcio", "numpy")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
_PROBE_BYTES = 256 * 1024**2
_PROBE_TRIES = 3


@dataclass(frozen=True, slots=True)
class Machine:
    """The header of every report. ``load_1m`` is the load average when the report began."""

    cpu: str
    cores: int
    cpu_flags: tuple[str, ...]
    memory_gib: float
    gpus: tuple[str, ...]
    system: str
    python: str
    versions: dict[str, str]
    load_1m: float


def describe_machine() -> Machine:
    cpuinfo = _cpuinfo()
    flags = set(cpuinfo.get("flags", "").split())
    return Machine(
        cpu=cpuinfo.get("model name") or platform.processor() or platform.machine(),
        cores=_usable_cores(),
        cpu_flags=tuple(flag for flag in _FLAGS if flag in flags),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1),
        gpus=_gpus(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        versions={name: version for name in _PACKAGES if (version := _version(name))},
        load_1m=round(os.getloadavg()[0], 2),
    )


def memory_bandwidth() -> float:
    """GB/s (1e9) that one core copies now: bytes read plus bytes written, best of three tries.

    It measures the moment, not the machine: other processes take their share.
    """
    source = np.ones(_PROBE_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    best = 0.0
    for _ in range(_PROBE_TRIES):
        start = time.perf_counter()
        np.copyto(target, source)
        best = max(best, 2 * _PROBE_BYTES / (time.perf_counter() - start))
    return best / 1e9


def _usable_cores() -> int:
    """Cores that this process may use, where the system tells; else all of them."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _cpuinfo() -> dict[str, str]:
    """Fields of the first processor; empty where the system has no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first, _, _ = path.read_text().partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _gpus() -> tuple[str, ...]:
    """Names of NVIDIA GPUs; none where their tool is not installed or sees none."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(found.stdout.split("\n")[:-1])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
