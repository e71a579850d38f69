"""Server-sent events, cut from a byte stream. Pure.

Follows the WHATWG event stream format as far as OpenAI-compatible servers use it: events of
``data:`` lines, ended by an empty line; other fields and comments are ignored.
"""


class SseParser:
    """Feed bytes as they come; whole events come out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The data of every event that ``chunk`` completes, in order."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode())
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events
