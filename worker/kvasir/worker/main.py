"""The `kvasir-worker` process: its arguments, start-up, signals and exit codes.

0   drained after SIGTERM or SIGINT, or stopped before it was ready
2   could not start: one line on stderr says what to mend
70  the engine failed; the traceback is in the log
143 a second signal: stopped at once
"""

import asyncio
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from kvasir.proto.process import (
    StateFile,
    configure_logging,
    join_host_port,
)
from kvasir.proto.startup import (
    EXIT_KILLED,
    StartError,
    open_state_file,
    parse_arguments,
    read_config,
    refuse_to_start,
)
from kvasir.worker.config import WorkerConfig
from kvasir.worker.health import Health, HealthServer

if TYPE_CHECKING:
    from kvasir.worker.loader import LoadedModel
    from kvasir.worker.service.server import WorkerServer

_PROGRAM = "kvasir-worker"
_EXIT_FATAL = 70
_PROGRESS_INTERVAL = 0.2

_log = logging.getLogger("kvasir.worker")


def main() -> int:
    """Entry point; returns the exit code."""
    args = parse_arguments(_PROGRAM, "Serve a model over gRPC.", WorkerConfig)
    configure_logging()
    try:
        config = read_config(WorkerConfig, args.config, args.settings)
        epoch = str(uuid.uuid4())
        state = open_state_file(args.state_file, epoch)
        asyncio.run(_Process(config, state, epoch).run())
    except StartError as error:
        return refuse_to_start(_PROGRAM, error)
    return 0


class _Process:
    """One worker process from its start to its exit."""

    def __init__(self, config: WorkerConfig, state: StateFile, epoch: str) -> None:
        self._config = config
        self._state = state
        self._epoch = epoch
        self._stop = asyncio.Event()
        self._serving = False
        self._health = Health()

    async def run(self) -> None:
        """Serve until told to stop. Raises StartError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        http = self._listen_http()
        beating = asyncio.create_task(_beat(self._health))
        try:
            server = self._build_server(await self._load())
            http.publish(server.metrics.registry)
            await self._serve(server, http)
        finally:
            beating.cancel()
            await asyncio.to_thread(http.stop)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            _exit_now(f"second signal, stopping at once signal={number.name}", EXIT_KILLED)
        if not self._serving:
            # The thread that loads the model cannot be interrupted, and nothing is at stake.
            _exit_now(f"stopped while starting signal={number.name}", 0)
        _log.info("stopping signal=%s", number.name)
        self._stop.set()

    def _listen_http(self) -> HealthServer:
        host, port = self._config.host, self._config.metrics_port
        try:
            return HealthServer(host, port, self._health)
        except OSError as error:
            raise StartError(
                f"cannot listen on {host}, metrics_port {port}: {error.strerror}; choose another"
            ) from error

    async def _load(self) -> "LoadedModel":
        self._state.update("loading", "importing torch")
        return await asyncio.to_thread(self._load_in_thread)

    def _load_in_thread(self) -> "LoadedModel":
        with _imports():
            from kvasir.worker.loader import ModelError, load_model
            from kvasir.worker.model.source import named_as

        config = self._config
        started = last = time.monotonic()

        def progress(text: str) -> None:
            nonlocal last
            if time.monotonic() - last >= _PROGRESS_INTERVAL:
                last = time.monotonic()
                self._state.update("loading", text)
                _log.info("loading: %s", text)

        try:
            model = load_model(config, progress)
        except ModelError as error:
            raise StartError(named_as(config.model_source, config.model, str(error))) from error
        _log.info("model loaded seconds=%.1f", time.monotonic() - started)
        return model

    def _build_server(self, model: "LoadedModel") -> "WorkerServer":
        with _imports():
            from kvasir.worker.service.server import WorkerServer

        server = WorkerServer(self._config, model, self._epoch, on_fatal=on_fatal)
        server.identity.on_draining = self._on_draining
        self._health.step_seconds = lambda: server.engine.turn_seconds
        return server

    async def _serve(self, server: "WorkerServer", http: HealthServer) -> None:
        from kvasir.worker.service.server import ListenError

        try:
            await server.start()
        except ListenError as error:
            raise StartError(str(error)) from error
        address = join_host_port(self._config.host, server.port)
        self._state.update(
            "ready",
            address=address,
            metrics_address=join_host_port(self._config.host, http.port),
        )
        self._health.ready = True
        self._serving = True
        _log.info(
            "ready worker=%s role=%s address=%s epoch=%s",
            *(self._config.worker_id, self._config.role, address, self._epoch),
        )
        await self._stop.wait()
        await server.drain(self._config.drain_deadline)
        await server.stop()
        _log.info("stopped")

    def _on_draining(self, draining: bool) -> None:
        self._health.ready = not draining
        self._state.update("draining" if draining else "ready")


@contextmanager
def _imports() -> Iterator[None]:
    """What an incomplete installation lacks, no restart brings."""
    try:
        yield
    except ImportError as error:
        raise StartError(
            f"{error}; install what a worker needs: pip install 'kvasir[worker]', or make setup"
        ) from error


async def _beat(health: Health) -> None:
    while True:
        health.beat()
        await asyncio.sleep(1.0)


def on_fatal(error: BaseException) -> None:
    """On the engine's thread: there is nothing to save, and nobody must wait for us."""
    _log.critical("the engine failed", exc_info=error)
    _flush_and_exit(_EXIT_FATAL)


def _exit_now(message: str, code: int) -> NoReturn:
    _log.warning(message)
    _flush_and_exit(code)


def _flush_and_exit(code: int) -> NoReturn:
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
