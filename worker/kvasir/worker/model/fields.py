"""Fields that others wrote: a model's JSON files, and GGUF metadata.

Each is read as the type that it must have. Anything else is a ModelError that names the file, the
field and the fix.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from kvasir.worker.model.errors import ModelError

_MOST = 2**31 - 1
"""No count is greater: the CPU kernels take them as 32-bit integers."""
_LEAST_REAL, _GREATEST_REAL = 1e-37, 1e38
"""Within what float32, in which the decoder computes, holds to full precision."""
_MENDED = "correct it, or download it again"


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(
            "model", f"{path} cannot be read ({error.strerror})", "make it readable, or remove it"
        ) from error


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ModelError(str(path), f"not UTF-8 text ({error})", _MENDED) from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        raw = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(str(path), f"not valid JSON ({error})", _MENDED) from error
    if not isinstance(raw, dict):
        raise ModelError(str(path), "not a JSON object", _MENDED)
    return raw


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one object; null counts as absent, which without a default is a ModelError.

    ``file`` and ``place``, which comes before a key, are for messages.
    """

    raw: Mapping[str, Any]
    file: str
    place: str = ""

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number, at least ``least``; 8.0 is one."""
        value = self._found(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not _is_whole(value) or not least <= value <= _MOST:
            raise self.unsupported(key, f"that is a whole number from {least} to {_MOST}")
        return int(value)

    def real(self, key: str, default: float | None = None, *, least: float = _LEAST_REAL) -> float:
        """A number, at least ``least``, that float32 can hold."""
        value = self._found(key, default)
        is_number = isinstance(value, float) or _is_whole(value)
        if not is_number or not least <= value <= _GREATEST_REAL:
            raise self.unsupported(key, f"that is a number from {least:g} to {_GREATEST_REAL:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        """Absent is False."""
        value = self._found(key, default=False)
        if not isinstance(value, bool):
            raise self.unsupported(key, "that is true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self.raw.get(key)
        if value is not None and not _is_text(value):
            raise self.unsupported(key, "that is text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._found(key, None)
        if not isinstance(value, list) or not all(map(_is_text, value)):
            raise self.unsupported(key, "that is a list of text")
        return value

    def whole_numbers(self, key: str) -> list[int]:
        """One or a list of them, of any size; absent is an empty list."""
        value = self._found(key, [])
        numbers = value if isinstance(value, list) else [value]
        if not all(map(_is_whole, numbers)):
            raise self.unsupported(key, "that is a whole number or a list of them")
        return numbers

    def section(self, key: str) -> "Fields":
        """The object under ``key``; absent is empty."""
        value = self._found(key, {})
        if not isinstance(value, dict):
            raise self.unsupported(key, "that is an object")
        return Fields(value, self.file, f"{self.place}{key}.")

    def missing(self, key: str) -> ModelError:
        return ModelError(
            self.file, f"{self.place}{key} is missing", "use the model's complete files"
        )

    def unsupported(self, key: str, supported: str) -> ModelError:
        name = f"{self.place}{key}"
        return ModelError(
            self.file,
            f"{name} {shortened(self.raw.get(key))} is not supported",
            f"use a model with {name} {supported}",
        )

    def _found(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.missing(key)
        return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    """Text that can be written: JSON may hold half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
