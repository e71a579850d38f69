"""A real node: containerd, kubelet and kube-proxy in namespaces of their own.

They believe to be a machine: their own first process, network, mounts and host name, with /run,
/var/lib and /var/log of their own. The rest of the file system is the host's, so that pods can
mount the host's interpreter. Nothing of it outlives the node but its folder and its control
groups, which `end` removes.
"""

import json
import shutil
from pathlib import Path

import psutil

from cluster import cgroups
from cluster.binaries import NODE, find_binaries
from cluster.control_plane import ControlPlane
from cluster.images import write_image
from cluster.namespaces import Namespaces
from cluster.network import Network
from cluster.node_files import (
    CNI_PLUGINS,
    KUBELET_SYSCTLS,
    cni_config,
    containerd_config,
    kubelet_config,
    proxy_config,
)
from cluster.processes import Daemon

_START_TIMEOUT = 60.0
_READY_TIMEOUT = "120s"
_PROGRAMS = ("containerd", "ctr", "runc", "nsenter", "unshare", "setpriv", "ip", "nft", "conntrack")


def missing_programs() -> list[str]:
    """What a node needs and this machine lacks, by name."""
    lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
    return lacking if (Path(CNI_PLUGINS) / "ptp").exists() else [*lacking, f"{CNI_PLUGINS}/ptp"]


class Node:
    """Node `number`, from 1. Starts on construction; `wait_ready` before use; `end` removes it."""

    def __init__(self, plane: ControlPlane, network: Network, folder: Path, number: int) -> None:
        self.name = f"node-{number}"
        self.address = network.address(number)
        self._plane = plane
        self._folder = folder
        self._binaries = find_binaries(NODE)
        self._cgroup_root = cgroups.make_root()
        self.namespaces = Namespaces(self.name, folder / "init.log", ("uts", "ipc"))
        self._prepare_mounts()
        network.attach(self.namespaces, number)
        self.containerd = self._start_containerd(network.pods(number))
        self.kubelet = self._start_kubelet()
        self.proxy = self._start_proxy(network.pod_cidr)

    def wait_ready(self) -> None:
        """Until pods can run here."""
        kubectl = self._plane.kubectl
        self.kubelet.wait_until(
            lambda: self.name in kubectl("get", "nodes", "--output=name"),
            "registered",
            _START_TIMEOUT,
        )
        condition = "--for=condition=Ready"
        kubectl("wait", condition, f"node/{self.name}", f"--timeout={_READY_TIMEOUT}")

    def container_processes(self, namespace: str, pod: str) -> list[psutil.Process]:
        """The processes of a pod's containers, as seen from outside; its sandbox's not."""
        found = self._plane.kubectl.get("pod", pod, f"--namespace={namespace}")
        statuses = found["status"].get("containerStatuses", [])
        running = [s["containerID"].rpartition("/")[2] for s in statuses if "running" in s["state"]]
        return [p for p in self.namespaces.processes() if _cgroup_has(p.pid, running)]

    def end(self) -> None:
        """End every process of the node and remove what it left."""
        self.namespaces.end()
        for daemon in (self.proxy, self.kubelet, self.containerd):
            daemon.kill()
        cgroups.remove(self._cgroup_root)
        shutil.rmtree(self._folder)

    def _prepare_mounts(self) -> None:
        inside = self.namespaces
        inside.run("hostname", self.name)
        inside.run("mount", "--make-rshared", "/")
        # No name server: a name that is not known is an error at once.
        (self._folder / "resolv.conf").write_text("")
        inside.run("mount", "--bind", str(self._folder / "resolv.conf"), "/etc/resolv.conf")
        inside.run("mount", "-t", "tmpfs", "-o", "mode=755", "run", "/run")
        for path in ("/var/lib", "/var/log"):
            own = self._folder / path.replace("/", "-").lstrip("-")
            own.mkdir()
            inside.run("mount", "--bind", str(own), path)
        for setting, value in KUBELET_SYSCTLS.items():
            own = self._folder / setting.replace("/", "-")
            own.write_text(f"{value}\n")
            inside.run("mount", "--bind", str(own), f"/proc/sys/{setting}")

    def _start_containerd(self, pods: str) -> Daemon:
        cni = self._folder / "cni"
        cni.mkdir()
        (cni / "10-pods.conflist").write_text(json.dumps(cni_config(pods)))
        config = self._folder / "containerd.toml"
        config.write_text(containerd_config(str(cni)))
        daemon = self._daemon("containerd", ["containerd", "--config", str(config)])
        daemon.wait_until(
            lambda: "containerd successfully booted" in daemon.log, "ready", _START_TIMEOUT
        )
        image = write_image(self._folder / "image.tar")
        self.namespaces.run("ctr", "--namespace=k8s.io", "images", "import", str(image))
        return daemon

    def _start_kubelet(self) -> Daemon:
        authority = self._folder / "ca.crt"
        authority.write_bytes(self._plane.authority.certificate)
        config = self._write(
            "kubelet.json",
            kubelet_config(
                self.address, str(authority), self._cgroup_root, str(self._folder / "resolv.conf")
            ),
        )
        kubeconfig = self._plane.user_kubeconfig(f"system:node:{self.name}", ["system:nodes"])
        flags = {
            "config": config,
            "kubeconfig": kubeconfig,
            "hostname-override": self.name,
            "node-ip": self.address,
        }
        return self._daemon("kubelet", [str(self._binaries["kubelet"]), *_arguments(flags)])

    def _start_proxy(self, pod_cidr: str) -> Daemon:
        kubeconfig = self._plane.user_kubeconfig("system:kube-proxy", [])
        config = self._write(
            "kube-proxy.json", proxy_config(str(kubeconfig), self.name, pod_cidr, "nftables")
        )
        binary = str(self._binaries["kube-proxy"])
        return self._daemon("kube-proxy", [binary, f"--config={config}"])

    def _daemon(self, name: str, command: list[str]) -> Daemon:
        log = self._folder / f"{name}.log"
        return Daemon(name, self.namespaces.inside(command), log, wrapped=True)

    def _write(self, name: str, content: dict[str, object]) -> Path:
        path = self._folder / name
        path.write_text(json.dumps(content, indent=1))
        return path


def _arguments(flags: dict[str, object]) -> list[str]:
    return [f"--{flag}={value}" for flag, value in flags.items()]


def _cgroup_has(pid: int, containers: list[str]) -> bool:
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(container in groups for container in containers)
