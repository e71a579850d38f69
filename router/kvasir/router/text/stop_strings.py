"""Finds stop strings in a text that arrives in pieces.

Owns the text that is held back: the longest end of the text so far with which a stop string
could begin. What has been released can therefore never be part of a stop string. The
outcome does not depend on how the text is cut into pieces: the stop string that is complete
first counts, and of several that end at the same character, the longest.
"""

from collections.abc import Sequence


class StopStrings:
    """Watches one sequence of output text for ``stops``, none of them empty."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """Take the next piece of text; returns what may be shown now.

        Once a stop string is complete, ``matched`` is set, the text before it is returned,
        and nothing more may be fed.
        """
        if not self._stops or not text:
            return text
        text = self._held + text
        start = self._first_match(text)
        if start is not None:
            self.matched = True
            self._held = ""
            return text[:start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The end of the text: what was held back."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Where the stop string that is complete first begins."""
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(matches)[1] if matches else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with, but is not all of."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
