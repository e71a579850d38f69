"""Reports: a header, tables for people, and the same numbers as JSON for machines."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kvasir.bench.machine import Machine
from kvasir.bench.stats import Spread

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PIPE_WIDTH = 200
"""Columns where no terminal limits them."""
_PIPE_PERIOD_S = 5.0


def output() -> Console:
    """Standard output for tables; a pipe is wide enough for all of them."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


@contextmanager
def progress(clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], None]]:
    """Show what is going on, on stderr: one live line in a terminal; in a pipe, a line now and
    then, because nobody wants each of a thousand steps in a log."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status("starting") as status:
            yield status.update
        return
    last = -math.inf

    def say(text: str) -> None:
        nonlocal last
        if clock() - last >= _PIPE_PERIOD_S:
            last = clock()
            console.print(text, markup=False)

    yield say


def print_header(
    console: Console, title: str, machine: Machine, settings: Mapping[str, Any]
) -> None:
    """What was run, where, and with which versions."""
    console.print(f"[bold]{title}[/bold]")
    flags = f" ({', '.join(machine.cpu_flags)})" if machine.cpu_flags else ""
    console.print(
        f"{machine.cpu}{flags}, {machine.cores} cores, {machine.memory_gib:g} GiB,"
        f" {', '.join(machine.gpus) or 'no GPU'}; {machine.system}; load {machine.load_1m:g}",
        highlight=False,
    )
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    console.print(f"Python {machine.python}, {versions}", highlight=False)
    shown = ", ".join(f"{name} {_plain(value)}" for name, value in settings.items())
    console.print(shown + "\n", highlight=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """First column to the left, numbers to the right."""
    result = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        result.add_row(*row)
    return result


def number(value: float) -> str:
    """About three significant digits, without an exponent for what is printed here."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def spread_cell(spread: Spread) -> str:
    """Median, and the range over runs where it is more than one value."""
    if spread.low == spread.high:
        return number(spread.median)
    return f"{number(spread.median)} ({number(spread.low)} to {number(spread.high)})"


def maybe_cell(spread: Spread | None, factor: float = 1.0) -> str:
    """As ``spread_cell``, times ``factor``; a dash for what no run had."""
    if spread is None:
        return "-"
    scaled = (factor * value for value in (spread.median, spread.low, spread.high))
    return spread_cell(Spread(*scaled))


def milliseconds(seconds: float) -> str:
    return number(seconds * 1000)


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Strict JSON: dataclasses become objects, and numbers that are none become null.

    The file is written whole or not at all.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(_as_json(report), indent=2, allow_nan=False) + "\n")
    temporary.replace(path)


def _as_json(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _as_json(_fields(value))
    if isinstance(value, Mapping):
        return {str(key): _as_json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def _plain(value: object) -> str:
    """A setting, as people write it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return " ".join(f"{name}={_plain(part)}" for name, part in _fields(value).items())
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_plain(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return " and ".join(map(_plain, value))
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _fields(value: "DataclassInstance") -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
