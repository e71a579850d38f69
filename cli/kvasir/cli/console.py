"""Output for people."""

from rich.console import Console

_PIPE_WIDTH = 200
"""Columns where no terminal limits them: a pipe must not get cut-off names."""


def output() -> Console:
    """Standard output, as it is now (tests replace it)."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console
