"""`kvasir status` against a real HTTP server."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from helpers.router_stub import RouterStub, running
from kvasir.cli.commands import cli
from kvasir.cli.errors import run
from kvasir.operator.local.state import Instance, ProcessRecord, StateDirectory, record_of

LONG_NAME = f"{'a' * 40}-prefill-0"


def worker(**changes: Any) -> dict[str, Any]:
    return {
        "worker_id": "smollm2-decode-0",
        "address": "127.0.0.1:50551",
        "role": "decode",
        "state": "ready",
        "running": 3,
        "waiting": 1,
        "kv_blocks_total": 800,
        "kv_blocks_used": 100,
        "kv_blocks_cached": 50,
        "prefix_query_tokens": 1000,
        "prefix_hit_tokens": 900,
        "kv_slots_filled": 1500,
        "kv_slots_reserved": 60,
        "kv_slots_internal_waste": 40,
        "kv_slots_external_waste": 0,
        **changes,
    }


def idle(name: str) -> dict[str, Any]:
    return worker(
        worker_id=name,
        role="prefill",
        state="connecting",
        kv_blocks_total=0,
        kv_blocks_used=0,
        prefix_query_tokens=0,
        kv_slots_filled=0,
        kv_slots_reserved=0,
        kv_slots_internal_waste=0,
    )


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "kvasir"


def remember(state: Path, name: str, url: str, supervisor: ProcessRecord) -> None:
    directory = StateDirectory(state, name)
    with directory.locked():
        directory.write_instance(Instance(name, url, supervisor, ()))


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    with running(RouterStub(get={"/workers": [idle(LONG_NAME), worker()]})) as router:
        assert run(cli, ["status", "--url", router.url]) == 0
    url, heading, first, second = capsys.readouterr().out.splitlines()
    assert url == router.url
    assert heading.split() == [
        *("WORKER", "ROLE", "STATE", "RUNNING", "WAITING"),
        *("KV", "USE", "KV", "WASTE", "PREFIX", "HITS"),
    ]
    assert first.split() == [LONG_NAME, "prefill", "connecting", "3", "1", "-", "-", "-"]
    assert second.split() == [
        *("smollm2-decode-0", "decode", "ready", "3", "1", "12.5%", "2.5%", "90.0%")
    ]


def test_acceptance_where_workers_speculate(capsys: pytest.CaptureFixture[str]) -> None:
    speculating = worker(worker_id="w0", draft_tokens=400, accepted_tokens=300)
    idle, old = worker(worker_id="w1", draft_tokens=0, accepted_tokens=0), worker(worker_id="w2")
    with running(RouterStub(get={"/workers": [speculating, idle, old]})) as router:
        assert run(cli, ["status", "--url", router.url]) == 0
    _, heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[-1] == "ACCEPTED"
    assert [row.split()[-1] for row in rows] == ["75.0%", "-", "-"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    with running(RouterStub(get={"/workers": [worker()]})) as router:
        assert run(cli, ["status", "--url", f"{router.url}/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "url": router.url,
        "metrics_url": f"{router.url}/metrics",
        "workers": [worker(metrics_url=None)],
    }


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_where_the_metrics_of_the_running_instance_are(
    state: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    own, name = os.getpid(), "smollm2-decode-0"
    directory = StateDirectory(state, "smollm2")
    with running(RouterStub(get={"/workers": [worker(), idle("starting")]})) as router:
        processes = tuple(record_of(process, own) for process in ("router", name, "starting"))
        with directory.locked():
            directory.write_instance(
                Instance("smollm2", router.url, record_of("kvasir up", own), processes)
            )
        address = router.url.removeprefix("http://")
        ready = {"pid": own, "phase": "ready", "address": address}
        directory.write_json(directory.state_file("router"), ready)
        directory.write_json(
            directory.state_file(name), ready | {"metrics_address": "127.0.0.1:9103"}
        )
        directory.write_json(directory.state_file("starting"), {"pid": own, "phase": "loading"})
        assert run(cli, ["status", *options]) == 0
    out = capsys.readouterr().out
    if options:
        rows = json.loads(out)["workers"]
        assert [row["metrics_url"] for row in rows] == ["http://127.0.0.1:9103/metrics", None]
    else:
        assert out.splitlines()[-3:] == [
            "Metrics:",
            f"  {router.url}/metrics (router)",
            f"  http://127.0.0.1:9103/metrics ({name})",
        ]


def test_no_workers(capsys: pytest.CaptureFixture[str]) -> None:
    with running(RouterStub(get={"/workers": []})) as router:
        assert run(cli, ["status", "--url", router.url]) == 0
    assert "no workers yet" in capsys.readouterr().out


def test_finds_the_running_instance(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = record_of("kvasir up", os.getpid())
    with running(RouterStub(get={"/workers": [worker()]})) as router:
        remember(state, "smollm2", router.url, own)
        remember(state, "crashed", "http://127.0.0.1:9", ProcessRecord("kvasir up", own.pid, 1.0))
        assert run(cli, ["status"]) == 0
    assert router.url in capsys.readouterr().out


@pytest.mark.parametrize("command", ["status", "chat"])
def test_nothing_runs(state: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cli, [command]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvasir: nothing is running; start one with `kvasir up -f ")


def test_several_run(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = record_of("kvasir up", os.getpid())
    remember(state, "a", "http://127.0.0.1:1", own)
    remember(state, "b", "http://127.0.0.1:2", own)
    assert run(cli, ["status"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "a on http://127.0.0.1:1, b on http://127.0.0.1:2" in line


@pytest.mark.parametrize("how", ["option", "environment"])
def test_api_key(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(RouterStub(get={"/workers": [worker()]}, api_key="s3cret")) as router:
        arguments = ["status", "--url", router.url]
        if how == "option":
            arguments += ["--api-key", "s3cret"]
        else:
            monkeypatch.setenv("KVASIR_API_KEY", "s3cret")
        assert run(cli, arguments) == 0


def test_no_api_key_and_none_that_could_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    with running(RouterStub(get={"/workers": [worker()]}, api_key="s3cret")) as router:
        assert run(cli, ["status", "--url", router.url]) == 1
        assert "send a valid API key (HTTP 401)" in capsys.readouterr().err
        assert run(cli, ["status", "--url", router.url, "--api-key", "a\r\nb"]) == 2
        assert "--api-key" in capsys.readouterr().err


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with running(RouterStub()) as router:
        pass
    assert run(cli, ["status", "--url", router.url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvasir: nothing answers on {router.url}; ")


@pytest.mark.parametrize("arguments", [["status"], ["chat", "hello"]])
def test_a_running_instance_that_does_not_answer_yet(
    state: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with running(RouterStub()) as router:
        pass
    remember(state, "smollm2", router.url, record_of("kvasir up", os.getpid()))
    assert run(cli, arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{router.url} is starting, stopping or restarting; try again in a moment")


def test_another_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with running(RouterStub()) as router:
        assert run(cli, ["status", "--url", router.url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("no Kvasir router answers there; check --url (HTTP 404)")
