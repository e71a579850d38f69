"""Which changes to a checkpoint give it another fingerprint."""

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from helpers.models import save_tiny
from kvasir.worker.model import fingerprint as module
from kvasir.worker.model.config import ModelConfig
from kvasir.worker.model.fingerprint import Span, WeightFile, fingerprint
from kvasir.worker.model.source import open_source

HEADER, SMALL, LARGE = 100, 4096, 6 << 20


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    save_tiny("llama", tmp_path / "tiny")
    return open_source(f"file://{tmp_path}/tiny").config


@pytest.fixture
def file(tmp_path: Path) -> WeightFile:
    """A header, a large tensor, a small one, and another large one."""
    spans, offset = [], HEADER
    for size in (LARGE, SMALL, LARGE):
        spans.append(Span(offset, size))
        offset += size
    path = tmp_path / "weights"
    path.write_bytes(bytes(offset))
    return WeightFile(path, tuple(reversed(spans)))


def flip(file: WeightFile, offset: int) -> None:
    with file.path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(b"\xff")


SMALL_AT = HEADER + LARGE
BETWEEN_WINDOWS = HEADER + 70_000


@pytest.mark.parametrize(
    "offset", [0, HEADER, BETWEEN_WINDOWS, SMALL_AT + 2000, SMALL_AT + SMALL + LARGE - 1]
)
def test_every_byte_counts(config: ModelConfig, file: WeightFile, offset: int) -> None:
    before = fingerprint(config, [file])
    flip(file, offset)
    assert fingerprint(config, [file]) != before


@pytest.mark.parametrize(
    ("offset", "counts"),
    [
        (HEADER - 1, True),
        (HEADER, True),
        (BETWEEN_WINDOWS, False),
        (HEADER + LARGE - 1, True),
        *((SMALL_AT + i, True) for i in (0, 1000, SMALL - 1)),
        (SMALL_AT + SMALL + LARGE - 1, True),
    ],
)
def test_of_a_huge_checkpoint_headers_and_small_tensors_count_whole(
    monkeypatch: pytest.MonkeyPatch,
    config: ModelConfig,
    file: WeightFile,
    offset: int,
    counts: bool,
) -> None:
    monkeypatch.setattr(module, "WHOLE_BYTES", LARGE)
    before = fingerprint(config, [file])
    flip(file, offset)
    assert (fingerprint(config, [file]) != before) == counts


def test_the_spans_of_safetensors_are_where_the_tensors_are(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path, shard="50KB")
    files = open_source(f"file://{tmp_path}").weights.files  # type: ignore[attr-defined]  # its own
    assert len(files) > 1
    for file in files:
        data = file.path.read_bytes()
        found = {data[span.offset : span.offset + span.size] for span in file.tensors}
        tensors = load_file(file.path).values()
        assert found == {tensor.contiguous().numpy().tobytes() for tensor in tensors}
        with safe_open(file.path, framework="pt") as reader:
            assert len(file.tensors) == len(reader.keys())


def test_the_spans_of_gguf_cover_the_data() -> None:
    weights = open_source("bundled://smollm2-135m-instruct").weights
    file = weights.file  # type: ignore[attr-defined]  # its own
    size = file.path.stat().st_size
    assert max(span.offset + span.size for span in file.tensors) == size
    assert min(span.offset for span in file.tensors) > 1000
    assert sum(span.size for span in file.tensors) > 0.9 * size
