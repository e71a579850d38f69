"""Log lines of the router: one line each, on stderr, times in UTC.

2026-01-01T00:00:00.000Z INFO kvasir.router message key=value
"""

import logging
import sys
import time


class LineFormatter(logging.Formatter):
    """A traceback follows its line; line breaks within a message are escaped."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - name of the base
        return super().formatMessage(record).replace("\n", "\\n")


def configure() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
