"""Option types and decorators that the bench commands share."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

P = ParamSpec("P")
R = TypeVar("R")

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}


class Duration(click.ParamType[float]):
    """A time such as 500ms, 2s or 1.5m, as seconds."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", str(value))
        if match is None:
            self.fail(f"{value!r} is not a time: write 500ms, 2s or 1.5m", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


class Names(click.ParamType[tuple[str, ...]]):
    """Some of ``known``, with commas between them; ``needed``: at least one."""

    name = "name,name,..."

    def __init__(self, known: Sequence[str], *, needed: bool = False) -> None:
        self._known = tuple(known)
        self._needed = needed

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        found = tuple(str(value).split(",")) if value else ()
        for name in found:
            if name not in self._known:
                self.fail(f"{name!r} is none of {', '.join(self._known)}", param, ctx)
        if len(set(found)) != len(found):
            self.fail(f"{value!r}: none twice", param, ctx)
        if self._needed and not found:
            self.fail("name at least one", param, ctx)
        return found


DURATION = Duration()
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
COUNT = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)


def check_folder(_ctx: click.Context, _param: click.Parameter, value: Path | None) -> Path | None:
    """Said before the measurement, which the file would come too late to report."""
    if value is not None and not os.access(value.absolute().parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"no file can be written in {value.absolute().parent}")
    return value


def check_threads(_ctx: click.Context, _param: click.Parameter, value: int) -> int:
    """The bound is the worker's, whose modules are imported when a command runs."""
    from kvasir.worker.config import MAX_THREADS

    if value > MAX_THREADS:
        raise click.BadParameter(f"{value} is more than {MAX_THREADS}")
    return value


def threads_option(function: Callable[P, R]) -> Callable[P, R]:
    """--threads, of all that compute in this process or start a worker."""
    return click.option(
        "--threads",
        type=click.IntRange(min=0),
        default=0,
        callback=check_threads,
        help="0: all usable cores.",
    )(function)


def common_options(function: Callable[P, R]) -> Callable[P, R]:
    """--json, --seed and --runs, which every bench command has."""
    for option in (
        click.option(
            "--runs",
            type=COUNT,
            default=1,
            show_default=True,
            help="Repeat; report median and range.",
        ),
        click.option(
            "--seed",
            type=int,
            default=0,
            show_default=True,
            help="Fixes what is drawn at random.",
        ),
        click.option(
            "--json",
            "json_file",
            type=click.Path(dir_okay=False, writable=True, path_type=Path),
            callback=check_folder,
            help="Also write everything to this file.",
        ),
    ):
        function = option(function)
    return function
