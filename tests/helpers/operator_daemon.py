"""The operator as a process of its own, over played workers; see operator_process."""

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from cluster.processes import Daemon, free_port
from helpers.operator_process import Series

_TESTS = Path(__file__).resolve().parents[1]
_SECONDS = 60


def own_temporary_folder(log: Path) -> str:
    """TMPDIR of a process that is going to be killed, for ``env``; beside its log.

    The Kubernetes client writes keys to temporary files, which it removes at a clean exit only.
    """
    folder = log.with_suffix(".tmp")
    folder.mkdir(exist_ok=True)
    return f"TMPDIR={folder}"


class Operator:
    """One operator process for one namespace."""

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        log: Path,
        *arguments: str,
        cluster_wide: bool = False,
        drain_seconds: float = 0,
        resync_seconds: float = 300,
    ) -> None:
        """``namespace``: where its lease is, and whose services it keeps, unless ``cluster_wide``.

        ``drain_seconds``: how long a worker that drains has a request. ``resync_seconds``: between
        two looks at a service that nothing happens to.
        """
        self._port = free_port()
        self._metrics = log.with_suffix(".metrics.json")
        self._told = log.with_name(f"{namespace}.told")
        command = [
            *("env", f"KUBECONFIG={kubeconfig}", f"PYTHONPATH={_TESTS}", own_temporary_folder(log)),
            f"KVASIR_TEST_METRICS={self._metrics}",
            f"KVASIR_TEST_TOLD={self._told}",
            f"KVASIR_TEST_DRAIN_SECONDS={drain_seconds}",
            f"KVASIR_TEST_RESYNC_SECONDS={resync_seconds}",
            *(sys.executable, "-m", "helpers.operator_process"),
            *("--worker-image=nowhere.invalid/worker:1", "--router-image=nowhere.invalid/router:1"),
            *(() if cluster_wide else (f"--namespace={namespace}",)),
            f"--lease-namespace={namespace}",
            *("--host=127.0.0.1", f"--port={self._port}", "--lease-seconds=20", *arguments),
        ]
        self.process = Daemon("operator", command, log)

    def play(self, metrics: Mapping[str, Series | None]) -> None:
        """From now on, workers and routers say this; see operator_process. Others are idle."""
        new = self._metrics.with_suffix(".new")
        new.write_text(json.dumps(metrics), encoding="utf-8")
        new.replace(self._metrics)

    def told(self, what: str) -> dict[str, int]:
        """How often each worker was told to ``drain`` or ``undrain``."""
        texts = {path.name: path.read_text(encoding="utf-8") for path in self._told.iterdir()}
        return {name: text.count(f"{what} ") for name, text in texts.items()}

    def ask(self, path: str) -> tuple[int, str]:
        """HTTP status and text of the answer; raises OSError if there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as told:
                return told.status, told.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series that have the labels."""
        _, text = self.ask("/metrics")
        found = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        return sum(float(value) for own, value in found if wanted <= set(own.split(",")))

    @property
    def writes(self) -> float:
        """Requests that change something, but for the lease."""
        verbs = ("create", "update", "apply", "patch", "delete")
        name = "kvasir_operator_api_requests_total"
        every = sum(self.metric(name, verb=verb) for verb in verbs)
        return every - sum(self.metric(name, verb=verb, kind="Lease") for verb in verbs)

    @property
    def steps(self) -> float:
        return self.metric("kvasir_operator_reconciliations_total")

    def wait_started(self, leader: float) -> None:
        def started() -> bool:
            try:
                return self.metric("kvasir_operator_leader") == leader
            except OSError:
                return False

        self.process.wait_until(started, "leading" if leader else "following", _SECONDS)
