"""The bytes of a GGUF file: metadata, and where its tensors are.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
The ``gguf`` package reads the same, but makes several numpy views of each of 100,000 strings:
seconds of start-up and 200 MB. Every count and offset is checked against the file's size.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4


class GgufError(ValueError):
    """What is wrong with a file."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """``shape`` has the slowest dimension first, as in torch; ``kind`` is a ggml type's number.

    ``offset`` is that of its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufReader:
    """A file mapped into memory: ``metadata`` by key, ``tensors`` by name."""

    def __init__(self, path: Path) -> None:
        """GgufError or OSError if the file cannot be read."""
        with path.open("rb") as stream:
            try:
                self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise GgufError("it is empty") from error
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, RecursionError) as error:
            raise GgufError(f"its header is torn ({error})") from error

    def bytes_at(self, tensor: TensorInfo, size: int) -> np.ndarray:
        """The first ``size`` bytes of a tensor, uint8, not copied."""
        if tensor.offset + size > len(self._data):
            raise GgufError(f"tensor {tensor.name} is cut short")
        return np.frombuffer(self._data, np.uint8, size, tensor.offset)

    def release(self, tensor: TensorInfo, size: int) -> None:
        """Pages of a tensor that has been read need not stay in memory."""
        first = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self._data.madvise(mmap.MADV_DONTNEED, first, tensor.offset + size - first)

    def _read(self) -> None:
        self._at = 0
        if self._take(4) != _MAGIC:
            raise GgufError("it does not begin with GGUF")
        if (version := self._scalar("I")) not in _VERSIONS:
            raise GgufError(f"its version {version} is none of {_VERSIONS}")
        num_tensors, num_entries = self._count(), self._count()
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufError(f"its {_ALIGNMENT} is {alignment!r}")
        base = -(-self._at // alignment) * alignment
        self.tensors = {
            name: TensorInfo(name, shape, kind, base + offset)
            for name, shape, kind, offset in infos
        }

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise GgufError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise GgufError(f"its metadata has the unknown type {kind}")
        item, count = self._scalar("I"), self._count()
        if item in _SCALARS:
            return list(self._many(f"{count}{_SCALARS[item]}"))
        return [self._value(item) for _ in range(count)]

    def _string(self) -> str:
        return self._take(self._count()).decode()

    def _count(self) -> int:
        count = int(self._scalar("Q"))
        if count > len(self._data):
            raise GgufError(f"it counts {count} things, more than its bytes")
        return count

    def _scalar(self, code: str) -> Any:
        return self._many(code)[0]

    def _many(self, code: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return values

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) < size:
            raise GgufError("its header is torn")
        self._at += size
        return taken


def tensor_size(tensor: TensorInfo, block_values: int, block_bytes: int) -> int:
    """Bytes of a tensor whose type packs ``block_values`` values into ``block_bytes``."""
    if tensor.shape[-1] % block_values:
        raise GgufError(f"tensor {tensor.name} has rows of {tensor.shape[-1]} values")
    return math.prod(tensor.shape) // block_values * block_bytes
