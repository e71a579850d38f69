"""Real `kvasir-worker` processes on the bundled model."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_START_TIMEOUT = 120.0
_STOP_TIMEOUT = 60.0


class WorkerProcess:
    """One worker process; ``state`` is what its state file says."""

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self.worker_id = str(settings["worker_id"])
        self._state_path = folder / f"{self.worker_id}.state.json"
        self._log_path = folder / f"{self.worker_id}.log"
        config_path = folder / f"{self.worker_id}.config.json"
        config_path.write_text(json.dumps(settings), encoding="utf-8")
        command = [sys.executable, "-m", "kvasir.worker.main", "--config", str(config_path)]
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--state-file", str(self._state_path)],
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @property
    def state(self) -> dict[str, Any]:
        if not self._state_path.exists():
            return {"phase": ""}
        state: dict[str, Any] = json.loads(self._state_path.read_text(encoding="utf-8"))
        return state

    @property
    def log(self) -> str:
        return self._log_path.read_text(encoding="utf-8")

    @property
    def address(self) -> str:
        return str(self.state["address"])

    def wait_ready(self) -> None:
        self.wait_phase("ready")

    def wait_phase(self, phase: str) -> None:
        self._wait(lambda: self.state["phase"] == phase, f"come to phase {phase}")

    def wait_exit(self) -> int:
        """The exit code."""
        return self.process.wait(_STOP_TIMEOUT)

    def wait_metric(
        self, name: str, labels: dict[str, str], accept: Callable[[float], bool]
    ) -> None:
        self._wait(lambda: accept(self.metric(name, labels)), f"reach the right {name} {labels}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def metric(self, name: str, labels: dict[str, str]) -> float:
        url = f"http://{self.state['metrics_address']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        raise AssertionError(f"no series {name} {labels}")

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()

    def _wait(self, predicate: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        while not predicate():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self.worker_id} did not {what}:\n{self.log}")
            time.sleep(0.01)


@contextmanager
def worker_process(folder: Path, worker_id: str, **settings: object) -> Iterator[WorkerProcess]:
    """A small float32 worker; not waited for. Gone when the block ends."""
    values: dict[str, object] = {
        "worker_id": worker_id,
        "dtype": "float32",
        "threads": 1,
        "kv_cache_memory": 96 * 1024**2,
        **settings,
    }
    worker = WorkerProcess(folder, values)
    try:
        yield worker
    finally:
        worker.close()
