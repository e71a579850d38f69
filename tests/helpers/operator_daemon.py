"""The operator as a process of its own, over played workers; see operator_process."""

import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

from cluster.processes import Daemon, free_port

_TESTS = Path(__file__).resolve().parents[1]
_SECONDS = 60


class Operator:
    """One operator process for one namespace."""

    def __init__(self, kubeconfig: Path, namespace: str, log: Path, *arguments: str) -> None:
        self._port = free_port()
        self.busy = log.with_suffix(".busy")
        """While it exists, workers say that they have more requests than they can take."""
        command = [
            *("env", f"KUBECONFIG={kubeconfig}", f"PYTHONPATH={_TESTS}"),
            f"KVASIR_TEST_BUSY={self.busy}",
            *(sys.executable, "-m", "helpers.operator_process"),
            *("--worker-image=nowhere.invalid/worker:1", "--router-image=nowhere.invalid/router:1"),
            *(f"--namespace={namespace}", f"--lease-namespace={namespace}"),
            *("--host=127.0.0.1", f"--port={self._port}", "--lease-seconds=3", *arguments),
        ]
        self.process = Daemon("operator", command, log)

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
