"""One namespace with an operator in it, and what a person would do and see there."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from cluster.clients import CommandError, Helm, Kubectl
from cluster.control_plane import ControlPlane
from cluster.processes import wait_until
from helpers.chart import CHART, SAMPLES
from helpers.operator_daemon import Operator

SECONDS = 60
"""For anything that a cluster does."""


def sample(**spec: Any) -> dict[str, Any]:
    """The minimal ModelService, smollm2, with fields of its spec replaced."""
    document: dict[str, Any] = yaml.safe_load(SAMPLES[0].read_text(encoding="utf-8"))
    document["spec"] |= spec
    return document


class Stage:
    """One namespace with an operator."""

    def __init__(self, kubectl: Kubectl, namespace: str, operator: Operator) -> None:
        self.kubectl = kubectl
        self.namespace = namespace
        self.operator = operator

    def run(self, *arguments: str) -> str:
        return self.kubectl(*arguments, f"--namespace={self.namespace}")

    def get(self, *arguments: str) -> dict[str, Any]:
        return self.kubectl.get(*arguments, f"--namespace={self.namespace}")

    def apply(self, document: dict[str, Any]) -> None:
        document = {**document, "metadata": {**document["metadata"], "namespace": self.namespace}}
        self.kubectl.apply(document)

    def condition(self, kind: str = "Ready") -> tuple[str, str, str]:
        """Status, reason and message."""
        found = self.get("msvc", "smollm2").get("status", {}).get("conditions", [])
        for each in found:
            if each["type"] == kind:
                return each["status"], each["reason"], each["message"]
        return "", "", ""

    def wait_ready(self, seconds: int = SECONDS) -> None:
        try:
            self.run("wait", "--for=condition=Ready", "msvc/smollm2", f"--timeout={seconds}s")
        except CommandError as error:
            raise AssertionError(f"{error}\n{self.explain()}") from error

    def wait_until(self, predicate: Callable[[], bool], what: str) -> None:
        wait_until(predicate, what, SECONDS, self.explain)

    def wait_reason(self, reason: str, kind: str = "Ready") -> str:
        self.wait_until(lambda: self.condition(kind)[1] == reason, f"{kind} is {reason}")
        return self.condition(kind)[2]

    def wait_quiet(self) -> None:
        """Until a second passes without a step."""

        def quiet() -> bool:
            before = self.operator.steps
            time.sleep(1)
            return self.operator.steps == before

        self.wait_until(quiet, "no more steps")

    def settled(self, seconds: float) -> bool:
        """Whether the operator writes nothing for so long."""
        before = self.operator.writes
        time.sleep(seconds)
        return self.operator.writes == before

    def rolled_out(self) -> bool:
        """Whether the newest spec is Ready, and pods of no older one are left."""
        service = self.get("msvc", "smollm2")
        status = service.get("status", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions", ())}
        deployments = self.get("deploy")["items"]
        pods = sum(each["spec"]["replicas"] for each in deployments)
        return (
            status.get("observedGeneration") == service["metadata"]["generation"]
            and conditions.get("Ready") == "True"
            and conditions.get("Progressing") == "False"
            and len(deployments) == 3
            and len(self.names("pods")) == pods
        )

    def names(self, *kinds: str) -> set[str]:
        return set(self.run("get", ",".join(kinds), "--output=name").split())

    def workers(self, role: str) -> set[str]:
        selector = f"--selector=kvasir.dev/role={role}"
        return set(self.run("get", "deploy", selector, "--output=name").split())

    def explain(self) -> str:
        return f"{self.run('get', 'msvc,pods,deploy,wpool', '-o', 'wide')}\n" + (
            self.operator.process.tail()
        )


@contextmanager
def operator_stage(
    control_plane: ControlPlane, namespace: str, folder: Path, *arguments: str
) -> Iterator[Stage]:
    """An operator that leads, with the rights of an administrator."""
    operator = Operator(control_plane.kubeconfig, namespace, folder / "operator.log", *arguments)
    try:
        operator.wait_started(leader=1)
        yield Stage(control_plane.kubectl, namespace, operator)
    finally:
        operator.process.kill()


def restricted(
    control_plane: ControlPlane, namespace: str, folder: Path, *settings: str
) -> Kubectl:
    """The operator's service account, with what the chart grants it; ``settings``: of the chart."""
    helm = Helm(control_plane.kubeconfig, folder)
    shown = [f"--show-only=templates/{name}.yaml" for name in ("rbac", "serviceaccount")]
    manifest = helm(
        *("template", "kvasir", str(CHART), f"--namespace={namespace}"),
        *(f"--set={setting}" for setting in settings),
        *shown,
    )
    control_plane.kubectl("apply", "--filename=-", stdin=manifest)
    return control_plane.kubectl.service_account("kvasir-operator", namespace, folder)
