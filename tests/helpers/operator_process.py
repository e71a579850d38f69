"""`kvasir-operator` over pods in which nothing runs: workers and routers are played.

For control planes whose node `FakeNode` plays. A worker here has no requests, and routers see at
once who drains. Everything else is the real operator: ``python -m helpers.operator_process``
takes its arguments.
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvasir.operator.cluster.main import parse, serve
from kvasir.operator.cluster.observed import Fleet, Pod, WorkerLoad
from kvasir.operator.signals import RouterSample, WorkerSample
from kvasir.proto.process import configure_logging


class IdleWorkers:
    """Workers without requests; a pod that is not ready does not answer."""

    def __init__(self) -> None:
        self._draining: set[str] = set()

    @staticmethod
    def _busy() -> bool:
        """As the metrics say, while the file exists that the environment names."""
        return Path(os.environ.get("KVASIR_TEST_BUSY", "/nonexistent")).exists()

    async def observe(self, pods: Sequence[Pod]) -> Fleet:
        ready = [pod for pod in pods if pod.ready and not pod.terminating]
        workers = [pod.name for pod in ready if pod.role != "router"]
        states = {name: "draining" if name in self._draining else "ready" for name in workers}
        return Fleet(
            loads={name: WorkerLoad(0, 0, name in self._draining) for name in workers},
            routers={pod.name: states for pod in ready if pod.role == "router"},
        )

    async def scrape(
        self, pods: Sequence[Pod]
    ) -> tuple[dict[str, WorkerSample], dict[str, RouterSample]]:
        ready = [pod for pod in pods if pod.ready and not pod.terminating]
        now = time.time()
        idle = WorkerSample(now, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        busy = replace(idle, running=64.0, waiting=9.0, kv_usage=1.0)
        return (
            {pod.name: busy if self._busy() else idle for pod in ready if pod.role != "router"},
            {pod.name: RouterSample(now, 0.0, 0.0) for pod in ready if pod.role == "router"},
        )

    async def drain(self, pod: Pod) -> None:
        self._draining.add(pod.name)

    async def undrain(self, pod: Pod) -> None:
        self._draining.discard(pod.name)


def main() -> int:
    configure_logging()
    return asyncio.run(serve(parse(sys.argv[1:]), IdleWorkers()))


if __name__ == "__main__":
    sys.exit(main())
