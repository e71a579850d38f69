"""The `kvasir-router` process: state file, signals, and errors that say the fix."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def _config(folder: Path, **settings: Any) -> Path:
    path = folder / "router.json"
    workers = str(folder / "workers.json")
    path.write_text(json.dumps({"workers_file": workers, "port": 0} | settings))
    return path


def _command(config: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "kvasir.router.main", "--config", str(config), *more]


def _finished(config: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(config), capture_output=True, text=True, timeout=60, check=False)


@contextmanager
def _running(folder: Path, **settings: Any) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    state = folder / "state.json"
    process = subprocess.Popen(
        _command(_config(folder, **settings), "--state-file", str(state)),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, state
    finally:
        process.kill()
        process.communicate()


def _await_phase(state: Path, phase: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if state.exists() and (read := json.loads(state.read_text()))["phase"] == phase:
            return dict(read)
        time.sleep(0.02)
    raise AssertionError(f"phase {phase} was not reached")


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as response:  # noqa: S310 - loopback
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serves_from_ready_on_and_stops_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    with _running(tmp_path) as (process, state):
        ready = _await_phase(state, "ready")
        assert ready["pid"] == process.pid
        base = f"http://{ready['address']}"
        assert [_status(f"{base}/{path}") for path in ("health", "ready")] == [200, 503]
        process.send_signal(number)
        assert process.wait(60) == 0
        assert json.loads(state.read_text())["phase"] == "draining"
        assert process.stderr
        log = process.stderr.read()
        assert "Traceback" not in log
        assert log.splitlines()[-1].endswith("INFO kvasir.router stopped")


def test_all_addresses_are_those_of_both_families(tmp_path: Path) -> None:
    """As in a pod, whose cluster may have addresses of one family alone."""
    with _running(tmp_path, host="*") as (_, state):
        port = _await_phase(state, "ready")["address"].rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]"):
            assert _status(f"http://{host}:{port}/health") == 200


def test_open_requests_finish_and_new_ones_are_not_taken(tmp_path: Path) -> None:
    """A request that waits for a worker ends in its own 503, not in a cut connection."""
    with _running(tmp_path, no_worker_timeout=15.0) as (process, state):
        host, port = _await_phase(state, "ready")["address"].split(":")
        body = json.dumps({"model": "m", "prompt": "x"}).encode()
        with socket.create_connection((host, int(port))) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            _await_in_flight(f"http://{host}:{port}/metrics")
            process.send_signal(signal.SIGTERM)
            _await_phase(state, "draining")
            with pytest.raises(OSError, match="refused"):
                _connect_until_refused(host, int(port))
            client.settimeout(60)
            answer = client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert process.wait(60) == 0


def _await_in_flight(metrics_url: str) -> None:
    """Until there is a request besides the one that asks."""
    for _ in range(1000):
        with urllib.request.urlopen(metrics_url) as response:  # noqa: S310 - loopback
            if b"kvasir_router_http_requests_in_flight 2.0" in response.read():
                return
        time.sleep(0.02)
    raise AssertionError("the request did not arrive")


def _connect_until_refused(host: str, port: int) -> None:
    for _ in range(100):
        socket.create_connection((host, port)).close()
        time.sleep(0.02)


def test_a_port_in_use_is_one_line_with_the_fix(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = _finished(_config(tmp_path, port=port))
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("kvasir-router:")]
    assert f"port {port}: the port is in use" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "phrase"),
    [
        ('{"workers_file": "w", "prot": 1}', "prot"),
        ('{"workers_file": "w", "limits": {"max_n": 0}}', "limits.max_n"),
        ('{"workers_file": "w", "api_keys": [""]}', "api_keys.0"),
        ('{"workers_file": "w", "api_keys": ["fine", "not fine"]}', "api_keys.1"),
        ("{}", "exactly one of workers_file and kubernetes"),
        (
            '{"workers_file": "w", "kubernetes": {"namespace": "n", "service": "s"}}',
            "exactly one of workers_file and kubernetes",
        ),
        ('{"kubernetes": {"namespace": "n", "service": "a/b"}}', "kubernetes.service"),
        ("{", "JSON"),
        (None, "No such file"),
    ],
)
def test_a_bad_config_is_one_line(tmp_path: Path, content: str | None, phrase: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    done = _finished(path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvasir-router: --config")
    assert phrase in line


def test_without_a_way_to_an_api_server_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    path = tmp_path / "config.json"
    path.write_text('{"kubernetes": {"namespace": "n", "service": "s"}}')
    done = _finished(path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("kvasir-router: kubernetes: no way to an API server")


def test_settings_on_the_command_line_change_the_file(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = _command(_config(tmp_path), "--set", f"port={port}", "--set=router_id=r1")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"port {port}: the port is in use" in done.stderr
