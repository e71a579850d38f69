"""The chart installed by a real helm: what the operator may do, and that it can work so.

Pods are played by a fixture; the operator itself runs as a process here, with the arguments and
the account of its pod.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml

from cluster.clients import CommandError, Helm, Kubectl
from cluster.control_plane import ControlPlane
from cluster.fake_node import FakeNode
from cluster.processes import Daemon, free_port, wait_until
from helpers.authorizer import Authorizer
from helpers.chart import CHART, OPERATOR, SAMPLES, install_resources, installed
from helpers.operator_daemon import own_temporary_folder


@pytest.fixture(scope="module")
def helm(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(control_plane.kubeconfig, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="module")
def resources(kubectl: Kubectl) -> None:
    install_resources(kubectl)


@pytest.fixture
def elsewhere(kubectl: Kubectl, namespace: str) -> Iterator[str]:
    """A namespace that is not the operator's."""
    name = f"{namespace}-other"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def authorizer(control_plane: ControlPlane) -> Iterator[Authorizer]:
    client = control_plane.client()
    yield Authorizer(client)
    client.close()


NEEDED = {
    **dict.fromkeys(("modelservices.kvasir.dev", "endpointslices.discovery.k8s.io"), "list watch"),
    "modelservices.kvasir.dev/status": "patch",
    "workerpools.kvasir.dev": "list watch create patch delete",
    "workerpools.kvasir.dev/status": "patch",
    "deployments.apps": "list watch create patch delete",
    "leaderworkersets.leaderworkerset.x-k8s.io": "list create patch delete",
    "configmaps": "list watch create patch delete",
    "services": "list watch create patch delete",
    "serviceaccounts": "list watch create patch delete",
    "poddisruptionbudgets.policy": "list watch create patch delete",
    "networkpolicies.networking.k8s.io": "list watch create patch delete",
    "roles.rbac.authorization.k8s.io": "list watch create patch delete",
    "rolebindings.rbac.authorization.k8s.io": "list watch create patch delete",
    "pods": "list watch patch",
    "events": "create patch",
}
FORBIDDEN = {
    "secrets": "get list create",
    "pods": "create delete",
    "pods/exec": "create",
    "modelservices.kvasir.dev": "create delete",
    "nodes": "list",
    "namespaces": "list delete",
    "serviceaccounts/token": "create",
    "clusterroles.rbac.authorization.k8s.io": "create",
}


def pairs(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(verb, resource) for resource, verbs in table.items() for verb in verbs.split()]


def test_a_namespaced_install_reads_no_other_namespace(
    kubectl: Kubectl,
    helm: Helm,
    authorizer: Authorizer,
    namespace: str,
    elsewhere: str,
    node: FakeNode,
    resources: None,
    tmp_path: Path,
) -> None:
    # The pods of the install itself must pass.
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    with installed(kubectl, helm, namespace, f"watchNamespaces={{{namespace}}}"):
        account = f"{namespace}:{OPERATOR}"
        for verb, resource in pairs(NEEDED):
            assert authorizer.allows(account, verb, resource, namespace), (verb, resource)
            assert not authorizer.allows(account, verb, resource, elsewhere), (verb, resource)
        for verb, resource in pairs(FORBIDDEN):
            assert not authorizer.allows(account, verb, resource, namespace), (verb, resource)

        operator = kubectl.service_account(OPERATOR, namespace, tmp_path)
        assert operator.get("modelservices")["items"] == []
        assert operator.get("pods")["items"]
        for reads in ("modelservices", "pods", "configmaps", "leases", "secrets"):
            for where in (f"--namespace={elsewhere}", "--all-namespaces"):
                with pytest.raises(CommandError, match="Forbidden"):
                    operator.get(reads, where)


def test_a_cluster_wide_install_serves_every_namespace(
    kubectl: Kubectl,
    helm: Helm,
    authorizer: Authorizer,
    namespace: str,
    elsewhere: str,
    node: FakeNode,
    resources: None,
    tmp_path: Path,
) -> None:
    with installed(kubectl, helm, namespace):
        account = f"{namespace}:{OPERATOR}"
        for verb, resource in pairs(NEEDED):
            assert authorizer.allows(account, verb, resource, elsewhere), (verb, resource)
        for verb, resource in pairs(FORBIDDEN):
            assert not authorizer.allows(account, verb, resource, elsewhere), (verb, resource)

        # Its own Lease and no other.
        operator = kubectl.service_account(OPERATOR, namespace, tmp_path)
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": {}}
        for name in (OPERATOR, "other"):
            body = json.dumps({**lease, "metadata": {"name": name}})
            operator("create", "--filename=-", stdin=body)
        assert operator.get("lease", OPERATOR)["kind"] == "Lease"
        with pytest.raises(CommandError, match="Forbidden"):
            operator.get("lease", "other")

        # The Role of a ModelService's routers can be granted; one that says more cannot.
        role = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": {"name": "smollm2-router", "namespace": elsewhere},
        }
        reads = {"verbs": ["get", "list", "watch"]}
        slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], **reads}
        operator.apply({**role, "rules": [slices]}, server_side=True)
        secrets = {"apiGroups": [""], "resources": ["secrets"], **reads}
        with pytest.raises(CommandError, match="attempting to grant RBAC permissions"):
            operator.apply({**role, "rules": [secrets]}, server_side=True)


def run_chart_test(helm: Helm, namespace: str, port: int) -> int:
    """Exit code of what ``helm test`` runs, with the address of an operator that runs here."""
    hooks = yaml.safe_load_all(helm("get", "hooks", "kvasir", f"--namespace={namespace}"))
    (container,) = next(each for each in hooks if each)["spec"]["containers"]
    command = [sys.executable, *container["command"][1:], *container["args"]]
    service = "KVASIR_OPERATOR_METRICS_SERVICE"
    environment = {f"{service}_HOST": "127.0.0.1", f"{service}_PORT": str(port)}
    return subprocess.run(command, check=False, timeout=60, env=environment).returncode


