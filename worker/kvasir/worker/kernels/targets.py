"""Which instruction sets the kernels are built for, and which of them this machine has.

The C++ is the same for all; what differs is how wide a vector is and whether products of
bfloat16 are one instruction.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """An instruction set: the compiler's flags for it, and what a CPU must have."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


_AVX2 = frozenset({"avx2", "fma3", "f16c", "bmi2", "lzcnt"})
_AVX512 = _AVX2 | {"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"}

TARGETS = (
    Target(
        "avx512bf16",
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
        _AVX512 | {"avx512_bf16", "avx512_vnni"},
    ),
    Target("avx512", ("-march=x86-64-v4",), _AVX512),
    Target("avx2", ("-march=x86-64-v3",), _AVX2),
)
"""The fastest first."""


def usable_targets() -> tuple[Target, ...]:
    """What this machine can run, the fastest first; empty if it is no x86-64 with AVX2."""
    import torch

    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    return runnable(torch.cpu.get_capabilities())


def runnable(capabilities: Mapping[str, object]) -> tuple[Target, ...]:
    """Targets for which ``torch.cpu.get_capabilities`` names everything."""
    return tuple(
        target for target in TARGETS if all(capabilities.get(name) is True for name in target.needs)
    )
