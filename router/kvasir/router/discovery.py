"""Which workers there are: what every source of them offers, and the file of the local runtime.

A source's ``poll`` is cheap enough to be called several times a second. A source that is
broken or gone leaves the last good list in force and is reported once, because a router
that forgets its workers over a typo does more harm than one that is a moment behind.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

log = logging.getLogger("kvasir.router")


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """One worker: its stable name and the ``host:port`` of its Engine service.

    ``accepts``: whether it may be given requests, so far as its source knows. Those that it has
    go on in any case.
    """

    worker_id: str
    address: str
    accepts: bool = True


class WorkerSource(Protocol):
    """Says which workers there are."""

    async def start(self) -> None:
        """Before the first poll. Raises SourceError if it can never be read."""
        ...

    def poll(self) -> tuple[WorkerAddress, ...] | None:
        """The new list if there is one; None while the last one is still in force."""
        ...

    @property
    def current(self) -> bool:
        """Whether the last list is known to be still true."""
        ...

    async def close(self) -> None: ...


class SourceError(Exception):
    """Why workers can never be found; the message names the setting and the fix."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(min_length=1, max_length=253)]
    address: Annotated[str, Field(pattern=r"^\S+:\d+$")]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    workers: tuple[_Entry, ...]

    @field_validator("workers")
    @classmethod
    def _ids_are_unique(cls, workers: tuple[_Entry, ...]) -> tuple[_Entry, ...]:
        ids = [entry.id for entry in workers]
        if len(ids) != len(set(ids)):
            raise ValueError("two workers have the same id")
        return workers


def parse_workers(text: bytes) -> tuple[WorkerAddress, ...]:
    """The workers that a file's content names.

    Raises:
        ValueError: not valid JSON, unknown or missing keys, or an id named twice.
    """
    try:
        content = _File.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise ValueError(f"{where}: {first['msg']}") from error
    return tuple(WorkerAddress(entry.id, entry.address) for entry in content.workers)


class WorkersFile:
    """The discovery file, read again whenever it changed."""

    def __init__(self, path: Path, stat: Callable[[Path], os.stat_result] = Path.stat) -> None:
        self._path = path
        self._stat = stat
        self._seen: tuple[int, int, int] | None = None
        self._complaint = ""

    async def start(self) -> None:
        """Nothing to prepare: a file that is missing means no workers yet."""

    async def close(self) -> None:
        """Nothing to end: no file stays open."""

    @property
    def current(self) -> bool:
        return self._seen is not None and not self._complaint

    def poll(self) -> tuple[WorkerAddress, ...] | None:
        """The new list if there is one; None while the last one is still in force."""
        try:
            status = self._stat(self._path)
            seen = (status.st_mtime_ns, status.st_size, status.st_ino)
            if seen == self._seen:
                return None
            workers = parse_workers(self._path.read_bytes())
        except FileNotFoundError:
            if self._seen is not None:
                self._complain("file is gone")
            return None
        except (OSError, ValueError) as error:
            self._complain(str(error))
            return None
        self._seen = seen
        self._complaint = ""
        return workers

    def _complain(self, complaint: str) -> None:
        """Once for each new fault: polls are frequent."""
        if complaint != self._complaint:
            log.warning(
                "workers file not usable, keeping the last list file=%s reason=%s",
                self._path,
                complaint,
            )
            self._complaint = complaint
