"""What every process of Kvasir does alike: settings, log lines, its state file, addresses.

The state file is how a process tells whoever started it where it stands. It is replaced by
rename, so that a reader never sees half of it.
"""

import errno
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

Phase = Literal["starting", "loading", "ready", "draining"]


SET_HELP = "change one setting of the file; VALUE is JSON, or else text; may be repeated"


def override_settings(document: bytes, settings: Sequence[str]) -> bytes:
    """A JSON document with what ``--set KEY=VALUE`` says over it.

    A document that is no JSON object passes unchanged, so that its reader says what is wrong.

    Raises:
        ValueError: a setting is not KEY=VALUE; the message says which.
    """
    changes = dict(_setting(text) for text in settings)
    try:
        content = json.loads(document)
    except ValueError:
        return document
    if not changes or not isinstance(content, dict):
        return document
    return json.dumps(content | changes).encode()


def _setting(text: str) -> tuple[str, object]:
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise ValueError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value, parse_constant=_not_json)
    except ValueError:
        return key, value


def _not_json(constant: str) -> NoReturn:
    """Python reads NaN and Infinity; JSON has neither."""
    raise ValueError(constant)


class LineFormatter(logging.Formatter):
    """``2026-01-01T00:00:00.000Z INFO kvasir.worker message key=value``, times in UTC.

    A traceback follows its line; line breaks within a message are escaped.
    """

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # name of the base
        return super().formatMessage(record).replace("\n", "\\n")


def configure_logging() -> None:
    """One line each, on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


@dataclass(frozen=True, slots=True)
class State:
    """What a state file says.

    ``epoch`` is a worker's. Addresses are host:port, set from phase ready on;
    ``metrics_address`` where it differs from ``address``.
    """

    phase: Phase
    pid: int
    epoch: str | None = None
    detail: str = ""
    address: str | None = None
    metrics_address: str | None = None


class StateFile:
    """Writes ``State`` to a path at each change; without a path, only remembers it."""

    def __init__(self, path: Path | None, epoch: str | None = None) -> None:
        """Raises OSError if the file cannot be written."""
        self._path = path
        self.state = State("starting", os.getpid(), epoch)
        self._write()

    def update(
        self,
        phase: Phase,
        detail: str = "",
        *,
        address: str | None = None,
        metrics_address: str | None = None,
    ) -> None:
        """An address that is not given stays as it was."""
        self.state = replace(
            self.state,
            phase=phase,
            detail=detail,
            address=address or self.state.address,
            metrics_address=metrics_address or self.state.metrics_address,
        )
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        present = {key: value for key, value in asdict(self.state).items() if value is not None}
        draft = self._path.with_name(f".{self._path.name}.{self.state.pid}")
        draft.write_text(json.dumps(present) + "\n", encoding="utf-8")
        draft.replace(self._path)


def join_host_port(host: str, port: int) -> str:
    """host:port; an IPv6 address goes into brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


EVERY_ADDRESS = "*"
"""As a host to listen on: all addresses of the machine, whichever families it has."""


def listen_everywhere(port: int) -> socket.socket:
    """A listening TCP socket on all addresses: of IPv6 and IPv4, or of IPv4 where IPv6 is off.

    Raises:
        OSError: the port is in use.
    """
    try:
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except ValueError:  # no socket of both families
        pass
    except OSError as error:
        if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
    return socket.create_server(("0.0.0.0", port))
