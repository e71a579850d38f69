"""The `kvasir-router` process: its arguments, start-up, signals and exit codes.

0   stopped by SIGTERM or SIGINT, open requests finished
2   could not start: one line on stderr says what to mend
143 a second signal: stopped at once
"""

import asyncio
import errno
import logging
import os
import signal
import sys

from aiohttp import web
from prometheus_client import CollectorRegistry

from kvasir.proto.process import (
    EVERY_ADDRESS,
    StateFile,
    configure_logging,
    join_host_port,
    listen_everywhere,
)
from kvasir.proto.startup import (
    EXIT_KILLED,
    StartError,
    open_state_file,
    parse_arguments,
    read_config,
    refuse_to_start,
)
from kvasir.router.api.app import build_app
from kvasir.router.api.server import Runner
from kvasir.router.config import RouterConfig
from kvasir.router.discovery import SourceError
from kvasir.router.dispatcher import running_dispatcher

_PROGRAM = "kvasir-router"

_log = logging.getLogger("kvasir.router")


def main() -> int:
    """Entry point; returns the exit code."""
    args = parse_arguments(_PROGRAM, "Serve the OpenAI API in front of workers.", RouterConfig)
    configure_logging()
    try:
        config = read_config(RouterConfig, args.config, args.settings)
        state = open_state_file(args.state_file)
        asyncio.run(_serve(config, state))
    except (StartError, SourceError) as error:
        return refuse_to_start(_PROGRAM, error)
    return 0


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
            await runner.drain()
        finally:
            # Cuts off what is left.
            await runner.cleanup()
    _log.info("stopped")


async def _listen(runner: Runner, config: RouterConfig) -> str:
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
            os._exit(EXIT_KILLED)
        _log.info("stopping signal=%s", number.name)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


if __name__ == "__main__":
    sys.exit(main())
