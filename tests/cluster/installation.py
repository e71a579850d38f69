"""Kvasir on a cluster with real nodes: its chart, and pods that run this project.

In a cluster that the tests made, every pod runs the host's interpreter and project from the one
small image; a given cluster has the images in a registry, as anybody's would:
$KVASIR_E2E_REGISTRY/kvasir/{operator,router,worker}:VERSION (see deploy/docker/build.sh).
"""

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from cluster.images import IMAGE, PAUSE, USER, with_host_python
from cluster.node_cluster import NodeCluster

REGISTRY_VARIABLE = "KVASIR_E2E_REGISTRY"
RELEASE = "kvasir"
NAMESPACE = "kvasir-e2e"
OPERATOR = f"{RELEASE}-operator"

_ROOT = Path(__file__).resolve().parents[2]
_CHART = _ROOT / "charts" / "kvasir"
_COMPONENTS = ("operator", "router", "worker")


class Installation:
    """The chart as a release of the cluster; `uninstall` may be called twice."""

    def __init__(self, cluster: NodeCluster, folder: Path) -> None:
        self._cluster = cluster
        values = folder / "values.json"
        values.write_text(json.dumps(_values(cluster)))
        # Helm leaves resources as it finds them, and the cluster may have older ones.
        cluster.kubectl("apply", f"--filename={_CHART / 'crds'}")
        where = (f"--namespace={NAMESPACE}", "--create-namespace", "--skip-crds")
        cluster.helm(
            *("install", RELEASE, str(_CHART), *where),
            *(f"--values={values}", "--wait", "--timeout=100s"),
        )
        self._installed = True

    def log(self) -> str:
        """The end of the operator's log."""
        where = (f"deployment/{OPERATOR}", f"--namespace={NAMESPACE}", "--tail=40")
        return self._cluster.kubectl("logs", *where)

    def pod(self) -> str:
        """Name of the operator's pod."""
        component = "--selector=app.kubernetes.io/component=operator"
        found = self._cluster.kubectl.get("pods", f"--namespace={NAMESPACE}", component)["items"]
        return str(found[0]["metadata"]["name"])

    def uninstall(self) -> None:
        if self._installed:
            where = f"--namespace={NAMESPACE}"
            self._cluster.helm("uninstall", RELEASE, where, "--wait", "--timeout=100s")
        self._installed = False


@contextmanager
def installed(cluster: NodeCluster, folder: Path) -> Iterator[Installation]:
    """The chart with its resources; only these are left after the block."""
    installation = Installation(cluster, folder)
    try:
        yield installation
    finally:
        installation.uninstall()
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false", "--ignore-not-found")


def overlay(cluster: NodeCluster, container: str) -> dict[str, Any]:
    """``template`` of a role of a ModelService, whose container is `worker` or `router`."""
    # Of the cores of one machine, no worker is to take more than one.
    variables = [{"name": "OMP_NUM_THREADS", "value": "1"}]
    spec = {"containers": [{"name": container, "env": variables}]}
    return {"spec": spec if cluster.made is None else with_host_python(spec)}


def minimal_sample(cluster: NodeCluster) -> dict[str, Any]:
    """The smallest of the samples, with pods that run in this cluster."""
    path = _ROOT / "deploy" / "samples" / "01-minimal.yaml"
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    for role in ("prefill", "decode", "router"):
        container = "router" if role == "router" else "worker"
        section = document["spec"].get(role, {})
        document["spec"][role] = {**section, "template": overlay(cluster, container)}
    return document


def client_pod(cluster: NodeCluster, name: str, namespace: str) -> dict[str, Any]:
    """A pod that idles, for ``kubectl exec`` of Python with aiohttp."""
    image = IMAGE if cluster.made else f"{_registry()}/kvasir/router:{_version()}"
    spec = {
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsUser": USER, "runAsNonRoot": True},
        "containers": [{"name": "client", "image": image, "command": PAUSE}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": with_host_python(spec) if cluster.made else spec,
    }


def kill_container(cluster: NodeCluster, namespace: str, pod: str) -> float:
    """``kill -9`` of the processes of a pod's container; returns when, since the Unix epoch.

    Only on nodes of our own: in its pod a container's first process is safe from signals. In a
    given cluster the nearest thing is to delete the pod without any grace.
    """
    if cluster.made is None:
        moment = time.time()
        cluster.kubectl(
            "delete", "pod", pod, f"--namespace={namespace}", "--force", "--grace-period=0"
        )
        return moment
    processes = [
        process
        for node in cluster.made.nodes
        for process in node.container_processes(namespace, pod)
    ]
    assert processes, f"pod {pod} has no processes"
    moment = time.time()
    for process in processes:
        process.send_signal(signal.SIGKILL)
    return moment


def _values(cluster: NodeCluster) -> Mapping[str, Any]:
    if cluster.made is None:
        return {"images": {"registry": _registry()}}
    registry, _, rest = IMAGE.partition("/")
    repository, _, tag = rest.partition(":")
    mounted = with_host_python({"containers": [{}]})
    return {
        "images": {
            "registry": registry,
            "tag": tag,
            **{component: {"repository": repository} for component in _COMPONENTS},
        },
        "extraVolumes": mounted["volumes"],
        "extraVolumeMounts": mounted["containers"][0]["volumeMounts"],
    }


def _registry() -> str:
    """`localhost` is what `make images` builds, to be loaded onto the nodes."""
    return os.environ.get(REGISTRY_VARIABLE, "localhost")


def _version() -> str:
    chart = yaml.safe_load((_CHART / "Chart.yaml").read_text(encoding="utf-8"))
    return str(chart["appVersion"])
