"""The configuration of a node: containerd, CNI, kubelet, kube-proxy. Pure text and objects."""

from typing import Any

from cluster.images import IMAGE

CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
CNI_PLUGINS = "/usr/lib/cni"

# What the kubelet would set for the whole machine; nodes are given files in their place.
KUBELET_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def containerd_config(cni_folder: str) -> str:
    """For containerd 1.6 and later 1.x.

    Scores for the kernel's out-of-memory killer are restricted to what a process without
    CAP_SYS_RESOURCE may set.
    """
    return f"""version = 2
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{IMAGE}"
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{cni_folder}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""


def cni_config(pods: str) -> dict[str, Any]:
    """Each pod on a link of its own to the node.

    On a bridge, two pods of one node would answer each other past the node's address translation,
    and services would need br_netfilter.
    """
    plugin = {
        "type": "ptp",
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": pods}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [plugin]}


def kubelet_config(address: str, authority: str, cgroup_root: str, resolver: str) -> dict[str, Any]:
    """cgroup v1 will do, restarts come soon, and a full machine evicts no pods."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "healthzPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": authority},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup_root,
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "resolvConf": resolver,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "0%",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
            "imagefs.inodesFree": "0%",
        },
        "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
        "nodeStatusUpdateFrequency": "5s",
    }


def proxy_config(kubeconfig: str, name: str, pod_cidr: str, mode: str) -> dict[str, Any]:
    """Leaves the machine's connection tracking as it is."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": kubeconfig},
        "hostnameOverride": name,
        "mode": mode,
        "clusterCIDR": pod_cidr,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0, "min": 0},
    }
