"""How worker and router begin alike: arguments, configuration, state file, errors in one line.

Needs pydantic, which each of them has. What is not alike stays in their ``main.py``.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from kvasir.proto.process import SET_HELP, StateFile, override_settings

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Config = TypeVar("Config", bound=BaseModel)

EXIT_UNUSABLE = 2
"""It cannot start, and starting it again is no use."""
EXIT_KILLED = 143
"""A second signal has ended it at once."""


class StartError(Exception):
    """Why a process cannot start; the message names the field or file, and the fix."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A command line."""

    config: Path
    settings: tuple[str, ...]
    """KEY=VALUE, each over what the file says."""
    state_file: Path | None


def parse_arguments(program: str, description: str, config: type[BaseModel]) -> Arguments:
    """The arguments of this process; ``config`` is what its file has the JSON of."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--config", type=Path, required=True, help=f"JSON of {config.__name__}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=SET_HELP)
    parser.add_argument("--state-file", type=Path, help="where to say how far the start-up is")
    args = parser.parse_args()
    return Arguments(args.config, tuple(args.set), args.state_file)


def read_config(config: type[Config], path: Path, settings: Sequence[str] = ()) -> Config:
    """The file's settings with ``settings`` over them; StartError names each bad one."""
    try:
        document = override_settings(path.read_bytes(), settings)
    except ValueError as error:
        raise StartError(f"--set {error}") from error
    except OSError as error:
        raise StartError(f"--config {path}: {error.strerror}") from error
    try:
        return config.model_validate_json(document)
    except ValidationError as error:
        faults = "; ".join(_describe(fault) for fault in error.errors(include_url=False))
        raise StartError(f"--config {path}: {faults}") from error


def open_state_file(path: Path | None, epoch: str | None = None) -> StateFile:
    """Raises StartError."""
    try:
        return StateFile(path, epoch)
    except OSError as error:
        raise StartError(f"--state-file {path}: {error.strerror}") from error


def refuse_to_start(program: str, error: Exception) -> int:
    """Say why, in one line; gives the exit code."""
    print(f"{program}: {error}", file=sys.stderr)  # noqa: T201 - the one line for people
    return EXIT_UNUSABLE


def _describe(fault: "ErrorDetails") -> str:
    field = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        return f"{field}: no such setting; remove it or correct its name"
    return f"{field}: {fault['msg']}" if field else fault["msg"]
