"""Which weights a worker holds, as one hash: equal fingerprints may exchange KV.

Fails closed. Up to ``WHOLE_BYTES`` every byte counts. A larger checkpoint would take longer
to hash than to load, so there the headers and the small tensors (norms, biases) count whole
and the large ones by windows: two such checkpoints are told apart unless they have the same
shapes and differ in nothing but unread parts of large tensors, as no training run leaves them.

Paths are left out: two nodes may mount one model in two places.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from kvasir.worker.model.config import ModelConfig

WHOLE_BYTES = 4 << 30
"""Files that are together no larger are hashed whole: seconds, on a CPU with SHA instructions."""
_TENSOR_BYTES = 1 << 20
"""What is read of one tensor: all of it, or windows of this size together."""
_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive bytes of a file."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file, and where in it the tensors are. All that is before the first one is header."""

    path: Path
    tensors: tuple[Span, ...]


def fingerprint(config: ModelConfig, files: Sequence[WeightFile]) -> str:
    """SHA-256 (hex) over the config and the files, in order."""
    digest = hashlib.sha256(repr(config).encode())
    sizes = [file.path.stat().st_size for file in files]
    whole = sum(sizes) <= WHOLE_BYTES
    for file, size in zip(files, sizes, strict=True):
        digest.update(size.to_bytes(8, "little"))
        digest.update(_whole(file.path) if whole else _sampled(file, size))
    return digest.hexdigest()


def _whole(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _sampled(file: WeightFile, size: int) -> bytes:
    digest = hashlib.sha256()
    tensors = sorted(file.tensors, key=lambda span: span.offset)
    header = Span(0, tensors[0].offset if tensors else size)
    with file.path.open("rb") as stream:
        for span in (header, *chain.from_iterable(map(_windows, tensors))):
            stream.seek(span.offset)
            digest.update(stream.read(span.size))
    return digest.digest()


def _windows(tensor: Span) -> list[Span]:
    """All of a small tensor; of a large one evenly spread parts, its first and last among them."""
    if tensor.size <= _TENSOR_BYTES:
        return [tensor]
    window = _TENSOR_BYTES // _WINDOWS
    last = tensor.size - window
    return [
        Span(tensor.offset + last * index // (_WINDOWS - 1), window) for index in range(_WINDOWS)
    ]
