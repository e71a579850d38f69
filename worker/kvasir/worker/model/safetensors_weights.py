"""Weights of a folder in Hugging Face layout: one safetensors file, or shards with an index."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvasir.worker.model.errors import ModelError
from kvasir.worker.model.fields import read_bytes
from kvasir.worker.model.fingerprint import Span, WeightFile

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsWeights:
    """A WeightSource over the safetensors files of one folder."""

    def __init__(self, folder: Path) -> None:
        files = _files(folder)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            for name, shape in _file_shapes(file).items():
                self._shapes[name] = shape
                self._file_of[name] = file
        self.files = tuple(WeightFile(file, _spans(file)) for file in files)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> torch.Tensor:
        file = self._file_of[name]
        try:
            with safe_open(file, framework="pt") as reader:
                tensor: torch.Tensor = reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                str(file), f"tensor {name} cannot be read ({error})", "download it again"
            ) from error
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelError(
                file.name,
                f"tensor {name} has dtype {tensor.dtype}, that is a quantized checkpoint",
                "use the float16, bfloat16 or float32 checkpoint of the model",
            )
        return tensor


def _file_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(file, framework="pt") as reader:
            names = reader.keys()
            return {name: tuple(reader.get_slice(name).get_shape()) for name in names}
    except SafetensorError as error:
        raise ModelError(
            str(file), f"not a readable safetensors file ({error})", "download it again"
        ) from error


def _spans(file: Path) -> tuple[Span, ...]:
    """Where the tensors of a readable file are: 8 bytes of header length, JSON header, data.

    https://huggingface.co/docs/safetensors/index#format
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    offsets = (entry["data_offsets"] for entry in header.values())
    return tuple(Span(8 + length + start, end - start) for start, end in offsets)


def _files(folder: Path) -> list[Path]:
    """The folder's weight files, all of which exist."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(
            str(folder),
            f"has neither {_SINGLE} nor {_INDEX}",
            "give a folder with the model's weights as safetensors",
        )
    try:
        names = sorted(
            {Path(name).name for name in json.loads(read_bytes(index))["weight_map"].values()}
        )
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(
            str(index), f"not a readable shard index ({error!r})", "download it again"
        ) from error
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise ModelError(str(file), "shard named in the index is missing", "download it")
    return files
