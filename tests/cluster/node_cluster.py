"""A cluster with real nodes, made by the tests or given by whoever runs them."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import cgroups
from cluster.binaries import CONTROL_PLANE, NODE
from cluster.clients import Helm, Kubectl
from cluster.control_plane import ControlPlane, ControlPlaneOptions, control_plane
from cluster.network import Network
from cluster.node import Node, missing_programs

KUBECONFIG_VARIABLE = "KVASIR_E2E_KUBECONFIG"
PACKAGES = "containerd runc containernetworking-plugins iptables nftables conntrack iproute2"


@dataclass(frozen=True)
class NodeCluster:
    """What tests need of a cluster; `made` is None where the cluster was given."""

    kubectl: Kubectl
    helm: Helm
    made: "MadeCluster | None"


@dataclass(frozen=True)
class MadeCluster:
    """What tests can do only to a cluster of their own: reach into nodes, stop parts."""

    plane: ControlPlane
    nodes: tuple[Node, ...]


def why_not_here() -> str:
    """Why real nodes cannot run on this machine and what to do; empty if they can."""
    if os.environ.get(KUBECONFIG_VARIABLE):
        return ""
    reasons = [] if os.geteuid() == 0 else ["this is not root"]
    if lacking := missing_programs():
        reasons.append(f"not installed: {', '.join(lacking)}")
    if not reasons:
        return ""
    return (
        f"tests on real nodes did not run: {'; '.join(reasons)}. To run them, either set "
        f"{KUBECONFIG_VARIABLE} to the kubeconfig of a cluster, or run as root with these "
        f"packages (Debian names): {PACKAGES}"
    )


def needed_binaries() -> tuple[str, ...]:
    """What `node_cluster` starts here."""
    if why_not_here():
        return ()
    return ("helm",) if os.environ.get(KUBECONFIG_VARIABLE) else (*CONTROL_PLANE, *NODE, "helm")


@contextmanager
def node_cluster(folder: Path, nodes: int = 1) -> Iterator[NodeCluster]:
    """The given cluster, or one made here, ready for pods; a made one is gone after the block."""
    given = os.environ.get(KUBECONFIG_VARIABLE)
    if given:
        yield NodeCluster(Kubectl(Path(given), folder), Helm(Path(given), folder), None)
        return
    with ExitStack() as stack:
        made = _make(stack, folder, nodes)
        yield NodeCluster(made.plane.kubectl, Helm(made.plane.kubeconfig, folder), made)


def _make(stack: ExitStack, folder: Path, count: int) -> MadeCluster:
    cgroups.remove_abandoned()
    network = Network(folder)
    stack.callback(network.end)
    options = ControlPlaneOptions(
        address=network.host, service_cidr=network.service_cidr, publish_endpoint=True
    )
    plane_folder = folder / "control-plane"
    plane_folder.mkdir()
    plane = stack.enter_context(control_plane(plane_folder, options))
    nodes = []
    for number in range(1, count + 1):
        node_folder = folder / f"node-{number}"
        node_folder.mkdir()
        node = Node(plane, network, node_folder, number)
        stack.callback(node.end)
        nodes.append(node)
    for node in nodes:
        node.wait_ready()
    return MadeCluster(plane, tuple(nodes))
