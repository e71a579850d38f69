"""A router and its workers as real processes on loopback, to be measured and to be broken.

    async with Stack(workers=[WorkerConfig(worker_id="w0")]) as stack:
        ...  # requests to stack.url
        stack.kill("w0", signal.SIGKILL)
        await stack.restart("w0")

Owns the processes, their folder and the discovery file. Restarts nothing unless asked: a
killed worker stays in the discovery file, so that the router has to notice by itself.
A clean exit checks for leaks: no KV block used, every process ended with code 0 after
SIGTERM, none left behind. After an exception everything is ended at once instead.
"""

import asyncio
import json
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from kvasir.bench.metrics import Samples, parse_metrics
from kvasir.bench.process import Process, RefusedStartError, StackError, State
from kvasir.router.config import RouterConfig
from kvasir.worker.config import WorkerConfig

_POLL_S = 0.05

__all__ = ["RefusedStartError", "Stack", "StackError"]


class Stack:
    """One router in front of ``workers``.

    Args:
        workers: their configurations; ids must differ, ports are usually 0 (free ones).
        router: fields of RouterConfig other than ``workers_file``; ``port`` is 0 by default.
        folder: where configurations, state files and logs go; a temporary one by default.
        env: added to the environment of every process.
        startup_timeout_s: longest wait for a process to be ready.
        stop_timeout_s: longest wait for a process to end after SIGTERM.
    """

    def __init__(
        self,
        workers: Sequence[WorkerConfig],
        *,
        router: Mapping[str, Any] | None = None,
        folder: Path | None = None,
        env: Mapping[str, str] | None = None,
        startup_timeout_s: float = 180.0,
        stop_timeout_s: float = 30.0,
    ) -> None:
        ids = [worker.worker_id for worker in workers]
        if len(set(ids)) != len(ids):
            raise ValueError(f"worker ids must differ: {ids}")
        self._configs = {worker.worker_id: worker for worker in workers}
        self._router_fields = {"port": 0, **(router or {})}
        self._given_folder = folder
        self._env = dict(env or {})
        self._startup_timeout_s = startup_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._resources = AsyncExitStack()
        self._workers: dict[str, Process] = {}
        self._states: dict[str, State] = {}
        self.url = ""
        """http://host:port of the router; set once the stack is entered."""

    # --- life ------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._destroy()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                await self._stop_cleanly()
        finally:
            await self._destroy()

    async def _start(self) -> None:
        self.folder = self._given_folder or Path(
            self._resources.enter_context(tempfile.TemporaryDirectory(prefix="kvasir-stack-"))
        )
        self._http = await self._resources.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
        )
        self._workers_file = self.folder / "workers.json"
        config = RouterConfig.model_validate(
            {**self._router_fields, "workers_file": self._workers_file}
        )
        self._router = self._new_process("router", "kvasir-router", config.model_dump_json())
        for worker_id, worker in self._configs.items():
            self._workers[worker_id] = self._new_worker(worker)
        await self._router.start()
        await asyncio.gather(*(process.start() for process in self._workers.values()))
        self.url = f"http://{(await self._router.ready(self._startup_timeout_s)).address}"
        for worker_id in self._workers:
            await self._register(worker_id)
        await self.wait_routable(*self._workers)

    async def _stop_cleanly(self) -> None:
        for process in self._workers.values():
            if process.alive:
                process.signal(signal.SIGCONT)  # a stopped process could not end
        if self._router.alive:
            await self.wait_idle()
        for process in [self._router, *self._workers.values()]:
            if not process.alive:
                continue
            process.signal(signal.SIGTERM)
            code = await process.exited(self._stop_timeout_s)
            if code != 0:
                raise StackError(
                    f"{process.name} ended with exit code {code} after SIGTERM;"
                    f" its log ends:\n{process.log_tail()}"
                )
            process.check_nothing_left()

    async def _destroy(self) -> None:
        processes = [*self._workers.values()]
        if hasattr(self, "_router"):
            processes.append(self._router)
        for process in processes:
            await process.destroy()
        await self._resources.aclose()

    # --- workers ---------------------------------------------------------------------------

    def worker(self, worker_id: str) -> Process:
        return self._workers[worker_id]

    def worker_state(self, worker_id: str) -> State:
        """Address, metrics address and epoch of the worker's current run."""
        return self._states[worker_id]

    @property
    def router(self) -> Process:
        return self._router

    def kill(self, worker_id: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal; discovery still names the worker. See ``exited`` and ``restart``."""
        self._workers[worker_id].signal(number)

    async def exited(self, worker_id: str) -> int:
        """Wait until a killed worker has ended; its exit code, negative for a signal."""
        return await self._workers[worker_id].exited(self._stop_timeout_s)

    async def restart(self, worker_id: str) -> None:
        """Start a worker anew, after SIGKILL if it still runs, and wait until it is routable."""
        await self._workers[worker_id].destroy()
        await self._workers[worker_id].start()
        await self._register(worker_id)
        await self.wait_routable(worker_id)

    # --- what can be seen ------------------------------------------------------------------

    async def worker_rows(self) -> list[dict[str, Any]]:
        """The router's view of its workers: WorkerStatus as JSON, one object per worker."""
        async with self._http.get(f"{self.url}/workers") as response:
            response.raise_for_status()
            rows: list[dict[str, Any]] = await response.json()
            return rows

    async def worker_metrics(self, worker_id: str) -> Samples:
        return await self._scrape(f"http://{self._states[worker_id].metrics_address}/metrics")

    async def router_metrics(self) -> Samples:
        return await self._scrape(f"{self.url}/metrics")

    async def wait_routable(self, *worker_ids: str) -> None:
        """Wait until the router calls the current run of each of these workers ready."""

        async def routable() -> bool:
            rows = await self.worker_rows()
            ready = {(r["worker_id"], r["address"]) for r in rows if r["state"] == "ready"}
            return all((w, self._states[w].address) in ready for w in worker_ids)

        await self._until(routable, f"router does not list {', '.join(worker_ids)} as ready")

    async def wait_idle(self) -> None:
        """Wait until no worker runs, queues or holds KV blocks; StackError names the leak."""

        async def idle() -> bool:
            alive = {w for w, process in self._workers.items() if process.alive}
            rows = [row for row in await self.worker_rows() if row["worker_id"] in alive]
            return len(rows) == len(alive) and all(
                row["state"] in ("ready", "draining")
                and not row["running"]
                and not row["waiting"]
                and not row["kv_blocks_used"]
                for row in rows
            )

        await self._until(idle, "workers are not idle")

    # --- inside ----------------------------------------------------------------------------

    def _new_worker(self, config: WorkerConfig) -> Process:
        return self._new_process(config.worker_id, "kvasir-worker", config.model_dump_json())

    def _new_process(self, name: str, program: str, config: str) -> Process:
        return Process(name, program, config, self.folder, self._env)

    async def _register(self, worker_id: str) -> None:
        self._states[worker_id] = await self._workers[worker_id].ready(self._startup_timeout_s)
        self._write_workers_file()

    def _write_workers_file(self) -> None:
        rows = [{"id": w, "address": state.address} for w, state in self._states.items()]
        temporary = self._workers_file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"workers": rows}))
        temporary.replace(self._workers_file)

    async def _scrape(self, url: str) -> Samples:
        async with self._http.get(url) as response:
            response.raise_for_status()
            return parse_metrics(await response.text())

    async def _until(self, condition: Callable[[], Awaitable[bool]], otherwise: str) -> None:
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                while True:
                    if await condition():
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            rows = await self.worker_rows()
            raise StackError(f"{otherwise} after {self._stop_timeout_s:g} s: {rows}") from None
