"""A bench that is told to end, or is killed, leaves no process and no folder behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

KVASIR = Path(sys.executable).parent / "kvasir"
_DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_ignored() -> Iterator[None]:
    """A child ignores what we ignore, as tests in the background do."""
    on_interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    on_hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, on_interrupt)
    signal.signal(signal.SIGHUP, on_hangup)


@contextmanager
def started_bench(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """`kvasir bench startup` whose temporary files are in ``folder``, and its two processes."""
    environment = os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    bench = subprocess.Popen(
        [KVASIR, "bench", "startup", "--threads", "1", "--runs", "100"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    family: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + _DEADLINE_S
        while len(family) < 2:
            assert bench.poll() is None, "the bench ended by itself"
            assert time.monotonic() < deadline, f"it started {family}"
            family = components(bench.pid)
            time.sleep(0.05)
        yield bench, family
    finally:
        bench.kill()
        bench.wait()
        for member in family:
            if member.is_running():
                member.kill()


def components(pid: int) -> list[psutil.Process]:
    """The router and the worker that this bench has started."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # what tells of the machine ends at once
            if "--state-file" in child.cmdline():
                found.append(child)
    return found


def assert_gone(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=_DEADLINE_S)
    assert not alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_all_and_tidy_up(tmp_path: Path, number: signal.Signals) -> None:
    with started_bench(tmp_path) as (bench, family):
        bench.send_signal(number)
        assert bench.wait(_DEADLINE_S) == 128 + number
        assert_gone(family)
    assert not list(tmp_path.glob("kvasir-stack-*"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends orphans: PR_SET_PDEATHSIG")
def test_kill_9_leaves_no_process(tmp_path: Path) -> None:
    with started_bench(tmp_path) as (bench, family):
        bench.kill()
        bench.wait(_DEADLINE_S)
        assert_gone(family)
