"""What a test says to a cluster: kubectl and helm as a person runs them.

Nothing of the person's own configuration is read or written: every call names its kubeconfig, and
caches lie in the test's folder.
"""

import base64
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from cluster.binaries import find_binaries, kubectl_path

_COMMAND_TIMEOUT = 300.0


class CommandError(Exception):
    """A command refused; the message is what it printed."""


@dataclass(frozen=True)
class Credentials:
    """How a client shows who it is: a certificate with its key, or a token."""

    certificate: bytes = b""
    key: bytes = b""
    token: str = ""

    def user(self) -> dict[str, str]:
        """The ``user`` of a kubeconfig."""
        if self.token:
            return {"token": self.token}
        return {
            "client-certificate-data": base64.b64encode(self.certificate).decode(),
            "client-key-data": base64.b64encode(self.key).decode(),
        }


def write_kubeconfig(
    path: Path, server: str, authority: bytes, credentials: Credentials, namespace: str = "default"
) -> Path:
    """A kubeconfig (JSON, which is YAML) with one context, readable by its owner only."""
    ca = base64.b64encode(authority).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "test", "cluster": {"server": server, "certificate-authority-data": ca}}
        ],
        "users": [{"name": "test", "user": credentials.user()}],
        "contexts": [
            {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}
        ],
        "current-context": "test",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path


class Kubectl:
    """kubectl with one kubeconfig; call it with kubectl's arguments. `folder` is for its caches."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.kubeconfig = kubeconfig
        self._folder = folder

    def __call__(self, *arguments: str, stdin: str | None = None) -> str:
        """What it printed. Raises CommandError with its message if it fails."""
        return _run([str(kubectl_path()), *arguments], self._environment(), stdin)

    def start(self, *arguments: str, output: TextIO) -> subprocess.Popen[str]:
        """A kubectl that runs on (exec, logs -f), with a pipe as its input; the caller ends it."""
        return subprocess.Popen(
            [str(kubectl_path()), *arguments],
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def get(self, *arguments: str) -> dict[str, Any]:
        """``kubectl get`` as a JSON object."""
        found: dict[str, Any] = json.loads(self("get", *arguments, "--output=json"))
        return found

    def apply(self, *objects: Mapping[str, Any], server_side: bool = False) -> str:
        """``kubectl apply`` of manifests."""
        flags = ["--server-side"] if server_side else []
        manifest = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        return self("apply", *flags, "--filename=-", stdin=json.dumps(manifest))

    def service_account(self, name: str, namespace: str, folder: Path) -> "Kubectl":
        """kubectl as a service account that exists, with a fresh token."""
        token = self("create", "token", name, f"--namespace={namespace}").strip()
        view = json.loads(self("config", "view", "--raw", "--flatten", "--minify", "--output=json"))
        server = view["clusters"][0]["cluster"]
        path = folder / f"{namespace}-{name}.kubeconfig"
        authority = base64.b64decode(server["certificate-authority-data"])
        credentials = Credentials(token=token)
        write_kubeconfig(path, server["server"], authority, credentials, namespace)
        return Kubectl(path, folder)

    def _environment(self) -> dict[str, str]:
        cache = str(self._folder / "kubectl-cache")
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig), "KUBECACHEDIR": cache}


class Helm:
    """helm with one kubeconfig; call it with helm's arguments. `folder` is for its caches."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self._kubeconfig = kubeconfig
        self._folder = folder
        self._binary = find_binaries(["helm"])["helm"]

    def __call__(self, *arguments: str) -> str:
        """What it printed. Raises CommandError with its message if it fails."""
        kinds = ("cache", "config", "data")
        folders = {f"HELM_{kind.upper()}_HOME": f"{self._folder}/helm-{kind}" for kind in kinds}
        environment = {**os.environ, **folders, "KUBECONFIG": str(self._kubeconfig)}
        return _run([str(self._binary), *arguments], environment, None)


def _run(command: Sequence[str], environment: Mapping[str, str], stdin: str | None) -> str:
    result = subprocess.run(
        command,
        check=False,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT,
    )
    if result.returncode != 0:
        raise CommandError(f"{result.stderr.strip()}\n{result.stdout.strip()}".strip())
    return result.stdout