@contextmanager
def service_of(kubectl: Kubectl, here: str) -> Iterator[None]:
    """The sample of a ModelService; it is deleted when no operator serves it any more."""
    kubectl("apply", f"--filename={SAMPLES[0]}", here)
    try:
        yield
    finally:
        kubectl("delete", "msvc", "--all", here, "--ignore-not-found")


@contextmanager
def operator_of_chart(
    kubectl: Kubectl, namespace: str, port: int, folder: Path
) -> Iterator[Daemon]:
    """The process that the pod would run, as the pod's account, listening on loopback."""
    deployment = kubectl.get("deploy", OPERATOR, f"--namespace={namespace}")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    account = kubectl.service_account(OPERATOR, namespace, folder)
    log = folder / "operator.log"
    command = [
        *("env", f"KUBECONFIG={account.kubeconfig}", own_temporary_folder(log)),
        str(Path(sys.executable).parent / container["command"][0]),
        *container["args"],
        *("--host=127.0.0.1", f"--port={port}", f"--lease-namespace={namespace}"),
    ]
    operator = Daemon("operator", command, log)
    try:
        yield operator
    finally:
        operator.kill()


def ready(port: int) -> bool:
    """As the kubelet asks; the chart's test comes to a pod that is ready."""
    try:
        urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10).close()
    except HTTPError as error:
        error.close()
        return False
    return True


@pytest.mark.parametrize("namespaced", [True, False], ids=["namespaced", "cluster-wide"])
def test_the_operator_works_with_these_arguments_and_rights(
    kubectl: Kubectl,
    helm: Helm,
    namespace: str,
    elsewhere: str,
    node: FakeNode,
    resources: None,
    tmp_path: Path,
    namespaced: bool,
) -> None:
    """The node only plays the operator's pod."""
    here = f"--namespace={namespace if namespaced else elsewhere}"
    own = "--selector=kvasir.dev/modelservice=smollm2"
    settings = [f"watchNamespaces={{{namespace}}}"] if namespaced else []
    port = free_port()
    with (
        installed(kubectl, helm, namespace, *settings),
        service_of(kubectl, here),
        operator_of_chart(kubectl, namespace, port, tmp_path) as operator,
    ):

        def served() -> bool:
            assert operator.running, operator.log
            found = kubectl.get("msvc", "smollm2", here).get("status", {})
            made = kubectl.get("deployments", own, here)["items"]
            return "conditions" in found and len(made) == 3

        wait_until(served, "objects and status of smollm2", 60, lambda: operator.log)
        wait_until(lambda: ready(port), "all watches", 60, lambda: operator.log)
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert "\nkvasir_operator_leader 1.0" in answer.read().decode()
        assert run_chart_test(helm, namespace, port) == 0
        assert "orbidden" not in operator.log
        assert " ERROR kvasir" not in operator.log
        events = kubectl.get("events", here)["items"]
        assert "kvasir-operator" in {event["source"].get("component") for event in events}


def test_who_edits_a_namespace_may_use_the_resources(
    kubectl: Kubectl,
    helm: Helm,
    authorizer: Authorizer,
    namespace: str,
    elsewhere: str,
    node: FakeNode,
    resources: None,
) -> None:
    with installed(kubectl, helm, namespace):
        for user in ("edit", "view"):
            kubectl("create", "serviceaccount", user, f"--namespace={elsewhere}")
            kubectl(
                *("create", "rolebinding", user, f"--clusterrole={user}"),
                *(f"--serviceaccount={elsewhere}:{user}", f"--namespace={elsewhere}"),
            )
        for user, verb, resource, expected in [
            ("edit", "create", "modelservices.kvasir.dev", True),
            ("edit", "patch", "workerpools.kvasir.dev/scale", True),
            ("edit", "patch", "modelservices.kvasir.dev/status", False),
            ("edit", "delete", "workerpools.kvasir.dev", False),
            ("view", "list", "modelservices.kvasir.dev", True),
            ("view", "create", "modelservices.kvasir.dev", False),
            ("view", "patch", "workerpools.kvasir.dev/scale", False),
        ]:
            account = f"{elsewhere}:{user}"
            assert authorizer.allows(account, verb, resource, elsewhere) is expected, (
                user,
                verb,
                resource,
            )


def test_upgrade_changes_mode_and_uninstall_keeps_the_services(
    kubectl: Kubectl, helm: Helm, namespace: str, node: FakeNode, resources: None
) -> None:
    here = f"--namespace={namespace}"
    with installed(kubectl, helm, namespace):
        kubectl("apply", f"--filename={SAMPLES[0]}", here)
        crds = CHART / "crds"
        kubectl("apply", "--server-side", "--force-conflicts", f"--filename={crds}")
        helm(
            *("upgrade", "kvasir", str(CHART), here, "--wait", "--timeout=90s"),
            *("--reset-then-reuse-values", "--set=replicas=2"),
            f"--set=watchNamespaces={{{namespace}}}",
        )
        assert kubectl.get("deploy", OPERATOR, here)["status"]["readyReplicas"] == 2
        query = "--selector=app.kubernetes.io/managed-by=Helm"
        assert kubectl.get("clusterroles", query)["items"] == []
        notes = helm("get", "notes", "kvasir", here)
        assert f"It serves ModelServices in: {namespace}." in notes
    assert kubectl.get("msvc", "smollm2", here)["spec"]["model"]["source"].startswith("bundled://")
