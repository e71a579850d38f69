"""Real pods on a real node do what end-to-end tests rely on, and leave nothing behind."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster import cgroups
from cluster.clients import CommandError, Kubectl
from cluster.images import IMAGE, USER, with_host_python
from cluster.node_cluster import MadeCluster, NodeCluster
from cluster.node_cluster import node_cluster as running_node_cluster
from cluster.processes import wait_until

_TIMEOUT = "--timeout=60s"
_SCRATCH = "/tmp"  # noqa: S108 - of the pod, not of this machine
_SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(os.environ["HOSTNAME"].encode())
    def log_message(self, *arguments):
        pass
print("serving", flush=True)
http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
"""
_ASK = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode())"


def _pod(name: str, namespace: str, **container: object) -> dict[str, Any]:
    spec = {
        "terminationGracePeriodSeconds": 1,
        "containers": [
            {
                "name": "main",
                "image": IMAGE,
                "securityContext": {
                    "runAsUser": USER,
                    "runAsNonRoot": True,
                    "readOnlyRootFilesystem": True,
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "volumeMounts": [{"name": "tmp", "mountPath": _SCRATCH}],
                **container,
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": with_host_python(spec),
    }


def _server(name: str, namespace: str) -> dict[str, Any]:
    return _pod(
        name,
        namespace,
        command=[sys.executable, "-c", _SERVER],
        readinessProbe={"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1},
    )


def _wait_ready(kubectl: Kubectl, namespace: str, *pods: str) -> None:
    names = [f"pod/{pod}" for pod in pods]
    kubectl("wait", "--for=condition=Ready", *names, f"--namespace={namespace}", _TIMEOUT)


def _status(kubectl: Kubectl, namespace: str, pod: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = kubectl.get("pod", pod, f"--namespace={namespace}")["status"]
    return found


def _container(kubectl: Kubectl, namespace: str, pod: str) -> Mapping[str, Any]:
    container: Mapping[str, Any] = _status(kubectl, namespace, pod)["containerStatuses"][0]
    return container


@pytest.fixture
def made(node_cluster: NodeCluster) -> MadeCluster:
    if node_cluster.made is None:
        pytest.skip("checks the cluster that the tests make, and another one was given")
    return node_cluster.made


@pytest.fixture
def kubectl(made: MadeCluster) -> Kubectl:
    return made.plane.kubectl


def test_a_pod_is_ready_by_its_probe_and_has_logs_and_exec(
    kubectl: Kubectl, node_namespace: str
) -> None:
    kubectl.apply(_server("web", node_namespace))
    _wait_ready(kubectl, node_namespace, "web")
    here = f"--namespace={node_namespace}"
    assert kubectl("logs", "web", here).splitlines() == ["serving"]
    script = "import os; print(os.getuid(), os.getpid() > 1)"
    assert kubectl("exec", "web", here, "--", sys.executable, "-c", script) == f"{USER} True\n"
    with pytest.raises(CommandError, match="exit code 7"):
        kubectl("exec", "web", here, "--", sys.executable, "-c", "raise SystemExit(7)")


def _service(name: str, namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]},
    }


def _assert_reaches(kubectl: Kubectl, namespace: str, asking: str, asked: str) -> None:
    """By the pod's address and by the service's."""

    def answer(url: str) -> str:
        program = [sys.executable, "-c", _ASK, url]
        try:
            return kubectl("exec", asking, f"--namespace={namespace}", "--", *program).strip()
        except CommandError as error:
            return str(error)

    def reaches(url: str) -> None:
        # kube-proxy learns of endpoints a moment after the pod is ready.
        what = f"{asked} answers {asking} at {url}"
        wait_until(lambda: answer(url) == asked, what, 30, lambda: answer(url))

    reaches(f"http://{_status(kubectl, namespace, asked)['podIP']}:8080/")
    service = kubectl.get("service", asked, f"--namespace={namespace}")["spec"]
    reaches(f"http://{service['clusterIP']}/")


def test_pods_reach_each_other_and_services(kubectl: Kubectl, node_namespace: str) -> None:
    kubectl.apply(
        _server("web", node_namespace),
        _server("asking", node_namespace),
        _service("web", node_namespace),
    )
    _wait_ready(kubectl, node_namespace, "web", "asking")
    _assert_reaches(kubectl, node_namespace, "asking", "web")
    _assert_reaches(kubectl, node_namespace, "web", "web")


def test_the_host_reaches_pods(kubectl: Kubectl, node_namespace: str, made: MadeCluster) -> None:
    kubectl.apply(_server("web", node_namespace))
    _wait_ready(kubectl, node_namespace, "web")
    url = f"http://{_status(kubectl, node_namespace, 'web')['podIP']}:8080/"
    answer = subprocess.run(
        [sys.executable, "-c", _ASK, url], check=True, capture_output=True, text=True
    )
    assert answer.stdout.strip() == "web"


def test_pods_outlive_the_kubelet_and_it_comes_back(
    kubectl: Kubectl, node_namespace: str, made: MadeCluster
) -> None:
    kubectl.apply(_server("web", node_namespace))
    _wait_ready(kubectl, node_namespace, "web")
    node = made.nodes[0]
    before = node.container_processes(node_namespace, "web")
    node.kubelet.kill()
    assert node.container_processes(node_namespace, "web") == before
    node.kubelet.start()
    kubectl.apply(_server("later", node_namespace))
    _wait_ready(kubectl, node_namespace, "later")
    assert node.container_processes(node_namespace, "web") == before


def test_a_killed_container_is_restarted(
    kubectl: Kubectl, node_namespace: str, made: MadeCluster
) -> None:
    kubectl.apply(_server("web", node_namespace))
    _wait_ready(kubectl, node_namespace, "web")
    before = _container(kubectl, node_namespace, "web")
    for process in made.nodes[0].container_processes(node_namespace, "web"):
        process.send_signal(signal.SIGKILL)

    def restarted() -> bool:
        now = _container(kubectl, node_namespace, "web")
        return bool(now["restartCount"] == before["restartCount"] + 1 and now["ready"])

    wait_until(restarted, "restarted and ready", 60)
    last = _container(kubectl, node_namespace, "web")["lastState"]["terminated"]
    assert last["exitCode"] == 128 + signal.SIGKILL


def test_a_memory_limit_holds(kubectl: Kubectl, node_namespace: str) -> None:
    pod = _pod(
        "greedy",
        node_namespace,
        command=[sys.executable, "-c", "x = b'x' * 256 * 1024**2; print(len(x))"],
        resources={"limits": {"memory": "64Mi"}},
    )
    pod["spec"]["restartPolicy"] = "Never"
    kubectl.apply(pod)
    failed = "--for=jsonpath={.status.phase}=Failed"
    kubectl("wait", failed, "pod/greedy", f"--namespace={node_namespace}", _TIMEOUT)
    state = _container(kubectl, node_namespace, "greedy")["state"]["terminated"]
    assert state["reason"] == "OOMKilled"


def test_a_pod_speaks_to_the_api_server_as_its_service_account(
    kubectl: Kubectl, node_namespace: str
) -> None:
    script = (
        "import os, ssl, urllib.request as r;"
        "f = '/var/run/secrets/kubernetes.io/serviceaccount/';"
        "e = os.environ; h = e['KUBERNETES_SERVICE_HOST'] + ':' + e['KUBERNETES_SERVICE_PORT'];"
        "q = r.Request(f'https://{h}/apis/authentication.k8s.io/v1/selfsubjectreviews',"
        " data=b'{}', headers={'Authorization': 'Bearer ' + open(f + 'token').read(),"
        " 'Content-Type': 'application/json'});"
        "c = ssl.create_default_context(cafile=f + 'ca.crt');"
        "print(r.urlopen(q, context=c).read().decode())"
    )
    pod = _pod("asking", node_namespace, command=[sys.executable, "-c", script])
    kubectl.apply(pod)
    pattern = f"system:serviceaccount:{node_namespace}:default"

    def log() -> str:
        try:
            return kubectl("logs", "asking", f"--namespace={node_namespace}")
        except CommandError:
            return ""  # no container yet

    wait_until(lambda: pattern in log(), "the API server names the account", 60, log)


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ([sys.executable, "-c", "import torch; print(torch.ones(2).sum().item())"], "2.0"),
        (["kvasir-worker", "--help"], "--state-file"),
    ],
)
def test_a_pod_runs_the_installed_project(
    kubectl: Kubectl, node_namespace: str, command: list[str], printed: str
) -> None:
    pod = _pod("once", node_namespace, command=command)
    pod["spec"]["restartPolicy"] = "Never"
    kubectl.apply(pod)
    done = "--for=jsonpath={.status.phase}=Succeeded"
    kubectl("wait", done, "pod/once", f"--namespace={node_namespace}", _TIMEOUT)
    assert printed in kubectl("logs", "once", f"--namespace={node_namespace}")


def test_an_image_that_is_not_there_cannot_be_pulled(kubectl: Kubectl, node_namespace: str) -> None:
    kubectl.apply(_pod("lost", node_namespace, image="nowhere.invalid/lost:1"))

    def reason() -> str:
        statuses = _status(kubectl, node_namespace, "lost").get("containerStatuses", [])
        return json.dumps([status["state"] for status in statuses])

    wait_until(lambda: "ImagePull" in reason(), "the pull fails", 60, reason)


def test_a_deleted_pod_is_gone_from_the_node(
    kubectl: Kubectl, node_namespace: str, made: MadeCluster
) -> None:
    kubectl.apply(_server("web", node_namespace))
    _wait_ready(kubectl, node_namespace, "web")
    processes = made.nodes[0].container_processes(node_namespace, "web")
    assert processes
    kubectl("delete", "pod", "web", f"--namespace={node_namespace}", _TIMEOUT)
    assert psutil.wait_procs(processes, timeout=10)[1] == []


def test_two_nodes_reach_each_other_and_leave_nothing_behind(
    made: MadeCluster, tmp_path: Path
) -> None:
    """Of a second one, beside that of the other tests. Clusters of other runs come and go."""

    def ours(traces: Sequence[str]) -> list[str]:
        made_by = (re.search(r"\bkv(?:asir|\d+)-(\d+)\b", trace) for trace in traces)
        own = str(os.getpid())
        return sorted(t for t, by in zip(traces, made_by, strict=True) if not by or by[1] == own)

    def traces() -> dict[str, list[str]]:
        routes = subprocess.check_output(["ip", "route"], text=True)
        processes = psutil.process_iter(["name", "cmdline"])
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        settings = ("kernel/panic", "vm/overcommit_memory", "net/ipv4/ip_forward")
        return {
            "processes": sorted(
                process.info["name"]
                for process in processes
                if str(tmp_path) in " ".join(process.info["cmdline"] or [])
            ),
            "mounts": [mount for mount in mounts if str(tmp_path) in mount],
            "links": ours([link.name for link in Path("/sys/class/net").iterdir()]),
            "routes": ours(routes.splitlines()),
            "cgroups": ours(list(cgroups.existing_roots())),
            "settings": [Path("/proc/sys", name).read_text() for name in settings],
        }

    before = traces()
    with running_node_cluster(tmp_path, nodes=2) as cluster:
        kubectl, namespace = cluster.kubectl, "default"
        servers = [_server(f"web-{number}", namespace) for number in (1, 2)]
        for number, server in enumerate(servers, start=1):
            server["spec"]["nodeName"] = f"node-{number}"
        kubectl.apply(*servers, _service("web-1", namespace), _service("web-2", namespace))
        _wait_ready(kubectl, namespace, "web-1", "web-2")
        _assert_reaches(kubectl, namespace, "web-1", "web-2")
        _assert_reaches(kubectl, namespace, "web-2", "web-1")
        assert traces() != before
    assert traces() == before
