"""``python -m cluster`` (``make cluster``): a cluster with a real node and Kvasir on it, to try
things on until Ctrl-C.

Prints on stdout the commands of a first session, ready to be pasted into another terminal, and
everything else on stderr. Nothing outlives it but the binaries' cache.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import yaml

from cluster.binaries import BinariesMissingError, find_binaries, kubectl_path
from cluster.installation import NAMESPACE, RELEASE, Installation, minimal_sample
from cluster.node_cluster import (
    KUBECONFIG_VARIABLE,
    NodeCluster,
    needed_binaries,
    node_cluster,
    why_not_here,
)

_QUESTION = (
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' "
    '-d \'{"model": "smollm2", "messages": [{"role": "user", "content": '
    '"What is the capital of France?"}], "temperature": 0}\''
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__.split("\n\n")[0])
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes (default 1)")
    parser.add_argument(
        "--without-kvasir", action="store_true", help="start the cluster alone; install nothing"
    )
    arguments = parser.parse_args()
    if os.environ.get(KUBECONFIG_VARIABLE):
        sys.exit(f"cluster: {KUBECONFIG_VARIABLE} names a cluster of yours; unset it to have one")
    if reason := why_not_here():
        sys.exit(f"cluster: {reason}")
    # A shell starts what ends in `&` with SIGINT ignored, and Python leaves that as it is.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        _run(arguments.nodes, with_kvasir=not arguments.without_kvasir)
    except BinariesMissingError as error:
        sys.exit(f"cluster: {error}")
    except KeyboardInterrupt:
        _say("ended")


def _end(_number: int, _frame: FrameType | None) -> None:
    # The second one would leave half of the cluster behind.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(nodes: int, *, with_kvasir: bool) -> None:
    find_binaries(needed_binaries())
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvasir-cluster-") as name:
        folder = Path(name)
        with node_cluster(folder, nodes) as cluster:
            commands = [*_environment(cluster, folder), *_image_imports(cluster)]
            if with_kvasir:
                _say("installing Kvasir, whose pods run this project with this machine's Python")
                Installation(cluster, folder)
                commands += _session(cluster, folder)
            seconds = time.monotonic() - started
            _say(f"ready after {seconds:.0f} s. Ctrl-C, or `kill {os.getpid()}`, takes all away.")
            _say("In another terminal:")
            sys.stdout.write("".join(f"{command}\n" for command in commands))
            sys.stdout.flush()
            while True:
                signal.pause()


def _environment(cluster: NodeCluster, folder: Path) -> Iterator[str]:
    """kubectl and helm of the versions that the tests use, by their names."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "kubectl").symlink_to(kubectl_path())
    (programs / "helm").symlink_to(find_binaries(["helm"])["helm"])
    yield f"export KUBECONFIG={cluster.kubectl.kubeconfig} PATH={programs}:$PATH"


def _image_imports(cluster: NodeCluster) -> Iterator[str]:
    """How images come in; there is no registry."""
    for node in cluster.made.nodes if cluster.made else ():
        enter = f"nsenter --target {node.containerd.pid} --mount --pid --net"
        yield f"# images onto {node.name}: {enter} ctr --namespace k8s.io images import FILE"


def _session(cluster: NodeCluster, folder: Path) -> Iterator[str]:
    manifest = folder / "smollm2.yaml"
    manifest.write_text(yaml.safe_dump(minimal_sample(cluster), sort_keys=False))
    yield f"kubectl apply -f {manifest}"
    yield "kubectl wait --for=condition=Ready --timeout=5m msvc/smollm2"
    yield "kubectl port-forward service/smollm2 8000:80 &"
    yield _QUESTION
    yield "kubectl scale wpool/smollm2-decode --replicas=2"
    two_ready = "--for=jsonpath='{.status.readyReplicas}'=2"
    yield f"kubectl wait {two_ready} --timeout=5m wpool/smollm2-decode"
    yield "kubectl delete msvc/smollm2"
    yield f"helm uninstall {RELEASE} --namespace {NAMESPACE}"


def _say(text: str) -> None:
    sys.stderr.write(f"cluster: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
