"""``python -m cluster``: a cluster with real nodes to try things on, until Ctrl-C."""

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from cluster.binaries import BinariesMissingError, find_binaries
from cluster.node_cluster import needed_binaries, node_cluster, why_not_here


def main() -> None:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes (default 1)")
    nodes = parser.parse_args().nodes
    if reason := why_not_here():
        sys.exit(f"cluster: {reason}")
    try:
        find_binaries(needed_binaries())
    except BinariesMissingError as error:
        sys.exit(f"cluster: {error}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvasir-cluster-") as folder:
        try:
            with node_cluster(Path(folder), nodes) as cluster:
                seconds = time.monotonic() - started
                sys.stderr.write(f"cluster: ready after {seconds:.1f} s; Ctrl-C ends it. Use:\n")
                sys.stdout.write(f"export KUBECONFIG={cluster.kubectl.kubeconfig}\n")
                sys.stdout.flush()
                signal.pause()
        except KeyboardInterrupt:
            sys.stderr.write("cluster: ended\n")


if __name__ == "__main__":
    main()
