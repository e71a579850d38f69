"""What `kvasir up` refuses before it starts anything, and what it says when all is ready."""

import json
import os
import shlex
import socket
from pathlib import Path

import pytest

from helpers import standin
from helpers.router_stub import RouterStub, running
from kvasir.cli.commands import cli
from kvasir.cli.errors import run
from kvasir.cli.up import Reporter
from kvasir.operator.local.ports import choose_port
from kvasir.operator.local.runtime import Exited, LocalRuntime, PhaseChanged, ProcessView
from kvasir.operator.local.state import Instance, StateDirectory, record_of

SAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "samples" / "01-minimal.yaml"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "kvasir"


def test_port_in_use(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(cli, ["up", "-f", str(SAMPLE), "--port", str(port)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvasir: port {port} on 127.0.0.1 is in use")
    assert "--port" in line


def test_name_in_use(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = StateDirectory(state, "smollm2")
    with directory.locked():
        own = record_of("kvasir up", os.getpid())
        directory.write_instance(Instance("smollm2", "http://127.0.0.1:8000", own, ()))
        assert run(cli, ["up", "-f", str(SAMPLE), "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvasir: smollm2 already runs on http://127.0.0.1:8000; ")


def test_problems_of_the_file_come_before_all_else(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = state.parent / "m.yaml"
    manifest.write_text(SAMPLE.read_text().replace("bundled://smollm2-135m-instruct", "hf://a/b"))
    with StateDirectory(state, "smollm2").locked():
        assert run(cli, ["up", "-f", str(manifest), "--port", "0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvasir: {manifest}: spec.model.source: hf:// is not available")


def test_state_directory_cannot_be_written(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state.write_text("a file where the folder should be")
    assert run(cli, ["up", "-f", str(SAMPLE), "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "set XDG_STATE_HOME" in line


def test_choose_port() -> None:
    free = choose_port("127.0.0.1", 0)
    assert free
    assert choose_port("127.0.0.1", free) == free
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert choose_port("127.0.0.1", taken.getsockname()[1]) is None


class ReadyRuntime(LocalRuntime):
    """Everything is ready, and nothing was started."""

    @property
    def ready(self) -> bool:
        return True

    def view(self) -> list[ProcessView]:
        return []


def test_ready_line_and_curl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = standin.plan(tmp_path / "events")
    runtime = ReadyRuntime(plan, StateDirectory(tmp_path, "standin"), url="")
    with running(RouterStub()) as router:
        report = Reporter(plan, tmp_path, router.url)
        report.show(runtime)
        assert "Ready" not in capsys.readouterr().out  # the router knows no worker yet
        router.get["/ready"] = {}
        report.show(runtime)
        report.show(runtime)
        output = capsys.readouterr().out
    assert output.count("Ready: ") == 1
    assert f"Ready: standin on {router.url} (1 prefill, 1 decode)" in output.splitlines()
    pasted = output[output.index("curl ") : output.index("Ctrl-C")]
    command = shlex.split(pasted)
    assert command[:2] == ["curl", f"{router.url}/v1/chat/completions"]
    body = json.loads(command[command.index("-d") + 1])
    assert (body["model"], body["temperature"]) == ("standin", 0)

    report.event(PhaseChanged("standin-decode-0", "loading", ""))
    report.event(Exited("standin-decode-0", -9, "", 0.5))
    report.event(PhaseChanged("standin-decode-0", "ready", ""))
    assert capsys.readouterr().out.splitlines() == [
        "standin-decode-0 was ended by SIGKILL; starting it again in 0.5 s",
        "standin-decode-0 is ready again",
    ]
