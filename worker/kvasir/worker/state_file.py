"""The state file: how a worker tells whoever started it where it stands.

Replaced by rename, so that a reader never sees half of it.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

Phase = Literal["starting", "loading", "ready", "draining"]


@dataclass(frozen=True, slots=True)
class State:
    """What the file says. Addresses are host:port, set from phase ready on."""

    phase: Phase
    pid: int
    epoch: str
    detail: str = ""
    address: str | None = None
    metrics_address: str | None = None


class StateFile:
    """Writes ``State`` to a path at each change; without a path, only remembers it."""

    def __init__(self, path: Path | None, epoch: str) -> None:
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
