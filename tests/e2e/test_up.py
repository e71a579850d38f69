"""`kvasir up` as a newcomer uses it: the sample, the pasted curl, Ctrl-C; and kill -9."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "deploy" / "samples" / "01-minimal.yaml"
SPECULATIVE = ROOT / "deploy" / "samples" / "05-speculative.yaml"
KVASIR = Path(sys.executable).parent / "kvasir"


@contextlib.contextmanager
def up(state_home: Path, sample: Path = SAMPLE) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `kvasir up`, and the curl command that it printed."""
    environment = os.environ | {"XDG_STATE_HOME": str(state_home)}
    process = subprocess.Popen(
        [KVASIR, "up", "-f", sample, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        yield process, read_curl(process.stdout)
    finally:
        family: list[psutil.Process] = []
        if process.poll() is None:
            family = [*children(process), psutil.Process(process.pid)]
        for member in family:
            member.kill()
        process.communicate()


def read_curl(lines: IO[str]) -> str:
    """Read until the command to paste is complete; a failed start ends the output before."""
    seen: list[str] = []
    for line in lines:
        seen.append(line)
        if line.strip().startswith("-d "):
            start = next(i for i, text in enumerate(seen) if text.strip().startswith("curl "))
            return "".join(seen[start:])
    raise AssertionError("no curl was printed:\n" + "".join(seen))


def paste(curl: str) -> str:
    """Run the printed command in a shell, as it stands; the answer's text."""
    return text_of(run_pasted(curl))


def paste_until_served(curl: str) -> str:
    """As ``paste``; a 503, which says to retry, is retried."""
    deadline = time.monotonic() + 120
    while (answer := run_pasted(curl)).get("error", {}).get("code") == "no_capacity":
        assert time.monotonic() < deadline, answer
    return text_of(answer)


def run_pasted(curl: str) -> dict[str, Any]:
    result = subprocess.run(
        ["sh", "-c", curl], capture_output=True, text=True, timeout=120, check=True
    )
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def text_of(answer: dict[str, Any]) -> str:
    content = answer["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def test_the_pasted_curl_is_answered_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with up(tmp_path) as (process, curl):
        assert "Paris" in paste(curl)
        family = children(process)
        assert len(family) == 3
        status = subprocess.run(
            [KVASIR, "status", "--json"],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        )
        rows = json.loads(status.stdout)["workers"]
        assert {row["role"] for row in rows} == {"prefill", "decode"}
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    assert_gone(family)
    port = re.search(r"127\.0\.0\.1:(\d+)", curl)
    assert port is not None
    refused = subprocess.run(["sh", "-c", curl], capture_output=True, timeout=60, check=False)
    assert refused.returncode == 7  # curl: could not connect


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends orphans: PR_SET_PDEATHSIG")
def test_kill_9_leaves_nothing(tmp_path: Path) -> None:
    with up(tmp_path) as (process, _):
        family = children(process)
        assert len(family) == 3
        process.kill()
        process.wait(timeout=10)
        assert_gone(family)


def test_a_killed_worker_comes_back(tmp_path: Path) -> None:
    with up(tmp_path) as (process, curl):
        victims = [p for p in children(process) if "decode" in " ".join(p.cmdline())]
        assert len(victims) == 1
        victims[0].kill()
        assert "Paris" in paste_until_served(curl)


def assert_gone(family: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 10
    while any(is_alive(p) for p in family):
        assert time.monotonic() < deadline, [p for p in family if is_alive(p)]
        time.sleep(0.1)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_speculative_sample_answers(tmp_path: Path) -> None:
    with up(tmp_path, SPECULATIVE) as (_, curl):
        assert "Paris" in paste(curl)
