"""``make cluster``: what it prints can be pasted, and a signal takes all of it away."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.node_cluster import KUBECONFIG_VARIABLE, NodeCluster
from cluster.processes import free_port, wait_until

_TESTS = Path(__file__).parents[1]
_SECONDS = 180

pytestmark = pytest.mark.timeout(600)


class Started:
    """The command as a shell starts it in the background: with SIGINT ignored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tmp"
        self.folder.mkdir()
        self._printed, self._said = folder / "printed", folder / "said"
        environment = {**os.environ, "PYTHONPATH": str(_TESTS), "TMPDIR": str(self.folder)}
        environment.pop(KUBECONFIG_VARIABLE, None)
        command = ["sh", "-c", 'trap "" INT; exec "$0" -m cluster', sys.executable]
        with self._printed.open("w") as printed, self._said.open("w") as said:
            self.process = subprocess.Popen(command, env=environment, stdout=printed, stderr=said)

    @property
    def said(self) -> str:
        return self._said.read_text()

    def commands(self) -> list[str]:
        """What is to be pasted, once it is there."""

        def there() -> bool:
            assert self.process.poll() is None, self.said
            return "helm uninstall" in self._printed.read_text()

        wait_until(there, "commands", _SECONDS, lambda: self.said)
        return self._printed.read_text().splitlines()


@pytest.fixture
def started(node_cluster: NodeCluster, tmp_path: Path) -> Iterator[Started]:
    if node_cluster.made is None:
        pytest.skip("no node can run here; the cluster is a given one")
    command = Started(tmp_path)
    try:
        yield command
    finally:
        command.process.send_signal(signal.SIGTERM)
        command.process.wait(_SECONDS)


def test_what_it_prints_is_a_session_from_install_to_uninstall(started: Started) -> None:
    port = f":{free_port()}"
    commands = []
    for command in started.commands():
        # As a person does, who sees when the port is forwarded.
        patient = command.replace(
            "curl ", "curl -sS --retry 30 --retry-delay 1 --retry-all-errors "
        )
        commands.append(patient.replace(":8000", port).replace(" 8000:", f" {port[1:]}:"))
    script = "\n".join(["set -e", "trap 'kill $(jobs -p)' EXIT", *commands])
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=2 * _SECONDS, check=False
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert "Paris" in result.stdout

    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(_SECONDS) == 0
    assert started.said.endswith("cluster: ended\n")
    assert not any(started.folder.iterdir())
