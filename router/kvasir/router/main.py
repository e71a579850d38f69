"""The `kvasir-router` process: its arguments, start-up, signals and exit codes.

0   stopped by SIGTERM or SIGINT, open requests finished
2   could not start: one line on stderr says what to mend
143 a second signal: stopped at once
"""

import argparse
import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from kvasir.proto.process import (
    EVERY_ADDRESS,
    SET_HELP,
    StateFile,
    configure_logging,
    join_host_port,
    listen_everywhere,
    override_settings,
)
from kvasir.router.api.app import build_app
from kvasir.router.api.server import Runner
from kvasir.router.config import RouterConfig
from kvasir.router.discovery import SourceError
from kvasir.router.dispatcher import running_dispatcher

_EXIT_UNUSABLE = 2
_EXIT_KILLED = 143

_log = logging.getLogger("kvasir.router")


class StartError(Exception):
    """Why the router cannot start; the message names the field or file, and the fix."""


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="kvasir-router", description="Serve the OpenAI API in front of workers."
    )
    parser.add_argument("--config", type=Path, required=True, help="JSON of RouterConfig")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=SET_HELP)
    parser.add_argument("--state-file", type=Path, help="where to say how far the start-up is")
    args = parser.parse_args()
    configure_logging()
    try:
        config = read_config(args.config, args.set)
        state = _open_state_file(args.state_file)
        asyncio.run(_serve(config, state))
    except (StartError, SourceError) as error:
        print(f"kvasir-router: {error}", file=sys.stderr)  # noqa: T201 - the one line for people
        return _EXIT_UNUSABLE
    return 0


def read_config(path: Path, settings: Sequence[str] = ()) -> RouterConfig:
    """The file's settings with ``settings`` over them; StartError names each bad one."""
    try:
        document = override_settings(path.read_bytes(), settings)
    except ValueError as error:
        raise StartError(f"--set {error}") from error
    except OSError as error:
        raise StartError(f"--config {path}: {error.strerror}") from error
    try:
        return RouterConfig.model_validate_json(document)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'file'}: {fault['msg']}"
            for fault in error.errors(include_url=False, include_input=False)
        )
        raise StartError(f"--config {path}: {faults}") from error


def _open_state_file(path: Path | None) -> StateFile:
    try:
        return StateFile(path)
    except OSError as error:
        raise StartError(f"--state-file {path}: {error.strerror}") from error


async def _serve(config: RouterConfig, state: StateFile) -> None:
    """Serve until told to stop. Raises StartError or SourceError."""
    stop = _stop_on_signals()
    registry = CollectorRegistry()
    async with running_dispatcher(config, registry) as dispatcher:
        runner = Runner(build_app(config, dispatcher, registry))
        await runner.setup()
        try:
            address = await _listen(runner, config)
            state.update("ready", address=address)
            _log.info("ready router=%s address=%s", config.router_id, address)
            await stop.wait()
            state.update("draining")
        finally:
            # Stops to accept, waits for open requests, then cancels what is left.
            await runner.cleanup()
    _log.info("stopped")


async def _listen(runner: web.AppRunner, config: RouterConfig) -> str:
    """Open the port; gives host:port."""
    try:
        if config.host == EVERY_ADDRESS:
            await web.SockSite(runner, listen_everywhere(config.port)).start()
        else:
            await web.TCPSite(runner, config.host, config.port).start()
    except OSError as error:
        where = f"cannot listen on host {config.host}, port {config.port}"
        if error.errno == errno.EADDRINUSE:
            fix = "the port is in use; stop what uses it, or choose another port (0: a free one)"
        else:
            fix = f"{error.strerror}; set host to an address of this machine"
        raise StartError(f"{where}: {fix}") from error
    host, port = runner.addresses[0][:2]
    return join_host_port(host, port)


def _stop_on_signals() -> asyncio.Event:
    """Set at the first SIGTERM or SIGINT; a second one ends the process at once."""
    stop = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            _log.warning("second signal, stopping at once signal=%s", number.name)
            logging.shutdown()
            os._exit(_EXIT_KILLED)
        _log.info("stopping signal=%s", number.name)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


if __name__ == "__main__":
    sys.exit(main())
