"""`kvasir-operator` over pods in which nothing runs: workers and routers are played.

For control planes whose node `FakeNode` plays. A worker here has no requests, and routers see at
once who drains. What metrics say is scripted: a JSON file, which may change at any time, maps a
pod's name, or a role for all its pods, to series and their values, or to null for silence. Where
routers have one named ``blind``, they see no worker.
What workers were told is in a folder of files, one for each, so that it outlives the operator, as
a worker does; one that drains has a request for as long as the environment says. Everything else is
the real operator: ``python -m helpers.operator_process`` takes its arguments.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvasir.operator.cluster import main as operator_main
from kvasir.operator.cluster import reconcile
from kvasir.operator.cluster.main import parse, serve
from kvasir.operator.cluster.observed import Fleet, Pod, WorkerLoad
from kvasir.operator.signals import (
    RouterSample,
    Unreadable,
    WorkerSample,
    parse_router,
    parse_worker,
)
from kvasir.proto.process import configure_logging

Series = Mapping[str, float | str]

_IDLE_WORKER: Series = {
    "vllm:num_requests_running": 0,
    "vllm:num_requests_waiting": 0,
    "vllm:kv_cache_usage_perc": 0,
    "kvasir_worker_queued_prefill_tokens": 0,
    "vllm:prompt_tokens_total": 0,
    "vllm:prefix_cache_hits_total": 0,
}
_IDLE_ROUTER: Series = {
    'kvasir_router_held_requests{role="decode"}': 0,
    'kvasir_router_held_requests{role="prefill"}': 0,
    'kvasir_router_disaggregated_total{decision="local_no_worker"}': 0,
}


class PlayedWorkers:
    """A pod that is not ready does not answer."""

    def __init__(self) -> None:
        self._told = Path(os.environ["KVASIR_TEST_TOLD"])
        self._told.mkdir(exist_ok=True)
        self._drain_seconds = float(os.environ.get("KVASIR_TEST_DRAIN_SECONDS", "0"))

    async def observe(self, pods: Sequence[Pod]) -> Fleet:
        ready = [pod for pod in pods if pod.ready and not pod.terminating]
        workers = [pod.name for pod in ready if pod.role != "router"]
        since = {name: self._draining_since(name) for name in workers}
        return Fleet(
            loads={name: self._load(moment) for name, moment in since.items()},
            routers=await self.views(pods),
        )

    async def views(self, pods: Sequence[Pod]) -> dict[str, dict[str, str]]:
        script = _script()
        blind = "blind" in (script.get("router") or {})
        ready = [pod for pod in pods if pod.ready and not pod.terminating]
        states = {
            pod.name: "ready" if self._draining_since(pod.name) is None else "draining"
            for pod in ready
            if pod.role != "router" and not blind
        }
        return {pod.name: states for pod in ready if pod.role == "router"}

    async def scrape(
        self, pods: Sequence[Pod]
    ) -> tuple[dict[str, WorkerSample], dict[str, RouterSample]]:
        script, now = _script(), time.time()
        workers: dict[str, WorkerSample] = {}
        routers: dict[str, RouterSample] = {}
        for pod in pods:
            if not pod.ready or pod.terminating:
                continue
            told = script.get(pod.name, script.get(pod.role, {}))
            if told is None:
                continue
            if pod.role == "router":
                router = parse_router(_text(_IDLE_ROUTER, told), now)
                assert not isinstance(router, Unreadable), router
                routers[pod.name] = router
            else:
                worker = parse_worker(_text(_IDLE_WORKER, told), now)
                assert not isinstance(worker, Unreadable), worker
                workers[pod.name] = worker
        return workers, routers

    async def drain(self, pod: Pod) -> None:
        self._tell(pod, "drain")

    async def undrain(self, pod: Pod) -> None:
        self._tell(pod, "undrain")

    def _tell(self, pod: Pod, what: str) -> None:
        """All or nothing: tests kill this process at any point, also between open and write."""
        path, new = self._told / pod.name, self._told.with_name(f"{self._told.name}.new")
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        new.write_text(f"{before}{what} {time.time()}\n", encoding="utf-8")
        new.replace(path)

    def _draining_since(self, pod: str) -> float | None:
        path = self._told / pod
        if not path.exists():
            return None
        what, moment = path.read_text(encoding="utf-8").splitlines()[-1].split()
        return float(moment) if what == "drain" else None

    def _load(self, draining_since: float | None) -> WorkerLoad:
        if draining_since is None:
            return WorkerLoad(0, 0, draining=False)
        finished = time.time() - draining_since >= self._drain_seconds
        return WorkerLoad(0 if finished else 1, 0, draining=True)


def _script() -> dict[str, Series | None]:
    path = Path(os.environ["KVASIR_TEST_METRICS"])
    if not path.exists():
        return {}
    found: dict[str, Series | None] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _text(idle: Series, told: Series) -> str:
    return "".join(f"{name} {value}\n" for name, value in {**idle, **told}.items())


def main() -> int:
    configure_logging()
    reconcile.RESYNC = float(os.environ["KVASIR_TEST_RESYNC_SECONDS"])
    if limit := os.environ.get("KVASIR_TEST_RECURSION_LIMIT"):
        operator_main.RECURSION_LIMIT = int(limit)
    return asyncio.run(serve(parse(sys.argv[1:]), PlayedWorkers()))


if __name__ == "__main__":
    sys.exit(main())
